"""The command: looks in one thread, draws in another, ends with the run, Ctrl-C or q."""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from smolcluster.errors import SmolclusterError
from smolcluster.launch.find import find
from smolcluster.launch.watch.probe import Ask
from smolcluster.launch.watch.top.frame import PLAIN, Canvas, frame
from smolcluster.launch.watch.top.source import Snapshot, SnapshotSource
from smolcluster.observability.terminal import SteadyConsole, displayable, steady

DRAW_EVERY_S = 1.0
LOOK_EVERY_S, LOOK_ELSEWHERE_EVERY_S = 1.0, 2.0
PAGE = 1000
"""Lines of a frame that is printed once, into a file or a pipe."""


def top(run: str, *, once: bool, ask: Ask | None = None) -> int:
    """Show how a run goes, until it is over, Ctrl-C or q; `once`, or without a terminal, print one frame.

    `ask` runs a script on a machine; only tests say another one.

    Raises:
        ConfigError: there is no such run.
        DataError: its list of processes is damaged.
    """
    paths = find(run)
    source, console = SnapshotSource(paths, ask), SteadyConsole()
    if once or not console.is_terminal:
        height = console.height if console.is_terminal else PAGE
        with steady(console):
            console.print(drawn(source.look(), console, height), no_wrap=True, crop=False)
        return 0
    lookout = Poller(source)
    lookout.start()
    with suppress(KeyboardInterrupt), steady(console):
        _watch(lookout, console, f"looking at {paths.run_id} …")
    lookout.stop()
    return 0


class Poller(threading.Thread):
    """Looks at a run again and again, and keeps the newest picture."""

    def __init__(self, source: SnapshotSource) -> None:
        super().__init__(name="lookout", daemon=True)
        self._source = source
        self._every_s = LOOK_ELSEWHERE_EVERY_S if source.is_elsewhere else LOOK_EVERY_S
        self._taken: tuple[Snapshot, float] | None = None
        self._error: SmolclusterError | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._taken = self._source.look(), time.monotonic()
            except SmolclusterError as error:
                self._error = error
                return
            self._stopped.wait(max(0.1, began + self._every_s - time.monotonic()))

    def snapshot(self) -> Snapshot | None:
        """How the run stands now, as far as is known; None: nothing was seen yet.

        Raises:
            DataError: its list of processes is damaged.
        """
        if self._error is not None:
            raise self._error
        if self._taken is None:
            return None
        snapshot, taken_at = self._taken
        return snapshot.later(time.monotonic() - taken_at)

    def stop(self) -> None:
        self._stopped.set()


def _watch(lookout: Poller, console: Console, first_words: str) -> None:
    """Draw until the run is over, whose end then stays on the screen, or q is pressed."""
    with (
        keyboard() as descriptor,
        Live(
            Text(displayable(console, first_words)),
            console=console,
            screen=True,
            auto_refresh=False,
        ) as live,
    ):
        live.refresh()
        while True:
            snapshot = lookout.snapshot()
            if snapshot is not None:
                live.update(drawn(snapshot, console, console.height), refresh=True)
                if snapshot.is_over:
                    break
            if is_q(descriptor, 0.1 if snapshot is None else DRAW_EVERY_S) or console.quiet:
                return
    console.print(drawn(snapshot, console, console.height - 1), no_wrap=True, crop=False)


def drawn(snapshot: Snapshot, console: Console, height: int) -> RenderableType:
    is_plain = not console.encoding.lower().startswith("utf")

    def show(text: str) -> str:
        return displayable(console, text.translate(PLAIN) if is_plain else text)

    canvas = Canvas(
        width=console.width,
        height=height,
        show=show,
        is_plain=is_plain,
        has_colour=console.color_system is not None and not console.no_color,
    )
    return Text("\n").join(frame(snapshot, canvas))


@contextmanager
def keyboard() -> Iterator[int | None]:
    """Hear single keys while the block lasts; None: there is no keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def is_q(descriptor: int | None, seconds: float) -> bool:
    """Wait so long; whether q was pressed, which ends the wait."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if descriptor is None:
            time.sleep(left)
        elif select.select([descriptor], [], [], left)[0]:
            pressed = os.read(descriptor, 64)
            if b"q" in pressed.lower():
                return True
            descriptor = descriptor if pressed else None
    return False
