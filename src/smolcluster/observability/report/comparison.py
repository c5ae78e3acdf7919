"""Several runs side by side: what came of each, the settings that differ, and curves on the same axes."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

import smolcluster
from smolcluster.configs.spec import STALENESS, shows
from smolcluster.errors import ConfigError
from smolcluster.observability.curves import RUN_COLORS
from smolcluster.observability.report.page import UNKNOWN, drawn, moment_of, number, state_of
from smolcluster.observability.report.render import write_page
from smolcluster.observability.report.settings import differing
from smolcluster.observability.terminal import SteadyConsole, displayable, steady
from smolcluster.observability.view.facts import ReportData, Worker, read_run, workers_of
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.units import format_bytes, format_duration

NUM_COLOURS = len(RUN_COLORS)


class Outcome(BaseModel):
    """What came of a run so far; null is what is not known, or does not apply."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    algorithm: str | None
    state: str
    train_loss: float | None = None
    is_last_step: bool = Field(
        False, description="Whether train_loss is the last step's, not the last epoch's mean."
    )
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_perplexity: float | None = None
    steps: int | None = None
    samples: int | None = None
    wall_s: float | None = None
    samples_per_s: float | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None
    mean_staleness: float | None = None
    num_workers: int | None = None
    num_workers_lost: int | None = None


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
    facts = [read_run(run) for run in dict.fromkeys(runs)]
    compared = comparison_of(facts)
    if as_json:
        document = {
            "runs": [outcome_of(each).model_dump() for each in facts],
            "settings": {
                row.name: [None if value == UNKNOWN else value for value in row.values]
                for row in compared.settings
            },
            "problems": list(compared.problems),
        }
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        with steady(console):
            console.print(table(console, compared))
    if page is not None:
        curves, undrawn = drawn([each.curves for each in facts])
        write_page(
            page,
            "comparison.html.jinja",
            compared=compared,
            curves=curves,
            problems=[*compared.problems, *undrawn],
            num_colours=NUM_COLOURS,
            written=moment_of(time.time()),
            version=smolcluster.__version__,
        )
        if not as_json:
            with steady(console):
                console.print(Text(displayable(console, str(page))), soft_wrap=True)


def comparison_of(facts: Sequence[ReportData]) -> Comparison:
    """The runs side by side."""
    columns = [dict(_cells(outcome_of(each))) for each in facts]
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
        settings=[
            Row(key, [value or UNKNOWN for value in values]) for key, values in settings.items()
        ],
        problems=problems,
    )


def outcome_of(facts: ReportData) -> Outcome:
    """What came of a run so far."""
    summary, status = facts.summary, facts.status
    values: dict[str, object] = {
        "run_id": facts.paths.run_id,
        "algorithm": facts.algorithm or None,
        "state": state_of(facts).word,
    }
    if summary is not None:
        values |= {**summary.final.model_dump(), "steps": summary.steps}
    elif status is not None:
        names = ("val_loss", "val_accuracy", "val_perplexity")
        values |= {name: getattr(status, name) for name in names}
        values |= {"train_loss": status.loss, "is_last_step": True, "steps": status.step}
    if (known := summary or status) is not None:
        rate = known.samples_applied / known.wall_s if known.wall_s else None
        values |= {"samples": known.samples_applied, "wall_s": known.wall_s, "samples_per_s": rate}
        if workers := workers_of(facts):
            values |= _of_cluster(facts, workers)
    return Outcome.model_validate(values)


def _of_cluster(facts: ReportData, workers: Sequence[Worker]) -> dict[str, object]:
    values: dict[str, object] = {
        "num_workers": len(workers),
        "num_workers_lost": sum(worker.num_losses for worker in workers),
    }
    if facts.summary is not None:
        traffic = facts.summary.bytes
        values |= {"received_bytes": traffic.received, "sent_bytes": traffic.sent}
    if shows(facts.algorithm, STALENESS):
        stale = [(w.samples or 0, w.mean_staleness) for w in workers]
        known = [(samples, tau) for samples, tau in stale if tau is not None]
        total = sum(samples for samples, _ in known)
        mean = sum(samples * tau for samples, tau in known) / total if total else None
        values |= {"mean_staleness": mean}
    return values


def _cells(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """The same for a person, by name, in the order of rows."""

    def said(value: float | None, text: Callable[[float], str]) -> str:
        return UNKNOWN if value is None else text(value)

    yield "algorithm", outcome.algorithm or UNKNOWN
    yield "state", outcome.state
    last = " (last step)" if outcome.is_last_step else ""
    yield "training loss", said(outcome.train_loss, lambda loss: f"{number(loss)}{last}")
    yield "validation loss", number(outcome.val_loss)
    yield "accuracy", said(outcome.val_accuracy, lambda value: f"{value:.2%}")
    yield "perplexity", said(outcome.val_perplexity, lambda value: f"{value:.4g}")
    yield "steps", said(outcome.steps, lambda count: f"{count:,}")
    yield "samples", said(outcome.samples, lambda count: f"{count:,}")
    yield "time", said(outcome.wall_s, format_duration)
    yield "samples/s", said(outcome.samples_per_s, lambda rate: f"{rate:,.0f}")
    yield "received", said(outcome.received_bytes, lambda nbytes: format_bytes(int(nbytes)))
    yield "sent", said(outcome.sent_bytes, lambda nbytes: format_bytes(int(nbytes)))
    yield "mean staleness", said(outcome.mean_staleness, lambda tau: f"{tau:.2f}")
    yield "workers", said(outcome.num_workers, lambda count: f"{count:,}")
    yield "workers lost", said(outcome.num_workers_lost, lambda count: f"{count:,}")


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
