"""What went wrong first, out of the logs of all nodes: the line, and those around it by time.

Machines' clocks differ, so lines of a worker are moved by as much as its clock was found to be off. Files of
any length are read in bounded memory, twice: for the moment, and for what was said around it.
"""

import contextlib
import json
import logging
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smolcluster.observability.parsing import LogLine, parse_log_line
from smolcluster.observability.view.story import told
from smolcluster.runs.events import EventRecord, RunEnded, WorkerLost
from smolcluster.runs.files import rotations, seconds_of
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import parse_log_stem, process_title
from smolcluster.runs.status import STOPPED
from smolcluster.utils.words import shortened

LINES_BEFORE, LINES_AFTER = 24, 8
MAX_LINE_NBYTES = 1 << 20
MAX_MESSAGE, MAX_EXCEPTION = 1000, 6000
"""Characters of a line that are shown."""
SAME_S = 1.0
"""A warning so shortly before an event is about it."""
SERIOUS = ("ERROR", "CRITICAL")
_NOTABLE = re.compile(rb'"level":\s*"(WARNING|ERROR|CRITICAL)"')
_MACHINE = re.compile(rb'"machine":\s*\{')


@dataclass(frozen=True)
class FirstError:
    """What went wrong first.

    Attributes:
        what: one sentence.
        seconds: when, since 1970 on the server's clock.
        line: the line that tells of it; None: an event does.
        lines: those before it and a few after it, of all processes, by time.
        place: which of these it is; None: none of them.
    """

    what: str
    seconds: float
    line: LogLine | None = None
    lines: Sequence[LogLine] = ()
    place: int | None = None


@dataclass
class Logs:
    """What the logs of a run say; processes go by their titles.

    Attributes:
        read: whose logs are here.
        missing: whose logs are not.
        num_errors: lines of level ERROR and above.
        num_warnings: lines of level WARNING.
        machines: what a process has said of itself and its machine.
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
    offsets: Mapping[str, float],
    stderr_tail: LogLine | None = None,
) -> Logs:
    """Look through the logs in a folder.

    Args:
        folder: where the files are.
        expected: processes that have written one, here or elsewhere.
        events: of the run, in order.
        offsets: how many seconds a worker's clock is ahead of the server's, by the worker's title.
        stderr_tail: a line that is not in a file yet.

    Raises:
        OSError: a file cannot be read.
    """
    files = _files(folder, expected)
    logs = Logs(read=[title for title, _ in files])
    logs.missing = [each.title for each in expected if each.title not in logs.read]
    serious, warnings = [] if stderr_tail is None else [stderr_tail], list[LogLine]()
    for title, path in files:
        for line in _look_through(path, title, offsets.get(title, 0.0), logs):
            (serious if line.level in SERIOUS else warnings).append(line)
    last = events[-1] if events else None
    ended = last.event if last else None
    # What processes warn of when a run ends as it should, or because it was asked to, is that end.
    is_good = isinstance(ended, RunEnded) and (ended.ok or ended.reason == STOPPED)
    end = seconds_of(last.ts, math.inf) if last and is_good else math.inf
    early = [line for line in warnings if line.seconds < end - SAME_S]
    trouble = _first(serious, events) or _first_warning(early)
    if trouble is not None:
        around = [_around(path, title, offsets.get(title, 0.0), trouble) for title, path in files]
        logs.trouble = _with_context(trouble, [*around, serious[:1] if stderr_tail else []])
    return logs


def _files(folder: Path, expected: Sequence[Process]) -> list[tuple[str, Path]]:
    """The log files that are here: whose, and where; those of one process in order of time."""
    known = {each.stem: each.title for each in expected}
    stems = sorted({path.name.rpartition(".log")[0] for path in folder.glob("*.log*")})
    return [
        (known.get(stem) or process_title(*(parse_log_stem(stem) or (stem, ""))), path)
        for stem in stems
        for path in reversed(rotations(folder / f"{stem}.log"))
        if path.is_file()
    ]


def _look_through(path: Path, title: str, offset_s: float, logs: Logs) -> Iterable[LogLine]:
    """The file's first serious line and first warning; counts all, keeps what is said of the machine."""
    first: dict[bool, LogLine] = {}
    for raw in _raw_lines(path):
        if _NOTABLE.search(raw):
            line = _shown(parse_log_line(raw, offset_s), title, offset_s)
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


def _shown(line: LogLine | None, title: str, offset_s: float) -> LogLine | None:
    """What can be shown of a line, at its time on the server's clock."""
    if line is None:
        return None
    message = shortened(line.message, MAX_MESSAGE)
    exception = shortened(line.exception, MAX_EXCEPTION)
    seconds = line.seconds - offset_s
    return LogLine(seconds, line.level, message, exception, source=title)


def _first(serious: Sequence[LogLine], events: Sequence[EventRecord]) -> FirstError | None:
    """The earliest of serious lines, of losses of workers, and of a failure that no line tells of."""
    found = [FirstError(f"{line.source}: {line.message}", line.seconds, line) for line in serious]
    for record in events:
        moment = seconds_of(record.ts, 0.0)
        match record.event:
            case WorkerLost():
                found.append(FirstError(told(record.event), moment))
            case RunEnded(ok=False, reason=reason) if reason.startswith("the run failed"):
                if not serious:
                    found.append(FirstError(reason, moment))
    return min(found, key=lambda trouble: trouble.seconds, default=None)


def _first_warning(warnings: Sequence[LogLine]) -> FirstError | None:
    first = min(warnings, key=lambda line: line.seconds, default=None)
    if first is None:
        return None
    what = f"no error and no lost worker; the first warning is {first.source}: {first.message}"
    return FirstError(what, first.seconds, first)


def _around(path: Path, title: str, offset_s: float, trouble: FirstError) -> list[LogLine]:
    """A file's last lines up to the trouble, with its own, and the first ones after it."""
    before: deque[LogLine] = deque(maxlen=LINES_BEFORE + 1)
    after: list[LogLine] = []
    is_its_own = trouble.line is not None and trouble.line.source == title
    seconds, has_met = 0.0, False
    for raw in _raw_lines(path):
        said = parse_log_line(raw, seconds)
        line = _shown(said, title, offset_s)
        if said is None or line is None or line.level == "DEBUG":
            continue
        seconds = said.seconds
        if line.seconds <= trouble.seconds and not has_met:
            before.append(line)
            has_met = line == trouble.line
        elif len(after) < LINES_AFTER:
            after.append(line)
        elif has_met or not is_its_own:
            break
    return [*before, *after]


def _with_context(trouble: FirstError, around: Sequence[Sequence[LogLine]]) -> FirstError:
    """The trouble among the lines of all files, by time."""
    lines = sorted((line for lines in around for line in lines), key=lambda line: line.seconds)
    its_own = _place(trouble, lines)
    before = sum(line.seconds <= trouble.seconds for line in lines) - 1
    place = before if its_own is None else its_own
    first = max(0, place - LINES_BEFORE)
    return replace(
        trouble,
        lines=lines[first : place + LINES_AFTER + 1],
        place=None if its_own is None else its_own - first,
    )


def _place(trouble: FirstError, lines: Sequence[LogLine]) -> int | None:
    """Where the trouble's own line is; of an event the warning that tells of it."""
    if trouble.line is not None:
        return lines.index(trouble.line) if trouble.line in lines else None
    for place in reversed(range(len(lines))):
        line = lines[place]
        is_warning = logging.getLevelNamesMapping().get(line.level, 0) >= logging.WARNING
        if is_warning and 0 <= trouble.seconds - line.seconds <= SAME_S:
            return place
    return None
