"""The command that removes runs: clean."""

from typing import Annotated

import typer

from smolcluster.cli.options import below

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "clean",
    epilog=below(
        "smolcluster clean                      starts that failed; asks first",
        "smolcluster clean --older-than 30d --keep 5",
        "smolcluster clean edp-20261120-135025-3f9c --yes",
    ),
)
def _clean(
    run: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN …", help="Only these.  [default: runs that never took a step]"),
    ] = None,
    *,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Also runs that ended so long ago: 30d."),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", min=0, help="Also all runs but the N newest."),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Only on this machine, whatever is on others.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask for no confirmation.")] = False,
) -> int:
    """Remove failed starts and old runs, here and on their machines, after showing them.

    With both --older-than and --keep, runs to which both apply. A run that lives stays, and so does the one
    that `latest` points to, unless it is named. Exits with 1 if a machine does not answer or something stays.
    """
    from smolcluster.launch.clean import Choice, clean, parse_age  # noqa: PLC0415 - takes time

    choice = Choice(tuple(run or ()), parse_age(older_than), keep)
    return clean(choice, here=here, yes=yes)
