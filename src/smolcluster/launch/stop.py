"""Ending a launched run: its server first, which saves a checkpoint while all take part; then the workers.

These do not hear of it: to them a server that was stopped is one that may come back.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.host import shell_path
from smolcluster.launch.interrupts import interrupts
from smolcluster.launch.sessions import Ending, ask_to_end, host_of, kill, wait_to_end
from smolcluster.launch.watch.probe import command_lines, is_launched_worker, is_server_of
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import RunPaths, log_stem
from smolcluster.runs.processes import ProcessEntry, read_processes
from smolcluster.runs.status import STATUS, stopped, write_status
from smolcluster.utils.at_once import at_once
from smolcluster.utils.retry import Deadline

SERVER_GRACE_S = 300.0
"""A large last checkpoint takes a slow disk that long."""
WORKER_GRACE_S = 10.0
SHIPPER_GRACE_S = 10.0
LAST_LINES_S = 1.0
"""What follows the log files may look at them once a second."""
KILL_GRACE_S = 5.0
"""How long what was killed may take to be gone."""
ASK_S = 2.0
"""How long a machine is waited for at once: so soon a changed mind is heard."""
POLL_S = 0.1
WAITING = "waiting for its last checkpoint"

InAHurry = Callable[[], bool]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Left:
    """A process of which it is not known that it has ended, and why."""

    process: LaunchedProcess
    reason: str


@dataclass(frozen=True)
class StopResult:
    """What came of stopping a run: what may be left of it, and whether it was over before."""

    left: list[Left]
    was_over: bool


def stop_processes(
    launched: Launched,
    *,
    in_a_hurry: InAHurry = lambda: False,
    say: Say = lambda _: None,
    server_grace_s: float = SERVER_GRACE_S,
) -> StopResult:
    """End all processes of a run and see that nothing is left.

    The server is asked first, then the workers, and at last what ships their logs. Who does not end in time
    is killed, and so is everybody as soon as `in_a_hurry()` says so.
    """
    server = _end(launched.server, server_grace_s, in_a_hurry, say)
    if server is Ending.ENDED:
        with suppress(LaunchError):
            _note_stopped(launched)
    workers = at_once(
        lambda worker: _end(worker, WORKER_GRACE_S, in_a_hurry, say), launched.workers
    )
    results = [server, *workers]
    shippers = _end_shippers(launched.shippers, in_a_hurry, say)
    return StopResult(
        left=[result for result in (*results, *shippers) if isinstance(result, Left)],
        was_over=all(result is Ending.WAS_OVER for result in results),
    )


def _note_stopped(launched: Launched) -> None:
    """Let the run's status say that it was stopped, where its server was killed before it could.

    Raises:
        LaunchError: the server's machine cannot be asked.
    """
    host, file = host_of(launched.server), f"{shell_path(launched.server.run_dir)}/status.json"
    status = STATUS.parse(host.run(f"cat {file} 2>/dev/null").stdout)
    last = stopped(status, launched.run_id, launched.algorithm)
    if last is not None:
        host.run(f"cat > {file}.stopped && mv {file}.stopped {file}", stdin=STATUS.text(last))


def note_stopped_here(paths: RunPaths) -> None:
    """The same of a run of this machine."""
    read = read_snapshot(paths)
    algorithm = "" if read.started is None else read.started.algorithm
    last = stopped(read.status, paths.run_id, algorithm)
    if last is not None:
        with suppress(SmolclusterError):
            write_status(paths.status, last)


def _end(process: LaunchedProcess, grace_s: float, in_a_hurry: InAHurry, say: Say) -> Ending | Left:
    try:
        if not in_a_hurry():
            ending = _ask(process, grace_s, in_a_hurry, say)
            if ending is not Ending.REMAINS:
                return ending
            if not in_a_hurry():
                say(f"{process.title} does not end within {grace_s:g} s: it is killed")
        ending = kill(process, KILL_GRACE_S)
    except LaunchError as error:
        return Left(process, str(error))
    if ending is Ending.REMAINS:
        return Left(process, "it cannot be killed: it may be waiting for a disk")
    return ending


def _end_shippers(
    shippers: Sequence[LaunchedProcess], in_a_hurry: InAHurry, say: Say
) -> list[Ending | Left]:
    def end(shipper: LaunchedProcess) -> Ending | Left:
        with suppress(LaunchError):
            ending = wait_to_end(shipper, 0.0 if in_a_hurry() else LAST_LINES_S)
            if ending is not Ending.REMAINS:
                return ending
        return _end(shipper, SHIPPER_GRACE_S, in_a_hurry, say)

    return at_once(end, shippers)


def _ask(process: LaunchedProcess, grace_s: float, in_a_hurry: InAHurry, say: Say) -> Ending:
    """Ask a process to end, and wait for it as long as there is time."""
    deadline = Deadline(grace_s)
    ending = ask_to_end(process, min(ASK_S, grace_s))
    if ending is Ending.REMAINS and process.role == "server":
        say(f"{process.title}: {WAITING}")
    while ending is Ending.REMAINS and not (deadline.expired or in_a_hurry()):
        ending = wait_to_end(process, ASK_S)
        if ending is Ending.WAS_OVER:  # since it was asked
            return Ending.ENDED
    return ending


def stop_children(paths: RunPaths, *, now: bool, server_grace_s: float = SERVER_GRACE_S) -> int:
    """End a run of this machine whose processes are some launcher's children.

    Its server is asked, and gets its time for a last checkpoint; then the launcher ends the workers. Who
    remains is killed, with `now` or at Ctrl-C at once. Returns the exit code: 1 if something is left.

    Raises:
        ConfigError: the run has left no list of processes.
        DataError: the list is damaged.
    """
    if not paths.processes.is_file():
        raise ConfigError(f"run {paths.run_id} was not launched from here: it lists no processes")
    children = Children(paths)
    servers, workers = children.servers(), children.workers()
    with interrupts() as asked:

        def in_a_hurry() -> bool:
            return now or signal.SIGINT in asked.received

        if servers and not in_a_hurry():
            _say(f"stopping run {paths.run_id}; Ctrl-C kills it, without a last checkpoint")
            children.ask(servers)
            if not _wait(children.servers, ASK_S, in_a_hurry):
                _say(f"run {paths.run_id}: {WAITING}")
                _wait(children.servers, server_grace_s, in_a_hurry)
        children.kill(children.servers())
        _wait(children.workers, WORKER_GRACE_S, in_a_hurry)
        children.kill(children.workers())
        if not _wait(children.alive, KILL_GRACE_S, lambda: False):
            _say(f"run {paths.run_id}: processes {sorted(children.alive())} do not end")
            return 1
    if servers:
        note_stopped_here(paths)
    what = "stopped" if servers or workers else "it was over already"
    _say(f"run {paths.run_id}: {what}; nothing of it is left running")
    return 0


class Children:
    """The listed processes of a run, as long as they live; other processes may have their ids by now."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._entries = read_processes(paths.processes)

    def servers(self) -> list[int]:
        return self._living(
            lambda each: each.rank is None, lambda line: is_server_of(line, self._paths.run_id)
        )

    def workers(self) -> list[int]:
        return self._living(lambda each: each.rank is not None, is_launched_worker)

    def _living(
        self, chosen: Callable[[ProcessEntry], bool], is_ours: Callable[[str], bool]
    ) -> list[int]:
        """Those of the chosen; `is_ours` judges the command line where the list does not tell enough."""
        entries = [each for each in self._entries if chosen(each)]
        lines = command_lines([each.pid for each in entries if each.started is None])
        unsure = {pid for pid, line in lines.items() if is_ours(line)}
        return [each.pid for each in entries if each.is_itself or each.pid in unsure]

    def alive(self) -> list[int]:
        return [*self.servers(), *self.workers()]

    def ask(self, pids: Collection[int]) -> None:
        """Send SIGTERM to who has not been asked before: a second one would cut the last checkpoint."""
        for entry in self._entries:
            if entry.pid in pids and _is_first(marker_of(self._paths, entry)):
                with suppress(ProcessLookupError):
                    os.kill(entry.pid, signal.SIGTERM)

    def kill(self, pids: Collection[int]) -> None:
        """End each of these, and what it has started in its session, at once."""
        for entry in self._entries:
            if entry.pid in pids:
                _is_first(marker_of(self._paths, entry))
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(entry.pid, signal.SIGKILL)


def marker_of(paths: RunPaths, entry: ProcessEntry) -> Path:
    """The file that is there when somebody has asked a process to end, or killed it."""
    stem = log_stem(entry.role, entry.node, entry.rank)
    return paths.root / "asked" / f"{stem}.{entry.pid}"


def _is_first(marker: Path) -> bool:
    """Whether nobody has asked this process to end; from now on somebody has."""
    try:
        marker.parent.mkdir(exist_ok=True)
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # it cannot be noted, for instance on a full disk
        return True
    return True


def _wait(alive: Callable[[], Collection[int]], timeout_s: float, in_a_hurry: InAHurry) -> bool:
    """Wait until nobody is alive; whether it is so."""
    deadline = Deadline(timeout_s)
    while alive():
        if deadline.expired or in_a_hurry():
            return False
        time.sleep(POLL_S)
    return True


def _say(line: str) -> None:
    with suppress(OSError):  # its terminal may have gone
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
