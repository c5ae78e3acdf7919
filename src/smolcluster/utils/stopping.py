"""Signals that ask a process to stop, at once or at the next good moment."""

import os
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_ON_STDIN_EOF = "--stop-on-stdin-eof"
"""What a launch gives the processes that it starts: they end with their standard input."""


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that are to be taken: of SIGHUP nothing is heard where it is ignored (nohup)."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(signum for signum in SIGNALS if not (is_deaf and signum == signal.SIGHUP))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to stop. `is_orderly`: between two steps, not in the middle of one."""

    def __init__(self, signum: int, *, is_orderly: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum
        self.is_orderly = is_orderly


_AS_TEXT = re.compile(r"\b(?:KeyboardInterrupt|Interrupted): (?:stopped by (SIG[A-Z]+))?$")


def as_raised(error: BaseException) -> BaseException:
    """What a signal has raised, where this error is that as text.

    Such is what pydantic makes of it while it builds a schema, which it does as modules are imported.
    """
    is_pydantics = type(error).__module__.startswith("pydantic")
    found = _AS_TEXT.search(str(error)) if is_pydantics else None
    return error if found is None else Interrupted(signal.Signals[found[1] or "SIGINT"])


@contextmanager
def signals_as_raised() -> Iterator[None]:
    """Raise what a signal has raised in the block, as that and not as text.

    Raises:
        Interrupted: there was a signal.
    """
    try:
        yield
    except Exception as error:
        if (raised := as_raised(error)) is not error:
            raise raised from None
        raise


class Ended(BaseException):
    """The process is over, and its log has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


Handler = Callable[[int, FrameType | None], None]


def take_signals(
    handler: Handler, signums: Collection[signal.Signals] = SIGNALS
) -> dict[signal.Signals, Any]:
    """Have `handler` take those of the signals that are to be heeded; returns the handlers before."""
    taking = _Taking(handler)
    return {signum: signal.signal(signum, taking) for signum in heeded() if signum in signums}


@contextmanager
def taking_signals(handler: Handler) -> Iterator[None]:
    """`take_signals` while the block lasts; afterwards everything is as it was."""
    before = take_signals(handler)
    try:
        yield
    finally:
        for signum, was in before.items():
            signal.signal(signum, was)


class _Taking:
    """A handler of this process, and not of those that it forks."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._handler(signum, frame)


def _end_by_sigterm() -> None:
    """Have a process that was forked end by SIGTERM, by which a user's `multiprocessing.Pool` ends its own.

    A handler could not see to that: Python calls it between two calls, so that of a signal that comes just
    before one that waits it hears only when that has come back.
    """
    if isinstance(signal.getsignal(signal.SIGTERM), _Taking):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_by_sigterm)


def leave_signals(*signums: signal.Signals) -> None:
    """Take no notice of them from now on: another process says when this one ends.

    They are not ignored: all processes that this one starts would ignore them, too.
    """
    take_signals(lambda *_: None, signums)


def interrupt(signum: int, _frame: FrameType | None) -> None:
    """A signal handler that stops the process at once."""
    raise Interrupted(signum)


def interrupt_once() -> Handler:
    """A handler that does so at the first signal; of further ones only Ctrl-C is impatience."""
    taken: list[int] = []

    def handler(signum: int, _frame: FrameType | None) -> None:
        if not taken or signum == signal.SIGINT:
            taken.append(signum)
            raise Interrupted(signum)

    return handler


def at_stdin_eof(act: Callable[[], None]) -> None:
    """Do something when standard input ends, in a thread: who started this process holds it."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        act()

    threading.Thread(target=wait, name="stdin", daemon=True).start()


class StopRequest:
    """Keeps a signal until `check`; a second one counts at once.

    But for SIGHUP: a terminal that goes, of which one may hear twice, is nobody's impatience.
    """

    def __init__(self) -> None:
        self._signum: int | None = None

    def note(self, signum: int) -> None:
        self._signum = signum

    def check(self) -> None:
        """Now is a good moment to stop.

        Raises:
            Interrupted: there was a signal.
        """
        if self._signum is not None:
            raise Interrupted(self._signum, is_orderly=True)

    def collecting(self) -> AbstractContextManager[None]:
        """Take the signals while the block lasts; only the main thread can, others hear of none."""
        is_main = threading.current_thread() is threading.main_thread()
        return taking_signals(self._take) if is_main else nullcontext()

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None and signum != signal.SIGHUP:
            interrupt(signum, frame)
        self.note(signum)
