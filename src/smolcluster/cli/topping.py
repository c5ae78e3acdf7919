"""The command that shows the cluster in the terminal: top."""

from typing import Annotated

import typer

from smolcluster.cli.options import Run, below

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "top",
    epilog=below(
        "smolcluster top                        the run that is running, else the newest",
        "smolcluster top edp-20261120-1350-3f9c",
        "smolcluster top --once | head -20",
    ),
)
def _top(
    run: Run = "latest",
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once; no terminal needed.")
    ] = False,
) -> int:
    """Show the cluster at work: progress, curves, a row a process, events and warnings.

    It is drawn anew every second and ends with the run; q or Ctrl-C ends it before. What does not fit in the
    window is left out.
    """
    from smolcluster.launch.watch.top.command import top  # noqa: PLC0415 - takes time

    return top(run, once=once)
