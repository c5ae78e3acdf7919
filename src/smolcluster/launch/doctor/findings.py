"""What a check of `smolcluster doctor` is made of, what it is told and what it finds.

A check is a script for a machine and a pure function from what the script said to a finding.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.launch.host import Done
from smolcluster.launch.manifest import Tree
from smolcluster.launch.probing import Listener

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


@dataclass(frozen=True)
class Answer(Done):
    """What a script said, with the time here when it began and the seconds until its end."""

    begun: float = 0.0
    took_s: float = 0.0


@dataclass(frozen=True)
class MachineFacts:
    """What the first contact tells of a machine.

    Attributes:
        system: as `uname -s` says: Linux or Darwin.
        machine: as `uname -m` says.
        is_apple_silicon: also where a shell under Rosetta says x86_64.
        packages: the program that installs packages; empty: none that we know.
    """

    system: str = ""
    machine: str = ""
    is_apple_silicon: bool = False
    packages: str = ""

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"


@dataclass(frozen=True)
class Context:
    """What is known of a node when it is looked at.

    Attributes:
        destination: as Host: what `ssh` is told; None: it is this machine.
        folder: the project's folder there.
        python: the interpreter of the project's environment there.
        secret_file: where the secret belongs; None: the default place.
        tree: what of this checkout belongs there; None: this is no checkout.
        environment: digest of what the node's environment is made of.
        token: what the test listener wants to hear.
    """

    node: str
    cluster: ClusterConfig
    destination: str | None = None
    folder: str = "~/smolcluster"
    python: str = "~/smolcluster/.venv/bin/python"
    secret_file: str | None = None
    tree: Tree | None = None
    environment: str = ""
    token: str = ""
    facts: MachineFacts = field(default_factory=MachineFacts)
    listener: Listener | None = None

    @property
    def settings(self) -> NodeConfig:
        return self.cluster.nodes.get(self.node, NodeConfig())

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that launches: nothing is brought there."""
        return self.destination is None

    @property
    def address(self) -> str:
        """Where the node reaches the server."""
        return self.cluster.host_ip[self.node]

    @property
    def is_server(self) -> bool:
        return self.node == self.cluster.server

    def there(self, command: str) -> str:
        """A command as a person has it run on the node."""
        return f"`{command}`" if self.destination is None else f"`ssh {self.destination} {command}`"


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        name: heads its line in the table.
        script: for the machine's POSIX shell.
        judge: what to think of the answer; ValueError and LookupError mean that it makes no sense.
        limit_s: seconds that the script may take.
        why_not: why it is not looked at there; None: it is.
        stdin: gives what the script reads.
    """

    name: str
    script: Callable[[Context], str]
    judge: Callable[[Answer, Context], Finding]
    limit_s: float = QUICK_S
    why_not: Callable[[Context], str | None] = lambda _: None
    stdin: Callable[[Context], bytes] = lambda _: b""


def fields(text: str) -> dict[str, str]:
    """Lines of a name, a blank and a value."""
    pairs = (line.split(" ", 1) for line in text.splitlines() if line.strip())
    return {pair[0]: pair[1].strip() if len(pair) > 1 else "" for pair in pairs}
