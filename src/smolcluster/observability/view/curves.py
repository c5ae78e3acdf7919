"""A run's curves over the samples applied, from its series and events: what every picture of them draws."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.events import (
    CheckpointSaved,
    Event,
    EventRecord,
    RunStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from smolcluster.runs.files import seconds_of
from smolcluster.runs.series import EVAL_VALUES, Bucket, Curve, Series
from smolcluster.utils.units import format_count
from smolcluster.utils.words import one_line

SMOOTHED_OVER = 50
"""The moving average of the loss spans this part of the steps: one in 50; also on the page."""
LEFT = ("loss", "val_perplexity", "val_accuracy")
RIGHT = ("lr", "samples_per_s", "staleness", "drift")

Mark = Literal["worker joined", "worker lost or left", "resumed"]
MARKS: tuple[Mark, ...] = ("worker joined", "worker lost or left", "resumed")
MARKED: Mapping[type[Event], Mark] = MappingProxyType(
    {
        WorkerJoined: "worker joined",
        WorkerLost: "worker lost or left",
        WorkerLeft: "worker lost or left",
    }
)


class Points(NamedTuple):
    """A curve's points: samples applied, in rising order, and the values there."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Curves:
    """What a picture shows.

    Attributes:
        title: one line.
        series: by metric; those that the run has, each of one point at least, all finite.
        marks: where something happened, in samples applied.
        saved: where there is a checkpoint, likewise.
        single: the loss of single steps; of a long run the lowest and the highest of those of each point.
    """

    title: str
    series: Mapping[str, Points]
    marks: Mapping[Mark, list[float]]
    saved: Sequence[float] = ()
    single: Points = field(default_factory=lambda: Points([], []))

    @property
    def panels(self) -> list[list[str]]:
        """The metrics that have a panel, column by column from the left, each from the top."""
        left, right = ([name for name in column if name in self.series] for column in (LEFT, RIGHT))
        return [names for names in (left + own_metrics([self]), right) if names]


def own_metrics(runs: Sequence[Curves]) -> list[str]:
    """The metrics of workloads of a user's own that the runs have."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    return [name for name in names if name.startswith(PREFIX) and name not in EVAL_VALUES]


def curves_of(
    run_id: str, series: Series, events: Sequence[EventRecord], num_workers: int
) -> Curves:
    """Arrange what a run has measured over the samples applied."""
    steps = [bucket.step for bucket in series.steps.buckets]

    def samples_at(step: int) -> float:
        place = bisect_right(steps, step)
        return series.steps.buckets[place - 1].samples if place else 0.0

    evaluations = sorted(series.evaluations.buckets if steps else [], key=lambda each: each.step)
    places = [each.samples for each in series.steps.buckets]
    found = {name: _points(series.steps.buckets, places, name) for name in ("loss", *RIGHT)}
    places = [samples_at(each.step) for each in evaluations]
    found |= {name: _points(evaluations, places, name) for name in series.evaluations.names}
    return Curves(
        title=_title(run_id, events, num_workers),
        series={name: points for name, points in found.items() if points.x},
        marks=_marks(series, events),
        saved=[
            samples_at(event.event.step)
            for event in events
            if isinstance(event.event, CheckpointSaved)
        ],
        single=_single(series.steps),
    )


def _points(buckets: Sequence[Bucket], places: Sequence[float], name: str) -> Points:
    pairs = zip(places, buckets, strict=True)
    known = [(x, value) for x, each in pairs if (value := each.mean(name)) is not None]
    return Points([x for x, _ in known], [y for _, y in known])


def _single(steps: Curve) -> Points:
    known = [
        (each.samples, value)
        for each in steps.buckets
        for value in ((each.low, each.high) if each.num > 1 else (each.low,))
        if math.isfinite(value)
    ]
    return Points([x for x, _ in known], [y for _, y in known])


def _title(run_id: str, events: Sequence[EventRecord], num_workers: int) -> str:
    begun = next((each.event for each in events if isinstance(each.event, RunStarted)), None)
    if begun is None:
        return run_id
    parts = (
        run_id,
        begun.shown_algorithm,
        f"{begun.model} on {begun.dataset}",
        f"{num_workers} workers" if num_workers > 1 else "",
        "" if begun.mesh is None else format_count(begun.num_ranks or 0, "rank"),
    )
    return one_line("  ·  ".join(filter(None, parts)))


def _marks(series: Series, events: Sequence[EventRecord]) -> dict[Mark, list[float]]:
    """Where workers came and went between two steps of one start, and where a later start went on."""
    own: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in series.starts}
    for bucket in series.steps.buckets:
        own[series.starts[series.start_of(bucket.step)][0]].append((bucket.t, bucket.samples))
    starts = [points for points in own.values() if points]
    marks: dict[Mark, list[float]] = {mark: [] for mark in MARKS}
    marks["resumed"] = [points[0][1] for points in starts[1:]]
    for event in events:
        mark = MARKED.get(type(event.event))
        points = own.get(event.incarnation, [])
        place = bisect_right(points, seconds_of(event.ts, 0.0), key=lambda point: point[0])
        if mark is not None and 0 < place < len(points):
            marks[mark].append(points[place - 1][1])
    return {mark: places for mark, places in marks.items() if places}


def smooth(points: Points) -> Points:
    """The curve's exponential moving average, over a fixed part of its length; its first point stays."""
    decay = 1.0 - 2.0 / (max(1, len(points.y) // SMOOTHED_OVER) + 1.0)
    average, weight, averages = 0.0, 0.0, []
    for value in points.y:
        average = decay * average + (1.0 - decay) * value
        weight = decay * weight + 1.0 - decay
        averages.append(average / weight)
    return Points(points.x, averages)


def window_means(points: Points, num_windows: int) -> Points:
    """Means of windows of about as many points each, at the middle of each window."""
    count = len(points.x)
    num_windows = min(num_windows, count)
    edges = [i * count // num_windows for i in range(num_windows + 1)]
    windows = [slice(start, stop) for start, stop in pairwise(edges)]
    return Points(
        [(points.x[window][0] + points.x[window][-1]) / 2 for window in windows],
        [math.fsum(points.y[window]) / (window.stop - window.start) for window in windows],
    )
