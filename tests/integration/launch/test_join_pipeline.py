"""A worker of DiLoCo on two hosts, which lose a stage and then the worker, and are brought back."""

import json
from pathlib import Path

import pytest

from launching import ENDLESS, LAUNCH_TIMEOUT_S, LAYERS, STORIES_TIMEOUT_S, Launching, wait_until

# The parts: what is started in test_join, lost stages in test_pipeline_worker.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


def two_stages(launching: Launching) -> str:
    """A cluster file whose only worker, mini2, has layers on its own host and on pi5."""
    launching.controller.write("layers.py", LAYERS)
    launching.write_config("staged.yaml")
    file: Path = launching.controller.path("staged.yaml")
    config = json.loads(file.read_text())
    del config["worker_update_interval"]
    host_ip = {"mini2": "127.0.0.1", "pi5": launching.lab["mini2"].address}
    config["nodes"]["mini2"]["stages"] = {"host_ip": host_ip, "shard_plan": "even"}
    file.write_text(json.dumps(config | {"workers": ["mini2"], "num_workers": 1}))
    return "~/staged.yaml"


def test_a_stage_and_its_worker_are_brought_back(launching: Launching) -> None:
    config = two_stages(launching)
    overrides = ("workload=layers.py:workload", "batch_size=16", "mode=sync", *ENDLESS)
    more = ("heartbeat_timeout_s=5", "reconnect_timeout_s=300", "empty_cluster_timeout_s=600")
    words = launching.script("diloco", "--detach", "--override", *overrides, *more, config=config)
    launched = launching.run(words, timeout_s=2 * LAUNCH_TIMEOUT_S)
    assert launched.returncode == 0, launched.stderr
    log = launching.folder("mini2") / "logs" / "worker-rank0-mini2.log"

    def says(text: str) -> None:
        wait_until(lambda: text in log.read_text(), lambda: log.read_text()[-2000:])

    launching.goes_on()
    launching.lab["pi5"].end_processes()
    says("(pi5) is gone")
    back = launching.run(launching.command("join"), timeout_s=LAUNCH_TIMEOUT_S)
    assert back.returncode == 0, back.stderr
    assert "stage pi5 is started" in back.stdout
    says("with stage 2 (pi5)")
    launching.goes_on()

    launching.lab["mini2"].end_processes()
    wait_until(lambda: launching.presence(0) != "joined", lambda: str(launching.status()))
    back = launching.run(launching.command("join"), timeout_s=LAUNCH_TIMEOUT_S)
    assert back.returncode == 0, back.stderr
    assert [each in back.stdout for each in ("stage mini2 is started", "stage pi5")] == [
        True,
        False,
    ]
    assert launching.presence(0) == "joined"
    launching.goes_on()
    stopped = launching.run(launching.command("stop"))
    assert stopped.returncode == 0, stopped.stdout
    launching.wait_until_clean()
