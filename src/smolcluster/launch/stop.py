"""Ending a launched run: its server first, which saves a checkpoint while all take part; then all others.

These do not hear of it: to them a server that was stopped is one that may come back.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from smolcluster.errors import LaunchError
from smolcluster.launch.host import shell_path
from smolcluster.launch.sessions import (
    Ending,
    ask_to_end,
    free_script,
    host_of,
    is_full_disk,
    kill,
    status_of,
    wait_to_end,
)
from smolcluster.launch.watch.probe import sections
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import CHECKPOINT
from smolcluster.runs.status import STATUS, no_space_on, stopped
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
LOOK_S = 0.5
"""How often it is looked whether the server has saved."""
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
    unsaved: str | None = None
    """What is not saved because the server's disk is full, with the checkpoint that there is."""


def stop_processes(
    launched: Launched,
    *,
    in_a_hurry: InAHurry = lambda: False,
    say: Say = lambda _: None,
    server_grace_s: float = SERVER_GRACE_S,
    why: str | None = None,
) -> StopResult:
    """End all processes of a run and see that nothing is left.

    The server is asked first, the workers when it has saved its last checkpoint or has ended, and at last
    what ships their logs. Who does not end in time is killed, and so is everybody as soon as `in_a_hurry()`
    says so. `why`: how the run has failed, which its status then says; None: it is stopped.
    """
    has_ended = threading.Event()

    def end_others() -> list[Ending | Left]:
        while not (has_ended.wait(LOOK_S) or _has_saved(launched.server)):
            pass
        return at_once(lambda each: _end(each, WORKER_GRACE_S, in_a_hurry, say), launched.others)

    with ThreadPoolExecutor(1) as beside:
        others = beside.submit(end_others)
        try:
            server, unsaved = _end(launched.server, server_grace_s, in_a_hurry, say, why), None
        finally:
            has_ended.set()
        if not isinstance(server, Left):
            with suppress(LaunchError):
                unsaved = _unsaved(launched.server)
                if server is Ending.ENDED:
                    _note_stopped(launched, why)
        workers = others.result()
    results = [server, *workers]
    shippers = _end_shippers(launched.shippers, in_a_hurry, say)
    return StopResult(
        left=[result for result in (*results, *shippers) if isinstance(result, Left)],
        was_over=all(result is Ending.WAS_OVER for result in results),
        unsaved=unsaved,
    )


def _has_saved(server: LaunchedProcess) -> bool:
    """Whether the server has told of the run's end: it draws and writes a page then, which takes seconds."""
    with suppress(LaunchError):
        status = status_of(server)
        return status is not None and status.is_over
    return False


def _unsaved(server: LaunchedProcess) -> str | None:
    """What a full disk has kept a server that has ended from saving; None: nothing.

    A server that could write down its end has said there what it could not save. Where it could not, the
    disk is looked at.

    Raises:
        LaunchError: the server's machine cannot be asked.
    """
    run = shell_path(server.run_dir)
    lines = [
        "echo ::free",
        free_script(server),
        "echo ::names",
        f"ls {run}/checkpoints 2>/dev/null",
    ]
    lines += ["echo ::status", f"cat {run}/status.json 2>/dev/null"]
    said = sections(host_of(server).run("\n".join(lines)).stdout)
    status = STATUS.parse(said.get("status", ""))
    trouble = status.trouble if status is not None else None
    could_write = status is not None and status.is_over
    if trouble is None and not could_write and is_full_disk(said.get("free", "")):
        trouble = no_space_on(server.node)
    if trouble is None:
        return None
    steps = sorted(
        int(found[1]) for found in map(CHECKPOINT.fullmatch, said.get("names", "").split()) if found
    )
    there = f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint"
    return f"{trouble}; {there}"


def _note_stopped(launched: Launched, why: str | None) -> None:
    """Let the run's status say that it was stopped, or why, where its server was killed before it could.

    Raises:
        LaunchError: the server's machine cannot be asked.
    """
    host, file = host_of(launched.server), f"{shell_path(launched.server.run_dir)}/status.json"
    last = stopped(status_of(launched.server), launched.run_id, launched.algorithm, why)
    if last is not None:
        host.run(f"cat > {file}.stopped && mv {file}.stopped {file}", stdin=STATUS.text(last))


def _end(
    process: LaunchedProcess,
    grace_s: float,
    in_a_hurry: InAHurry,
    say: Say,
    why: str | None = None,
) -> Ending | Left:
    try:
        if not in_a_hurry():
            ending = _ask(process, grace_s, in_a_hurry, say, why)
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


def _ask(
    process: LaunchedProcess, grace_s: float, in_a_hurry: InAHurry, say: Say, why: str | None
) -> Ending:
    """Ask a process to end, and wait for it as long as there is time."""
    deadline = Deadline(grace_s)
    ending = ask_to_end(process, min(ASK_S, grace_s), why)
    if ending is Ending.REMAINS and process.role == "server":
        say(f"{process.title}: {WAITING}")
    while ending is Ending.REMAINS and not (deadline.expired or in_a_hurry()):
        ending = wait_to_end(process, ASK_S)
        if ending is Ending.WAS_OVER:  # since it was asked
            return Ending.ENDED
    return ending
