"""Files of a run: JSON lines, written and followed as they grow, and files replaced whole.

A line is written once and never changed. A reader may meet a last line that is only half there,
and, after a crash and a resume, a broken line in the middle: both are left out.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from smolcluster.errors import DataError, SmolclusterError
from smolcluster.runs.tail import Tail
from smolcluster.utils.replacing import replacing
from smolcluster.utils.units import format_bytes

T = TypeVar("T")

_HOW = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
MOST_DEPTH = 20
"""Of mappings and lists in each other, where JSON cannot hold all that is in them."""
FLUSH_EVERY_S = 1.0
CLOSING_RETRY_S = 0.2
MAX_KEPT_NBYTES = 8_000_000
"""Of lines that wait for their file."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The system's numbers of an error for which a disk has no space, or none for its user."""
NUM_OLD_FILES = 2
"""Of a file that is rotated: `name.1` is what was `name` before, `name.2` what was `name.1`."""


def utc_timestamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 in UTC, to the millisecond: `2026-11-20T13:50:25.123Z`."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return f"{_utc_second(whole)}.{milliseconds:03d}Z"


@functools.lru_cache(maxsize=4)
def _utc_second(seconds: int) -> str:
    """Made once for all that happens in the same second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def seconds_of(ts: object, otherwise: float) -> float:
    """RFC 3339 as seconds since 1970; `otherwise` where it is not."""
    try:
        return datetime.fromisoformat(str(ts)).timestamp()
    except (ValueError, OverflowError):
        return otherwise


def json_line(record: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline. NaN and infinity, which JSON lacks, become null.

    A value that JSON cannot hold, such as one that contains itself, becomes text.
    """
    try:
        return orjson.dumps(record, default=str, option=_HOW)
    except TypeError:
        text = json.dumps(_jsonable(record), ensure_ascii=False, default=str)
        return text.encode("utf-8", "backslashreplace") + b"\n"


def _jsonable(value: Any, within: frozenset[int] = frozenset()) -> Any:
    """A value as JSON holds it; what of it JSON cannot hold is text. `within`: the ids of what it is in."""
    try:
        return orjson.loads(orjson.dumps(value, default=str, option=_HOW))
    except TypeError:
        pass
    is_fit = id(value) not in within and len(within) < MOST_DEPTH
    if is_fit and isinstance(value, Mapping | list | tuple):
        within |= {id(value)}
        if isinstance(value, Mapping):
            return {str(key): _jsonable(each, within) for key, each in value.items()}
        return [_jsonable(each, within) for each in value]
    return value if isinstance(value, str | int) else str(value)


@dataclass
class _Lost:
    """Lines that will not come any more: how many, and when the first and the last were to be written."""

    num: int = 0
    since: float = 0.0
    until: float = 0.0

    def add(self, moment: float) -> None:
        """One more, of that moment, seconds since 1970."""
        self.since = min(self.since, moment) if self.num else moment
        self.until = max(self.until, moment)
        self.num += 1

    def __str__(self) -> str:
        lines = "1 line was" if self.num == 1 else f"{self.num:,} lines were"
        return f"{lines} lost, from {utc_timestamp(self.since)} to {utc_timestamp(self.until)}"


class LineWriter:
    """Appends JSON lines to a file; safe to use from several threads.

    Only `flush`, `close`, and the first `tick` that comes `FLUSH_EVERY_S` after the last flush wait for
    the disk. Lines that cannot be written (a full disk, a missing folder) are kept and tried again every
    `FLUSH_EVERY_S`; when they take more than `MAX_KEPT_NBYTES` the oldest are dropped. `warn` is called
    with one sentence when writing fails, and with one that says what was lost when it works again, or the
    file is closed. A file that would grow over `max_nbytes` is rotated first.
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None],
        max_nbytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._warn = warn
        self._max_nbytes = max_nbytes
        self._clock = clock
        self._now = now
        self._kept = deque[tuple[float, bytes]]()
        self._kept_nbytes = 0
        self._lost = _Lost()
        self._is_closed = False
        self._keeping = threading.Lock()
        """Guards the above; never held while the disk is waited for."""
        self._last_flush = clock()
        self._file: FileIO | None = None
        self._taken = deque[tuple[float, bytes]]()
        """Lines that are being written."""
        self._is_inside = False
        """Whether the beginning of the first of them is in the file already."""
        self._problem: OSError | None = None
        self._writing = threading.Lock()
        """Guards what follows `_keeping`."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record; never raises for the file's sake."""
        line = json_line(record)
        with self._keeping:
            if self._is_closed:
                return
            self._kept.append((self._now(), line))
            self._kept_nbytes += len(line)
            while self._kept_nbytes > MAX_KEPT_NBYTES and len(self._kept) > 1:
                moment, dropped = self._kept.popleft()
                self._kept_nbytes -= len(dropped)
                self._lost.add(moment)

    def tick(self) -> None:
        if self._clock() - self._last_flush >= FLUSH_EVERY_S:
            self._flush()

    def flush(self) -> None:
        """Write all that waits to the file; nothing soon after that has failed."""
        if self._problem is None:
            self._flush()
        else:
            self.tick()

    def close(self, patience_s: float = 0.0) -> None:
        """Flush and close; for so many seconds it is tried again on a full disk. Later writes are ignored."""
        with self._keeping:
            if self._is_closed:
                return
            self._is_closed = True
        flush_at_the_end(self.path, self._flush, lambda: self._problem, self._warn, patience_s)
        with self._writing:
            self._close_file()
            self._taken += self._take()
            for moment, _ in self._taken:
                self._lost.add(moment)
            self._taken.clear()
        if self._lost.num:
            self._warn(f"{self.path}: {self._lost}: {_reason(self._problem)}")

    def abandon(self) -> int:
        """Ignore later writes without waiting for the disk; returns how many lines are not on it."""
        with self._keeping:
            self._is_closed = True
            return len(self._kept) + len(self._taken)

    def _flush(self) -> None:
        with self._writing:
            self._last_flush = self._clock()
            before, self._problem = self._problem, None
            try:
                for _ in range(2):  # what could not be written before, then what has come since
                    self._taken = self._taken or self._take()
                    if self._taken:
                        self._append()
            except OSError as error:
                self._problem = error
                self._close_file()
            said = self._news(before)
        if said:
            self._warn(said)

    def _news(self, before: OSError | None) -> str:
        """What there is to say after a try to write; `before`: what went wrong at the one before."""
        if self._problem is not None:
            return (
                ""
                if before
                else (
                    f"cannot write {self.path}: {_reason(self._problem)}; its lines are kept in memory, the "
                    f"newest {format_bytes(MAX_KEPT_NBYTES)} of them, until it can be written"
                )
            )
        with self._keeping:
            lost, self._lost = self._lost, _Lost()
        if before is None and not lost.num:
            return ""
        return f"{self.path} is written again: {lost if lost.num else 'no line was lost'}"

    def _take(self) -> deque[tuple[float, bytes]]:
        with self._keeping:
            taken, self._kept, self._kept_nbytes = self._kept, deque(), 0
        return taken

    def _append(self) -> None:
        """Write what was taken.

        Raises:
            OSError: it cannot be written; what was not is still taken.
        """
        file = self._file or self._open()
        if not self._taken:
            return
        data = memoryview(b"".join(line for _, line in self._taken))
        if not self._is_inside and self._is_too_long_for(file, data.nbytes):
            rotate(self.path)
            self._close_file()
            file = self._open()
        while data:
            num_written = file.write(data)
            data = data[num_written:]
            self._forget(num_written)

    def _forget(self, num_written: int) -> None:
        """So many bytes of what was taken are in the file."""
        while num_written:
            moment, line = self._taken.popleft()
            self._is_inside = num_written < len(line)
            if self._is_inside:
                self._taken.appendleft((moment, line[num_written:]))
            num_written -= min(num_written, len(line))

    def _open(self) -> FileIO:
        """Open the file at the end of a line, or of what it has of the first one that was taken."""
        file = self._file = FileIO(self.path, "ab")
        ends_inside = _ends_inside(self.path)
        if ends_inside and not self._is_inside:  # as a crash leaves it
            file.write(b"\n")
        elif self._is_inside and not ends_inside:  # it is another file now
            self._is_inside = False
            moment, _ = self._taken.popleft()
            with self._keeping:
                self._lost.add(moment)
        return file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _is_too_long_for(self, file: FileIO, num_more: int) -> bool:
        if self._max_nbytes is None:
            return False
        nbytes = os.fstat(file.fileno()).st_size
        return nbytes > 0 and nbytes + num_more > self._max_nbytes


class StampedLog(LineWriter):
    """Appends records to a file, each with its time, its kind and its run's incarnation; any thread."""

    def __init__(
        self,
        path: Path,
        incarnation: str,
        *,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path, warn=warn, now=now)
        self._incarnation = incarnation

    def stamp(self, kind: str, values: Mapping[str, Any]) -> None:
        stamp = {"ts": utc_timestamp(self._now()), "kind": kind, "incarnation": self._incarnation}
        self.append({**stamp, **values})


def is_full(problem: BaseException | None) -> bool:
    """Whether a file could not be written because there is no space on its disk, or none for its user."""
    return isinstance(problem, OSError) and problem.errno in FULL


def flush_at_the_end(
    path: Path,
    flush: Callable[[], None],
    problem: Callable[[], BaseException | None],
    warn: Callable[[str], None],
    patience_s: float,
) -> None:
    """Flush a file whose process would end; for so many seconds again and again while its disk is full.

    `problem` is what the last flush has failed on.
    """
    end = time.monotonic() + patience_s
    flush()
    if patience_s and is_full(problem()):
        warn(f"{path} waits for space on its disk, {patience_s:.0f} s at most")
    while is_full(problem()) and time.monotonic() < end:
        time.sleep(CLOSING_RETRY_S)
        flush()


def _reason(problem: OSError | None) -> str:
    return (problem and problem.strerror) or str(problem)


def rotate(path: Path) -> None:
    """Give a file the name of an old one, and each old one that of an older; the oldest is removed.

    Raises:
        OSError: it cannot be done.
    """
    for newer, older in reversed(list(itertools.pairwise(rotations(path)))):
        if newer.exists():
            newer.replace(older)


def rotations(path: Path) -> list[Path]:
    """The names under which the lines of a file that is rotated may lie, the newest first."""
    old = range(1, NUM_OLD_FILES + 1)
    return [path, *(path.with_name(f"{path.name}.{age}") for age in old)]


def _ends_inside(path: Path) -> bool:
    """Whether a regular file's last line lacks its newline, as a crash leaves it."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Follower(Generic[T]):
    """Reads what a growing file of JSON lines has gained since the last look."""

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], T | None]) -> None:
        self._tail = Tail(path)
        self._parse = parse

    def skip(self) -> None:
        """Leave out what is there now, however much that is."""
        while self._tail.poll():
            pass

    def poll(self) -> list[T]:
        """The records that are new and whole; none while the file cannot be read."""
        found: list[T] = []
        while lines := self._tail.poll():
            records = map(self._parse, json_objects(line.data for line in lines))
            found += [record for record in records if record is not None]
        return found


def json_objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines; what is not one is left out."""
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry


def or_none(read: Callable[[Path], T], path: Path) -> T | None:
    """What a small file says; None where it is missing or damaged."""
    try:
        return read(path)
    except DataError:
        return None


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace a small file at once: a reader sees the old content or the new, never a part.

    Returns when it is on the disk, unless it need not be `durable`.

    Raises:
        SmolclusterError: the file cannot be written; the old one, if any, is still there.
    """
    try:
        with replacing(path, durable=durable) as draft:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "free some space or mend the folder's rights"
        if isinstance(error, FileNotFoundError):
            remedy = "make the folder first"
        raise SmolclusterError(f"cannot write {path}: {reason}; {remedy}") from error
