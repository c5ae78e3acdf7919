"""Several runs side by side: what came of each, the settings that differ, and curves on the same axes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import smolcluster
from smolcluster.errors import ConfigError
from smolcluster.observability.curves import (
    LABELS,
    LEFT,
    NUM_WINDOWS,
    RIGHT,
    Curves,
    Series,
    short,
    smooth,
    thin,
    window_means,
)
from smolcluster.observability.report.chart import (
    MAX_POINTS,
    Axis,
    Chart,
    Stroke,
    dots_of,
    from_zero,
    limits,
    path_of,
    percent,
    x_axis,
)
from smolcluster.observability.report.facts import Facts, read_run, workers_of
from smolcluster.observability.report.page import UNKNOWN, moment_of, number, state_of
from smolcluster.observability.report.render import write_page
from smolcluster.observability.report.settings import differing
from smolcluster.observability.terminal import SteadyConsole, displayable, steady
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary
from smolcluster.utils.units import format_bytes, format_duration

NUM_COLOURS = 7
SHOWN = ("loss", "val_loss", *LEFT[1:], *RIGHT[1:], RIGHT[0])


@dataclass(frozen=True)
class Row:
    """One thing of which each run has its own."""

    name: str
    values: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, by name; what came of them, and the settings that differ."""

    names: Sequence[str]
    outcomes: Sequence[Row]
    settings: Sequence[Row]
    problems: Sequence[str]


def compare(runs: Sequence[RunPaths], page: Path | None, console: Console | None = None) -> None:
    """Print a table of two runs or more, and write a page with their curves if there is a place for it.

    Raises:
        ConfigError: it is one run only.
        SmolclusterError: a run cannot be read, or the page not written.
    """
    if len({run.root for run in runs}) < 2:
        raise ConfigError(f"compare needs two different runs, and got {runs[0].run_id} only")
    console = console or SteadyConsole()
    facts = [read_run(run) for run in dict.fromkeys(runs)]
    compared = comparison_of(facts)
    with steady(console):
        console.print(table(console, compared))
    if page is not None:
        charts = charts_of([each.curves for each in facts])
        write_page(
            page,
            "comparison.html.jinja",
            compared=compared,
            charts=charts,
            num_colours=NUM_COLOURS,
            written=moment_of(time.time()),
            version=smolcluster.__version__,
        )
        with steady(console):
            console.print(Text(displayable(console, str(page))), soft_wrap=True)


def comparison_of(facts: Sequence[Facts]) -> Comparison:
    """The runs side by side."""
    columns = [dict(_outcomes(each)) for each in facts]
    names = dict.fromkeys(name for column in columns for name in column)
    outcomes = [Row(name, [column.get(name, UNKNOWN) for column in columns]) for name in names]
    settings = differing([each.settings for each in facts])
    problems = [problem for each in facts for problem in each.problems]
    problems += [
        f"{each.paths.run_id}: its settings are not known" for each in facts if not each.settings
    ]
    return Comparison(
        names=[each.paths.run_id for each in facts],
        outcomes=[row for row in outcomes if set(row.values) != {UNKNOWN}],
        settings=[Row(key, values) for key, values in differing_values(settings)],
        problems=problems,
    )


def differing_values(settings: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """The settings with a dash where one does not apply."""
    for key, values in settings.items():
        yield key, [value or UNKNOWN for value in values]


def _outcomes(facts: Facts) -> Iterator[tuple[str, str]]:
    """What came of a run, by name, in the order of rows."""
    summary, status = facts.summary, facts.status
    yield "algorithm", facts.algorithm or UNKNOWN
    yield "state", state_of(facts).word
    if summary is not None:
        final = summary.final
        yield "training loss", number(final.train_loss)
    elif status is not None:
        yield "training loss", f"{number(status.loss)} (last step)"
    source = summary.final if summary is not None else status
    if source is not None:
        yield "validation loss", number(source.val_loss)
        accuracy, perplexity = source.val_accuracy, source.val_perplexity
        yield "accuracy", UNKNOWN if accuracy is None else f"{accuracy:.2%}"
        yield "perplexity", UNKNOWN if perplexity is None else f"{perplexity:.4g}"
    known = summary or status
    if known is None:
        return
    samples, wall_s = known.samples_applied, known.wall_s
    yield "steps", f"{known.steps if isinstance(known, Summary) else known.step:,}"
    yield "samples", f"{samples:,}"
    yield "time", format_duration(wall_s)
    yield "samples/s", f"{samples / wall_s:,.0f}" if wall_s else UNKNOWN
    yield from _cluster_outcomes(facts)


def _cluster_outcomes(facts: Facts) -> Iterator[tuple[str, str]]:
    workers = workers_of(facts)
    if not workers:
        return
    if facts.summary is not None:
        yield "received", format_bytes(facts.summary.bytes.received)
        yield "sent", format_bytes(facts.summary.bytes.sent)
    if facts.algorithm == "edp":
        stale = [(w.samples or 0, w.mean_staleness) for w in workers]
        known = [(samples, tau) for samples, tau in stale if tau is not None]
        total = sum(samples for samples, _ in known)
        mean = sum(samples * tau for samples, tau in known) / total if total else None
        yield "mean staleness", UNKNOWN if mean is None else f"{mean:.2f}"
    yield "workers", f"{len(workers):,}"
    yield "workers lost", f"{sum(worker.num_losses for worker in workers):,}"


def table(console: Console, compared: Comparison) -> Table:
    """For a terminal: a column a run, what came of them first."""
    shown = Table()
    shown.add_column("")
    for name in compared.names:
        shown.add_column(Text(displayable(console, name)), overflow="fold")
    for place, rows in enumerate((compared.outcomes, compared.settings)):
        if place and rows:
            shown.add_section()
        for row in rows:
            cells = (row.name, *row.values)
            shown.add_row(*(Text(displayable(console, cell)) for cell in cells))
    return shown


def charts_of(runs: Sequence[Curves]) -> list[Chart]:
    """A chart for each metric that a run has, a curve a run."""
    x = x_axis(runs)
    return [_chart(name, runs, x) for name in SHOWN if any(name in run.series for run in runs)]


def _chart(name: str, runs: Sequence[Curves], x: Axis) -> Chart:
    shown = [_shown(name, run.series[name]) if name in run.series else None for run in runs]
    values = [points.y for points in shown if points is not None]
    is_evaluated = name.startswith("val_")
    if is_evaluated or name == "loss":
        y = limits(values, logarithmic=name != "val_accuracy")
    else:
        y = from_zero(values)
    strokes = []
    for place, points in enumerate(shown):
        if points is not None:
            look = f"run{place % NUM_COLOURS}" + (" dashed" if place >= NUM_COLOURS else "")
            strokes.append(Stroke(path_of(points, x, y), f"curve {look}"))
            if len(points.x) == 1:
                strokes.append(Stroke(dots_of(points, x, y), f"dots {look}"))
    return Chart(
        name,
        {"loss": "training loss, smoothed", "val_loss": "validation loss"}.get(name)
        or LABELS[name],
        strokes,
        x.ticks(),
        y.ticks(percent if name == "val_accuracy" else short),
        "samples applied",
    )


def _shown(name: str, points: Series) -> Series:
    """The points of a run's curve that are drawn."""
    if name == "loss":
        return thin(smooth(points), MAX_POINTS)
    if name.startswith("val_"):
        return thin(points, MAX_POINTS)
    return window_means(points, NUM_WINDOWS)
