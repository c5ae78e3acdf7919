"""The command: looks in one thread, draws in another, ends with the run, Ctrl-C or q."""

import os
import select
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from smolcluster.launch.find import find
from smolcluster.launch.watch.probe import Ask
from smolcluster.launch.watch.top.frame import PLAIN, Canvas, frame
from smolcluster.launch.watch.top.source import Picture, Source
from smolcluster.observability.terminal import SteadyConsole, displayable, steady

DRAW_EVERY_S = 1.0
PAGE = 1000
"""Lines of a frame that is printed once, into a file or a pipe."""


def top(run: str, *, once: bool, ask: Ask | None = None) -> int:
    """Show how a run goes, until it is over, Ctrl-C or q; `once`, or without a terminal, print one frame.

    `ask` runs a script on a machine; only tests say another one.

    Raises:
        ConfigError: there is no such run.
        DataError: its list of processes is damaged.
    """
    paths, console = find(run), SteadyConsole()
    with tempfile.TemporaryDirectory(prefix="smolcluster-") as folder:
        source = Source(paths, Path(folder), ask)
        try:
            return _top(source, paths.run_id, console, once=once or not console.is_terminal)
        finally:
            source.close()


def _top(source: Source, run_id: str, console: Console, *, once: bool) -> int:
    if once:
        height = console.height if console.is_terminal else PAGE
        console.print(drawn(source.look(), console, height), no_wrap=True, crop=False)
        return 0
    source.keep_looking()
    with suppress(KeyboardInterrupt), steady(console):
        _watch(source, console, f"looking at {run_id} …")
    return 0


def _watch(source: Source, console: Console, first_words: str) -> None:
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
            picture = source.newest()
            if picture is not None:
                live.update(drawn(picture, console, console.height), refresh=True)
                if picture.is_over:
                    break
            if is_q(descriptor, 0.1 if picture is None else DRAW_EVERY_S) or console.quiet:
                return
    console.print(drawn(picture, console, console.height - 1), no_wrap=True, crop=False)


def drawn(picture: Picture, console: Console, height: int) -> RenderableType:
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
    return Text("\n").join(frame(picture, canvas))


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
