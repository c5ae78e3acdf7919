"""`series.json`: the curves of a run, however long it is, in at most `MAX_NBYTES`.

The run's owner makes it from `metrics.jsonl` while that grows, and replaces it every `EVERY_S` seconds and
at the end; `metrics.jsonl` stays the archive. Points lie in buckets of `stride` steps: a bucket tells its
last step and moment, how many steps it has, the mean of each value, and the lowest and highest loss. When
there are more than `MAX_STEPS` buckets the stride doubles. Steps that were undone, and are taken again, are
left out.

The document: `metrics_nbytes` (how much of `metrics.jsonl` it tells), `starts` (`[incarnation, first step]`),
`t0` (seconds since 1970, to be added to each `t`), `steps`, `evaluations` and `processes`, which are columns.
Null is what was not measured, or is no finite number.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from smolcluster.errors import SmolclusterError
from smolcluster.runs.evaluated import PREFIX, metrics_in
from smolcluster.runs.files import json_objects, seconds_of, write_whole
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.tail import Tail

EVERY_S, POLL_S = 10.0, 1.0
MAX_NBYTES, MAX_CURVES_NBYTES = 200_000, 180_000
"""Of the file, and of the steps and evaluations in it: the rest is for what the processes report."""
MAX_STEPS = 1200
MAX_EVALUATIONS = 300
MAX_REPORTS = 400
"""Of each process; fewer where there are so many processes that the file would be too large."""
MAX_PROCESSES = 256
MAX_METRICS = 16
"""Of a workload's own, of which there are curves: the first ones."""
POINT_NBYTES = 110
"""About so long is a report."""
STEP_VALUES = ("loss", "lr", "samples_per_s", "mb_per_s", "staleness", "drift", "grad_norm")
EVAL_VALUES = ("val_loss", "val_perplexity", "val_accuracy")
REPORT_VALUES = (
    *("samples_per_s", "cpu", "memory_bytes", "sent_bytes_per_s", "rtt_s"),
    *("gpu/utilization", "gpu/memory_bytes", "gpu/temperature_c", "gpu/power_w"),
)
"""Of a process: of these there are curves, of all others totals."""
REPORTED = "memory_bytes"
"""In every report of a worker; what its user's own loop has logged is a line without it."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""How long the first report of a process counts, and any one at most, seconds."""
RESERVED = frozenset({"ts", "kind", "incarnation", "step", "epoch", "rank", "node"})
_DIGITS = 6

Columns = dict[str, list[float | None]]


@dataclass(slots=True)
class Bucket:
    """Points that follow each other.

    Attributes:
        place: of the last one, by which buckets are formed.
        step: of the last one.
        t: when the last one was measured, seconds since 1970.
        samples: applied in the run when it was.
        num: how many points it has.
        sums: the sum of each value, over its finite ones, and how many these are.
        low: the lowest finite value of the first name; infinite where there is none.
        high: the highest one.
    """

    place: int
    step: int
    t: float
    samples: float
    num: int
    sums: dict[str, tuple[float, int]]
    low: float = math.inf
    high: float = -math.inf

    def take(self, later: "Bucket") -> None:
        """Add the points of one that follows it."""
        self.place, self.step = later.place, later.step
        self.t, self.samples = later.t, later.samples
        self.num += later.num
        for name, (total, count) in later.sums.items():
            own_total, own_count = self.sums.get(name, (0.0, 0))
            self.sums[name] = own_total + total, own_count + count
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)

    def mean(self, name: str) -> float | None:
        total, count = self.sums.get(name, (0.0, 0))
        return total / count if count else None


@dataclass
class Curve:
    """Points of a run in order, in at most `at_most` buckets; `names` are their values."""

    at_most: int
    names: Sequence[str]
    stride: int = 1
    buckets: list[Bucket] = field(default_factory=list)

    def add(self, entry: Mapping[str, Any], t: float, samples: float, place: int = -1) -> None:
        """Take the next point; without a place it is one after the last."""
        if place < 0:
            place = self.buckets[-1].place + 1 if self.buckets else 0
        sums = {
            name: (float(value), 1)
            for name in self.names
            if isinstance(value := entry.get(name), int | float) and math.isfinite(value)
        }
        low = sums.get(self.names[0], (math.inf, 0))[0]
        high = sums.get(self.names[0], (-math.inf, 0))[0]
        self._append(Bucket(place, int(entry["step"]), t, samples, 1, sums, low, high))
        if len(self.buckets) > self.at_most:
            self.thin(self.at_most)

    def thin(self, at_most: int) -> None:
        """Make buckets larger until there are no more than that."""
        while len(self.buckets) > max(1, at_most):
            self.stride *= 2
            buckets, self.buckets = self.buckets, []
            for each in buckets:
                self._append(each)

    def thinned(self, at_most: int) -> "Curve":
        """A copy with so many buckets at most."""
        buckets = [replace(each, sums=dict(each.sums)) for each in self.buckets] if at_most else []
        thinned = replace(self, buckets=buckets)
        thinned.thin(at_most)
        return thinned

    def cut(self, step: int) -> None:
        """Forget what came after a step; also of the bucket that goes over it."""
        self.buckets = [each for each in self.buckets if each.step <= step]

    def columns(self, digits: int = _DIGITS) -> Columns:
        """`t`, `step` and a column a value, without those that no point has."""
        values = {name: [each.mean(name) for each in self.buckets] for name in self.names}
        return {
            "t": [each.t for each in self.buckets],
            "step": [each.step for each in self.buckets],
            **{
                name: [rounded(value, digits) for value in column]
                for name, column in values.items()
                if any(value is not None for value in column)
            },
        }

    def document(self, t0: float) -> dict[str, Any]:
        """As it is in the file."""
        return {
            "stride": self.stride,
            **self.columns(),
            "t": [round(each.t - t0, 3) for each in self.buckets],
            "places": [each.place for each in self.buckets],
            "num": [each.num for each in self.buckets],
            "samples_applied": [rounded(each.samples, 12) for each in self.buckets],
            "low": [rounded(each.low, _DIGITS) for each in self.buckets],
            "high": [rounded(each.high, _DIGITS) for each in self.buckets],
        }

    def load(self, document: Mapping[str, Any], t0: float) -> None:
        self.stride = int(document["stride"])
        shared = [document[name] for name in ("t", "step", "num", "samples_applied", "low", "high")]
        places = document.get("places", document["step"])  # an earlier version did not write them
        for index, (t, step, num, samples, low, high) in enumerate(zip(*shared, strict=True)):
            values = {name: document[name][index] for name in self.names if name in document}
            sums = {name: (value * num, num) for name, value in values.items() if value is not None}
            self.buckets.append(
                Bucket(
                    place=int(places[index]),
                    step=int(step),
                    t=t0 + t,
                    samples=samples or 0.0,
                    num=int(num),
                    sums=sums,
                    low=math.inf if low is None else low,
                    high=-math.inf if high is None else high,
                )
            )

    def _append(self, point: Bucket) -> None:
        last = self.buckets[-1] if self.buckets else None
        if last is not None and last.place // self.stride == point.place // self.stride:
            last.take(point)
        else:
            self.buckets.append(point)


@dataclass
class Total:
    """One value of a process over the run, by how long it had it."""

    mean: float = 0.0
    seconds: float = 0.0
    most: float = -math.inf
    newest: float = math.nan

    def take(self, value: float, seconds: float) -> None:
        """It had this value for so long."""
        self.seconds += seconds
        self.mean += (value - self.mean) * seconds / self.seconds
        self.most = max(self.most, value)
        self.newest = value


@dataclass
class ProcessSeries:
    """What a process reported of itself; the rank of the run's owner is None.

    `role`: server, worker, or rank of a mesh.
    """

    role: str
    rank: int | None
    node: str
    curve: Curve = field(default_factory=lambda: Curve(MAX_REPORTS, REPORT_VALUES))
    totals: dict[str, Total] = field(default_factory=dict)
    last_s: float | None = None

    def add(self, entry: Mapping[str, Any], t: float) -> None:
        """Take a report."""
        elapsed = FIRST_S if self.last_s is None else min(t - self.last_s, LONGEST_S)
        self.last_s = t
        self.curve.add(entry, t, 0.0)
        for name, value in entry.items():
            if name not in RESERVED and isinstance(value, int | float) and math.isfinite(value):
                self.totals.setdefault(name, Total()).take(float(value), max(elapsed, 1e-3))

    def newest(self) -> dict[str, float]:
        return {name: total.newest for name, total in self.totals.items()}

    def document(self, t0: float, at_most: int) -> dict[str, Any]:
        """As it is in the file, with so many points at most."""
        totals = {
            name: [
                rounded(value, _DIGITS) for value in (own.mean, own.seconds, own.most, own.newest)
            ]
            for name, own in self.totals.items()
        }
        return {
            "role": self.role,
            "rank": self.rank,
            "node": self.node,
            "last_s": self.last_s,
            "points": self.curve.thinned(at_most).document(t0),
            "totals": totals,
        }

    def load(self, document: Mapping[str, Any], t0: float) -> None:
        self.curve.load(document["points"], t0)
        self.last_s = document["last_s"]
        self.totals = {name: Total(*values) for name, values in document["totals"].items()}


class Series:
    """What a run has measured, as curves in bounded memory."""

    def __init__(self) -> None:
        self.steps = Curve(MAX_STEPS, STEP_VALUES)
        self.evaluations = Curve(MAX_EVALUATIONS, EVAL_VALUES)
        self.processes: dict[tuple[int | None, str], ProcessSeries] = {}
        self.starts: list[tuple[str, int]] = []
        """Each start of the owner of which there are steps, and the first of these."""
        self._samples = 0.0

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take a line of `metrics.jsonl`; one that makes no sense is left out."""
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            kind, t, step = entry.get("kind"), seconds_of(entry.get("ts"), 0.0), int(entry["step"])
            if kind == "step":
                self._take_step(entry, t, step)
            elif kind == "eval":
                self._name_metrics(entry)
                self.evaluations.add(entry, t, self._samples)
            elif kind in ("rank", "server") or (kind == "worker" and REPORTED in entry):
                self._take_report(entry, t)

    def start_of(self, step: int) -> int:
        """Which start of the owner has taken a step, from 0."""
        return bisect_right([first for _, first in self.starts], step) - 1

    def document(self, metrics_nbytes: int) -> bytes:
        """The content of the file; of each curve as many points as there is room for."""
        t0 = self.steps.buckets[0].t if self.steps.buckets else 0.0
        whole: dict[str, Any] = {
            "version": 1,
            "metrics_nbytes": metrics_nbytes,
            "starts": self.starts,
            "t0": t0,
            "samples_applied": self._samples,
            "steps": self.steps.document(t0),
            "evaluations": self.evaluations.document(t0),
        }
        thinning = 1
        while len(orjson.dumps(whole)) > MAX_CURVES_NBYTES and thinning < MAX_EVALUATIONS:
            thinning *= 2
            whole["steps"] = self.steps.thinned(MAX_STEPS // thinning).document(t0)
            few = MAX_EVALUATIONS // thinning
            whole["evaluations"] = self.evaluations.thinned(few).document(t0)
        shown = list(self.processes.values())
        room = MAX_NBYTES - len(orjson.dumps(whole))
        num_points = min(MAX_REPORTS, max(0, room) // (POINT_NBYTES * max(1, len(shown))))
        while True:
            whole["processes"] = [each.document(t0, num_points) for each in shown]
            content = orjson.dumps(whole)
            if len(content) <= MAX_NBYTES or not shown:
                return content
            if num_points == 0:
                shown = shown[: len(shown) // 2]
            num_points //= 2

    def _take_step(self, entry: Mapping[str, Any], t: float, step: int) -> None:
        incarnation = str(entry["incarnation"])
        if not self.starts or self.starts[-1][0] != incarnation:
            self.starts = [each for each in self.starts if each[1] < step] + [(incarnation, step)]
            self._cut(step - 1)
        elif self.steps.buckets and step <= self.steps.buckets[-1].step:
            self._cut(step - 1)
        samples = entry.get("samples_applied")
        if isinstance(samples, int | float):
            self._samples = float(samples)
        self.steps.add(entry, t, self._samples, place=step)

    def _name_metrics(self, entry: Mapping[str, Any]) -> None:
        """Let there be curves of what this evaluation has measured."""
        names = self.evaluations.names
        new = [f"{PREFIX}{name}" for name in metrics_in(entry) if f"{PREFIX}{name}" not in names]
        self.evaluations.names = (*names, *new)[: len(EVAL_VALUES) + MAX_METRICS]

    def _cut(self, step: int) -> None:
        """What came after a step is undone: a later start takes it up, or a pipeline that lost a stage."""
        for curve in (self.steps, self.evaluations, *(p.curve for p in self.processes.values())):
            curve.cut(step)

    def _take_report(self, entry: Mapping[str, Any], t: float) -> None:
        rank, node = entry.get("rank"), str(entry.get("node") or "")
        if not isinstance(rank, int | None):
            return
        if (rank, node) in self.processes or len(self.processes) < MAX_PROCESSES:
            new = ProcessSeries(entry["kind"], rank, node)
            self.processes.setdefault((rank, node), new).add(entry, t)


def loaded(content: bytes) -> tuple[Series, int] | None:
    """The series of a file's content, and how much of `metrics.jsonl` it tells; None: it is damaged."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        document, series = orjson.loads(content), Series()
        t0 = float(document["t0"])
        series.steps.load(document["steps"], t0)
        evaluations = document["evaluations"]
        series.evaluations.names = tuple(
            dict.fromkeys(
                [*EVAL_VALUES, *(name for name in evaluations if name.startswith(PREFIX))]
            )
        )
        stride = int(evaluations["stride"])  # of an evaluation, its number is its place
        numbers = [stride * number - 1 for number, _ in enumerate(evaluations["step"], start=1)]
        series.evaluations.load({"places": numbers, **evaluations}, t0)
        series.starts = [(str(name), int(step)) for name, step in document["starts"]]
        series._samples = float(document["samples_applied"])
        for each in document["processes"]:
            role = each.get("role", "server" if each["rank"] is None else "worker")
            own = ProcessSeries(role, each["rank"], each["node"])
            own.load(each, t0)
            series.processes[own.rank, own.node] = own
        return series, int(document["metrics_nbytes"])
    return None


class SeriesReader:
    """The series of a run as it grows: what `series.json` tells, and what `metrics.jsonl` has after that.

    Where there is no `metrics.jsonl`, as of a run on another machine, it is `series.json` alone.

    Attributes:
        version: grows whenever there is something new.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read_at: tuple[int, int] | None = None
        self.version = 0
        self._tail = Tail(paths.metrics, on_restart=self._begin)
        self._begin()
        self._load()

    @property
    def offset(self) -> int:
        """How much of `metrics.jsonl` it has."""
        return self._tail.offset

    def poll(self) -> bool:
        """Take what is new, a piece of the file at most; whether there was something."""
        if not self._paths.metrics.is_file():
            return self._load()
        lines = self._tail.poll()
        for entry in json_objects(line.data for line in lines):
            self.series.take(entry)
            self.version += 1
        return bool(lines)

    def _begin(self) -> None:
        self.series = Series()
        self.version += 1

    def poll_all(self) -> Series:
        """All that there is now."""
        while self.poll():
            pass
        return self.series

    def _load(self) -> bool:
        """Read `series.json`, if it is not the one that was read last."""
        with suppress(OSError):
            facts = self._paths.series.stat()
            if (facts.st_mtime_ns, facts.st_ino) == self._read_at:
                return False
            found = loaded(self._paths.series.read_bytes()[: 4 * MAX_NBYTES])
            self._read_at = facts.st_mtime_ns, facts.st_ino
            if found is not None:
                self.series, self._tail.offset = found
                self.version += 1
                return True
        return False


class SeriesFile:
    """Keeps `series.json` up to date, for the run's owner; `warn` is called once if it cannot be written."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path: Path = paths.series
        self._reader = SeriesReader(paths)
        self._warn = warn
        self._clock = clock
        self._poll_at, self._due_at = clock(), clock() + EVERY_S
        self._has_warned = False

    def tick(self) -> None:
        """Read what was measured, once a second or piece by piece, and write the file when it is time."""
        now = self._clock()
        if now >= self._poll_at:
            self._poll_at = now if self._reader.poll() else now + POLL_S
        if now >= self._due_at:
            self._due_at = now + EVERY_S
            self.write()

    def close(self) -> None:
        """Read and write the rest."""
        self._reader.poll_all()
        self.write()

    def write(self) -> None:
        """Replace the file; never raises for its sake."""
        try:
            content = self._reader.series.document(self._reader.offset)
            write_whole(self._path, content, durable=False)
        except SmolclusterError as error:
            if not self._has_warned:
                self._warn(f"{error}; training goes on")
                self._has_warned = True


def rounded(value: float | None, digits: int) -> float | None:
    """A finite number with so many digits; None for any other."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
