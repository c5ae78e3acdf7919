"""Files of a run: JSON lines, written and followed as they grow, and files replaced whole.

A line is written once and never changed. A reader may meet a last line that is only half there,
and, after a crash and a resume, a broken line in the middle: both are left out.
"""

import errno
import functools
import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from smolcluster.errors import DataError, SmolclusterError
from smolcluster.runs.tail import Tail
from smolcluster.utils.replacing import replacing

T = TypeVar("T")

_HOW = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
_PASSING = frozenset({errno.EMFILE, errno.ENFILE})
"""What may be over at the next try: no file could be opened."""
FLUSH_EVERY_S = 1.0
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


def json_line(record: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline. NaN and infinity, which JSON lacks, become null.

    A value that JSON cannot hold, such as one that contains itself, becomes text.
    """
    try:
        return orjson.dumps(record, default=str, option=_HOW)
    except TypeError:
        fit = {str(key): _jsonable(value) for key, value in record.items()}
        text = json.dumps(fit, ensure_ascii=False, default=str)
        return text.encode("utf-8", "backslashreplace") + b"\n"


def _jsonable(value: Any) -> Any:
    try:
        finite = _without_non_finite(value)
        json.dumps(finite, default=str)
    except (ValueError, TypeError, RecursionError):
        return str(value)
    return finite


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return value


class LineWriter:
    """Appends JSON lines to a file; safe to use from several threads.

    Only `flush`, `close`, and the first `tick` that comes `FLUSH_EVERY_S` after the last flush wait for
    the disk. When the file cannot be written (a full disk, a missing folder), `warn` is called once with
    one sentence, and the writer does nothing from then on: a run is worth more than its log. A file that
    would grow over `max_nbytes` is rotated first.
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None],
        max_nbytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._warn = warn
        self._max_nbytes = max_nbytes
        self._clock = clock
        self._writing = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._last_flush = clock()
        self._file: FileIO | None = None
        self._off = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; never raises for the file's sake."""
        if not self._off:
            self._waiting.append(json_line(record))

    def tick(self) -> None:
        """Flush what has waited long enough."""
        if self._clock() - self._last_flush >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write all that waits to the file."""
        problem = None
        with self._writing:
            self._last_flush = self._clock()
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if lines and not self._off:
                problem = self._append(b"".join(lines))
                self._off = problem is not None
        if problem is not None:
            self._warn(f"cannot write {self.path}: {problem}; the run goes on without this file")

    def close(self) -> None:
        """Flush and close; later writes are ignored."""
        self.flush()
        with self._writing:
            self._off = True
            if self._file is not None:
                self._file.close()
                self._file = None

    def _append(self, data: bytes) -> str | None:
        """Write all of `data`; returns what went wrong, in the system's words."""
        try:
            if self._file is None:
                self._file = FileIO(self.path, "ab")
                if _ends_half_way(self.path):
                    data = b"\n" + data
            if self._is_too_long_for(self._file, data):
                rotate(self.path)
                self._file.close()
                self._file = FileIO(self.path, "ab")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            if self._file is None and error.errno in _PASSING:
                self._waiting.appendleft(data)
                return None
            return error.strerror or str(error)
        return None

    def _is_too_long_for(self, file: FileIO, data: bytes) -> bool:
        if self._max_nbytes is None:
            return False
        nbytes = os.fstat(file.fileno()).st_size
        return nbytes > 0 and nbytes + len(data) > self._max_nbytes


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


def _ends_half_way(path: Path) -> bool:
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
