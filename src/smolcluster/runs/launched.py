"""`launch.json`: which processes were started for a run, and where; kept on the machine that launched it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

from smolcluster.configs.begun import remember
from smolcluster.configs.spec import spec_of
from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.paths import RunPaths, log_stem, process_title

Scheduler = Literal["slurm", "kubernetes"]
NoOption = Annotated[str, StringConstraints(pattern=r"^([^-]|$)")]
"""What becomes an argument of a command, such as `kubectl get NAME`."""
INVITER = "inviter"
"""The role of the process that invites other machines into a run."""
HELPERS = ("store", "stage")
"""Roles of processes that take a part of the server's work, or of a worker's."""


class Process(BaseModel):
    """A process of a run, by which its files are named: `rank` is a worker's, from 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str
    role: str
    rank: int | None = None

    @property
    def is_helper(self) -> bool:
        """Whether it is neither a worker nor the server, which does not know of it or says nothing of it."""
        return self.role in HELPERS

    @property
    def title(self) -> str:
        """The process for people: `server mini1`, `worker 1 (pi5)`."""
        return process_title(self.role, self.node, self.rank)

    @property
    def stem(self) -> str:
        """Its name in the names of files: `worker-rank0-pi5`."""
        return log_stem(self.role, self.node, self.rank)


class LaunchedProcess(Process):
    """One process of a run, in a tmux session of its own or a child of its launcher.

    Attributes:
        node: the machine's name in the cluster file.
        ssh: where `ssh` finds the machine; None: it is the one that launched.
        run_dir: the run's folder there, absolute or from `~/`.
        session: name of the tmux session, or of the scheduler's job; empty: it is a child of its launcher.
        project_dir: the project's folder there, likewise; the command starts in it.
        argv: the command, an argument an item.
        device: what it computes on, where the configuration says so.
        pid: of a child.
        scheduler: which has the job that it is; None: it is a process of ours.
    """

    ssh: NoOption | None = None
    run_dir: str = ""
    session: NoOption = ""
    project_dir: str = "~/smolcluster"
    argv: tuple[str, ...] = ()
    device: str | None = None
    pid: PositiveInt | None = None
    scheduler: Scheduler | None = None

    @property
    def lives_here(self) -> bool:
        """Whether it is a process of this machine; numbers of processes are used again."""
        if self.ssh is not None or not self.run_dir:
            return False
        folder, pid = Path(self.run_dir).expanduser(), self.pid
        with suppress(OSError, ValueError, psutil.Error):
            pid = pid or int((RunPaths(folder).pids / self.stem).read_text())
            return folder.name in " ".join(psutil.Process(pid).cmdline())
        return False

    def with_arguments(self, *arguments: str) -> "LaunchedProcess":
        return self.model_copy(update={"argv": (*self.argv, *arguments)})


class Launched(BaseModel):
    """A run that was launched: its processes, the server first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    algorithm: str
    port: int = 0
    overrides: tuple[str, ...] = ()
    """What the user set for this run besides the files."""
    processes: Annotated[tuple[LaunchedProcess, ...], Field(min_length=1)]
    version: str = ""
    """In files of before: a digest of the code that its machines were brought."""
    before: str | None = None
    """The incarnation of the status that its server had left when it was started, if it goes on."""
    shippers: tuple[LaunchedProcess, ...] = ()
    """What ends with them: what brings their logs to Loki, one a machine, and what invites other machines."""

    def resumed(self) -> "Launched":
        """The same run, which goes on from its newest good checkpoint."""
        server = self.server.with_arguments("--resume", "auto")
        return self.model_copy(update={"processes": (server, *self.others)})

    def with_worker(self, worker: LaunchedProcess) -> "Launched":
        """The same run with this worker or stage, instead of the one of that machine or that number."""

        def is_replaced(each: LaunchedProcess) -> bool:
            has_its_rank = worker.rank is not None and each.rank == worker.rank
            return each.role == worker.role and (each.node == worker.node or has_its_rank)

        others = [each for each in self.processes if not is_replaced(each)]
        processes = sorted((*others, worker), key=lambda each: (each.role, each.rank or 0))
        return self.model_copy(update={"processes": tuple(processes)})

    def with_pids(self, pids: Mapping[str, int]) -> "Launched":
        """The same run, whose processes are children with these ids, by stem."""
        return self._changed(lambda each: {"pid": pids.get(each.stem)})

    def at(self, run_dir: str) -> "Launched":
        """The same run, whose folder has been moved or copied here since."""
        return self._changed(lambda _: {"run_dir": run_dir})

    def _changed(self, change: Callable[[LaunchedProcess], dict[str, object]]) -> "Launched":
        processes, shippers = (
            tuple(each.model_copy(update=change(each)) for each in some)
            for some in (self.processes, self.shippers)
        )
        return self.model_copy(update={"processes": processes, "shippers": shippers})

    @property
    def is_group(self) -> bool:
        """Whether its processes begin together, as a group of `torch.distributed`; the first owns the run."""
        return spec_of(self.algorithm).is_group

    @property
    def has_script(self) -> bool:
        """Whether its workers are a script of the user's own."""
        return any("--script" in worker.argv for worker in self.workers)

    @property
    def is_local(self) -> bool:
        """Whether all of it runs on the machine that launched it."""
        return all(process.ssh is None for process in self.processes)

    @property
    def server(self) -> LaunchedProcess:
        return self.processes[0]

    @property
    def others(self) -> tuple[LaunchedProcess, ...]:
        """All but the server."""
        return self.processes[1:]

    @property
    def helpers(self) -> tuple[LaunchedProcess, ...]:
        return tuple(process for process in self.others if process.is_helper)

    @property
    def workers(self) -> tuple[LaunchedProcess, ...]:
        return tuple(process for process in self.others if not process.is_helper)

    @property
    def has_sessions(self) -> bool:
        """Whether it goes on without its launcher."""
        return bool(self.server.session)

    @property
    def is_job(self) -> bool:
        """Whether a scheduler starts it, when there is room."""
        return self.server.scheduler is not None


LAUNCHED = ModelFile[Launched](Launched, "is damaged")
read_launched = LAUNCHED.read


def write_launched(path: Path, launched: Launched) -> None:
    """Replace the file at once, and note that it is of this user's launcher.

    Raises:
        SmolclusterError: it cannot be written.
    """
    remember(path.parent.name, path.name, LAUNCHED.text(launched))
    LAUNCHED.write(path, launched)


class _Child(Process):
    """What `processes.json` says of a process, in which earlier versions listed a launcher's children."""

    model_config = ConfigDict(strict=True, extra="ignore")

    pid: PositiveInt


CHILDREN = ModelFile[list[_Child]](list[_Child], "is not a list of processes")


def launched_of(paths: RunPaths) -> Launched | None:
    """The processes of a run that was launched from here, also by an earlier version; None: it was not.

    Raises:
        DataError: their list is damaged.
    """
    if paths.launched.is_file():
        launched = read_launched(paths.launched)
        return launched if launched.has_sessions else launched.at(str(paths.root))
    children = CHILDREN.read(paths.processes) if paths.processes.is_file() else []
    if not children:
        return None
    processes = [LaunchedProcess(**dict(child), run_dir=str(paths.root)) for child in children]
    return Launched(run_id=paths.run_id, algorithm="", processes=tuple(processes))
