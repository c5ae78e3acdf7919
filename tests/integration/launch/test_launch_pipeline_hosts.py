"""A pipeline over three hosts, of which one is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from launching import ENDLESS, LAUNCH_TIMEOUT_S, LAYERS, STORIES_TIMEOUT_S, Launching, wait_until

# The parts: lost stages in test_pipeline, three hosts in test_hetero_hosts.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


def three_stages(launching: Launching) -> str:
    """A cluster file in which the server's machine has layers, too."""
    launching.controller.write("layers.py", LAYERS)
    launching.write_config("pipeline.yaml")
    file: Path = launching.controller.path("pipeline.yaml")
    config = json.loads(file.read_text())
    del config["worker_update_interval"]
    names = ["mini1", "mini2", "pi5"]
    file.write_text(json.dumps(config | {"workers": names, "num_workers": 3}))
    return "~/pipeline.yaml"


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
    config = three_stages(launching)
    overrides = ("workload=layers.py:workload", "batch_size=16", "shard_plan=even", *ENDLESS)
    more = ("checkpoint_steps=5", "heartbeat_timeout_s=5", "reconnect_timeout_s=300")
    words = launching.script("pipeline", "--detach", "--override", *overrides, *more, config=config)
    launched = launching.run(words, timeout_s=2 * LAUNCH_TIMEOUT_S)
    assert launched.returncode == 0, launched.stderr
    launching.goes_on()
    thirds = {"mini1": [[0, 2]], "mini2": [[2, 4]], "pi5": [[4, 6]]}
    wait_until(lambda: stages(launching) == thirds, lambda: str(stages(launching)))

    picture = launching.controller.path("step.svg")
    drawn = launching.command("trace", "--timeline", "step.svg")
    wait_until(lambda: launching.run(drawn).returncode == 0, lambda: launching.run(drawn).stderr)
    assert [name in picture.read_text() for name in ("mini1 0-1", "pi5 4-5")] == [True] * 2

    launching.lab["pi5"].end_processes()
    halves = {"mini1": [[0, 3]], "mini2": [[3, 6]]}
    wait_until(lambda: stages(launching) == halves, lambda: str(launching.status()))
    launching.goes_on()
    stopped = launching.run(launching.command("stop"))
    assert stopped.returncode == 0, stopped.stdout
