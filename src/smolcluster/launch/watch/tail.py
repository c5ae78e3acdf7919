"""Lines of a file on any machine, as it grows: `tail -F` over ssh, begun again when the connection breaks.

The command says `::ready` before the lines that are there and `::whole` after them; what a login shell prints
before is left out. It ends when its standard input does.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO

from smolcluster.errors import LaunchError
from smolcluster.launch.host import CONNECT_TIMEOUT_S, SSH_FAILED, Host
from smolcluster.runs.files import NUM_OLD_FILES

PATIENCE_S = CONNECT_TIMEOUT_S + 1.0
"""How long what one machine has is kept back for what others have, before the first is shown."""
RETRY_S = 2.0
END_S = 1.0
MAX_LINE_NBYTES = 1 << 20
CHUNK_NBYTES = 1 << 16
NUM_FIRST, NUM_AGAIN = 20, 20_000
"""Of a file that is not sent whole, and after a break: so many of its first and of its newest lines."""


def tail_script(file: str, newest: int | None, *, follow: bool) -> str:
    """What sends a file (a word of a shell) and its rotated ones, or its newest lines."""
    older = " ".join(f"{file}.{age}" for age in range(NUM_OLD_FILES, 0, -1))
    if newest is None:
        there = (
            f'for each in {older}; do [ ! -f "$each" ] || cat "$each"; done; '
            f"[ $num = 0 ] || head -n $num {file}"
        )
    else:
        there = (
            f"if [ $num -gt {newest + NUM_FIRST} ]; then head -n {NUM_FIRST} {file}; "
            f"head -n $num {file} | tail -n {newest}; elif [ $num -gt 0 ]; then head -n $num {file}; fi"
        )
    start = f"echo ::ready; num=$(($(cat {file} 2>/dev/null | wc -l))); {{ {there}; }} 2>/dev/null"
    rest = f"tail -n +$((num + 1)) {file} 2>/dev/null"
    if not follow:
        return f"{start}; {rest}; echo; echo ::whole\n"
    return (
        f"{start}; echo ::whole\n"
        f"tail -n +$((num + 1)) -F {file} 2>/dev/null & tail=$!; cat > /dev/null; kill $tail\n"
    )


Told = Callable[[str], None]


class RemoteTail:
    """Reads one file of one machine.

    Args:
        host: the machine.
        file: its path, a word of a shell.
        on_lines: gets lines of it, in order.
        on_whole: hears that all that was there when the command began has been handed out.
        newest: so many of the newest lines, and some of the first; None: all.
    """

    def __init__(
        self,
        host: Host,
        file: str,
        *,
        on_lines: Callable[[list[bytes]], None],
        on_whole: Callable[[], None] = lambda: None,
        newest: int | None = None,
    ) -> None:
        self.host = host
        self._file = file
        self._on_lines = on_lines
        self._on_whole = on_whole
        self._newest = newest
        self._last: bytes | None = None
        """The line that came last."""
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def read(self) -> None:
        """Read what is there.

        Raises:
            LaunchError: the machine cannot be reached, or not all of it came.
        """
        if not self._once(follow=False, on_whole=self._on_whole):
            raise LaunchError(f"{self.host.node}: the connection broke while its logs came")

    def follow(self, on_lost: Told, on_found: Callable[[], None]) -> None:
        """Read for ever, from where it ended when the connection breaks; returns after `stop`.

        `on_lost` hears once a break, in a sentence; `on_found` when it is mended.
        """
        is_lost = False

        def whole() -> None:
            nonlocal is_lost
            if is_lost:
                on_found()
            is_lost = False
            self._on_whole()

        while not self._stopped.is_set():
            try:
                self._once(follow=True, on_whole=whole)
                problem = f"{self.host.node} ({self.host.shown}): the connection broke"
            except LaunchError as error:
                problem = str(error)
            if not is_lost and not self._stopped.is_set():
                on_lost(problem)
                is_lost = True
            self._stopped.wait(RETRY_S)

    def stop(self) -> None:
        self._stopped.set()
        if (process := self._process) is not None:
            _close_input(process)

    def kill(self) -> None:
        """End its command at once, which a dead connection needs."""
        if (process := self._process) is not None and process.poll() is None:
            _kill(process)

    def _once(self, *, follow: bool, on_whole: Callable[[], None]) -> bool:
        """Run the command until its end; whether all that was there when it began has come.

        Raises:
            LaunchError: the machine cannot be reached.
        """
        newest = self._newest if self._last is None else NUM_AGAIN
        is_whole = False
        with TemporaryFile() as said:
            process = self._start(tail_script(self._file, newest, follow=follow), said)
            assert process.stdout is not None  # noqa: S101 - it was asked for
            again: list[bytes] | None = None if self._last is None else []
            try:
                for lines in _after_ready(process.stdout):
                    if b"::whole" in lines and not is_whole:
                        place = lines.index(b"::whole")
                        self._hand_on(lines[:place], again, is_last=True)
                        again, is_whole = None, True
                        on_whole()
                        lines = lines[place + 1 :]  # noqa: PLW2901 - the rest of them
                    self._hand_on(lines, again)
            finally:
                code = _end(process)
            if not is_whole and code == SSH_FAILED and self.host.destination is not None:
                said.seek(0)
                raise self.host.unreachable(said.read().decode("utf-8", "replace"))
        return is_whole

    def _hand_on(
        self, lines: list[bytes], again: list[bytes] | None, *, is_last: bool = False
    ) -> None:
        """Hand lines on; those that may have come before the break are kept in `again` until its last."""
        if again is not None:
            again += lines
            if not is_last:
                return
            num_known = max(
                (i + 1 for i, line in enumerate(again) if line == self._last), default=0
            )
            lines = again[num_known:]
        if lines:
            self._last = lines[-1]
            self._on_lines(lines)

    def _start(self, script: str, errors: IO[bytes]) -> "subprocess.Popen[bytes]":
        try:
            self._process = process = subprocess.Popen(  # noqa: S603 - an argument list; it is quoted
                self.host.argv(script),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends them
            )
        except OSError as error:
            raise LaunchError(f"cannot run ssh: {error.strerror or error}") from error
        if self._stopped.is_set():
            _close_input(process)
        return process


class Followed:
    """Files that are followed, each in a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._threads: list[tuple[RemoteTail, threading.Thread]] = []

    def add(self, tail: RemoteTail, on_lost: Told, on_found: Callable[[], None]) -> None:
        """Follow a file; the others hear of breaks, as `RemoteTail.follow` says."""
        thread = threading.Thread(target=tail.follow, args=(on_lost, on_found), daemon=True)
        self._threads.append((tail, thread))
        thread.start()

    def close(self) -> None:
        """Ask all to end; who does not soon is killed."""
        for tail, _ in self._threads:
            tail.stop()
        end = time.monotonic() + END_S
        for _, thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for tail, _ in self._threads:
            tail.kill()
        for _, thread in self._threads:
            thread.join(END_S)


def _after_ready(output: IO[bytes]) -> Iterator[list[bytes]]:
    """The whole lines of an output after `::ready`, as they come; of a huge one its beginning."""
    held, left_out, is_ready = b"", 0, False
    while more := os.read(output.fileno(), CHUNK_NBYTES):
        *lines, last = more.split(b"\n")
        if lines:
            lines[0] = held + lines[0] if not left_out else held
            held, left_out = b"", 0
        room = max(0, MAX_LINE_NBYTES - len(held))
        held, left_out = held + last[:room], left_out + len(last[room:])
        if not is_ready and b"::ready" in lines:
            is_ready = True
            lines = lines[lines.index(b"::ready") + 1 :]
        if is_ready and lines:
            yield lines


def _close_input(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError, ValueError):
        if process.stdin is not None:
            process.stdin.close()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With what it has started, which would keep its output open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: "subprocess.Popen[bytes]") -> int:
    """End a command, which ends when its input does, and free its pipes; returns its exit code."""
    _close_input(process)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        _kill(process)
    if process.stdout is not None:
        process.stdout.close()
    return process.wait()
