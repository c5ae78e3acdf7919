"""A run's learning curves as one picture: `curves.png`, and in pages, which have their own colours.

matplotlib is imported where it draws; no display, no pyplot and none of its settings for the whole process
are touched for longer than a picture takes.
"""

import contextlib
import io
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from smolcluster.errors import SmolclusterError
from smolcluster.observability.view.curves import (
    LEFT,
    RIGHT,
    Curves,
    Mark,
    Points,
    own_metrics,
    smooth,
    window_means,
)
from smolcluster.observability.view.view import read_view
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.files import write_whole
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.words import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

WIDTH_PX, HEIGHT_PX, DPI = 1600, 900, 100
MAX_MARKS = 60
NUM_WINDOWS = 100
"""Over which learning rate, throughput and staleness are averaged."""
LABELS = MappingProxyType(
    {
        "loss": "loss",
        "val_loss": "validation loss",
        "val_perplexity": "validation perplexity",
        "val_accuracy": "validation accuracy",
        "lr": "learning rate",
        "samples_per_s": "throughput (samples/s)",
        "staleness": "mean staleness (steps)",
        "drift": "mean drift of a change (of the weights' norm)",
    }
)
SHOWN = ("loss", "val_loss", *LEFT[1:], *RIGHT[1:], RIGHT[0])
"""The panels of runs side by side."""

# Okabe and Ito's colours, which people of any colour vision tell apart; marks differ in dashes too.
BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
INK, FAINT, GREY = "#333333", "#DDDDDD", "#999999"
COLORS = MappingProxyType({"lr": GREEN, "samples_per_s": INK, "staleness": PURPLE, "drift": PURPLE})
RUN_COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, INK, GREY)
VARIABLES = MappingProxyType(
    {
        BLUE: "blue",
        ORANGE: "orange",
        GREEN: "green",
        VERMILION: "red",
        PURPLE: "purple",
        INK: "ink",
        FAINT: "hair",
        GREY: "grey",
        "#FFFFFF": "page",
    }
)
"""What a page calls our colours, which are others on a dark screen."""
MARK_STYLES: Mapping[Mark, tuple[str, str]] = MappingProxyType(
    {
        "worker joined": (GREEN, ":"),
        "worker lost or left": (VERMILION, "--"),
        "resumed": (INK, "-."),
    }
)

UNSAID: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"svg": ("Date", "Creator", "Format", "Type"), "pdf": ("CreationDate",)}
)
"""What matplotlib would write into files beside the picture."""

SHARES = (3, 2)
"""Of the width, of the left and of the right column of panels."""
COLUMN_PX, COLUMN_HEIGHT_PX = 233, 660
"""A column on a page: the width of a share, and its height."""


_DRAWING = threading.Lock()
"""matplotlib is not made for several threads: runs of one process are drawn one after another."""


def draw_curves(paths: RunPaths) -> None:
    """Draw the run's learning curves; without any step nothing is written.

    Takes a second or two, most of it for the import of matplotlib; safe to call from several threads.

    Raises:
        SmolclusterError: the run cannot be drawn or written; an older picture is still there.
    """
    curves = read_view(paths).curves
    if curves.series:
        what = f"the curves of {curves.title}"
        write_whole(paths.curves, rendered(lambda: figure_of(curves), "png", what))


def svg_of(runs: Sequence[Curves]) -> str:
    """The curves of one run, or of several on the same axes, for a page; empty where there are none.

    Of one run each column of panels is an element of its own, which a narrow page puts below the other.

    Raises:
        SmolclusterError: matplotlib failed, in whatever way.
    """
    if not any(curves.series for curves in runs):
        return ""
    makes: list[Callable[[], Figure]] = [lambda: figure_of_runs(runs)]
    if len(runs) == 1:
        makes = [partial(_figure_of_column, runs[0], place) for place in range(len(runs[0].panels))]
    return "".join(_for_a_page(make, runs[0].title) for make in makes)


def _for_a_page(make: Callable[[], "Figure"], title: str) -> str:
    text = rendered(make, "svg", f"the curves of {title}").decode()
    text = re.sub(r' (width|height)="[^"]*pt"', "", text[text.index("<svg") :], count=2)
    for color, name in VARIABLES.items():
        text = re.sub(color, f"var(--{name})", text, flags=re.IGNORECASE)
    return text


def rendered(make: Callable[[], "Figure"], form: str, what: str) -> bytes:
    """A figure as svg, png or pdf, the same bytes each time; `what` it shows is said if it fails.

    Raises:
        SmolclusterError: matplotlib failed, in whatever way.
    """
    try:
        with _DRAWING, contextlib.ExitStack() as until_then:
            # Without remarks on its font cache, or on a home folder that cannot be written.
            log = logging.getLogger("matplotlib")
            until_then.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)
            import matplotlib as mpl  # noqa: PLC0415 - it takes a second

            image = io.BytesIO()
            figure = make()
            # The box is the whole figure: a user's own settings may say "tight".
            with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "smolcluster"}):
                figure.savefig(
                    image,
                    format=form,
                    dpi=DPI,
                    facecolor="white",
                    bbox_inches=figure.bbox_inches,
                    metadata=dict.fromkeys(UNSAID.get(form, ())),
                )
            return image.getvalue()
    except Exception as error:
        reason = one_line(str(error) or type(error).__name__)
        raise SmolclusterError(f"cannot draw {what}: {reason}") from error


def _empty(width_px: float = WIDTH_PX, height_px: float = HEIGHT_PX) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    size = (width_px / DPI, height_px / DPI)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=size, dpi=DPI, layout=layout, facecolor="white")


def figure_of(curves: Curves) -> "Figure":
    """The picture, not yet rendered; one thread at a time."""
    figure = _empty()
    figure.suptitle(curves.title, fontsize=14, color=INK, parse_math=False)
    shares = SHARES[: len(curves.panels)]
    grid = figure.add_gridspec(1, len(shares), width_ratios=shares, wspace=0.04)
    for place in range(len(shares)):
        _fill(figure, grid[0, place], curves, place)
    return figure


def _figure_of_column(curves: Curves, place: int) -> "Figure":
    """One column of panels alone."""
    figure = _empty(COLUMN_PX * SHARES[place], COLUMN_HEIGHT_PX)
    _fill(figure, figure.add_gridspec(1, 1)[0, 0], curves, place)
    return figure


def _fill(figure: "Figure", spot: "SubplotSpec", curves: Curves, place: int) -> None:
    """Draw the panels of a column, one below another; the first column has the legend."""
    names, end = curves.panels[place], _end([curves])
    heights = [2 if name == "loss" else 1 for name in names]
    rows = spot.subgridspec(len(names), 1, height_ratios=heights)
    for row, name in enumerate(names):
        axes = figure.add_subplot(rows[row, 0])
        _furnish(axes, name, end, is_lowest=row == len(names) - 1)
        _plot(axes, name, curves)
        _mark(axes, curves.marks)
        if name == "loss" and curves.saved:
            ticks = thinned(curves.saved)
            bottom = axes.get_xaxis_transform()
            axes.vlines(ticks, 0, 0.035, GREY, transform=bottom, label="checkpoint")
        if row == place == 0:
            _add_legend(axes)


def figure_of_runs(runs: Sequence[Curves]) -> "Figure":
    """Several runs side by side: a panel a metric, a curve a run, in the order of `RUN_COLORS`."""
    figure = _empty()
    names = [name for name in SHOWN if any(name in run.series for run in runs)]
    names += own_metrics(runs)
    num_rows = (len(names) + 1) // 2
    for place, name in enumerate(names):
        axes = figure.add_subplot(num_rows, 2, place + 1)
        _furnish(axes, name, _end(runs), is_lowest=place >= len(names) - 2)
        drawn = [_compared(name, run.series[name]) if name in run.series else None for run in runs]
        for index, points in enumerate(drawn):
            if points is not None:
                axes.plot(
                    points.x,
                    points.y,
                    color=RUN_COLORS[index % len(RUN_COLORS)],
                    linestyle="-" if index < len(RUN_COLORS) else "--",
                    marker="o" if len(points.x) == 1 else "",
                )
        values = [value for points in drawn if points is not None for value in points.y]
        if name in RIGHT:
            _begin_at_zero(axes, values)
        elif name in ("loss", "val_loss", "val_perplexity") and is_over_a_decade(values):
            _use_decades(axes)
    return figure


def _compared(name: str, points: Points) -> Points:
    if name == "loss":
        return smooth(points)
    return points if name.startswith("val_") else window_means(points, NUM_WINDOWS)


def _end(runs: Sequence[Curves]) -> float:
    """The samples that were applied, as far as any of the runs went."""
    return max(points.x[-1] for curves in runs for points in curves.series.values())


def _furnish(axes: "Axes", name: str, end: float, *, is_lowest: bool) -> None:
    """What all panels have: axes, labels, grid."""
    axes.set_label(name)
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=FAINT, linewidth=0.7, linestyle="-")
    axes.tick_params(colors=INK, labelsize=10, labelbottom=is_lowest)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    label = LABELS.get(name) or f"validation {name.removeprefix(PREFIX)}"
    axes.set_ylabel(label, color=INK, fontsize=11, parse_math=False)
    if is_lowest:
        axes.set_xlabel("samples applied", color=INK, fontsize=11)
    axes.set_xlim(0, 1.01 * end or 1)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    if name == "val_accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def _mark(axes: "Axes", marks: Mapping[Mark, list[float]]) -> None:
    for mark, places in marks.items():
        color, dashes = MARK_STYLES[mark]
        for place in thinned(places):
            axes.axvline(place, color=color, linestyle=dashes, linewidth=1, alpha=0.8, label=mark)


def thinned(places: Sequence[float]) -> list[float]:
    """Places in order, at most `MAX_MARKS` of them at even distances, the first and the last among them."""
    ordered, last = sorted(places), len(places) - 1
    if last < MAX_MARKS:
        return ordered
    return [ordered[round(i * last / (MAX_MARKS - 1))] for i in range(MAX_MARKS)]


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


def _plot(axes: "Axes", name: str, curves: Curves) -> None:
    """Draw one panel's curves."""
    points = curves.series[name]
    match name:
        case "loss":
            _plot_loss(axes, points, curves.single, curves.series.get("val_loss"))
        case _ if name.startswith(PREFIX):
            _plot_evaluations(axes, points, "validation")
            if name == "val_perplexity" and is_over_a_decade(points.y):
                _use_decades(axes)
        case _:
            _plot_means(axes, points, COLORS[name], with_steps=name in ("lr", "samples_per_s"))


def _plot_loss(axes: "Axes", loss: Points, single: Points, val_loss: Points | None) -> None:
    smoothed = smooth(loss)
    axes.plot(*single, color=BLUE, linewidth=0.6, alpha=0.3, label="training, each step")
    axes.plot(*smoothed, color=BLUE, linewidth=2, label="training, smoothed")
    if val_loss is not None:
        _plot_evaluations(axes, val_loss, "validation")
        best = min(range(len(val_loss.y)), key=val_loss.y.__getitem__)
        axes.plot(
            val_loss.x[best],
            val_loss.y[best],
            color=GREEN,
            linestyle="",
            marker="*",
            markersize=14,
            markeredgecolor="white",
            zorder=4,
            label=f"best validation, {val_loss.y[best]:.4g}",
        )
    low, high, is_logarithmic = loss_limits(single, smoothed, val_loss)
    if is_logarithmic:
        _use_decades(axes)
    axes.set_ylim(low, high)


def loss_limits(
    loss: Points, smoothed: Points, val_loss: Points | None
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


def _plot_evaluations(axes: "Axes", points: Points, label: str) -> None:
    axes.plot(
        points.x,
        points.y,
        color=ORANGE,
        linewidth=1,
        marker="o",
        markersize=6 if len(points.x) <= 60 else 3,
        markeredgecolor="white",
        markeredgewidth=0.5,
        zorder=3,
        label=label,
    )


def _plot_means(axes: "Axes", points: Points, color: str, *, with_steps: bool) -> None:
    """Means of windows, bold, and behind them the steps; the axis begins at zero."""
    means = window_means(points, NUM_WINDOWS)
    if with_steps:
        axes.plot(*points, color=color, linewidth=0.6, alpha=0.3)
    marker = "o" if len(means.x) == 1 else ""
    axes.plot(means.x, means.y, color=color, linewidth=1.8, marker=marker)
    _begin_at_zero(axes, points.y if with_steps else means.y)


def _begin_at_zero(axes: "Axes", values: Sequence[float]) -> None:
    """Unless there are values below it."""
    low, high = min(0.0, *values), max(0.0, *values)
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
