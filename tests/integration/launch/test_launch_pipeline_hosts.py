"""Pipelines over several hosts, of which one is lost: as a run, and as a worker of DiLoCo."""

import json
from typing import Any

import pytest

from launching import ENDLESS, LAUNCH_TIMEOUT_S, STORIES_TIMEOUT_S, Launching
from waiting import eventually

# The parts: lost stages in test_pipeline and test_pipeline_worker, three hosts in test_hetero_hosts, what is
# brought back in test_join.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


def stages(launching: Launching) -> dict[str, Any]:
    """The layers of the machines that are there, as `status --json` tells them."""
    told = launching.run(launching.command("status", "--json"))
    found = json.loads(told.stdout)["processes"] if told.returncode == 0 else []
    return {
        each["node"]: each["stage"]["layers"]
        for each in found
        if each["stage"] and each["presence"] == "joined"
    }


def test_layers_of_a_host_that_is_lost_go_to_the_others(launching: Launching) -> None:
    config = launching.write_layers_config(["mini1", "mini2", "pi5"])
    overrides = ("workload=layers.py:workload", "batch_size=16", "shard_plan=even", *ENDLESS)
    more = ("checkpoint_steps=5", "heartbeat_timeout_s=5", "reconnect_timeout_s=300")
    words = launching.script("pipeline", "--detach", "--override", *overrides, *more, config=config)
    launched = launching.run(words, timeout_s=2 * LAUNCH_TIMEOUT_S)
    assert launched.returncode == 0, launched.stderr
    launching.goes_on()
    thirds = {"mini1": [[0, 2]], "mini2": [[2, 4]], "pi5": [[4, 6]]}
    eventually(lambda: stages(launching) == thirds, lambda: str(stages(launching)))

    picture = launching.controller.path("step.svg")
    drawn = launching.command("trace", "--timeline", "step.svg")
    eventually(lambda: launching.run(drawn).returncode == 0, lambda: launching.run(drawn).stderr)
    assert [name in picture.read_text() for name in ("mini1 0-1", "pi5 4-5")] == [True] * 2

    launching.lab["pi5"].end_processes()
    halves = {"mini1": [[0, 3]], "mini2": [[3, 6]]}
    eventually(lambda: stages(launching) == halves, lambda: str(launching.status()))
    launching.goes_on()
    stopped = launching.run(launching.command("stop"))
    assert stopped.returncode == 0, stopped.stdout


def test_a_stage_and_its_worker_are_brought_back(launching: Launching) -> None:
    """A worker of DiLoCo, mini2, has layers on its own host and on pi5."""
    host_ip = {"mini2": "127.0.0.1", "pi5": launching.lab["mini2"].address}
    stages = {"mini2": {"host_ip": host_ip, "shard_plan": "even"}}
    config = launching.write_layers_config(["mini2"], stages)
    overrides = ("workload=layers.py:workload", "batch_size=16", "mode=sync", *ENDLESS)
    more = ("heartbeat_timeout_s=5", "reconnect_timeout_s=300", "empty_cluster_timeout_s=600")
    words = launching.script("diloco", "--detach", "--override", *overrides, *more, config=config)
    launched = launching.run(words, timeout_s=2 * LAUNCH_TIMEOUT_S)
    assert launched.returncode == 0, launched.stderr
    log = launching.folder("mini2") / "logs" / "worker-rank0-mini2.log"

    def says(text: str) -> None:
        eventually(lambda: text in log.read_text(), lambda: log.read_text()[-2000:])

    launching.goes_on()
    launching.lab["pi5"].end_processes()
    says("(pi5) is gone")
    back = launching.run(launching.command("join"), timeout_s=LAUNCH_TIMEOUT_S)
    assert back.returncode == 0, back.stderr
    assert "stage pi5 is started" in back.stdout
    says("with stage 2 (pi5)")
    launching.goes_on()

    launching.lab["mini2"].end_processes()
    eventually(lambda: launching.presence(0) != "joined", lambda: str(launching.status()))
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
