"""Log lines of a run: searched from the newest, and followed as they are written."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from smolcluster.observability.parsing import parse_log_line
from smolcluster.runs.files import rotations
from smolcluster.runs.paths import parse_log_stem
from smolcluster.runs.tail import Line, Tail

MAX_SHOWN = 2000
"""Characters of a message, until more is asked for."""
MAX_LINE_NBYTES = 2 << 20
BLOCK_NBYTES = 1 << 20
MAX_SEARCHED_NBYTES = 64 << 20
"""Of each file, from its end."""
MAX_NEW = 500
"""Lines of each file that are handed out at a time; of more that have come the newest."""
_NAME = re.compile(r"(.+?)\.log(\.\d{1,3})?")
"""Of a log file: its stem; an old one has a number behind it."""


@dataclass(frozen=True)
class Wanted:
    """Which lines: None and empty leave nothing out."""

    node: str | None = None
    rank: int | None = None
    level: int = 0
    text: str = ""

    def accepts(self, entry: dict[str, Any]) -> bool:
        searched = f"{entry['message']}\n{entry['detail']}" if self.text else ""
        return (
            self.node in (None, entry["node"])
            and self.rank in (None, entry["rank"])
            and level_number(entry["level"]) >= self.level
            and self.text.casefold() in searched.casefold()
        )


@dataclass(frozen=True)
class Found:
    """Lines, the oldest first; `is_all`: nothing older was left out."""

    entries: list[dict[str, Any]]
    is_all: bool


def level_number(level: str) -> int:
    """A level's number; what is none counts as INFO."""
    return logging.getLevelNamesMapping().get(level, logging.INFO)


def log_files(folders: Iterable[Path]) -> dict[str, Path]:
    """The log files by their stems; a folder goes before those after it."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.log")):
            if not path.is_symlink():
                found.setdefault(path.stem, path)
    return found


def search(
    files: dict[str, Path],
    wanted: Wanted,
    at_most: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Found:
    """The newest lines that are wanted, in the order of time; what was found when it need not go on."""
    entries: list[dict[str, Any]] = []
    is_all = True
    for path in (each for newest in files.values() for each in rotations(newest)):
        own, has_all = _newest(path, wanted, at_most, goes_on)
        entries += own
        is_all = is_all and has_all
    newest = nlargest(at_most, entries, key=_order)
    return Found(newest[::-1], is_all and len(entries) == len(newest))


def _newest(
    path: Path, wanted: Wanted, at_most: int, goes_on: Callable[[], bool]
) -> tuple[list[dict[str, Any]], bool]:
    """A file's newest lines that are wanted, and whether there are no others."""
    own: list[dict[str, Any]] = []
    near = _written_at(path)
    for line in _backwards(path, goes_on):
        if line is None or len(own) == at_most:
            return own, False
        if entry := entry_of(path.name, line, near):
            near = entry["t"]
            if wanted.accepts(entry):
                own.append(_cut(entry))
    return own, True


def file_of(files: dict[str, Path], name: str) -> Path | None:
    """The log file of that name, old ones included; None: there is none."""
    found = _NAME.fullmatch(name)
    newest = files.get(found[1]) if found else None
    names = rotations(newest) if newest else []
    return next((path for path in names if path.name == name), None)


def line_at(path: Path, offset: int) -> dict[str, Any] | None:
    """The line that begins there, whole (its first two megabytes)."""
    try:
        with path.open("rb") as file:
            if offset:
                file.seek(offset - 1)
                if file.read(1) != b"\n":
                    return None
            line = Line(offset, file.readline(MAX_LINE_NBYTES))
            return entry_of(path.name, line, _written_at(path))
    except OSError:
        return None


class NewLines:
    """Follows the log files of a run; begins with the newest bytes that are there, or with what comes."""

    def __init__(self, files: dict[str, Path], newest_nbytes: int = 0) -> None:
        self._tails = {
            stem: Tail.newest(path, newest_nbytes)
            if newest_nbytes
            else Tail(path, _whole_nbytes(path))
            for stem, path in files.items()
        }

    def poll(self, files: dict[str, Path]) -> Found:
        """The lines that have come, in the order of time; of a file's many the newest."""
        entries, is_all = [], True
        for stem, path in files.items():
            tail = self._tails.get(stem)
            # a copy that grows may take the place of one that was fetched
            if tail is None or tail.path != path:
                tail = self._tails[stem] = Tail(path)
            near = _written_at(path)
            come = tail.poll()
            is_all = is_all and len(come) <= MAX_NEW
            for line in come[-MAX_NEW:]:
                if entry := entry_of(path.name, line, near):
                    near = entry["t"]
                    entries.append(_cut(entry))
        return Found(sorted(entries, key=_order), is_all)


def entry_of(name: str, line: Line, near: float) -> dict[str, Any] | None:
    """What a line says; one that is no JSON object is shown as it is. None: it is empty.

    `near` is the time of a neighbour, for a line that has none.
    """
    found = _NAME.fullmatch(name)
    stem = found[1] if found else name
    component, node, rank = parse_log_stem(stem) or ("", stem, None)
    if component == "rank":  # a mesh's owner, whose file has no number, is its rank 0
        rank = rank or 0
    said = parse_log_line(line.data, near)
    if said is None:
        return None
    return {
        "file": name,
        "offset": line.offset,
        "component": component,
        "node": said.node or node,
        "rank": rank,
        "t": said.seconds,
        "level": said.level,
        "message": said.message,
        "detail": said.exception,
    }


def _backwards(path: Path, goes_on: Callable[[], bool] = lambda: True) -> Iterator[Line | None]:
    """The lines of a file from its last whole one on; None where there are more that are not searched."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            lowest = max(0, end - MAX_SEARCHED_NBYTES)
            held, is_whole = b"", False
            while end > lowest and goes_on():
                start = max(lowest, end - BLOCK_NBYTES)
                file.seek(start)
                held, end = file.read(end - start) + held[:MAX_LINE_NBYTES], start
                first, *lines = held.split(b"\n")
                place = start + len(held)
                for data in reversed(lines):
                    place -= len(data)
                    if is_whole:
                        yield Line(place, data)
                    is_whole = True
                    place -= 1
                held = first
            if end:
                yield None
            elif is_whole:
                yield Line(0, held)
    except OSError:
        return


def _order(entry: dict[str, Any]) -> tuple[float, str, int]:
    return entry["t"], entry["file"], entry["offset"]


def _cut(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with at most so much of its text; `more` is how many characters are missing."""
    message, detail = entry["message"], entry["detail"]
    more = max(0, len(message) - MAX_SHOWN) + max(0, len(detail) - MAX_SHOWN)
    return entry | {"message": message[:MAX_SHOWN], "detail": detail[:MAX_SHOWN], "more": more}


def _whole_nbytes(path: Path) -> int:
    last = next(_backwards(path), None)
    return last.offset + len(last.data) + 1 if last else 0


def _written_at(path: Path) -> float:
    """When a file was last written, seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
