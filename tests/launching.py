"""Launching on the hosts of the lab, from its controller, as a user does."""

import itertools
import json
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab import Host, Lab, Process, Running
from waiting import eventually

PROJECT = "launching"
"""The controller's checkout."""
ODD = "my $(touch /tmp/pwned) 'cluster\""
"""pi5's own clone of the project: nothing of its name must ever be executed."""
CACHE = ".cache/smolcluster"
"""Where the other nodes have the project."""
STORIES_TIMEOUT_S = 1200
"""Of a test that tells the story of a run, on a busy machine."""
LAUNCH_TIMEOUT_S = 240.0
"""From a command to the end of a tiny run: three processes load PyTorch on two cores."""
TINY = ("num_epochs=1", "batch_size=32")
ENDLESS = ("num_epochs=100000", "eval_steps=100000")
PACED = ("workload=paced.py:workload", *ENDLESS)
"""A run that is there while others look at it, and leaves them the machine's cores."""
PACED_WORKLOAD = """
import time
import torch
from torch import nn
from smolcluster.training.workload import Workload

def loss(model, batch):
    time.sleep(0.02)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

def workload():
    return Workload(nn.Linear(4, 1), loss, torch.randn(320, 4).unbind())
"""
LAYERS = """
import time
import torch
from torch import nn
from smolcluster.training.workload import Workload

class Slow(nn.Linear):
    def forward(self, value):
        time.sleep(0.005)
        return super().forward(value)

def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

def model():
    return nn.Sequential(*(Slow(4, 4) for _ in range(5)), nn.Linear(4, 1))

def workload():
    return Workload(model, loss, torch.randn(320, 4).unbind())
"""
"""The workload of a pipeline: six layers, each of which takes its time."""
READY = """
import sys
from smolcluster.launch.host import Host
from smolcluster.launch.places import project_root
from smolcluster.launch.project import bring, read_project
project = read_project(project_root())
for node in sys.argv[1:]:
    bring(Host(node, node), project, "pypi", {}, is_allowed=True)
print(project.environment("pypi"))
"""
COLUMNS, ROWS = 160, 48


class Launching:
    """A controller with a checkout, hosts to which a launch brings code, and one with a clone of its own."""

    brought = ("mini1", "mini2")

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.controller = lab.controller
        self.root = self.controller.checkout(PROJECT)
        self.programs = self.controller.prepare(PROJECT)
        self.projects = {"mini1": "smolcluster", "mini2": "smolcluster", "pi5": ODD}
        """The folders whose `runs` have the runs."""
        lab["pi5"].checkout(ODD)
        lab["pi5"].prepare(ODD)
        environment = self._ready().removeprefix("~/")
        for node in self.brought:  # else each makes and compiles an environment
            lab[node].link_environment(environment)
            lab[node].output(
                f"cd {environment}/lib/python*/site-packages && rm *smolcluster*.pth && "
                "echo ../../../../src > _smolcluster.pth"
            )
        self.write_config("cluster.yaml")
        self.controller.write("paced.py", PACED_WORKLOAD)

    def write_config(self, path: str, nodes: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Make a cluster file; `nodes` are further settings."""
        address = self.lab["mini1"].address
        settings: dict[str, dict[str, Any]] = {
            name: {"torch": "pypi", "threads": 1, **(nodes or {}).get(name, {})}
            for name in self.projects
        }
        settings["pi5"].setdefault("project_dir", f"~/{ODD}")
        config = {
            "host_ip": dict.fromkeys(settings, address),
            "port": 6000,
            "num_workers": 2,
            "workers": ["mini2", "pi5"],
            "server": "mini1",
            "worker_update_interval": 2,
            "nodes": settings,
        }
        self.controller.write(path, json.dumps(config))  # JSON is YAML

    def make_ready(self) -> None:
        """Bring code and environment to the nodes, as a launch does first."""
        self._ready(*self.brought)

    def _ready(self, *nodes: str) -> str:
        ready = [str(self.programs / "python"), "-c", READY, *nodes]
        return self.controller.output(ready, timeout_s=LAUNCH_TIMEOUT_S)

    # commands

    def command(self, *words: str) -> list[str]:
        return ["env", "WANDB_MODE=disabled", str(self.programs / "smolcluster"), *words]

    def script(self, name: str, *words: str, config: str = "~/cluster.yaml") -> list[str]:
        """A launch script of the project."""
        script = f"{self.root}/launch_{name}.sh"
        return ["env", "WANDB_MODE=disabled", "bash", script, "--config", config, *words]

    def launch(self, *words: str, config: str = "~/cluster.yaml") -> list[str]:
        return self.command("launch", "edp", "--config", config, "--train-config", "digits", *words)

    def write_layers_config(
        self, workers: list[str], stages: Mapping[str, object] | None = None
    ) -> str:
        """A cluster file of these workers, who train `LAYERS`, some of them in stages; returns its place."""
        self.controller.write("layers.py", LAYERS)
        self.write_config("layers.yaml")
        file: Path = self.controller.path("layers.yaml")
        config = json.loads(file.read_text())
        del config["worker_update_interval"]
        for node, stated in (stages or {}).items():
            config["nodes"][node]["stages"] = stated
        file.write_text(json.dumps(config | {"workers": workers, "num_workers": len(workers)}))
        return "~/layers.yaml"

    def run(
        self, words: list[str], *, timeout_s: float = LAUNCH_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        return self.controller.run(words, timeout_s=timeout_s)

    def popen(self, words: list[str]) -> Running:
        return self.controller.popen(words)

    # runs

    @property
    def run_id(self) -> str:
        """The newest run."""
        return self.controller.path(f"{PROJECT}/runs/latest").readlink().name

    def folder(self, node: str, run_id: str | None = None) -> Path:
        """A run's folder on a node."""
        return self.lab[node].path(f"{self.projects[node]}/runs/{run_id or self.run_id}")

    def status(self, run_id: str | None = None) -> dict[str, Any]:
        """What the server last wrote of itself."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.folder("mini1", run_id) / "status.json").read_text()))
        return {"step": 0, "workers": []}

    def goes_on(self, run_id: str | None = None) -> None:
        """See that a run makes progress."""
        before = self.status(run_id)["step"]
        eventually(
            lambda: self.status(run_id)["step"] > before + 5, f"progress after step {before}"
        )

    def presence(self, rank: int) -> str:
        """Whether a worker takes part."""
        found = [each["state"] for each in self.status()["workers"] if each["rank"] == rank]
        return str(found[0]) if found else "unknown"

    def num_params(self) -> int:
        """Of the newest run's model."""
        events = (self.folder("mini1") / "events.jsonl").read_text().splitlines()
        [started] = [each for each in map(json.loads, events) if each["kind"] == "run_started"]
        return int(started["num_params"])

    def end_worker(self, rank: int, node: str) -> None:
        """End all processes of its machine; returns when the server has noticed."""
        self.lab[node].end_processes()
        eventually(lambda: self.presence(rank) != "joined", lambda: str(self.status()))

    def join_again(self, rank: int, node: str) -> None:
        back = self.run(self.command("join", "--name", node))
        assert back.returncode == 0, back.stderr
        assert self.presence(rank) == "joined"

    # what is left

    def is_clean(self) -> bool:
        return all(host.processes() == [] for host in self.lab)

    def left(self) -> dict[str, list[Process]]:
        return {host.name: host.processes() for host in self.lab}

    def left_of(self, run_id: str) -> list[Process]:
        """What runs of a run; a tmux server shows the session for which it was started, for ever."""
        everything = [each for processes in self.left().values() for each in processes]
        return [each for each in everything if each.argv[0] != "tmux" and run_id in str(each.argv)]

    def wait_until_clean(self) -> None:
        """See that each host has its sshd alone."""
        eventually(self.is_clean, lambda: str(self.left()))

    def wait_for_ssh(self) -> None:
        """Until all hosts answer; after a cut the old connections are of no use."""
        for host in (self.controller, *self.lab):
            host.join()
        self.cut_ssh()
        for host in self.lab:
            probe = ["ssh", "-o", "ConnectTimeout=2", host.name, "true"]
            eventually(lambda probe=probe: self.controller.run(probe).returncode == 0, host.name)  # type: ignore[misc]

    def cut_ssh(self) -> None:
        """Kill all SSH clients of the controller."""
        pids = [each.pid for each in self.controller.processes() if each.argv[0].startswith("ssh")]
        if pids:
            self.controller.run(["kill", "-KILL", *map(str, pids)])

    def end_all(self) -> None:
        """End whatever a test has left, and make all as it was."""
        for host in (self.controller, *self.lab):
            host.join()
            host.end_processes()


_screens = itertools.count()


class Screen:
    """A terminal on the controller: a pane of an outer tmux, whose screen can be read."""

    def __init__(self, controller: Host, words: list[str]) -> None:
        self._host = controller
        command = f"env -u TMUX {shlex.join(words)}; echo code=$?; sleep 1000"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        # Each with a tmux server of its own: the last one may still be going.
        self._socket = f"outer-{next(_screens)}"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-s", "screen", *size, command)

    def _tmux(self, *words: str) -> str:
        return self._host.output(["tmux", "-L", self._socket, *words])

    @property
    def text(self) -> str:
        """What is on it now."""
        return self._tmux("capture-pane", "-p", "-t", "=screen:")

    def press(self, *keys: str) -> None:
        """Press keys, in tmux's names."""
        self._tmux("send-keys", "-t", "=screen:", *keys)

    def wait_for(self, *texts: str, timeout_s: float = 180.0) -> str:
        """Wait until all of these are on it at once; returns it."""
        eventually(
            lambda: all(text in self.text for text in texts),
            lambda: f"{texts} on\n{self.text}",
            timeout_s,
        )
        return self.text

    def close(self) -> None:
        self._host.run(["tmux", "-L", self._socket, "kill-server"])
