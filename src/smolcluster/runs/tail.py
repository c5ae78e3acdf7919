"""Whole lines of a file that grows, a bounded piece at a time."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MAX_PIECE_NBYTES = 4 << 20


class Line(NamedTuple):
    """A line without its end, and where in the file it begins."""

    offset: int
    data: bytes


class Tail:
    """Reads what a file has gained since the last look.

    Attributes:
        path: the file, which may not exist yet.
        offset: where the first line that was not handed out begins.
    """

    def __init__(
        self,
        path: Path,
        offset: int = 0,
        max_piece_nbytes: int = MAX_PIECE_NBYTES,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_restart`: called when it is another file, which is read from its beginning."""
        self.path = path
        self.offset = offset
        self._max_nbytes = max_piece_nbytes
        self._on_restart = on_restart
        self._is_inside = False
        self._inode = 0

    @classmethod
    def newest(
        cls, path: Path, nbytes: int, on_restart: Callable[[], None] = lambda: None
    ) -> "Tail":
        """One that begins with the first line that begins within the file's last bytes."""
        tail = cls(path, on_restart=on_restart)
        with suppress(OSError):
            tail.offset = max(0, path.stat().st_size - nbytes)
        tail._is_inside = tail.offset > 0
        return tail

    def poll(self) -> list[Line]:
        """Lines that are new and whole, a piece of the file at most; none when all are read.

        Of a line that is longer than a piece the beginning is handed out. A file that has become shorter is
        read from its beginning; if it was rotated, what it was before is read to its end first. One that
        cannot be read is empty.
        """
        data = self._read()
        end = data.rfind(b"\n") + 1
        if not end:
            return self._beginning(data) if len(data) == self._max_nbytes else []
        lines, place = [], self.offset
        for part in data[: end - 1].split(b"\n"):
            lines.append(Line(place, part))
            place += len(part) + 1
        self.offset = place
        if self._is_inside:
            self._is_inside = False
            return lines[1:] or self.poll()
        return lines

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_size < self.offset:
                    if rest := self._rest():
                        return rest
                    self.offset, self._is_inside = 0, False
                    self._on_restart()
                self._inode = facts.st_ino
                file.seek(self.offset)
                return file.read(self._max_nbytes)
        except OSError:
            return b""

    def _rest(self) -> bytes:
        """What a file that was rotated since the last look has after that, to the end of a line."""
        with suppress(OSError), self.path.with_name(f"{self.path.name}.1").open("rb") as file:
            if os.fstat(file.fileno()).st_ino == self._inode:
                file.seek(self.offset)
                data = file.read(self._max_nbytes)
                return data[: data.rfind(b"\n") + 1]
        return b""

    def _beginning(self, data: bytes) -> list[Line]:
        """The first piece of a long line; nothing for its other pieces."""
        line = Line(self.offset, data)
        self.offset += len(data)
        if self._is_inside:
            return self.poll()
        self._is_inside = True
        return [line]
