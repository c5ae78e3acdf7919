"""Several runs side by side: what came of each, the settings that differ, and curves on the same axes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smolcluster.errors import ConfigError
from smolcluster.observability.curves import RUN_COLORS
from smolcluster.observability.report.outcome import Outcome, outcome_of
from smolcluster.observability.report.render import UNKNOWN, drawn, loss, or_unknown, write_page
from smolcluster.observability.report.settings import differing
from smolcluster.observability.terminal import SteadyConsole, displayable
from smolcluster.observability.view.view import View, read_view
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.units import format_bytes, format_duration
from smolcluster.utils.words import write_json
from smolcluster.version import __version__

CELLS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("algorithm", "algorithm", str),
    ("state", "state", str),
    ("training loss", "train_loss", loss),
    ("validation loss", "val_loss", loss),
    ("accuracy", "val_accuracy", "{:.2%}".format),
    ("perplexity", "val_perplexity", "{:.4g}".format),
    ("steps", "steps", "{:,}".format),
    ("samples", "samples", "{:,}".format),
    ("time", "wall_s", format_duration),
    ("samples/s on average", "samples_per_s", "{:,.0f}".format),
    ("received", "received_bytes", format_bytes),
    ("sent", "sent_bytes", format_bytes),
    ("mean staleness", "mean_staleness", "{:.2f}".format),
    ("workers", "num_workers", "{:,}".format),
    ("workers lost", "num_workers_lost", "{:,}".format),
)
"""What is said of each run, in the order of rows: a name, the field of `Outcome`, and its text."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: their outcomes, and in rows what is said of them and the settings that differ."""

    runs: Sequence[Outcome]
    outcomes: dict[str, list[str]]
    settings: dict[str, list[str]]
    problems: Sequence[str]


def compare(
    runs: Sequence[RunPaths],
    page: Path | None,
    console: Console | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Print a table of two runs or more, and write a page with their curves if there is a place for it.

    `as_json`: print one document instead, `{runs: [Outcome], settings: {key: [value]}, problems: [text]}`,
    whose values are in the order of the runs; a setting that does not apply is null.

    Raises:
        ConfigError: it is one run only.
        SmolclusterError: a run cannot be read, or the page not written.
    """
    if len({run.root for run in runs}) < 2:
        raise ConfigError(f"compare needs two different runs, and got {runs[0].run_id} only")
    console = console or SteadyConsole()
    views = [read_view(run) for run in dict.fromkeys(runs)]
    compared = comparison_of(views)
    if as_json:
        settings = {
            key: [None if value == UNKNOWN else value for value in row]
            for key, row in compared.settings.items()
        }
        runs_told = [run.model_dump() for run in compared.runs]
        problems = list(compared.problems)
        write_json({"runs": runs_told, "settings": settings, "problems": problems})
    else:
        console.print(table(console, compared))
    if page is not None:
        curves, undrawn = drawn([each.curves for each in views])
        write_page(
            page,
            "comparison.html.jinja",
            compared=compared,
            curves=curves,
            problems=[*compared.problems, *undrawn],
            num_colours=len(RUN_COLORS),
            now=time.time(),
            version=__version__,
        )
        if not as_json:
            console.print(Text(displayable(console, str(page))), soft_wrap=True)


def comparison_of(views: Sequence[View]) -> Comparison:
    """The runs side by side."""
    runs = [outcome_of(each) for each in views]
    own = dict.fromkeys(name for run in runs for name in run.__pydantic_extra__)
    cells = [*CELLS, *((name.removeprefix(PREFIX), name, "{:.4g}".format) for name in own)]
    outcomes = {
        name: [or_unknown(text, getattr(run, field, None)) for run in runs]
        for name, field, text in cells
    }
    for place, run in enumerate(runs):
        if run.is_last_step and run.train_loss is not None:
            outcomes["training loss"][place] += " (last step)"
    problems = [problem for each in views for problem in each.problems]
    problems += [
        f"{each.paths.run_id}: its settings are not known" for each in views if not each.settings
    ]
    settings = differing([each.settings for each in views])
    return Comparison(
        runs,
        {name: row for name, row in outcomes.items() if set(row) != {UNKNOWN}},
        {key: [value or UNKNOWN for value in row] for key, row in settings.items()},
        problems,
    )


def table(console: Console, compared: Comparison) -> Table:
    """For a terminal: a column a run, what came of them first."""
    shown = Table()
    shown.add_column("")
    for run in compared.runs:
        shown.add_column(Text(displayable(console, run.run_id)), overflow="fold")
    for place, rows in enumerate((compared.outcomes, compared.settings)):
        if place and rows:
            shown.add_section()
        for name, row in rows.items():
            shown.add_row(*(Text(displayable(console, cell)) for cell in (name, *row)))
    return shown
