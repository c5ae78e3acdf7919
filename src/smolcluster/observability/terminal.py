"""The console that log lines, the progress bar and the closing table share."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
"""Of the processes of a run, in their order, again and again."""
HANGING = "hanging terminal"
"""Name of a thread that was left waiting for a terminal."""


class SteadyConsole(Console):
    """A rich console that falls silent, rather than ending the process, when it cannot be written."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does; a run does not end with its view."""
        with steady(self):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        silence(self)


@contextlib.contextmanager
def steady(console: Console) -> Iterator[None]:
    """Let a console fall silent when it cannot be written, whatever writes to it in the block."""
    try:
        yield
    except (OSError, ValueError):
        silence(console)


def silence(console: Console) -> None:
    """Print nothing from now on, and let what is still buffered go to the null device.

    Otherwise the interpreter complains when it flushes standard output at its end, and exits with
    120.
    """
    console.quiet = True
    with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), console.file.fileno())


def print_line(console: Console, line: str | Text) -> None:
    """Print exactly one line, above a progress bar if there is one.

    Control characters, which could come from a peer and move the cursor, are shown as `\\x1b`;
    nothing is wrapped or read as markup.
    """
    plain = displayable(console, line if isinstance(line, str) else line.plain)
    text = line if isinstance(line, Text) and line.plain == plain else Text(plain)
    with steady(console):
        console.print(text, soft_wrap=True, highlight=False)


def displayable(console: Console, text: str) -> str:
    """The text with control characters escaped, and what the console cannot encode as `?`."""
    controls = r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
    text = re.sub(controls, lambda match: match.group().encode("unicode_escape").decode(), text)
    return text.encode(console.encoding, "replace").decode(console.encoding)


def shown_text(console: Console, text: str) -> Text:
    """Text of several lines as the console can show it, each as `displayable`."""
    return Text("\n".join(displayable(console, line) for line in text.splitlines()))
