"""Commands that look back at runs: report, compare."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import Run, below

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "report",
    epilog=below("smolcluster report", "smolcluster report edp-20261120-1350-3f9c"),
)
def _report(run: Run = "latest") -> int:
    """Write a run's report anew, from the files that are here, and print where it is.

    It is one page for a browser: curves, workers, links, events, and what went wrong first. A run writes it
    itself when it ends; of one that goes on, or that broke off, it says how things stand.
    """
    from smolcluster.launch.find import find  # noqa: PLC0415 - takes time
    from smolcluster.observability.report.page import write_report  # noqa: PLC0415

    typer.echo(write_report(find(run)))
    return 0


@app.command(
    "compare",
    epilog=below(
        "smolcluster compare edp-20261120-1350-3f9c latest",
        "smolcluster compare RUN1 RUN2 RUN3 --html compared.html",
    ),
)
def _compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN…", help="Names of runs, latest, or folders.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with their curves."),
    ] = None,
) -> int:
    """Show runs side by side: the settings that differ, and what came of each."""
    from smolcluster.launch.watch.fetch import brought  # noqa: PLC0415 - takes time
    from smolcluster.observability.report.comparison import compare  # noqa: PLC0415

    found = [brought(run, checkpoints=False) for run in runs]
    compare(found, None if html is None else Path(html), as_json=as_json)
    return 0
