"""The log files of one run as a spool: what Loki has not got yet, and how far it has got it.

A file is known by its log and a digest of its first line. So one that was rotated is read on, and one that
was truncated, or has the name of an old one, is read from its start.
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
"""Of a first line, for its digest."""
READ_NBYTES = 4 << 20
"""A longer line is taken as several."""
TIE_NS = 10**9
"""Lines of a log are put in order where their times differ by less: clocks tell milliseconds."""
_LOG = re.compile(r"(.+)\.log(?:\.\d+)?")


class Shipped(Strict):
    """`.shipped.json`: how many bytes of each file Loki has, and the last time of each log.

    Times are in nanoseconds since 1970.
    """

    places: dict[str, NonNegativeInt] = Field({})
    last_ns: dict[str, NonNegativeInt] = Field({})


SHIPPED = ModelFile[Shipped](Shipped, "is damaged", durable=False)


@dataclass(frozen=True)
class Batch:
    """Lines of one log in their order, and what is to be stored when Loki has them."""

    stem: str
    entries: Sequence[LokiLine]
    after: Shipped


@dataclass(frozen=True)
class _Open:
    """An open log file by its key in `Shipped`; `grows`: its last line may not be whole yet."""

    key: str
    data: BinaryIO
    size: int
    grows: bool


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
        self._sizes: dict[str, int] = {}
        # A file that is damaged, or of an earlier version, says nothing: then all is sent again.
        self._shipped = or_none(SHIPPED.read, folder / STATE) or Shipped()

    def next_batch(self, *, at_end: bool = False) -> Batch | None:
        """The lines that come next, of each log in turn; None: there are none.

        With `at_end` a last line that has no end is one of them.
        """
        with ExitStack() as stack:
            logs = self._opened(stack, at_end=at_end)
            before, taken = self._sizes, self._shipped.places
            self._sizes = {file.key: file.size for files in logs.values() for file in files}
            gone = before.keys() - self._sizes.keys()
            self.lost_nbytes += sum(before[key] - taken.get(key, 0) for key in gone)
            for stem in sorted(logs, key=lambda stem: stem <= self._last_stem):
                if self._is_wanted(stem) and (batch := self._read(stem, logs[stem])):
                    return batch
        return None

    def commit(self, batch: Batch, *, stored: bool = True) -> None:
        """Go on behind a batch; with `stored` who ships these logs anew does so, too.

        Raises:
            SmolclusterError: it cannot be stored; in this process it holds all the same.
        """
        self._shipped, self._last_stem = batch.after, batch.stem
        if stored:
            SHIPPED.write(self.folder / STATE, batch.after)

    def left_nbytes(self) -> int:
        """How many bytes are still to be taken, as the files are now. Any thread."""
        taken = self._shipped.places
        with ExitStack() as stack, suppress(OSError):
            logs = self._opened(stack, at_end=True).items()
            files = [file for stem, own in logs if self._is_wanted(stem) for file in own]
            return sum(file.size - taken.get(file.key, 0) for file in files)
        return 0

    def _read(self, stem: str, files: Sequence[_Open]) -> Batch | None:
        """The next lines of a log, whose newest file is the first of these; None: there are none.

        A line keeps its time if that is much earlier than the one before: then the clock was ahead before, or
        was set back. Else it comes after that one.
        """
        labels = labels_of(stem, self._run_id)
        before, last_ns = self._shipped.places, self._shipped.last_ns.get(stem, -TIE_NS)
        places = {key: before.get(key, 0) for key in self._sizes}
        entries: list[LokiLine] = []
        num_read = nbytes = 0
        for key, line in _unread(files, dict(places)):
            places[key] += len(line)
            num_read += len(line)
            if entry := entry_of(line, labels, self._now_ns()):
                is_tie = 0 <= last_ns - entry.ns < TIE_NS
                last_ns = last_ns + 1 if is_tie else entry.ns
                entries.append(replace(entry, ns=last_ns))
                nbytes += len(entry.text.encode())
            if len(entries) >= self._max_lines or nbytes >= self._max_nbytes:
                break
        if not num_read:
            return None
        times = self._shipped.last_ns | ({stem: last_ns} if entries else {})
        return Batch(stem, entries, Shipped(places=places, last_ns=times))

    def _is_wanted(self, stem: str) -> bool:
        return not self._only or stem in self._only

    def _opened(self, stack: ExitStack, *, at_end: bool) -> dict[str, list[_Open]]:
        """The files of each log, the newest first: one that is rotated meanwhile is met twice, never missed.

        One whose first line is not whole yet is left out, but for `at_end`.
        """
        names = (_LOG.fullmatch(path.name) for path in self.folder.glob("*.log*"))
        found: dict[str, list[_Open]] = {name[1]: [] for name in names if name}
        for stem, files in sorted(found.items()):
            log = self.folder / f"{stem}.log"
            for path in filter(Path.is_file, rotations(log)):
                with suppress(FileNotFoundError):
                    data = stack.enter_context(path.open("rb"))
                    grows, head = path == log and not at_end, data.readline(HEAD_NBYTES)
                    key = f"{stem}-{hashlib.sha256(head).hexdigest()[:16]}"
                    is_whole = head.endswith(b"\n") or len(head) == HEAD_NBYTES or not grows
                    if head and is_whole and key not in (file.key for file in files):
                        size = os.fstat(data.fileno()).st_size
                        files.append(_Open(key, data, size, grows))
        return found


def _unread(files: Sequence[_Open], places: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
    """The lines of a log from these places on, each with the key of its file; the oldest first."""
    for file in reversed(files):
        file.data.seek(places[file.key])
        while line := file.data.readline(READ_NBYTES):
            if file.grows and len(line) < READ_NBYTES and not line.endswith(b"\n"):
                break
            yield file.key, line
