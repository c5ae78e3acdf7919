"""What went wrong first, out of the logs of all nodes: the line, and those around it by time.

Machines' clocks differ, so lines of a worker are moved by as much as its clock was found to be off. Files of
any length are read in bounded memory, twice: for the moment, and for what was said around it.
"""

import contextlib
import json
import logging
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smolcluster.observability.parsing import parse_log_line
from smolcluster.observability.view.story import told
from smolcluster.runs.events import EventRecord, RunEnded, WorkerLost
from smolcluster.runs.files import seconds_of
from smolcluster.runs.paths import log_stem, parse_log_stem, process_title

LINES_BEFORE, LINES_AFTER = 24, 8
MAX_LINE_NBYTES = 1 << 20
MAX_MESSAGE, MAX_EXCEPTION = 1000, 6000
"""Characters of a line that are shown."""
SAME_S = 1.0
"""A warning so shortly before an event is about it."""
SERIOUS = ("ERROR", "CRITICAL")
_NOTABLE = re.compile(rb'"level":\s*"(WARNING|ERROR|CRITICAL)"')
_MACHINE = re.compile(rb'"machine":\s*\{')


@dataclass(frozen=True, order=True)
class Process:
    """A process of a run, by which log files are named."""

    role: str
    node: str
    rank: int | None = None

    @property
    def title(self) -> str:
        """As the console calls it: `server mini1`, `worker 1 (pi5)`."""
        return process_title(self.role, self.node, self.rank)

    @property
    def stem(self) -> str:
        """As its log file is called."""
        return log_stem(self.role, self.node, self.rank)


@dataclass(frozen=True)
class LogLine:
    """One line of a log: when, in seconds since 1970 on the server's clock; by whom; and what."""

    seconds: float
    source: str
    level: str
    message: str
    exception: str = ""
    is_it: bool = False
    """Whether it is the one that is looked for."""


@dataclass(frozen=True)
class FirstError:
    """What went wrong first.

    Attributes:
        what: one sentence.
        seconds: when, since 1970 on the server's clock.
        lines: those before it and a few after it, of all processes, by time.
    """

    what: str
    seconds: float
    lines: Sequence[LogLine]


@dataclass
class Logs:
    """What the logs of a run say.

    Attributes:
        read: titles of the processes whose logs are here.
        missing: titles of those whose logs are not.
        num_errors: lines of level ERROR and above, by title.
        num_warnings: lines of level WARNING, by title.
        machines: what a process has said of itself and its machine, by title.
        trouble: what went wrong first, or, where nothing did, the first warning; None: there is neither.
    """

    read: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    num_errors: Counter[str] = field(default_factory=Counter)
    num_warnings: Counter[str] = field(default_factory=Counter)
    machines: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    trouble: FirstError | None = None


def read_logs(
    folder: Path,
    expected: Sequence[Process],
    events: Sequence[EventRecord],
    offsets: Mapping[Process, float],
    stderr_tail: LogLine | None = None,
) -> Logs:
    """Look through the logs in a folder.

    Args:
        folder: where the files are.
        expected: processes that have written one, here or elsewhere.
        events: of the run, in order.
        offsets: how many seconds a worker's clock is ahead of the server's.
        last_words: a line that is not in a file yet.

    Raises:
        OSError: a file cannot be read.
    """
    files = _files(folder, expected)
    logs = Logs(read=[process.title for process, _ in files])
    logs.missing = [each.title for each in expected if each.title not in logs.read]
    shifts = {process.title: offset for process, offset in offsets.items()}
    serious, warnings = [] if stderr_tail is None else [stderr_tail], list[LogLine]()
    for process, path in files:
        for line in _look_through(path, process.title, logs):
            (serious if line.level in SERIOUS else warnings).append(_moved(line, shifts))
    trouble = _first(serious, events) or _first_warning(warnings)
    if trouble is not None:
        around = [_around(path, process.title, trouble, shifts) for process, path in files]
        logs.trouble = _with_context(trouble, [*around, serious[:1] if stderr_tail else []])
    return logs


def _files(folder: Path, expected: Sequence[Process]) -> list[tuple[Process, Path]]:
    """The log files that are here: whose, and where; those of one process in order of time."""
    known = {each.stem: each for each in expected}
    found: list[tuple[Process, Path]] = []
    for path in sorted(folder.glob("*.log*"), key=_age_order):
        stem = path.name.partition(".log")[0]
        if path.is_file() and path.name.rpartition(".")[2] not in ("gz", "tmp", "json"):
            process = known.get(stem) or Process(*(parse_log_stem(stem) or (stem, "")))
            found.append((process, path))
    return found


def _age_order(path: Path) -> tuple[str, int]:
    """`x.log.2` was written before `x.log.1`, and that before `x.log`."""
    stem, _, number = path.name.partition(".log")
    digits = number.strip(".")
    return stem, -int(digits) if digits.isdigit() else 0


def _look_through(path: Path, title: str, logs: Logs) -> Iterable[LogLine]:
    """The file's first serious line and first warning; counts all, keeps what is said of the machine."""
    first: dict[bool, LogLine] = {}
    for raw in _raw_lines(path):
        if _NOTABLE.search(raw):
            line = parse_line(raw, title, 0.0)
            if line is not None and line.level in (*SERIOUS, "WARNING"):
                is_serious = line.level in SERIOUS
                (logs.num_errors if is_serious else logs.num_warnings)[title] += 1
                if line.seconds:
                    first.setdefault(is_serious, line)
        elif _MACHINE.search(raw):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                logs.machines[title] = dict(json.loads(raw)["machine"])
    return first.values()


def _raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; of one that is too long, its beginning."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_NBYTES):
            yield line
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_NBYTES)


def parse_line(raw: bytes, source: str, before: float) -> LogLine | None:
    """What a line says that can be shown; `before` is the time of the line before it."""
    said = parse_log_line(raw, before)
    if said is None:
        return None
    return LogLine(
        said.seconds,
        source,
        said.level,
        _cut(said.message, MAX_MESSAGE),
        _cut(said.exception, MAX_EXCEPTION),
    )


def _cut(text: str, at_most: int) -> str:
    left_out = len(text) - at_most
    return text if left_out <= 0 else f"{text[:at_most]} … ({left_out:,} characters more)"


def _moved(line: LogLine, shifts: Mapping[str, float]) -> LogLine:
    return replace(line, seconds=line.seconds - shifts.get(line.source, 0.0))


def _first(serious: Sequence[LogLine], events: Sequence[EventRecord]) -> FirstError | None:
    """The earliest of serious lines, of losses of workers, and of a failure that no line tells of."""
    found = [FirstError(f"{line.source}: {line.message}", line.seconds, [line]) for line in serious]
    for record in events:
        moment = seconds_of(record.ts, 0.0)
        match record.event:
            case WorkerLost():
                found.append(FirstError(told(record.event), moment, []))
            case RunEnded(ok=False, reason=reason) if reason.startswith("the run failed"):
                if not serious:
                    found.append(FirstError(reason, moment, []))
    return min(found, key=lambda trouble: trouble.seconds, default=None)


def _first_warning(warnings: Sequence[LogLine]) -> FirstError | None:
    first = min(warnings, key=lambda line: line.seconds, default=None)
    if first is None:
        return None
    what = f"no error and no lost worker; the first warning is {first.source}: {first.message}"
    return FirstError(what, first.seconds, [first])


def _around(
    path: Path, title: str, trouble: FirstError, shifts: Mapping[str, float]
) -> list[LogLine]:
    """A file's last lines up to the trouble, with its own, and the first ones after it."""
    before: deque[LogLine] = deque(maxlen=LINES_BEFORE + 1)
    after: list[LogLine] = []
    is_its_own = title in (line.source for line in trouble.lines)
    seconds, has_met = 0.0, False
    for raw in _raw_lines(path):
        line = parse_line(raw, title, seconds)
        if line is None or line.level == "DEBUG":
            continue
        seconds = line.seconds
        line = _moved(line, shifts)
        if line.seconds <= trouble.seconds and not has_met:
            before.append(line)
            has_met = line in trouble.lines
        elif len(after) < LINES_AFTER:
            after.append(line)
        elif has_met or not is_its_own:
            break
    return [*before, *after]


def _with_context(trouble: FirstError, around: Sequence[Sequence[LogLine]]) -> FirstError:
    """The trouble among the lines of all files, by time."""
    lines = sorted((line for lines in around for line in lines), key=lambda line: line.seconds)
    place = _place(trouble, lines)
    if place is not None:
        lines[place] = replace(lines[place], is_it=True)
    else:
        place = sum(line.seconds <= trouble.seconds for line in lines) - 1
    first = max(0, place - LINES_BEFORE)
    return replace(trouble, lines=lines[first : place + LINES_AFTER + 1])


def _place(trouble: FirstError, lines: Sequence[LogLine]) -> int | None:
    """Where the trouble's own line is; of an event the warning that tells of it."""
    if trouble.lines:
        return lines.index(trouble.lines[0]) if trouble.lines[0] in lines else None
    for place in reversed(range(len(lines))):
        line = lines[place]
        is_warning = logging.getLevelNamesMapping().get(line.level, 0) >= logging.WARNING
        if is_warning and 0 <= trouble.seconds - line.seconds <= SAME_S:
            return place
    return None
