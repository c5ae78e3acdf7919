"""What a check of `smolcluster doctor` is made of, what it is told and what it finds.

A check is a script for a machine and a pure function from what the script said to a finding.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.launch.host import Done, Host
from smolcluster.launch.links import Listener
from smolcluster.launch.node_facts import NOTHING_KNOWN, Facts
from smolcluster.launch.plan import Machine

State = Literal["ok", "warn", "fail", "skipped"]

QUICK_S = 10.0


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        what: for `ok` some words, such as a version; else a sentence's middle: `tmux is not there`.
        fix: what mends it.
    """

    state: State
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    return Finding("ok", what)


def warn(what: str, fix: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding("warn", what, fix)


def fail(what: str, fix: str) -> Finding:
    """A run would fail."""
    return Finding("fail", what, fix)


def skipped(why: str) -> Finding:
    return Finding("skipped", why)


@dataclass
class NodeChecks:
    """A node that is looked at: what is known of it, and what was found.

    Attributes:
        sums: of this machine's code, as `Project.sums`.
        packages: what a workload imports besides Python's own and the user's.
        token: what the test listener wants to hear.
        listener: the test listener on the server's machine; None: there is none.
        findings: by the names of checks.
    """

    machine: Machine
    cluster: ClusterConfig
    sums: bytes = b""
    packages: tuple[str, ...] = ()
    token: str = ""
    facts: Facts = NOTHING_KNOWN
    listener: Listener | None = None
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def host(self) -> Host:
        return self.machine.host

    @property
    def name(self) -> str:
        return self.host.node

    @property
    def settings(self) -> NodeConfig:
        return self.cluster.nodes.get(self.name, NodeConfig())

    @property
    def address(self) -> str:
        """Where the node reaches the server."""
        return self.cluster.host_ip[self.name]

    @property
    def is_server(self) -> bool:
        return self.name == self.cluster.server

    def there(self, command: str) -> str:
        """A command as a person has it run on the node."""
        return (
            f"`{command}`" if self.machine.is_here else f"`ssh {self.host.destination} {command}`"
        )


@dataclass(frozen=True)
class Check:
    """A row of the table: one thing to look at.

    Attributes:
        name: heads its line in the table.
        script: makes the script for the machine's POSIX shell; None: the check is of the fact of its name.
        judge: what to think of the answer; ValueError and LookupError mean that it makes no sense.
        limit_s: seconds that the script may take, or what makes them of what is known of the node.
        why_not: why it is not looked at there; None: it is.
        stdin: gives what the script reads.
        of: whether each machine is looked at, the server's, or each worker's.
    """

    name: str
    script: Callable[[NodeChecks], str] | None
    judge: Callable[[Done, NodeChecks], Finding]
    limit_s: float | Callable[[NodeChecks], float] = QUICK_S
    why_not: Callable[[NodeChecks], str | None] = lambda _: None
    stdin: Callable[[NodeChecks], bytes] = lambda _: b""
    of: Literal["machine", "server", "worker"] = "machine"


def fields(text: str) -> dict[str, str]:
    """Lines of a name, a blank and a value."""
    pairs = (line.partition(" ") for line in text.splitlines() if line.strip())
    return {name: value.strip() for name, _, value in pairs}


def not_here(node: NodeChecks) -> str | None:
    return "not needed here" if node.machine.is_here else None
