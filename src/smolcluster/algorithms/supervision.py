"""The supervisor of a worker or a store: it starts the process, and starts it again when it died.

A process has died when it was killed (memory ran out, a driver crashed), when its device failed, or when it
met an internal error after it had taken part: before, the next one would meet it as well. One that says
itself why it ends is not started again: the run is over, the server refused it, the user's code raised an
exception, the secret is wrong. One that has taken part and then found no server for as long as the
configuration lets it is tried again for an hour: its link may be cut, or its server's machine restart.

The process is in the supervisor's process group, so whoever ends the group ends both; who asks the supervisor
alone to stop is handed on. Its standard input is a pipe of the supervisor's: when that is gone, however it
went, the process stops.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType

from smolcluster.errors import DEVICE_FAILED, RANK_LOST, TryAgain
from smolcluster.observability.logs import NodeLog
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.retry import Deadline
from smolcluster.utils.stopping import signal_name, take_signals
from smolcluster.utils.units import format_count, format_duration
from smolcluster.utils.words import as_command

SUPERVISED = "--supervised"
"""The option of a supervised process: where to write the folder of its run, a file descriptor."""
TOOK_PART = b"took part"
"""What it writes after that, once it takes part. Each ends with a NUL."""
FIRST_DELAY_S, FACTOR = 1.0, 4.0
SETTLED_S = 600.0
"""A process that lived for so long is not one that cannot live."""
AWAY_S, AWAY_DELAY_S = 3600.0, 10.0
"""For how long a server that was there is looked for again, and how long is waited before each start."""
POLL_S = 0.1

_DIED = MappingProxyType(
    {BUG: "met an internal error", DEVICE_FAILED: "lost its device", RANK_LOST: "lost a rank"}
)
"""Exit codes of a process that another one may do better than, and what it has done."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a process that has ended."""

    delay_s: float | None
    """Until it is started again; None: it is not."""
    num_restarts: int
    """In a row, this time included."""
    reason: str = ""
    """How it died; empty: it has not, but said itself why it ended."""


def decide(
    code: int,
    lived_s: float,
    num_restarts: int,
    allowed: int,
    *,
    took_part: bool = True,
    away_s: float | None = None,
) -> Decision:
    """Whether to start a process again, `num_restarts` times in a row so far of the `allowed` ones.

    Args:
        code: its exit code; minus a signal's number when that ended it.
        took_part: whether it took part in the run before it ended.
        away_s: how long ago it or one before it last took part; None: none has.
    """
    if lived_s >= SETTLED_S:
        num_restarts = 0
    if code == TryAgain.exit_code and away_s is not None and away_s < AWAY_S and allowed:
        return Decision(AWAY_DELAY_S, num_restarts, "has lost its server")
    if -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) or (code >= 0 and code not in _DIED):
        return Decision(None, num_restarts)
    how = _DIED.get(code) or f"was ended by {signal_name(-code)}"
    if code == BUG and not took_part:
        return Decision(None, num_restarts, f"{how} before it took part")
    if num_restarts >= allowed:
        return Decision(None, num_restarts, how)
    return Decision(FIRST_DELAY_S * FACTOR**num_restarts, num_restarts + 1, how)


def is_started_again(code: int) -> bool:
    """Whether a process with this exit code has died, as far as it could say so itself."""
    return code in _DIED


class Stopping:
    """Signals that ask the supervisor to stop: noted, and handed on to the process that it has."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Take a signal; the process takes only one of those that are handed on."""
        self.signum = self.signum or signum
        self.hand_on()

    def hand_on(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.terminate()


def supervise(role: str, node: str, rank: int | None, allowed: int, *, named: bool = True) -> int:
    """Be the supervisor of a process with this command line; returns the last one's exit code.

    It is started again `allowed` times in a row. `named`: whether lines on the console say whose they are.
    """
    stopping, folder = Stopping(), b""
    take_signals(stopping)
    command = [sys.executable, *sys.argv]

    def say(level: str, line: str) -> None:
        _say(level, line, (role, node, rank), os.fsdecode(folder), named=named)

    brought_back = f"; {as_command('join')} brings it back" if role == "worker" else ""
    num_restarts, last_part = 0, None
    while True:
        began = time.monotonic()
        code, (told, *more) = _life(command, stopping)
        folder = told or folder
        ended, took_part = time.monotonic(), TOOK_PART in more
        last_part = ended if took_part else last_part
        away_s = None if last_part is None else ended - last_part
        decision = decide(
            code, ended - began, num_restarts, allowed, took_part=took_part, away_s=away_s
        )
        num_restarts = decision.num_restarts
        if stopping.signum is not None or not decision.reason:
            return code if code >= 0 else 128 - code
        if decision.delay_s is None:
            is_spent = took_part or code != BUG
            why = (
                f"that was done {format_count(allowed, 'time')} (restarts)"
                if is_spent
                else "it would meet it again"
            )
            say(
                "error",
                f"error: this {role} {decision.reason}, and is not started again: {why}{brought_back}",
            )
            return code if code >= 0 else 128 - code
        is_away = code == TryAgain.exit_code
        how_often = (
            f"for {format_duration(AWAY_S)}"
            if is_away
            else f"{num_restarts} of {format_count(allowed, 'time')}"
        )
        say(
            "warning",
            f"this {role} {decision.reason}; it is started again in "
            f"{format_duration(decision.delay_s)} ({how_often})",
        )
        if asked_by := _asked_within(decision.delay_s, stopping):
            return 128 + asked_by


def _life(command: Sequence[str], stopping: Stopping) -> tuple[int, list[bytes]]:
    """Run the process until its end; its exit code, and what it told: the folder of its run, and more."""
    hears, tells = os.pipe()
    for end in (hears, tells):
        os.set_blocking(end, False)
    try:
        stopping.process = subprocess.Popen(  # noqa: S603 - our own command line
            [*command, SUPERVISED, str(tells)], stdin=subprocess.PIPE, pass_fds=(tells,)
        )
        with stopping.process:
            if stopping.signum is not None:  # while it was being started
                stopping.hand_on()
            code = stopping.process.wait()
        with suppress(BlockingIOError):
            return code, os.read(hears, 1 << 16).split(b"\0")
        return code, [b""]
    finally:
        stopping.process = None
        os.close(hears)
        os.close(tells)


def _asked_within(delay_s: float, stopping: Stopping) -> int | None:
    """The signal that asked to stop, if one did while we waited."""
    deadline = Deadline(delay_s)
    while stopping.signum is None and not deadline.expired:
        time.sleep(min(POLL_S, deadline.remaining()))
    return stopping.signum


def _say(
    level: str, line: str, who: tuple[str, str, int | None], folder: str, *, named: bool
) -> None:
    """Log a line, in the process's file as well if there is one; it is closed again for its next process.

    `who`: its role, node and rank.
    """
    log = NodeLog(*who, named=named)
    if folder:
        paths = RunPaths(Path(folder))
        log.file_logs_to(paths.log_file(*who), paths.run_id)
    getattr(log.logger, level)(line)
    log.close()
