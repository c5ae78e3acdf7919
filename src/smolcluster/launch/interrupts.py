"""Signals as something to look at, so that the launcher can end its children in order.

`uv run` hands signals on to the process that it runs, but for SIGKILL, of which it hears nothing. So the end
of a `uv run` around this process counts as a request to stop, too.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from smolcluster.utils.stopping import taking_signals


@dataclass
class Interrupts:
    """What asked this process to stop.

    Attributes:
        received: the signals, in order.
        wrapper: process id of the `uv run` that runs this process; None: there is none.
    """

    received: list[int] = field(default_factory=list)
    wrapper: int | None = None

    def __bool__(self) -> bool:
        return bool(self.received) or self.wrapper not in (None, os.getppid())

    @property
    def repeated(self) -> bool:
        """Whether the user has asked twice; who closes the terminal asks for nothing."""
        return any(signum != signal.SIGHUP for signum in self.received[1:])

    @property
    def hung_up(self) -> bool:
        return signal.SIGHUP in self.received

    @property
    def exit_code(self) -> int:
        """What to end with: 128 + the first signal's number."""
        return 128 + (self.received[0] if self.received else signal.SIGTERM)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Collect SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP, instead of obeying them.

    For the main thread only; afterwards everything is as it was.
    """
    collected = Interrupts(wrapper=uv_around(os.getppid()))
    with taking_signals(lambda signum, _: collected.received.append(signum)):
        yield collected


def uv_around(parent: int) -> int | None:
    """`parent` if that process is uv, else None."""
    file = Path(f"/proc/{parent}/comm")
    try:
        if file.exists():
            name = file.read_text()
        else:
            command = ["ps", "-o", "comm=", "-p", str(parent)]
            name = subprocess.run(  # noqa: S603 - a fixed command
                command, capture_output=True, text=True, timeout=5, check=False
            ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parent if Path(name.strip()).name == "uv" else None
