"""The log files of one run as a spool: what Loki has not got yet, and how far it has got it.

A file is known by its inode and a digest of its beginning, so that one that was rotated is read on under its
old name's number, and one that was truncated, or whose inode has a new file, from the start.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from pydantic import Field, NonNegativeInt

from smolcluster.observability.shipping.lines import Labels, LokiLine, entry_of, labels_of
from smolcluster.runs.files import or_none, rotations
from smolcluster.runs.model_file import ModelFile, Strict

STATE = ".shipped.json"
MAX_LINES = 2000
MAX_NBYTES = 1_000_000
HEAD_NBYTES = 256
READ_NBYTES = 4 << 20
"""A longer line is taken as several."""
TIE_NS = 10**9
"""Lines of a stream are put in order where their times differ by less: clocks tell milliseconds."""
_LOG = re.compile(r"(.+)\.log(?:\.\d+)?")


class Head(Strict):
    """How a file begins: a digest of its first bytes."""

    nbytes: NonNegativeInt
    digest: str


class FilePosition(Strict):
    """How far a file has been taken, and how it begins."""

    offset: NonNegativeInt
    head: Head


class Shipped(Strict):
    """`.shipped.json`: up to where all has arrived.

    Places by inode, and each stream's last time in nanoseconds since 1970.
    """

    places: dict[str, FilePosition] = Field({})
    last_ns: dict[str, NonNegativeInt] = Field({})


SHIPPED = ModelFile[Shipped](Shipped, "is damaged", durable=False)


@dataclass
class Batch:
    """Some lines in their order, and what is to be stored when Loki has them."""

    entries: list[LokiLine] = field(default_factory=list)
    places: dict[str, FilePosition] = field(default_factory=dict)
    last_ns: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, entry: LokiLine) -> None:
        """Add a line, which comes after those of its stream that were before it.

        It keeps its time if that is much earlier: then the clock was ahead before, or was set back.
        """
        stream = _name_of(entry.labels)
        last_ns = self.last_ns.get(stream, -TIE_NS)
        ns = last_ns + 1 if 0 <= last_ns - entry.ns < TIE_NS else entry.ns
        self.last_ns[stream] = ns
        self.entries.append(replace(entry, ns=ns))
        self.nbytes += len(entry.text.encode())


@dataclass(frozen=True)
class _Open:
    """An open log file; `grows`: its last line may not be whole yet."""

    data: BinaryIO
    inode: str
    size: int
    grows: bool

    def head(self, nbytes: int) -> Head:
        self.data.seek(0)
        digest = hashlib.sha256(self.data.read(min(nbytes, HEAD_NBYTES))).hexdigest()
        return Head(nbytes=min(nbytes, HEAD_NBYTES), digest=digest[:16])

    def begins(self, head: Head) -> bool:
        return self.head(head.nbytes) == head


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
        self._only = only
        self._max_lines = max_lines
        self._max_nbytes = max_nbytes
        self._now_ns = now_ns
        self._run_id = folder.absolute().parent.name
        self._shipped = self._taken = or_none(SHIPPED.read, folder / STATE) or Shipped()
        """Up to where all has arrived, and up to where it has been taken: Loki may refuse some.

        A damaged file says nothing, so that all is sent again rather than left out.
        """
        self._seen: dict[str, FilePosition] = {}

    def next_batch(self, *, at_end: bool = False) -> Batch:
        """The lines that come next, of each log some; with `at_end` also a last one that has no end."""
        batch = Batch(last_ns=dict(self._taken.last_ns))
        logs = self._logs()
        with ExitStack() as stack:
            files = {log: _opened(log, stack, at_end=at_end) for log in logs}
            self._look(file for of_log in files.values() for file in of_log)
            for number, log in enumerate(logs, start=1):
                share = number / len(logs)
                limits = round(self._max_lines * share), round(self._max_nbytes * share)
                labels = labels_of(log.stem, self._run_id)
                for file in reversed(files[log]):
                    if not self._take(file, labels, batch, limits):
                        break
        return batch

    def commit(self, batch: Batch, *, arrived: bool = True) -> None:
        """Note that the lines of a batch have been dealt with, and whether all of them have arrived.

        From the first that did not on, nothing more is stored: who ships these logs anew begins with it.

        Raises:
            SmolclusterError: it cannot be stored; in this process it holds all the same.
        """
        places = {
            inode: place
            for inode, place in (self._taken.places | batch.places).items()
            if inode in self._seen
        }
        before, self._taken = self._taken, Shipped(places=places, last_ns=batch.last_ns)
        if arrived and before is self._shipped:
            self._shipped = self._taken
            if self._shipped != before:
                SHIPPED.write(self.folder / STATE, self._shipped)

    def left_nbytes(self) -> int:
        """How many bytes are behind what has arrived, as the files are now. Any thread."""
        shipped = self._shipped
        with ExitStack() as stack, suppress(OSError):
            files = [file for log in self._logs() for file in _opened(log, stack, at_end=True)]
            return sum(file.size - _offset(file, shipped) for file in files)
        return 0

    def _look(self, files: Iterable[_Open]) -> None:
        """Note which files there are, and what has gone with those that are there no more."""
        present = {file.inode: file for file in files}
        for inode, end in self._seen.items():
            if inode not in present or not present[inode].begins(end.head):
                taken = self._taken.places.get(inode)
                self.lost_nbytes += max(0, end.offset - (taken.offset if taken else 0))
        self._seen = {
            inode: FilePosition(offset=file.size, head=file.head(file.size))
            for inode, file in present.items()
        }

    def _logs(self) -> list[Path]:
        """The newest file of each log, which may be about to be made anew."""
        names = (_LOG.fullmatch(path.name) for path in self.folder.glob("*.log*"))
        stems = sorted({name[1] for name in names if name})
        return [
            self.folder / f"{stem}.log" for stem in stems if not self._only or stem in self._only
        ]

    def _take(
        self, file: _Open, labels: Mapping[str, str], batch: Batch, limits: tuple[int, int]
    ) -> bool:
        """Add lines of one file; whether all of it has been taken."""
        start = offset = _offset(file, self._taken)
        file.data.seek(start)
        is_whole = False
        while len(batch.entries) < limits[0] and batch.nbytes < limits[1]:
            line = file.data.readline(READ_NBYTES)
            is_half = len(line) < READ_NBYTES and not line.endswith(b"\n")
            if not line or (is_half and file.grows):
                is_whole = True
                break
            offset += len(line)
            if entry := entry_of(line, labels, self._now_ns()):
                batch.add(entry)
        if offset != start:
            batch.places[file.inode] = FilePosition(offset=offset, head=file.head(offset))
        return is_whole


def _offset(file: _Open, shipped: Shipped) -> int:
    """Where to go on reading a file."""
    place = shipped.places.get(file.inode)
    if place is None or place.offset > file.size:
        return 0
    return place.offset if file.begins(place.head) else 0


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


@lru_cache(maxsize=64)
def _name_of(labels: Labels) -> str:
    """A stream's name in `.shipped.json`."""
    return json.dumps(labels)
