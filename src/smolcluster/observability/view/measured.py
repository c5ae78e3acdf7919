"""What a run has measured, as points for curves: from `metrics.jsonl`, however large it is."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from smolcluster.observability.curves import Series, kept, smooth
from smolcluster.observability.metrics import RESERVED
from smolcluster.observability.sinks.jsonl import MetricLine, parse_metric
from smolcluster.observability.view.sampling import sampled, writer_of
from smolcluster.observability.view.thinned import Thinned
from smolcluster.runs.events import EventRecord
from smolcluster.runs.files import json_objects, seconds_of
from smolcluster.runs.tail import Tail

MAX_STEPS = 1500
MAX_REPORTS = 400
"""Of each process."""
MAX_PROCESSES = 256
READ_WHOLE_NBYTES = 8 << 20
"""A larger file is sampled when it is opened."""
STEP_VALUES = ("loss", "lr", "samples_per_s", "mb_per_s", "staleness", "grad_norm")
REPORT_VALUES = (
    *("samples_per_s", "cpu", "memory_bytes", "sent_bytes_per_s", "rtt_s"),
    *("gpu/utilization", "gpu/memory_bytes", "gpu/temperature_c", "gpu/power_w"),
)
"""Of which there are curves; the newest of all of them is told with how the run stands."""
_READ = RESERVED.union(STEP_VALUES)
_STEP = re.compile(rb'"kind": ?"step"')
_DIGITS = 6

Columns = dict[str, list[float | None]]
Whose = tuple[int | None, str]


class Measured:
    """The steps of a run, and what its processes reported of themselves.

    Attributes:
        version: grows whenever there is something new.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self._path = path
        self._tail = Tail(path)
        self._steps = Thinned[MetricLine](MAX_STEPS, lambda line: line.record.step, _start, _loss)
        self._reports: dict[Whose, Thinned[MetricLine]] = {}
        self._open()

    def poll(self) -> bool:
        """Take what is new, a piece of the file at most; whether there was something."""
        offset = self._tail.offset
        lines = self._tail.poll()
        if self._tail.offset < offset:
            self.version += 1
            self._steps.replace([])
            self._reports.clear()
        self._take(line.data for line in lines)
        return bool(lines)

    def newest_reports(self) -> dict[int | None, dict[str, float]]:
        """What each rank reported last; None is the server."""
        newest: dict[int | None, MetricLine] = {}
        for (rank, _), lines in self._reports.items():
            last = list(lines)[-1]
            if rank not in newest or newest[rank].ts < last.ts:
                newest[rank] = last
        return {rank: dict(line.record.values) for rank, line in newest.items()}

    def staleness_values(self) -> list[float]:
        """The staleness of the steps that are known, steps."""
        values = (line.record.values.get("staleness", math.nan) for line in self._steps)
        return [value for value in values if math.isfinite(value)]

    def series(self, events: Sequence[EventRecord]) -> dict[str, Any]:
        """Points of what no later start has undone: of the steps, and of each process.

        Each has `t` (seconds since 1970), `step`, and a column a value; null is what was not measured or is
        no finite number. `smoothed` has the columns of the steps as all views smooth them.
        """
        reports = [line for lines in self._reports.values() for line in lines]
        lines = kept([*self._steps, *reports], events)
        of_process: dict[Whose, list[MetricLine]] = {}
        for line in lines:
            if line.record.kind != "step":
                of_process.setdefault(_whose(line), []).append(line)
        steps = columns([line for line in lines if line.record.kind == "step"], STEP_VALUES)
        return {
            "steps": steps,
            "smoothed": {name: _smoothed(steps[name]) for name in STEP_VALUES if name in steps},
            "processes": [
                {"rank": rank, "node": node, **columns(own, REPORT_VALUES)}
                for (rank, node), own in sorted(of_process.items(), key=_by_rank)
            ],
        }

    def _open(self) -> None:
        """Take what is there, all of it or samples; the rest is new to `poll`."""
        try:
            size = self._path.stat().st_size
            if size <= READ_WHOLE_NBYTES:
                return
            start = size - READ_WHOLE_NBYTES // 8
            for lines in sampled(self._path, start):
                self._take(_first_of_each(lines))
        except OSError:
            return
        self._tail.offset = start
        self._tail.skip_half()

    def _take(self, lines: Iterable[bytes]) -> None:
        for entry in json_objects(lines):
            is_step = entry.get("kind") == "step"
            own = {key: entry[key] for key in entry if key in _READ} if is_step else entry
            if (line := parse_metric(own)) is not None:
                self._add(line)

    def _add(self, line: MetricLine) -> None:
        self.version += 1
        if line.record.kind == "step":
            self._steps.add(line)
        elif line.record.kind in ("worker", "server"):
            whose = _whose(line)
            if whose not in self._reports and len(self._reports) < MAX_PROCESSES:
                self._reports[whose] = Thinned(MAX_REPORTS, _seconds, _start)
            if whose in self._reports:
                self._reports[whose].add(line)


def columns(lines: Iterable[MetricLine], names: Iterable[str]) -> Columns:
    """The lines as columns, by name; values that none of them has are left out."""
    lines = list(lines)
    result: Columns = {
        "t": [_seconds(line) for line in lines],
        "step": [line.record.step for line in lines],
    }
    for name in names:
        values = [_rounded(line.record.values.get(name, math.nan)) for line in lines]
        if any(value is not None for value in values):
            result[name] = values
    return result


def _seconds(line: MetricLine) -> float:
    """When it was written, seconds since 1970; 0 where it does not say."""
    return seconds_of(line.ts, 0.0)


def _smoothed(values: Sequence[float | None]) -> list[float | None]:
    known = [value for value in values if value is not None]
    averages = iter(smooth(Series(known, known)).y)
    return [None if value is None else _rounded(next(averages)) for value in values]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _first_of_each(lines: Iterable[bytes]) -> list[bytes]:
    """The first step among the lines, and the first report of each process; of each start of the server."""
    found: dict[Any, bytes] = {}
    for line in lines:
        step = (writer_of(line), "step") if _STEP.search(line) else None
        if step in found:
            continue
        for entry in json_objects([line]):
            report = (writer_of(line), entry.get("kind"), str(entry.get("rank")))
            found.setdefault(step or report, line)
    return list(found.values())


def _loss(line: MetricLine) -> float:
    """Of a step, for what stands out; one that is no number counts as the lowest."""
    loss = line.record.values.get("loss", math.nan)
    return loss if math.isfinite(loss) else -math.inf


def _start(line: MetricLine) -> str:
    return line.incarnation


def _whose(line: MetricLine) -> Whose:
    return line.record.rank, line.record.node or ""


def _by_rank(item: tuple[Whose, Any]) -> tuple[int, str]:
    rank, node = item[0]
    return (-1 if rank is None else rank), node
