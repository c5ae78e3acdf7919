"""A small cluster to look at, and what machines say."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.findings import NodeChecks
from smolcluster.launch.host import Done, Host, TookTooLong
from smolcluster.launch.node_facts import Facts
from smolcluster.launch.plan import Machine
from smolcluster.launch.project import LATEST


def facts(**told: str) -> Facts:
    return Facts({name: Done(0, text, "") for name, text in told.items()})


LINUX = facts(system="Linux x86_64", packages="apt-get")
MAC = facts(system="Darwin arm64", apple_silicon="1", packages="brew")


def cluster(nodes: Mapping[str, Any] | None = None, **stated: Any) -> ClusterConfig:
    """A server and two workers."""
    values = {
        "host_ip": {"mini1": "10.10.0.1", "mini2": "10.10.0.1", "pi5": "192.168.50.1"},
        "num_workers": 2,
        "workers": ["mini2", "pi5"],
        "server": "mini1",
        "nodes": dict(nodes or {}),
        **stated,
    }
    return ClusterConfig.model_validate(values)


def large_cluster(num_nodes: int) -> ClusterConfig:
    names = [f"machine{number}" for number in range(num_nodes)]
    host_ip = dict.fromkeys(names, "10.10.0.1")
    return cluster(host_ip=host_ip, workers=names[1:], num_workers=num_nodes - 1, server="machine0")


def node_checks(name: str = "pi5", facts: Facts = LINUX, **stated: Any) -> NodeChecks:
    """A worker that has been reached; `stated` is of its section of the file, `Machine` or `NodeChecks`."""
    own = {
        key: stated.pop(key) for key in ("device", "torch", "env", "project_dir") if key in stated
    }
    where = {key: stated.pop(key) for key in ("python", "secret_file") if key in stated}
    machine = replace(machine_at(Host(name, name), own.get("project_dir")), **where)
    return NodeChecks(machine, cluster({name: own}), facts=facts, **{"token": "t0", **stated})


def machine_at(host: Host, own_dir: str | None = None) -> Machine:
    """A machine with the project in its cache, or in its owner's own folder."""
    is_own = own_dir is not None
    return Machine(host, own_dir or LATEST, runs_dir="~/runs", is_own=is_own)


@dataclass(frozen=True)
class FakeHost(Host):
    """A healthy machine that answers from memory.

    `says` changes what it says to a check, or of a fact, or raises.
    """

    says: Mapping[str, str | LaunchError] = field(default_factory=dict)
    before: Callable[[str, str, float], None] = lambda *_: None
    calls: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    """Those of `calls` over a connection of their own."""

    @contextmanager
    def holding(self, script: str, *, stdin: bytes, timeout_s: float) -> Iterator[Done]:
        yield self.run(script, stdin=stdin, timeout_s=timeout_s)
        self.calls.append("ended")

    def run(
        self,
        script: str,
        *,
        stdin: bytes = b"",  # noqa: ARG002
        timeout_s: float = 20.0,
        shielded: bool = False,  # noqa: ARG002
        alone: bool = False,
    ) -> Done:
        found = re.match(r": 'doctor: (.+)'\n(?:wanted='?([\w ]+))?", script)
        name, wanted = (found[1], found[2]) if found else (script, None)
        self.calls.append(name)
        self.alone.extend([name] * alone)
        self.before(self.node, name, timeout_s)
        if wanted is None:
            return Done(0, self._said(name), "", begun=time.time())
        told, late = "", None
        for fact in wanted.split():
            try:
                lines = self._said(fact).splitlines()
            except TookTooLong as error:
                late = error
            else:
                told += "".join(f"{fact} {line}\n" for line in (*lines, "=0"))
        if late is not None:
            late.stdout = told
            raise late
        return Done(0, told, "", begun=time.time())

    def _said(self, name: str) -> str:
        said = self.says.get(name, HEALTHY.get(name, ""))
        if isinstance(said, LaunchError):
            raise said
        return said.format(node=self.node, now=int(time.time()))


HEALTHY = {
    "system": "Linux aarch64\n",
    "packages": "apt-get\n",
    "identity": "3d1219c7{node}\n{node}\n",
    "folder": "/home/pi/project\n",
    "interpreter": "",
    "clock": "{now}\n",
    "Python": "Python 3.12.3\n",
    "uv": "uv 0.9.2\n",
    "tmux": "tmux 3.4\n",
    "rsync": "rsync  version 3.2.7  protocol version 31\n",
    "disk": "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/a 9 9 47398644 1% /\n",
    "memory": "MemAvailable:    7000000 kB\n",
    "secret": "-rw------- 1 pi pi 65 Nov 22 03:00 /home/pi/.config/smolcluster/secret\n",
    "code": "0\n",
    "environment": "runs\n",
    "torch": 'torch {{"version": "2.11.0", "cuda": null, "hip": null, "num_gpus": 0, "mps": false, '
    '"machine": "aarch64"}}\n',
    "workload": "missing []\n",
    "port": '{{"places": {{"10.10.0.1": {{"state": "listening", "port": 65432}}, "192.168.50.1": '
    '{{"state": "listening", "port": 65432}}}}, "own": ["10.10.0.1"]}}\n',
    "server": 'outside {{"error": null}}\ninside {{"error": null}}\n',
    "link": '{{"error": null, "ms": 0.31, "mb_per_s": 112.4}}\n',
}
"""What a healthy machine says to each check."""


def healthy_nodes(
    stated: ClusterConfig | None = None,
    says: Mapping[str, Mapping[str, str | LaunchError]] | None = None,
    **more: Any,
) -> list[NodeChecks]:
    """The nodes of a cluster, on fake hosts; `says`: what those say that are ill."""
    stated = stated or cluster()
    return [
        NodeChecks(
            machine_at(FakeHost(node, node, says=(says or {}).get(node, {}), **more)),
            stated,
            packages=("torch",),
            token="t0",
        )
        for node in dict.fromkeys((stated.server, *stated.workers))
    ]
