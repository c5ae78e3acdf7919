"""A run's learning curves as one picture: `curves.png`, drawn from `metrics.jsonl` and `events.jsonl`.

What is drawn is computed first, without matplotlib: `kept` leaves out abandoned time lines,
`curves_of` arranges the rest over the samples applied. matplotlib is imported where it draws; no
display, no pyplot and none of its settings for the whole process are touched.
"""

import contextlib
import io
import logging
import math
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from smolcluster.errors import SmolclusterError
from smolcluster.observability.metrics import RESERVED
from smolcluster.observability.sinks.jsonl import MetricLine, parse_metric
from smolcluster.runs.events import (
    CheckpointSaved,
    Event,
    EventRecord,
    RunResumed,
    RunStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    read_events,
)
from smolcluster.runs.files import json_objects, write_whole
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.words import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PX, HEIGHT_PX, DPI = 1600, 900, 100
MAX_STEPS_READ = 100_000
"""So many steps are in memory at most; of a longer run it is every 2nd, 4th, 8th and so on."""
MAX_POINTS = 3000
"""A curve's points that are drawn, about two for each column of its panel's pixels."""
MAX_EVALUATIONS = 300
MAX_MARKS = 60
NUM_WINDOWS = 100
"""Over which learning rate, throughput and staleness are averaged."""
SMOOTHED_OVER = 50
"""The moving average of the loss spans this part of the steps: one in 50; also on the page."""

STEP_VALUES = ("loss", "lr", "samples_per_s", "staleness")
EVAL_VALUES = ("val_loss", "val_perplexity", "val_accuracy")
X = "samples_applied"
_BEGINNING = re.compile(
    rb'"kind": ?"(\w{1,9})", ?"incarnation": ?"\w{1,99}", ?"step": ?(\d{1,18}),'
)
READ = RESERVED.union((X,), STEP_VALUES, EVAL_VALUES)

LEFT = ("loss", "val_perplexity", "val_accuracy")
RIGHT = ("lr", "samples_per_s", "staleness")
LABELS = MappingProxyType(
    {
        "loss": "loss",
        "val_perplexity": "validation perplexity",
        "val_accuracy": "validation accuracy",
        "lr": "learning rate",
        "samples_per_s": "throughput (samples/s)",
        "staleness": "mean staleness (steps)",
    }
)

Mark = Literal["worker joined", "worker lost or left", "resumed"]
MARKED: Mapping[type[Event], Mark] = MappingProxyType(
    {
        WorkerJoined: "worker joined",
        WorkerLost: "worker lost or left",
        WorkerLeft: "worker lost or left",
    }
)

# Okabe and Ito's colours, which people of any colour vision tell apart; marks differ in dashes too.
BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
INK, FAINT = "#333333", "#DDDDDD"
COLORS = MappingProxyType({"lr": GREEN, "samples_per_s": INK, "staleness": PURPLE})
MARK_STYLES: Mapping[Mark, tuple[str, str]] = MappingProxyType(
    {
        "worker joined": (GREEN, ":"),
        "worker lost or left": (VERMILION, "--"),
        "resumed": (INK, "-."),
    }
)

_DRAWING = threading.Lock()
"""matplotlib is not made for several threads: runs of one process are drawn one after another."""


class Series(NamedTuple):
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
    """

    title: str
    series: Mapping[str, Series]
    marks: Mapping[Mark, list[float]]
    saved: Sequence[float] = ()

    @property
    def panels(self) -> tuple[list[str], list[str]]:
        """The metrics that have a panel, of the left and of the right column, from the top."""
        left, right = ([name for name in column if name in self.series] for column in (LEFT, RIGHT))
        return left, right


def draw_curves(paths: RunPaths) -> None:
    """Draw the run's learning curves; without any step nothing is written.

    Takes a second or two, most of it for the import of matplotlib; safe to call from several threads.

    Raises:
        SmolclusterError: the run cannot be read, drawn or written; an older picture is still there.
    """
    try:
        lines, events = read_lines(paths.metrics), read_events(paths.events)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SmolclusterError(f"cannot read the curves of {paths.root}: {reason}") from error
    curves = curves_of(paths.run_id, kept(lines, events), events)
    if curves.series:
        write_whole(paths.curves, _picture(curves))


def kept(lines: Sequence[MetricLine], events: Sequence[EventRecord]) -> list[MetricLine]:
    """The lines that no later start of the server has undone.

    A start undoes what the earlier ones did after the step that it went on from: the one that its
    `RunResumed` names, or the one before its own first step (a run that had no checkpoint yet
    begins again, and has no such event). Starts are ordered as the events are; one that has none
    is taken for the newest.
    """
    went_on_from: dict[str, float] = {}
    for event in events:
        went_on_from.setdefault(event.incarnation, math.inf)
        if isinstance(event.event, RunResumed):
            went_on_from[event.incarnation] = event.event.step
    for line in lines:
        before = line.record.step - 1 if line.record.kind == "step" else math.inf
        went_on_from[line.incarnation] = min(went_on_from.get(line.incarnation, math.inf), before)
    last_step: dict[str, float] = {}
    limit = math.inf
    for incarnation in reversed(went_on_from):
        last_step[incarnation] = limit
        limit = min(limit, went_on_from[incarnation])
    return [line for line in lines if line.record.step <= last_step[line.incarnation]]


def curves_of(run_id: str, lines: Sequence[MetricLine], events: Sequence[EventRecord]) -> Curves:
    """Arrange a run's lines, of which nothing is undone, over the samples applied."""
    steps = [
        line
        for line in lines
        if line.record.kind == "step" and math.isfinite(line.record.values.get(X, math.nan))
    ]
    steps.sort(key=lambda line: line.record.step)
    versions = [line.record.step for line in steps]

    def samples_at(step: int) -> float:
        place = bisect_right(versions, step)
        return steps[place - 1].record.values[X] if place else 0.0

    evaluations = [line for line in lines if line.record.kind == "eval" and steps]
    evaluations.sort(key=lambda line: line.record.step)
    series = {
        name: _series(name, steps, [line.record.values[X] for line in steps])
        for name in STEP_VALUES
    }
    places = [samples_at(line.record.step) for line in evaluations]
    series |= {name: _series(name, evaluations, places) for name in EVAL_VALUES}
    return Curves(
        title=_title(run_id, events),
        series={name: points for name, points in series.items() if points.x},
        marks=_marks(steps, events),
        saved=[
            samples_at(event.event.step)
            for event in events
            if isinstance(event.event, CheckpointSaved)
        ],
    )


def _series(name: str, lines: Sequence[MetricLine], places: Sequence[float]) -> Series:
    points = [
        (place, line.record.values[name])
        for place, line in zip(places, lines, strict=True)
        if math.isfinite(line.record.values.get(name, math.nan))
    ]
    return Series([x for x, _ in points], [y for _, y in points])


def _title(run_id: str, events: Sequence[EventRecord]) -> str:
    begun = next((each.event for each in events if isinstance(each.event, RunStarted)), None)
    if begun is None:
        return run_id
    parts = [run_id, begun.algorithm, f"{begun.model} on {begun.dataset}"]
    if begun.num_workers > 1:
        parts.append(f"{begun.num_workers} workers")
    return one_line("  ·  ".join(parts))


def _marks(steps: Sequence[MetricLine], events: Sequence[EventRecord]) -> dict[Mark, list[float]]:
    """Where workers came and went between two steps, and where a later start went on."""
    starts: dict[str, list[MetricLine]] = {}
    for line in steps:
        starts.setdefault(line.incarnation, []).append(line)
    marks: dict[Mark, list[float]] = {mark: [] for mark in MARK_STYLES}
    marks["resumed"] = [own[0].record.values[X] for own in list(starts.values())[1:]]
    for event in events:
        mark = MARKED.get(type(event.event))
        own = starts.get(event.incarnation, [])
        place = bisect_right(own, event.ts, key=lambda line: line.ts)
        if mark is not None and 0 < place < len(own):
            marks[mark].append(own[place - 1].record.values[X])
    return {mark: places for mark, places in marks.items() if places}


def thin(series: Series, at_most: int) -> Series:
    """Points of the series at even distances, its first and last among them."""
    count = len(series.x)
    if count <= at_most:
        return series
    chosen = [round(i * (count - 1) / (at_most - 1)) for i in range(at_most)]
    return Series([series.x[i] for i in chosen], [series.y[i] for i in chosen])


def smooth(series: Series) -> Series:
    """The series' exponential moving average, over a fixed part of its length; its first point stays."""
    decay = 1.0 - 2.0 / (max(1, len(series.y) // SMOOTHED_OVER) + 1.0)
    average, weight, averages = 0.0, 0.0, []
    for value in series.y:
        average = decay * average + (1.0 - decay) * value
        weight = decay * weight + 1.0 - decay
        averages.append(average / weight)
    return Series(series.x, averages)


def window_means(series: Series, num_windows: int) -> Series:
    """Means of windows of about as many points each, at the middle of each window."""
    count = len(series.x)
    num_windows = min(num_windows, count)
    edges = [i * count // num_windows for i in range(num_windows + 1)]
    windows = [slice(start, stop) for start, stop in pairwise(edges)]
    return Series(
        [(series.x[window][0] + series.x[window][-1]) / 2 for window in windows],
        [math.fsum(series.y[window]) / (window.stop - window.start) for window in windows],
    )


def read_lines(path: Path, max_steps: int = MAX_STEPS_READ) -> list[MetricLine]:
    """The run's metrics, with the values that are drawn; not every step of a long run.

    Raises:
        OSError: the file cannot be read; one that does not exist is empty.
    """
    steps: list[MetricLine] = []
    evaluations: list[MetricLine] = []
    every = 1
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in _lines(raw for raw in file if _is_wanted(raw, every)):
            if line.record.kind == "eval":
                evaluations.append(line)
            elif line.record.step % every == 0:
                steps.append(line)
            if len(steps) > max_steps:
                every *= 2
                steps = [line for line in steps if line.record.step % every == 0]
    return steps + evaluations


def _is_wanted(raw: bytes, every: int) -> bool:
    """Whether a line need be parsed, as far as its beginning tells."""
    if found := _BEGINNING.search(raw, 0, 200):
        kind, step = found.groups()
        return kind == b"eval" or (kind == b"step" and int(step) % every == 0)
    return True


def _lines(raw: Iterable[bytes]) -> Iterator[MetricLine]:
    """The steps and evaluations among the lines, one by one: they may be more than the memory holds."""
    for entry in json_objects(raw):
        if entry.get("kind") in ("step", "eval"):
            line = parse_metric({key: entry[key] for key in entry if key in READ})
            if line is not None:
                yield line


def _picture(curves: Curves) -> bytes:
    """The curves as a PNG.

    Raises:
        SmolclusterError: matplotlib failed, in whatever way.
    """
    try:
        with _DRAWING, _quiet():
            image = io.BytesIO()
            figure = figure_of(curves)
            # The box is the whole figure: a user's own settings may say "tight".
            figure.savefig(
                image, format="png", dpi=DPI, facecolor="white", bbox_inches=figure.bbox_inches
            )
            return image.getvalue()
    except Exception as error:
        reason = one_line(str(error) or type(error).__name__)
        raise SmolclusterError(f"cannot draw the curves of {curves.title}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without matplotlib's remarks on its font cache, or on a home folder that cannot be written."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def figure_of(curves: Curves) -> "Figure":
    """The picture, not yet rendered; one thread at a time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    size = (WIDTH_PX / DPI, HEIGHT_PX / DPI)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=size, dpi=DPI, layout=layout, facecolor="white")
    figure.suptitle(curves.title, fontsize=14, color=INK, parse_math=False)
    columns = [names for names in curves.panels if names]
    grid = figure.add_gridspec(1, len(columns), width_ratios=(3, 2)[: len(columns)], wspace=0.04)
    for column, names in enumerate(columns):
        heights = [2 if name == "loss" else 1 for name in names]
        rows = grid[0, column].subgridspec(len(names), 1, height_ratios=heights)
        for row, name in enumerate(names):
            axes = figure.add_subplot(rows[row, 0])
            _furnish(axes, name, curves, is_lowest=row == len(names) - 1)
            _plot(axes, name, curves.series)
            _mark(axes, curves.marks)
            if column == row == 0:
                _add_legend(axes)
    return figure


def _furnish(axes: "Axes", name: str, curves: Curves, *, is_lowest: bool) -> None:
    """What all panels have: axes, labels, grid."""
    axes.set_label(name)
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=FAINT, linewidth=0.7, linestyle="-")
    axes.tick_params(colors=INK, labelsize=10, labelbottom=is_lowest)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.set_ylabel(LABELS[name], color=INK, fontsize=11)
    if is_lowest:
        axes.set_xlabel("samples applied", color=INK, fontsize=11)
    axes.set_xlim(0, 1.01 * max(points.x[-1] for points in curves.series.values()) or 1)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))


def _mark(axes: "Axes", marks: Mapping[Mark, list[float]]) -> None:
    for mark, places in marks.items():
        color, dashes = MARK_STYLES[mark]
        for place in thin(Series(places, places), MAX_MARKS).x:
            axes.axvline(place, color=color, linestyle=dashes, linewidth=1, alpha=0.8, label=mark)


def _add_legend(axes: "Axes") -> None:
    """One entry for each label."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        list(unique.values()),
        list(unique),
        loc="upper right",
        fontsize=10,
        facecolor="white",
        edgecolor=FAINT,
        framealpha=0.9,
        labelcolor=INK,
    )


def _plot(axes: "Axes", name: str, series: Mapping[str, Series]) -> None:
    """Draw one panel's curves."""
    points = series[name]
    match name:
        case "loss":
            _plot_loss(axes, points, series.get("val_loss"))
        case "val_perplexity" | "val_accuracy":
            _plot_evaluations(axes, points, "validation")
            if name == "val_accuracy":
                axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
            elif is_over_a_decade(points.y):
                _use_decades(axes)
        case _:
            _plot_means(axes, points, COLORS[name], with_steps=name != "staleness")


def _plot_loss(axes: "Axes", loss: Series, val_loss: Series | None) -> None:
    smoothed = smooth(loss)
    raw, bold = thin(loss, MAX_POINTS), thin(smoothed, MAX_POINTS)
    axes.plot(raw.x, raw.y, color=BLUE, linewidth=0.6, alpha=0.3, label="training, each step")
    axes.plot(bold.x, bold.y, color=BLUE, linewidth=2, label="training, smoothed")
    if val_loss is not None:
        _plot_evaluations(axes, val_loss, "validation")
    low, high, is_logarithmic = loss_limits(loss, smoothed, val_loss)
    if is_logarithmic:
        _use_decades(axes)
    axes.set_ylim(low, high)


def loss_limits(
    loss: Series, smoothed: Series, val_loss: Series | None
) -> tuple[float, float, bool]:
    """What an axis of losses spans, all but the rarest of single steps, and whether it is logarithmic."""
    ordered = sorted(loss.y)
    usual = [ordered[len(ordered) // 200], ordered[-1 - len(ordered) // 200]]
    means = [*smoothed.y, *(val_loss.y if val_loss else [])]
    low, high = min(*usual, *means), max(*usual, *means)
    if is_over_a_decade(means):
        return max(low, min(means) / 2.0) / 1.1, 1.1 * high, True
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin, False


def is_over_a_decade(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows them better."""
    return 0.0 < 10.0 * min(values) < max(values)


def _plot_evaluations(axes: "Axes", points: Series, label: str) -> None:
    few = thin(points, MAX_EVALUATIONS)
    axes.plot(
        *(few.x, few.y),
        color=ORANGE,
        linewidth=1,
        marker="o",
        markersize=6 if len(few.x) <= 60 else 3,
        markeredgecolor="white",
        markeredgewidth=0.5,
        zorder=3,
        label=label,
    )


def _plot_means(axes: "Axes", points: Series, color: str, *, with_steps: bool) -> None:
    """Means of windows, bold, and behind them the steps; the axis begins at zero."""
    means, raw = window_means(points, NUM_WINDOWS), thin(points, MAX_POINTS)
    if with_steps:
        axes.plot(raw.x, raw.y, color=color, linewidth=0.6, alpha=0.3)
    marker = "o" if len(means.x) == 1 else ""
    axes.plot(means.x, means.y, color=color, linewidth=1.8, marker=marker)
    shown = raw.y if with_steps else means.y
    low, high = min(0.0, *shown), max(0.0, *shown)
    axes.set_ylim(1.08 * low, 1.08 * high if high > low else 1.0)


def _use_decades(axes: "Axes") -> None:
    """A logarithmic axis."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - as above

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.yaxis.set_minor_formatter(lambda _, __: "")


def short(value: float) -> str:
    """A number on an axis: `0.00005`, `64`, `2.5k`, `20M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1e12:
            return f"{value / unit:g}{name}"
    if 1e-6 <= abs(value) < 1e-3:
        return f"{value:.9f}".rstrip("0")
    return f"{value:g}"
