"""The log files of one run as a spool: what Loki has not got yet, and how far it has got it.

A file is known by its inode and a digest of its beginning, so that one that was rotated is read on under its
old name's number, and one that was truncated, or whose inode has a new file, from the start.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pydantic import Field, NonNegativeInt

from smolcluster.observability.shipping.lines import LokiLine, entry_of, labels_of
from smolcluster.runs.files import or_none, rotations
from smolcluster.runs.model_file import ModelFile, Strict

STATE = ".shipped.json"
MAX_LINES = 2000
MAX_NBYTES = 1_000_000
HEAD_NBYTES = 256
READ_NBYTES = 4 << 20
"""A longer line is taken as several."""
TIE_NS = 10**9
"""Lines of a log are put in order where their times differ by less: clocks tell milliseconds."""
_LOG = re.compile(r"(.+)\.log(?:\.\d+)?")


class FilePosition(Strict):
    """How far a file has been taken; its size and the digest of its beginning when it was looked at."""

    offset: NonNegativeInt
    size: NonNegativeInt
    digest: str


class Shipped(Strict):
    """`.shipped.json`: files by inode, and the last time of each log in nanoseconds since 1970."""

    places: dict[str, FilePosition] = Field({})
    last_ns: dict[str, NonNegativeInt] = Field({})


SHIPPED = ModelFile[Shipped](Shipped, "is damaged", durable=False)


@dataclass(frozen=True)
class Batch:
    """Lines of one log in their order, and what is to be stored when Loki has them."""

    entries: Sequence[LokiLine]
    after: Shipped


@dataclass(frozen=True)
class _Open:
    """An open log file; `grows`: its last line may not be whole yet."""

    data: BinaryIO
    inode: str
    size: int
    grows: bool

    def digest(self, nbytes: int) -> str:
        self.data.seek(0)
        return hashlib.sha256(self.data.read(min(nbytes, HEAD_NBYTES))).hexdigest()[:16]

    def offset(self, place: FilePosition | None) -> int | None:
        """How far it has been taken; None: it is not the file of that place."""
        is_it = place and place.size <= self.size and place.digest == self.digest(place.size)
        return place.offset if place and is_it else None

    def lines_from(self, offset: int) -> Iterator[bytes]:
        self.data.seek(offset)
        while line := self.data.readline(READ_NBYTES):
            if self.grows and len(line) < READ_NBYTES and not line.endswith(b"\n"):
                return
            yield line


class Spool:
    """The logs in one folder; `only` of these stems, if any are given.

    Attributes:
        lost_nbytes: what was removed before Loki had it, because files were rotated too often.
    """

    def __init__(
        self,
        folder: Path,
        only: Collection[str] = (),
        *,
        max_lines: int = MAX_LINES,
        max_nbytes: int = MAX_NBYTES,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder = folder
        self.lost_nbytes = 0
        self._run_id = folder.absolute().parent.name
        self._only = only
        self._max_lines = max_lines
        self._max_nbytes = max_nbytes
        self._now_ns = now_ns
        self._last_stem = ""
        # A damaged file says nothing, so that all is sent again rather than left out.
        self._shipped = or_none(SHIPPED.read, folder / STATE) or Shipped()

    def next_batch(self, *, at_end: bool = False) -> Batch | None:
        """The lines that come next, of each log in turn; None: there are none.

        With `at_end` a last line that has no end is one of them.
        """
        with ExitStack() as stack:
            files = {log.stem: _opened(log, stack, at_end=at_end) for log in self._logs()}
            self._look([file for of_log in files.values() for file in of_log])
            for stem in sorted(files, key=lambda stem: stem <= self._last_stem):
                if self._is_wanted(stem) and (batch := self._read(stem, files[stem])):
                    self._last_stem = stem
                    return batch
        return None

    def commit(self, batch: Batch, *, stored: bool = True) -> None:
        """Go on behind a batch; with `stored` who ships these logs anew does so, too.

        Raises:
            SmolclusterError: it cannot be stored; in this process it holds all the same.
        """
        self._shipped = batch.after
        if stored:
            SHIPPED.write(self.folder / STATE, batch.after)

    def left_nbytes(self) -> int:
        """How many bytes are still to be taken, as the files are now. Any thread."""
        places = self._shipped.places
        with ExitStack() as stack, suppress(OSError):
            logs = [log for log in self._logs() if self._is_wanted(log.stem)]
            files = [file for log in logs for file in _opened(log, stack, at_end=True)]
            return sum(file.size - (file.offset(places.get(file.inode)) or 0) for file in files)
        return 0

    def _look(self, files: Sequence[_Open]) -> None:
        """Note which files there are, and what has gone with those that are there no more."""
        before = self._shipped.places
        offsets = {file.inode: file.offset(before.get(file.inode)) for file in files}
        self.lost_nbytes += sum(
            place.size - place.offset
            for inode, place in before.items()
            if offsets.get(inode) is None
        )
        places = {
            file.inode: FilePosition(
                offset=offsets[file.inode] or 0, size=file.size, digest=file.digest(file.size)
            )
            for file in files
        }
        self._shipped = Shipped(places=places, last_ns=self._shipped.last_ns)

    def _read(self, stem: str, files: Sequence[_Open]) -> Batch | None:
        """The next lines of a log, whose newest file is the first of these; None: there are none.

        A line keeps its time if that is much earlier than the one before: then the clock was ahead before, or
        was set back. Else it comes after that one.
        """
        labels = labels_of(stem, self._run_id)
        places, last_ns = self._shipped.places, self._shipped.last_ns.get(stem, -TIE_NS)
        entries: list[LokiLine] = []
        ends: dict[str, int] = {}
        nbytes = 0
        for file, end, line in _unread(files, places):
            ends[file.inode] = end
            if entry := entry_of(line, labels, self._now_ns()):
                is_tie = 0 <= last_ns - entry.ns < TIE_NS
                last_ns = last_ns + 1 if is_tie else entry.ns
                entries.append(replace(entry, ns=last_ns))
                nbytes += len(entry.text.encode())
            if len(entries) >= self._max_lines or nbytes >= self._max_nbytes:
                break
        if not ends:
            return None
        after = {
            inode: places[inode].model_copy(update={"offset": end}) for inode, end in ends.items()
        }
        times = self._shipped.last_ns | ({stem: last_ns} if entries else {})
        return Batch(entries, Shipped(places=places | after, last_ns=times))

    def _is_wanted(self, stem: str) -> bool:
        return not self._only or stem in self._only

    def _logs(self) -> list[Path]:
        """The newest file of each log, which may be about to be made anew."""
        names = (_LOG.fullmatch(path.name) for path in self.folder.glob("*.log*"))
        return [self.folder / f"{stem}.log" for stem in sorted({name[1] for name in names if name})]


def _unread(
    files: Sequence[_Open], places: Mapping[str, FilePosition]
) -> Iterator[tuple[_Open, int, bytes]]:
    """The lines of a log from these places on, each with its file and where it ends; the oldest first."""
    for file in reversed(files):
        end = places[file.inode].offset
        for line in file.lines_from(end):
            end += len(line)
            yield file, end, line


def _opened(log: Path, stack: ExitStack, *, at_end: bool) -> list[_Open]:
    """The files of a log, the newest first: one that is rotated meanwhile is met twice, never missed."""
    files: list[_Open] = []
    for path in rotations(log):
        with suppress(FileNotFoundError):
            if not path.is_file():
                continue
            data = stack.enter_context(path.open("rb"))
            facts = os.fstat(data.fileno())
            inode = str(facts.st_ino)
            if inode not in (file.inode for file in files):
                grows = path == log and not at_end
                files.append(_Open(data, inode, facts.st_size, grows))
    return files
