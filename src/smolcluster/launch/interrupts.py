"""Signals as something to look at, so that the launcher can end its children in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class Interrupts:
    """The signals that asked this process to stop, in order."""

    received: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there was any."""
        return bool(self.received)

    @property
    def repeated(self) -> bool:
        """Whether the user has asked twice."""
        return len(self.received) > 1

    @property
    def exit_code(self) -> int:
        """What to end with: 128 + the first signal's number."""
        return 128 + self.received[0]


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Collect SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP, instead of obeying them.

    For the main thread only; afterwards everything is as it was.
    """
    collected = Interrupts()

    def collect(signum: int, _frame: FrameType | None) -> None:
        collected.received.append(signum)

    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, collect) for signum in caught}
    try:
        yield collected
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
