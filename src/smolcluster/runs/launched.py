"""`launch.json`: which processes were started for a run, and where; kept on the machine that launched it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.paths import log_stem, process_title


class LaunchedProcess(BaseModel):
    """One process of a run, in a tmux session of its own or a child of its launcher.

    Attributes:
        node: the machine's name in the cluster file.
        role: server or worker.
        rank: a worker's place, from 0; None for the server.
        ssh: where `ssh` finds the machine; None: it is the one that launched.
        run_dir: the run's folder there, absolute or from `~/`; empty: the launcher's own.
        session: name of the tmux session; empty: it is a child of its launcher.
        project_dir: the project's folder there, likewise; the command starts in it.
        argv: the command, an argument an item.
        device: what it computes on, where the configuration says so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str
    role: str
    rank: int | None
    ssh: str | None = None
    run_dir: str = ""
    session: str = ""
    project_dir: str = "~/smolcluster"
    argv: tuple[str, ...] = ()
    device: str | None = None

    @property
    def title(self) -> str:
        """The process in messages: `server mini1`, `worker 1 (pi5)`."""
        return process_title(self.role, self.node, self.rank)

    @property
    def stem(self) -> str:
        """Its name in the names of files: `worker-rank0-pi5`."""
        return log_stem(self.role, self.node, self.rank)

    def with_arguments(self, *arguments: str) -> "LaunchedProcess":
        """The same process with more arguments to its command."""
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
    """Digest of the code that its machines were brought; empty: they run what they have."""
    shippers: tuple[LaunchedProcess, ...] = ()
    """What brings their logs to Loki, one a machine."""

    def resumed(self) -> "Launched":
        """The same run, which goes on from its newest good checkpoint."""
        server = self.server.with_arguments("--resume", "auto")
        return self.model_copy(update={"processes": (server, *self.workers)})

    def with_worker(self, worker: LaunchedProcess) -> "Launched":
        """The same run with this worker, instead of the one of that machine or that number."""
        others = [
            each
            for each in self.processes
            if each.role != worker.role or (each.node != worker.node and each.rank != worker.rank)
        ]
        processes = sorted((*others, worker), key=lambda each: (each.role, each.rank or 0))
        return self.model_copy(update={"processes": tuple(processes)})

    @property
    def is_local(self) -> bool:
        """Whether all of it runs on the machine that launched it."""
        return all(process.ssh is None for process in self.processes)

    @property
    def server(self) -> LaunchedProcess:
        """The server's process."""
        return self.processes[0]

    @property
    def workers(self) -> tuple[LaunchedProcess, ...]:
        """The workers' processes."""
        return self.processes[1:]


LAUNCHED = ModelFile[Launched](Launched, "is damaged")
read_launched, write_launched = LAUNCHED.read, LAUNCHED.write
