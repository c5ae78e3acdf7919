"""Ending a launched run: its server first, which saves a checkpoint while all take part; then the workers.

These do not hear of it: to them a server that was stopped is one that may come back.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.sessions import Ending, ask_to_end, kill
from smolcluster.launch.watch.probe import ours_alive
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.processes import read_processes
from smolcluster.utils.retry import Deadline

SERVER_GRACE_S = 60.0
"""A large last checkpoint takes a slow disk that long."""
WORKER_GRACE_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True)
class Left:
    """A process of which it is not known that it has ended, and why."""

    process: LaunchedProcess
    reason: str


@dataclass(frozen=True)
class Stopped:
    """What came of stopping a run: what may be left of it, and whether it was over before."""

    left: list[Left]
    was_over: bool


def stop_processes(
    launched: Launched, *, in_a_hurry: bool = False, say: Callable[[str], None] = lambda _: None
) -> Stopped:
    """End all processes of a run and see that nothing is left.

    The server is asked first, then the workers; whoever does not end in time is killed, in a hurry at once.
    """
    server = _end(launched.server, 0.0 if in_a_hurry else SERVER_GRACE_S, say)
    with ThreadPoolExecutor(max_workers=max(1, len(launched.workers))) as pool:
        ended = pool.map(lambda worker: _end_worker(worker, in_a_hurry, say), launched.workers)
    results = [server, *ended]
    return Stopped(
        left=[result for result in results if isinstance(result, Left)],
        was_over=all(result is Ending.WAS_OVER for result in results),
    )


def _end_worker(
    worker: LaunchedProcess, in_a_hurry: bool, say: Callable[[str], None]
) -> Ending | Left:
    return _end(worker, 0.0 if in_a_hurry else WORKER_GRACE_S, say)


def _end(process: LaunchedProcess, grace_s: float, say: Callable[[str], None]) -> Ending | Left:
    try:
        if grace_s:
            ending = ask_to_end(process, grace_s)
            if ending is not Ending.REMAINS:
                return ending
            say(f"{process.title} does not end within {grace_s:g} s: it is killed")
        ending = kill(process)
    except LaunchError as error:
        return Left(process, str(error))
    if ending is Ending.REMAINS:
        return Left(process, "it cannot be killed: it may be waiting for a disk")
    return ending


def stop_children(paths: RunPaths) -> int:
    """Ask the launcher's children of a run of this machine to end: their server, which ends the others.

    Returns the exit code: 1 if it still runs after a minute.

    Raises:
        ConfigError: the run has left no list of processes.
    """
    if not paths.processes.is_file():
        raise ConfigError(f"run {paths.run_id} was not launched from here: it lists no processes")
    alive = ours_alive([entry.pid for entry in read_processes(paths.processes)])
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = Deadline(SERVER_GRACE_S)
    while left := ours_alive(list(alive)):
        if deadline.expired:
            sys.stdout.write(f"run {paths.run_id}: processes {sorted(left)} do not end\n")
            return 1
        time.sleep(POLL_S)
    what = "stopped" if alive else "it was over already"
    sys.stdout.write(f"run {paths.run_id}: {what}; nothing of it is left running\n")
    return 0
