"""What `top` shows, looked up again and again: on the run's machines, or here for a local run.

Each machine is asked once a look, by the same command that asks for its processes; it sends the ends of its
files only. What it sends more than once is known by its text. How loss and speed went tells `series.json`,
which comes every ten seconds; the newest point is the status'.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.sessions import host_of
from smolcluster.launch.watch.logs import log_of, sources_of
from smolcluster.launch.watch.probe import Ask, AskMore, ask_host, look, sections
from smolcluster.launch.watch.report import RunReport, report_of
from smolcluster.observability.parsing import parse_log_line
from smolcluster.observability.view.measured import Measured
from smolcluster.observability.view.story import told
from smolcluster.runs.events import EpochFinished, Evaluated, kind_of, records_of
from smolcluster.runs.files import seconds_of
from smolcluster.runs.launched import LaunchedProcess, launched_of
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import Bucket, loaded
from smolcluster.runs.status import RunStatus

EVENTS_NBYTES = 8192
RARE_NBYTES = 1 << 18
RARE_LINES = 20
LOG_NBYTES = 65536
LOG_LINES = 8
MAX_NEWS = 400
AT_END = ("ended", "stopped")
"""States of a run with which nothing is wrong."""
ROUTINE = (EpochFinished, Evaluated)
"""The head of the picture tells them."""
_FREQUENT = '"kind": ?"(epoch_finished|evaluated|checkpoint_saved|push_dropped|lease_returned)"'
"""What may hide the rare events that tell more, and is looked for in a shorter end of the file."""
_SERIOUS = '"level": ?"(WARNING|ERROR|CRITICAL)"'


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
        return replace(self, report=report, now=self.now + timedelta(seconds=seconds))


class SnapshotSource:
    """Looks at one run; `ask` runs a script on a machine."""

    def __init__(self, paths: RunPaths, ask: Ask | None = None) -> None:
        """Read which processes the run has.

        Raises:
            DataError: its list of processes is damaged.
        """
        self._launched = launched_of(paths)
        self.is_elsewhere = self._launched is not None and not self._launched.is_local
        """Whether looking may take a network."""
        self._paths = paths
        here = LaunchedProcess(node="this machine", role="server", run_dir=str(paths.root))
        self._server = self._launched.server if self._launched else here
        self._ask = AskMore(ask, self._server, self._script)
        self._logs = sources_of(paths)
        self._steps: Sequence[Bucket] | None = None
        """As the server's machine told them last."""
        self._measured_here = Measured(paths)
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
        if self._ask.server not in self._ask.said:  # it is here, or its machine is off
            self._ask_here()
        for said in self._ask.said.values():
            for place, log in enumerate(self._logs):
                self._learn_lines(log, said.get(f"log {place}", ""))
            self._learn_events(said.get("events", ""))
        while len(self._news) > MAX_NEWS:
            del self._news[next(iter(self._news))]
        algorithm = None if self._launched is None else self._launched.algorithm
        report = report_of(self._paths.run_id, algorithm, probed)
        news = sorted(self._news.values(), key=lambda each: each.seconds)
        return Snapshot(report, probed.status, probed.now, self._points(probed.status), news)

    def _script(self, host: Host) -> str:
        places = enumerate(self._logs)
        lines = [_log_tail(place, log_of(log)) for place, log in places if host_of(log) == host]
        if host == self._ask.server:
            lines.append(_events_tail(self._server.run_dir))
        return "\n".join(lines)

    def _ask_here(self) -> None:
        """Read what lies here, of a local run or fetched before."""
        folder = str(self._paths.root)
        copies = [log.model_copy(update={"run_dir": folder}) for log in self._logs]
        lines = [_log_tail(place, log_of(copy)) for place, copy in enumerate(copies)]
        with suppress(LaunchError):
            script = "\n".join([_events_tail(folder), *lines, "true"])
            self._ask.said[self._ask.server] = sections(ask_host(Host("this machine"), script))

    def _points(self, status: RunStatus | None) -> Sequence[Point]:
        """How it went so far; what an abandoned time line had after the newest step is left out."""
        if self._ask.series:
            found = loaded(self._ask.series.encode())
            self._steps = found[0].steps.buckets if found else self._steps
        while self._measured_here.poll():
            pass
        points = [
            Point(each.step, _or_nan(each.mean("loss")), _or_nan(each.mean("samples_per_s")))
            for each in self._steps or self._measured_here.steps
        ]
        if status is None or status.loss is None:
            return points
        newest = Point(status.step, status.loss, status.samples_per_s)
        return [*(point for point in points if point.step < newest.step), newest]

    def _learn_events(self, text: str) -> None:
        for line in text.split("\n"):
            if line in self._news:
                continue
            for record in records_of([line.encode()]):
                if not isinstance(record.event, ROUTINE):
                    seconds = seconds_of(record.ts, time.time())
                    kind = kind_of(type(record.event))
                    self._news[line] = EventLine(seconds, kind, told(record.event))

    def _learn_lines(self, log: LaunchedProcess, text: str) -> None:
        for line in text.split("\n"):
            key = f"{log.stem} {line}"
            said = None if key in self._news else parse_log_line(line.encode(), time.time())
            if said is not None and said.level:
                self._news[key] = EventLine(
                    said.seconds, said.level, f"{log.title}: {said.message}"
                )


def _log_tail(place: int, file: str) -> str:
    return (
        f"echo; echo '::log {place}'; tail -c {LOG_NBYTES} {file} 2>/dev/null | "
        f"grep -aE '{_SERIOUS}' | tail -n {LOG_LINES}"
    )


def _events_tail(run_dir: str) -> str:
    file = f"{shell_path(run_dir)}/events.jsonl"
    return (
        "echo; echo ::events\n"
        f"tail -c {RARE_NBYTES} {file} 2>/dev/null | grep -avE '{_FREQUENT}' | tail -n {RARE_LINES}\n"
        f"echo; tail -c {EVENTS_NBYTES} {file} 2>/dev/null"
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
