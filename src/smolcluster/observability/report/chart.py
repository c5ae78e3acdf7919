"""Charts for a page: curves in SVG, with texts beside them that keep their size when the chart is scaled.

The drawing area is a square of `SIZE` units that is stretched to its place; strokes are not. Colours are the
page's. What is drawn comes from `observability.curves`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smolcluster.observability.curves import (
    LABELS,
    MAX_EVALUATIONS,
    MAX_MARKS,
    NUM_WINDOWS,
    Curves,
    Series,
    is_over_a_decade,
    loss_limits,
    short,
    smooth,
    thin,
    window_means,
)

SIZE = 1000
MAX_POINTS = 800
"""Of one curve: a page is not a picture of 1600 pixels."""
NUM_TICKS = 5
MARK_CLASSES = {"worker joined": "joined", "worker lost or left": "lost", "resumed": "resumed"}


@dataclass(frozen=True)
class Stroke:
    """A curve: its path, and the class of its look; `label` is empty where a legend has no need of it."""

    path: str
    look: str
    label: str = ""


@dataclass(frozen=True)
class Tick:
    """A number at an axis; `at` is from its beginning, in percent."""

    at: float
    text: str


@dataclass(frozen=True)
class MarkLine:
    """A moment: where it is on the horizontal axis, in percent, its look and what it was."""

    at: float
    look: str
    label: str


@dataclass(frozen=True)
class Chart:
    """One panel of a page."""

    name: str
    title: str
    strokes: Sequence[Stroke]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_label: str
    marks: Sequence[MarkLine] = ()
    saved: Sequence[float] = ()
    """Where there are checkpoints, in percent."""


@dataclass(frozen=True)
class Axis:
    """From values to a place from 0 to 1."""

    low: float
    high: float
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value is; outside of 0 to 1 when it is outside of the axis."""
        if self.is_logarithmic:
            if value <= 0.0:
                return -math.inf
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, text: Callable[[float], str] = short) -> list[Tick]:
        """Some round numbers along it."""
        values = _decades(self.low, self.high) if self.is_logarithmic else round_numbers(self)
        return [Tick(100 * self.place(value), text(value)) for value in values]


def round_numbers(axis: Axis) -> list[float]:
    """At most `NUM_TICKS` numbers of the axis that are easily read, at even distances."""
    rough = (axis.high - axis.low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1.0, 2.0, 2.5, 5.0, 10.0) if each * power >= rough)
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    return [float(f"{step * i:.10g}") for i in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Numbers of a logarithmic axis: powers of ten, and twice and five times them if there is room."""
    powers = [
        10.0**power
        for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ]
    inside: list[float] = []
    for digits in ((1, 2, 5), (1,)):
        values = [digit * power for power in powers for digit in digits]
        inside = [value for value in values if low <= value <= high]
        if len(inside) <= NUM_TICKS + 1:
            return inside
    return inside[:: math.ceil(len(inside) / NUM_TICKS)]


def path_of(points: Series, x: Axis, y: Axis) -> str:
    """A line through the points."""
    places = zip(points.x, points.y, strict=True)
    return "M" + "L".join(f"{SIZE * x.place(a):.1f} {_down(y, b):.1f}" for a, b in places)


def dots_of(points: Series, x: Axis, y: Axis) -> str:
    """A dot at each point: a line of no length, with round ends."""
    places = zip(points.x, points.y, strict=True)
    return "".join(f"M{SIZE * x.place(a):.1f} {_down(y, b):.1f}h0" for a, b in places)


def _down(y: Axis, value: float) -> float:
    return SIZE * (1.0 - max(-1.0, min(2.0, y.place(value))))


def charts_of(curves: Curves) -> list[Chart]:
    """A chart for each metric that the run has, the loss first."""
    if not curves.series:
        return []
    x = x_axis([curves])
    return [_chart(name, curves, x) for column in curves.panels for name in column]


def x_axis(of: Sequence[Curves]) -> Axis:
    """The samples that were applied, as far as any of the runs went."""
    ends = (points.x[-1] for curves in of for points in curves.series.values())
    return Axis(0.0, 1.01 * max(ends, default=0.0) or 1.0)


def _chart(name: str, curves: Curves, x: Axis) -> Chart:
    points = curves.series[name]
    y, strokes = _drawn(name, points, curves.series, x)
    text = percent if name == "val_accuracy" else short
    return Chart(
        name,
        LABELS[name],
        strokes,
        x.ticks(),
        y.ticks(text),
        "samples applied",
        marks=list(_marks(curves, x)),
        saved=[100 * x.place(at) for at in _thinned(curves.saved)] if name == "loss" else (),
    )


def percent(value: float) -> str:
    """A share on an axis: `95%`."""
    return f"{100 * value:.4g}%"


def _drawn(
    name: str, points: Series, series: Mapping[str, Series], x: Axis
) -> tuple[Axis, list[Stroke]]:
    match name:
        case "loss":
            smoothed, evaluated = smooth(points), series.get("val_loss")
            y = Axis(*loss_limits(points, smoothed, evaluated))
            raw, bold = thin(points, MAX_POINTS), thin(smoothed, MAX_POINTS)
            strokes = [
                Stroke(path_of(raw, x, y), "faint loss"),
                Stroke(path_of(bold, x, y), "bold loss", "training, smoothed"),
            ]
            if evaluated is not None:
                strokes += _evaluations(evaluated, x, y, "validation")
            return y, strokes
        case "val_perplexity" | "val_accuracy":
            y = limits([points.y], logarithmic=name == "val_perplexity")
            return y, _evaluations(points, x, y, "")
        case _:
            means = window_means(points, NUM_WINDOWS)
            raw = thin(points, MAX_POINTS)
            is_noisy = name == "staleness"
            y = from_zero([means.y] if is_noisy else [raw.y, means.y])
            strokes = [] if is_noisy else [Stroke(path_of(raw, x, y), f"faint {name}")]
            shown = path_of(means, x, y) if len(means.x) > 1 else dots_of(means, x, y)
            look = "bold" if len(means.x) > 1 else "dots"
            return y, [*strokes, Stroke(shown, f"{look} {name}")]


def _evaluations(points: Series, x: Axis, y: Axis, label: str) -> list[Stroke]:
    few = thin(points, MAX_EVALUATIONS)
    dots = "dots" if len(few.x) <= 60 else "small dots"
    return [
        Stroke(path_of(few, x, y), "thin evaluated", label),
        Stroke(dots_of(few, x, y), f"{dots} evaluated"),
    ]


def limits(values: Sequence[Sequence[float]], *, logarithmic: bool = False) -> Axis:
    """An axis that has room for all values; logarithmic only where they range over a decade."""
    low = min(min(each) for each in values)
    high = max(max(each) for each in values)
    if logarithmic and is_over_a_decade([low, high]):
        return Axis(low / 1.1, high * 1.1, is_logarithmic=True)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Axis(low - margin, high + margin)


def from_zero(values: Sequence[Sequence[float]]) -> Axis:
    """An axis that begins at zero, unless there are values below it."""
    low = min(0.0, *(min(each) for each in values))
    high = max(0.0, *(max(each) for each in values))
    return Axis(1.08 * low, 1.08 * high if high > low else 1.0)


def _marks(curves: Curves, x: Axis) -> list[MarkLine]:
    return [
        MarkLine(100 * x.place(place), MARK_CLASSES[mark], f"{mark}, at {place:,.0f} samples")
        for mark, places in curves.marks.items()
        for place in _thinned(places)
    ]


def _thinned(places: Sequence[float]) -> list[float]:
    ordered = sorted(places)
    return thin(Series(ordered, ordered), MAX_MARKS).x
