"""Files of another machine, read as they grow: one command a machine, which sends what is new.

The command runs over ssh like any other. It sends frames: `::data FILE INODE OFFSET LENGTH`, then exactly
so many bytes, then `::sent`, or `::void` where the file was rotated or cut meanwhile, so that they may be
anything; `::whole` after the first round over the files; `::beat` twice a second from then on, so that a
broken connection is noticed at either end. It ends when its standard input does. A file that has become
shorter is read from its beginning; one that is rotated (`runs.files.rotate`) to its end, and its successor
after it.
"""

import os
import re
import select
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Protocol

from smolcluster.errors import LaunchError
from smolcluster.launch.host import SSH_FAILED, Host
from smolcluster.runs.files import NUM_OLD_FILES

SILENCE_S = 20.0
RETRY_S = 2.0
END_S = 1.0
MAX_LINE_NBYTES = 1 << 20
CHUNK_NBYTES = 1 << 16
FRAME_NBYTES = 1 << 20
_DATA = re.compile(rb"::data (\d{1,6}) (\d{1,20}) (\d{1,18}) (\d{1,18})")
_FROM_OLDEST = " ".join([*(f'"$2.{age}"' for age in range(NUM_OLD_FILES, 0, -1)), '"$2"'])
_SHOW = f"""number() {{ ls -id "$1" 2>/dev/null | {{ read -r number rest; echo "$number"; }}; }}
send() {{
  while size=$(($(wc -c < "$2" 2>/dev/null))); do
    [ "$(number "$2")" = "$inode" ] || return 1
    [ "$size" -ge "$end" ] || end=0
    [ "$size" -gt "$end" ] || return 0
    [ $((size - end)) -le {FRAME_NBYTES} ] || size=$((end + {FRAME_NBYTES}))
    echo "::data $1 $inode $end $((size - end))"
    {{ tail -c "+$((end + 1))" "$2"; cat /dev/zero; }} 2>/dev/null | head -c "$((size - end))"
    if [ "$(number "$2")" != "$inode" ] || [ "$(($(wc -c < "$2" 2>/dev/null)))" -lt "$size" ]; then
      echo ::void
      return 1
    fi
    echo ::sent
    end=$size
  done
}}
show() {{
  inode=$3; end=$4; known=; before=; missing=
  if [ "$inode" != 0 ]; then
    for each in "$2" {_FROM_OLDEST}; do
      [ "$(number "$each")" = "$inode" ] && known=$each && break
    done
  fi
  for each in {_FROM_OLDEST}; do
    [ -f "$each" ] || {{ missing=$each; continue; }}
    if [ -n "$known" ]; then
      [ "$each" = "$known" ] || continue
      known=
    else
      next=$(number "$each")
      [ -n "$next" ] || return 1
      [ -z "$before" ] || [ "$(number "$before")" = "$inode" ] || return 1
      [ ! -f "$missing" ] || return 1
      inode=$next; end=0
    fi
    send "$1" "$each" || return 1
    before=$each
  done
  return 0
}}
look() {{
  inode=$3; end=$4
  for try in 1 2 3; do show "$1" "$2" "$inode" "$end" && break; done
}}
"""


@dataclass(frozen=True)
class ReadPosition:
    """Where to go on reading: in the file of that inode, 0 for none yet, at that offset."""

    inode: int = 0
    offset: int = 0


def growing_script(files: Sequence[str], places: Sequence[ReadPosition], *, follow: bool) -> str:
    """What sends the files (words of a shell) from these places on; with `follow` without end."""
    start = "; ".join(
        f"i{index}={place.inode} o{index}={place.offset}" for index, place in enumerate(places)
    )
    rounds = "; ".join(
        f'look {index} {file} "$i{index}" "$o{index}"; i{index}=$inode o{index}=$end'
        for index, file in enumerate(files)
    )
    script = f"{_SHOW}{start}\necho ::ready\n{rounds}\necho ::whole\n"
    if not follow:
        return script
    loop = f"while sleep 0.5; do {rounds}; echo ::beat || exit; done"
    return f"{script}{{ {loop}; }} & loop=$!\ncat > /dev/null; kill $loop\n"


class Output(Protocol):
    """What a command prints."""

    def read(self, most: int) -> bytes:
        """Some bytes, no more than `most`; none at the end."""


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file, which may be rotated; `file` None: the first round is over."""

    file: int | None
    inode: int = 0
    offset: int = 0
    data: bytes = b""


class BadFrame(Exception):
    """What came is no frame."""


class _Buffered:
    """An output, by lines and by numbers of bytes."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._held = b""

    def line(self) -> bytes | None:
        """The next line, without its end; None: there is none.

        Raises:
            BadFrame: it has no end.
        """
        while b"\n" not in self._held:
            if len(self._held) > CHUNK_NBYTES:
                raise BadFrame
            more = self._output.read(CHUNK_NBYTES)
            if not more:
                return None
            self._held += more
        line, _, self._held = self._held.partition(b"\n")
        return line

    def exactly(self, length: int) -> bytes:
        """So many bytes; fewer at the end.

        Raises:
            BadFrame: they are more than a frame may have.
        """
        if length > FRAME_NBYTES:
            raise BadFrame
        held = bytearray(self._held)
        while len(held) < length and (more := self._output.read(CHUNK_NBYTES)):
            held += more
        self._held = bytes(held[length:])
        return bytes(held[:length])


def pieces(output: Output) -> Iterator[Piece]:
    """The pieces of files in what the command prints; what a login shell prints before is left out.

    Raises:
        BadFrame: what came makes no sense.
    """
    source = _Buffered(output)
    while (line := source.line()) not in (None, b"::ready"):
        pass
    while (line := source.line()) is not None:
        if line == b"::whole":
            yield Piece(None)
        elif found := _DATA.fullmatch(line):
            file, inode, offset, length = map(int, found.groups())
            data = source.exactly(length)
            if (verdict := source.line()) == b"::sent":
                yield Piece(file, inode, offset, data)
            elif verdict not in (None, b"::void"):
                raise BadFrame
        elif line != b"::beat":
            raise BadFrame


class Lines:
    """The whole lines of one file.

    The first line that was not yet handed out begins at `offset`, in the file of that `inode`. The middle of
    a line of more than a megabyte is left out.
    """

    def __init__(self) -> None:
        self.inode = self.offset = 0
        self._held = b""
        self._left_out = 0

    def take(self, piece: Piece) -> list[bytes]:
        """The lines that are whole now."""
        place = ReadPosition(self.inode, self.offset + self._left_out + len(self._held))
        if ReadPosition(piece.inode, piece.offset) != place:  # it begins anew
            self.inode, self.offset = piece.inode, piece.offset
            self._held, self._left_out = b"", 0
        *lines, last = piece.data.split(b"\n")
        whole = []
        for line in lines:
            whole.append(self._held + line[: max(0, MAX_LINE_NBYTES - len(self._held))])
            self.offset += self._left_out + len(self._held) + len(line) + 1
            self._held, self._left_out = b"", 0
        kept = last[: max(0, MAX_LINE_NBYTES - len(self._held))]
        self._held += kept
        self._left_out += len(last) - len(kept)
        return whole

    def rest(self) -> list[bytes]:
        """What is there of a last line that has no end."""
        return [self._held] if self._held else []

    def forget_half(self) -> ReadPosition:
        """Drop what is held of a half line; returns where to go on."""
        self._held, self._left_out = b"", 0
        return ReadPosition(self.inode, self.offset)


class Pipe:
    """The output of a running command; as if it had ended when it says nothing for long."""

    def __init__(self, source: IO[bytes], silence_s: float = SILENCE_S) -> None:
        self._descriptor = source.fileno()
        self._silence_s = silence_s

    def read(self, most: int) -> bytes:
        """Some bytes; none at the end, or after a long silence."""
        ready, _, _ = select.select([self._descriptor], [], [], self._silence_s)
        return os.read(self._descriptor, most) if ready else b""


class Reader:
    """Reads files of one machine.

    Args:
        host: the machine.
        files: their paths, as words of a shell.
        on_lines: gets a file's number and lines of it, in order.
        on_whole: hears that all that was there when the command began has been handed out.
    """

    def __init__(
        self,
        host: Host,
        files: Sequence[str],
        *,
        on_lines: Callable[[int, list[bytes]], None],
        on_whole: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self._files = files
        self._lines = [Lines() for _ in files]
        self._on_lines = on_lines
        self._on_whole = on_whole
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def read(self) -> None:
        """Read what is there.

        Raises:
            LaunchError: the machine cannot be reached, or not all of it came.
        """
        if not self._once(follow=False):
            raise LaunchError(f"{self.host.node}: the connection broke while its logs came")
        for index, lines in enumerate(self._lines):
            if rest := lines.rest():
                self._on_lines(index, rest)

    def follow(self, on_lost: Callable[[str], None], on_found: Callable[[], None]) -> None:
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
        """Ask it to end, from another thread."""
        self._stopped.set()
        if (process := self._process) is not None:
            _close_input(process)

    def kill(self) -> None:
        """End its command at once, which a dead connection needs."""
        if (process := self._process) is not None and process.poll() is None:
            process.kill()

    def _once(self, *, follow: bool, on_whole: Callable[[], None] | None = None) -> bool:
        """Run the command until its end; whether all that was there when it began has come.

        Raises:
            LaunchError: the machine cannot be reached.
        """
        places = [lines.forget_half() for lines in self._lines]
        script = growing_script(self._files, places, follow=follow)
        is_whole = False
        with TemporaryFile() as said:
            process = self._start(script, said)
            assert process.stdout is not None  # noqa: S101 - it was asked for
            try:
                with suppress(BadFrame):
                    for piece in pieces(Pipe(process.stdout)):
                        if piece.file is None:
                            is_whole = True
                            (on_whole or self._on_whole)()
                        elif piece.file < len(self._files):
                            self._hand_on(piece, piece.file)
            finally:
                code = _end(process)
            if not is_whole and code == SSH_FAILED and self.host.destination is not None:
                said.seek(0)
                raise self.host.unreachable(said.read().decode("utf-8", "replace"))
        return is_whole

    def _hand_on(self, piece: Piece, file: int) -> None:
        if lines := self._lines[file].take(piece):
            self._on_lines(file, lines)

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


def _close_input(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError, ValueError):
        if process.stdin is not None:
            process.stdin.close()


def _end(process: "subprocess.Popen[bytes]") -> int:
    """End a command, which ends when its input does, and free its pipes; returns its exit code."""
    _close_input(process)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.stdout is not None:
        process.stdout.close()
    return process.wait()
