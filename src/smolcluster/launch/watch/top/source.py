"""What `top` shows, looked up again and again: on the run's machines, or here for a local run.

Each machine is asked once a look, by the same command that asks for its processes; it sends the ends of its
files only. What it sends more than once is known by its text. How loss and speed went before the first look
tells `series.json`.
"""

import itertools
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.watch.logs import LogFile, entry_of, sources_of
from smolcluster.launch.watch.probe import Ask, AskMore, ask_host, look, sections, series_script
from smolcluster.launch.watch.report import RunReport, report_of
from smolcluster.launch.watch.top.bars import mean
from smolcluster.observability.view.curves import read_series
from smolcluster.observability.view.story import records_of, told
from smolcluster.runs.events import EpochFinished, Evaluated, kind_of
from smolcluster.runs.files import seconds_of
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import loaded
from smolcluster.runs.status import RunStatus

EVENTS_NBYTES = 8192
RARE_NBYTES = 1 << 18
RARE_LINES = 20
LOG_NBYTES = 65536
LOG_LINES = 8
MAX_POINTS = 480
MAX_NEWS = 400
AT_END = ("ended", "stopped")
"""States of a run with which nothing is wrong."""
ROUTINE = (EpochFinished, Evaluated)
"""The head of the picture tells them."""
_FREQUENT = '"kind": ?"(epoch_finished|evaluated|checkpoint_saved|push_dropped|lease_returned)"'
"""What may hide the rare events that tell more, and is looked for in a shorter end of the file."""
_SERIOUS = '"level": ?"(WARNING|ERROR|CRITICAL)"'
_HERE = Host("this machine")


@dataclass(frozen=True)
class Point:
    """Loss and speed at a step; NaN is what is not known."""

    step: int
    loss: float
    samples_per_s: float


@dataclass(frozen=True)
class EventLine:
    """Something that happened.

    Attributes:
        seconds: when, since 1970, by the clock of the machine that tells.
        kind: an event's kind, or a log line's level.
    """

    seconds: float
    kind: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; `now` is by its server's clock. The newest points and news come last."""

    report: RunReport
    status: RunStatus | None
    now: datetime
    points: Sequence[Point]
    news: Sequence[EventLine]

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come; a server that still runs may be winding up, or beginning again."""
        server = self.report.processes[0].process if self.report.processes else "unknown"
        return self.report.state in (*AT_END, "failed", "broken off") and server != "running"

    def later(self, seconds: float) -> "Snapshot":
        """The same picture, so much later: what it tells is older then."""
        if self.status is None or self.status.is_over:
            return self
        aged = [
            process
            if process.heartbeat_age_s is None
            else process.model_copy(update={"heartbeat_age_s": process.heartbeat_age_s + seconds})
            for process in self.report.processes
        ]
        age = None if self.report.age_s is None else self.report.age_s + seconds
        report = self.report.model_copy(update={"processes": tuple(aged), "age_s": age})
        now = self.now + timedelta(seconds=seconds)
        return Snapshot(report, self.status, now, self.points, self.news)


class SnapshotSource:
    """Looks at one run; `ask` runs a script on a machine."""

    def __init__(self, paths: RunPaths, ask: Ask | None = None) -> None:
        """Read which processes the run has.

        Raises:
            DataError: its list of processes is damaged.
        """
        self.is_elsewhere = paths.launched.is_file()
        """Whether looking may take a network."""
        self._paths = paths
        self._ask = AskMore(ask, self._script)
        self._launched = read_launched(paths.launched) if self.is_elsewhere else None
        self._logs = sources_of(paths)
        self._points: list[Point] = []
        self._has_curve = False
        self._news: dict[str, EventLine] = {}

    def look(self) -> Snapshot:
        """How the run stands now; takes as long as the slowest machine.

        Raises:
            DataError: its list of processes is damaged.
        """
        self._ask.said.clear()
        if not self.is_elsewhere:
            self._logs = sources_of(self._paths)
        probed = look(self._paths, self._ask)
        server = self._server_of(self._launched)
        if server not in self._ask.said:  # what lies here, of a local run or fetched before
            self._ask_here(server)
        self._learn(server)
        status = probed.status
        if status is not None and status.loss is not None:
            self._add([Point(status.step, status.loss, status.samples_per_s)])
        algorithm = None if self._launched is None else self._launched.algorithm
        report = report_of(self._paths.run_id, algorithm, probed)
        news = sorted(self._news.values(), key=lambda each: each.seconds)
        return Snapshot(report, status, probed.now, tuple(self._points), news)

    def _ask_here(self, server: Host) -> None:
        with suppress(LaunchError):
            script = self._tails(str(self._paths.root), is_here=True)
            copies = [shlex.quote(str(log.copy)) for log in self._logs]
            lines = [
                *script,
                *(_log_tail(place, file) for place, file in enumerate(copies)),
                "true",
            ]
            self._ask.said[server] = sections(ask_host(_HERE, "\n".join(lines)))

    @staticmethod
    def _server_of(launched: Launched | None) -> Host:
        return _HERE if launched is None else Host(launched.server.node, launched.server.ssh)

    def _script(self, host: Host) -> str:
        """What is asked of a machine besides its processes."""
        assert self._launched is not None  # noqa: S101 - nobody else is asked
        lines = [
            _log_tail(place, log.file) for place, log in enumerate(self._logs) if log.host == host
        ]
        if host == self._server_of(self._launched):
            lines += self._tails(self._launched.server.run_dir, is_here=False)
        return "\n".join(lines)

    def _tails(self, run_dir: str, *, is_here: bool) -> list[str]:
        folder = shlex.quote(run_dir) if is_here else shell_path(run_dir)
        lines = ["echo; echo ::events", _events_script(f"{folder}/events.jsonl")]
        return lines if self._has_curve or is_here else [*lines, series_script(folder)]

    def _learn(self, server: Host) -> None:
        """Keep what is new in the answers."""
        for host, said in self._ask.said.items():
            for place, log in enumerate(self._logs):
                self._learn_lines(log, said.get(f"log {place}", ""))
            if host == server:
                self._learn_events(said.get("events", ""))
                if not self._has_curve:
                    self._learn_curve(said.get("series", ""))
        while len(self._news) > MAX_NEWS:
            del self._news[next(iter(self._news))]

    def _learn_curve(self, text: str) -> None:
        found = loaded(text.encode()) if text else None
        series = found[0] if found else read_series(self._paths)
        self._has_curve = bool(series.steps.buckets)
        self._add(
            Point(each.step, _or_nan(each.mean("loss")), _or_nan(each.mean("samples_per_s")))
            for each in series.steps.buckets
        )

    def _learn_events(self, text: str) -> None:
        for line in text.split("\n"):
            if line in self._news:
                continue
            for record in records_of([line.encode()]):
                if not isinstance(record.event, ROUTINE):
                    seconds = seconds_of(record.ts, time.time())
                    kind = kind_of(type(record.event))
                    self._news[line] = EventLine(seconds, kind, told(record.event))

    def _learn_lines(self, log: LogFile, text: str) -> None:
        for line in text.split("\n"):
            key = f"{log.file} {line}"
            entry = None if key in self._news else entry_of(line.encode(), 0, time.time())
            if entry is not None and entry.level:
                self._news[key] = EventLine(
                    entry.seconds, entry.level, f"{log.title}: {entry.message}"
                )

    def _add(self, points: Iterable[Point]) -> None:
        """Add points; what an abandoned time line had after them goes."""
        for point in points:
            while self._points and self._points[-1].step >= point.step:
                self._points.pop()
            self._points.append(point)
        if len(self._points) > MAX_POINTS:
            self._points = thinned(self._points, MAX_POINTS // 2)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """The means of stretches of as many steps each, at most `most` of them."""
    if len(points) <= most:
        return list(points)
    first, length = points[0].step, points[-1].step + 1 - points[0].step
    groups = itertools.groupby(points, lambda point: (point.step - first) * most // length)
    return [_mean(list(group)) for _, group in groups]


def _mean(points: Sequence[Point]) -> Point:
    return Point(
        points[-1].step,
        mean(point.loss for point in points),
        mean(point.samples_per_s for point in points),
    )


def _log_tail(place: int, file: str) -> str:
    return (
        f"echo; echo '::log {place}'; tail -c {LOG_NBYTES} {file} 2>/dev/null | "
        f"grep -aE '{_SERIOUS}' | tail -n {LOG_LINES}"
    )


def _events_script(file: str) -> str:
    return (
        f"tail -c {RARE_NBYTES} {file} 2>/dev/null | grep -avE '{_FREQUENT}' | tail -n {RARE_LINES}\n"
        f"echo; tail -c {EVENTS_NBYTES} {file} 2>/dev/null"
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
