"""The progress bar in a terminal that changes its size: a pane of a real tmux."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

import progress_shown
from waiting import eventually

TMUX_TIMEOUT_S = 60.0
BAR = re.compile(r"━+ .*?(?:step (\d+)|$)")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Pane:
    """A terminal in which a command runs, on a tmux server of its own."""

    def __init__(self, words: list[str], *, columns: int) -> None:
        self._socket = f"progress-{os.getpid()}"
        command = f"{shlex.join(words)}; sleep 600"
        self.tmux("new-session", "-d", "-s", "pane", "-x", str(columns), "-y", "20", command)

    def tmux(self, *words: str) -> str:
        argv = ["tmux", "-L", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(
            argv,
            check=True,
            capture_output=True,
            text=True,
            timeout=TMUX_TIMEOUT_S,
        ).stdout

    @property
    def lines(self) -> list[str]:
        """What is on it and what has scrolled away, without empty lines."""
        shown = self.tmux("capture-pane", "-p", "-S", "-", "-t", "=pane:").splitlines()
        return [line for line in shown if line.strip()]

    @property
    def step(self) -> int:
        """The step that the bar shows; 0 without one."""
        found = BAR.search(self.lines[-1]) if self.lines else None
        return int(found[1] or 0) if found else 0

    def is_past(self, step: int) -> bool:
        return self.step > step


@pytest.fixture
def pane() -> Iterator[Pane]:
    """A bar of about 95 columns in a terminal of 140."""
    pane = Pane([sys.executable, progress_shown.__file__], columns=140)
    yield pane
    pane.tmux("kill-server")


def test_a_terminal_whose_size_changes_shows_one_bar(pane: Pane) -> None:
    eventually(lambda: pane.step)
    for columns, rows in ((60, 20), (45, 8), (200, 30), (50, 30), (140, 12)):
        after = pane.step + progress_shown.EVERY
        pane.tmux("resize-window", "-t", "=pane:", "-x", str(columns), "-y", str(rows))
        eventually(partial(pane.is_past, after))
        lines = pane.lines
        assert [line for line in lines[:-1] if not re.fullmatch(r"(begun|line) \d+", line)] == []
    pane.tmux("send-keys", "-t", "=pane:", "Enter")
    eventually(lambda: pane.lines[-1] == "over")
    assert sum("━" in line for line in pane.lines) == 1
