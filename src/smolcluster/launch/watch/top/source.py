"""What `top` shows: how the run stands, its curve, its newest events and warnings, of a folder or its mirror.

How loss and speed went tells `series.json`, which comes every ten seconds; the newest point is the status'.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from smolcluster.launch.watch.mirror import Mirror
from smolcluster.launch.watch.probe import Ask
from smolcluster.observability.view.lines import NewLines
from smolcluster.observability.view.report import RunReport, report_of
from smolcluster.observability.view.story import told
from smolcluster.observability.view.view import View
from smolcluster.runs.events import EpochFinished, Evaluated, kind_of
from smolcluster.runs.files import seconds_of
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.runs.status import RunStatus

EVENTS_NBYTES, LOG_NBYTES = 1 << 18, 1 << 16
"""Of each file, so many of the newest bytes are read."""
LOG_LINES = 500
"""The same of a log on another machine, in lines."""
MAX_NEWS = 400
AT_END = ("ended", "stopped")
"""States of a run with which nothing is wrong."""
ROUTINE = (EpochFinished, Evaluated)
"""The head of the picture tells them."""
SERIOUS = ("WARNING", "ERROR", "CRITICAL")


class Point(NamedTuple):
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
class Picture:
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


class Source:
    """Looks at one run; its copies, if it is elsewhere, are in `folder` until `close`.

    `ask` runs a script on a machine.

    Raises:
        DataError: what says which processes it has is damaged.
    """

    def __init__(self, paths: RunPaths, folder: Path, ask: Ask | None = None) -> None:
        self._mirror = Mirror(paths, folder / paths.run_id, ask, num_lines=LOG_LINES)
        self.close = self._mirror.close
        self.keep_looking = self._mirror.keep_looking
        self._view = View(self._mirror, newest_nbytes=EVENTS_NBYTES)
        self._lines = NewLines(self._view.log_files(), LOG_NBYTES)
        self._warnings: list[EventLine] = []

    def look(self) -> Picture:
        """How the run stands now; takes as long as the slowest machine.

        Raises:
            DataError: what says which processes it has is damaged.
        """
        self._mirror.look()
        self._mirror.wait()
        return self._picture()

    def newest(self) -> Picture | None:
        """How the run stands as far as is known, while it is looked at; None: nothing was seen yet.

        Raises:
            DataError: what says which processes it has is damaged.
        """
        return self._picture() if self._mirror.has_looked() else None

    def _picture(self) -> Picture:
        self._view.read()
        read = self._view.snapshot
        for entry in self._lines.poll(self._view.log_files()).entries:
            if entry["level"] in SERIOUS:
                title = process_title(entry["component"], entry["node"], entry["rank"])
                text = f"{title}: {entry['message']}"
                self._warnings.append(EventLine(entry["t"], entry["level"], text))
        del self._warnings[:-MAX_NEWS]
        news = [
            EventLine(seconds_of(each.ts, 0.0), kind_of(type(each.event)), told(each.event))
            for each in self._view.story.kept(without=ROUTINE)[-MAX_NEWS:]
        ]
        news = sorted([*news, *self._warnings], key=lambda each: each.seconds)[-MAX_NEWS:]
        report = report_of(read).model_copy(update={"state": read.heard})
        return Picture(report, read.status, read.now, self._points(read.status), news)

    def _points(self, status: RunStatus | None) -> Sequence[Point]:
        """How it went so far; what an abandoned time line had after the newest step is left out."""
        points = [
            Point(each.step, _or_nan(each.mean("loss")), _or_nan(each.mean("samples_per_s")))
            for each in self._view.series.steps.buckets
        ]
        if status is None or status.loss is None:
            return points
        before = (point for point in points if point.step < status.step)
        return [*before, Point(status.step, status.loss, status.samples_per_s)]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
