"""What a launch will start: from a configuration to command lines.

Pure: nothing is read, started or written here. A plan lists the processes of a run, the server first;
each is a command that a person could type as well.
"""

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from smolcluster.algorithms.registry import Algorithm
from smolcluster.configs.resolve import node_overrides
from smolcluster.configs.schema import ClusterConfig
from smolcluster.utils.units import format_address

Role = Literal["server", "worker"]

PATIENCE = "start_timeout_s=86400"
"""The server may tokenize for long before it listens; if it ends, the launcher stops the workers."""


@dataclass(frozen=True)
class Request:
    """What a user asks to be launched.

    Attributes:
        algorithm: the algorithm whose server and workers are started.
        config: cluster file, a path or a shipped name; None: the algorithm's own.
        train_config: training file, a path or a shipped name; None: the default one.
        overrides: `key=value` texts, in the order in which they were given.
        num_workers: workers on this machine; None: as many as the cluster file lists.
    """

    algorithm: Algorithm
    config: str | None = None
    train_config: str | None = None
    overrides: tuple[str, ...] = ()
    num_workers: int | None = None


@dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
        node: the machine's name in the cluster file.
        rank: a worker's place, from 0; None for the server.
        argv: the command, an argument an item.
        folder: where a person changes to first; None: the command works anywhere.
    """

    node: str
    role: Role
    rank: int | None
    argv: tuple[str, ...]
    folder: str | None = None

    @property
    def command(self) -> str:
        """The command as one line for a shell."""
        line = shlex.join(self.argv)
        return line if self.folder is None else f"cd {shlex.quote(self.folder)} && {line}"

    @property
    def title(self) -> str:
        """The process in messages: `server mini1`, `worker 1 pi5`."""
        place = "" if self.rank is None else f"{self.rank + 1} "
        return f"{self.role} {place}{self.node}"


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of a run."""

    server: Process
    workers: tuple[Process, ...]

    @property
    def processes(self) -> tuple[Process, ...]:
        """All of them, the server first."""
        return (self.server, *self.workers)

    def lines(self) -> list[str]:
        """The plan as text: for each process a line that says what it is, and its command."""
        return [
            line
            for process in self.processes
            for line in (f"{process.title}:", f"  {process.command}")
        ]


def plan_local(
    request: Request,
    cluster: ClusterConfig,
    *,
    run_id: str,
    python: str,
    with_threads: Collection[str] = (),
    place: Sequence[str] = (),
    resume: bool = False,
) -> LaunchPlan:
    """The commands that run the whole cluster on this machine with the interpreter `python`.

    Every process gets one compute thread, because side by side more of them get into each other's way; but
    for the nodes in `with_threads`, whose number the user has set. `place` are overrides that tell
    every worker where the training file says that the data are. With `resume` the run goes on from its
    newest good checkpoint.
    """

    def overrides(texts: Sequence[str], node: str) -> tuple[str, ...]:
        return _overrides(texts if node in with_threads else (*texts, "threads=1"))

    local = ("--local", *_option("--workers", request.num_workers))
    config = _option("--config", request.config)
    server = Process(
        node=cluster.server,
        role="server",
        rank=None,
        argv=(
            *(python, str(request.algorithm.server), *local),
            *("--run-id", run_id, "--no-progress"),
            *_option("--resume", "auto" if resume else None),
            *config,
            *_option("--train-config", request.train_config),
            *overrides(request.overrides, cluster.server),
        ),
    )
    workers = tuple(
        Process(
            node=node,
            role="worker",
            rank=rank,
            argv=(
                *(python, str(request.algorithm.worker), str(rank + 1), node, *local),
                *("--server", format_address(cluster.host_ip[node], cluster.port)),
                *config,
                *overrides((PATIENCE, *place, *node_overrides(request.overrides)), node),
            ),
        )
        for rank, node in enumerate(cluster.workers)
    )
    return LaunchPlan(server, workers)


def plan_by_hand(request: Request, cluster: ClusterConfig) -> LaunchPlan:
    """The commands that a person types on each machine, in its checkout of the project."""
    folder = f"src/smolcluster/algorithms/{request.algorithm.folder.name}"
    config = _option("--config", request.config)
    server = Process(
        node=cluster.server,
        role="server",
        rank=None,
        argv=(
            *("uv", "run", request.algorithm.server.name, *config),
            *_option("--train-config", request.train_config),
            *_overrides(request.overrides),
        ),
        folder=folder,
    )
    workers = tuple(
        Process(
            node=node,
            role="worker",
            rank=rank,
            argv=(
                *("uv", "run", request.algorithm.worker.name, str(rank + 1), node, *config),
                *_overrides(node_overrides(request.overrides)),
            ),
            folder=folder,
        )
        for rank, node in enumerate(cluster.workers)
    )
    return LaunchPlan(server, workers)


def _option(flag: str, value: str | int | None) -> tuple[str, ...]:
    return () if value is None else (flag, str(value))


def _overrides(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for text in texts for item in ("--override", text))
