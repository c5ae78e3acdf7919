"""A command that the launcher starts on every node: ship."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import Run, below

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "ship",
    hidden=True,
    epilog=below(
        "smolcluster ship latest --loki http://192.168.1.10:3100",
        "smolcluster ship edp-20261120-1350-3f9c --loki http://192.168.1.10:3100 --once",
    ),
)
def _ship(
    run: Run = "latest",
    *,
    loki: Annotated[
        str, typer.Option("--loki", metavar="URL", help="Where Loki listens; no password.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="STEM", help="Only this log, such as server-mini1.  [all]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Push what is there, and end.")] = False,
    stop_on_stdin_eof: Annotated[bool, typer.Option("--stop-on-stdin-eof", hidden=True)] = False,
) -> int:
    """Push the logs that this machine has of a run to Loki, until it is told to end.

    Launching does it by itself on every node, where Loki is known and neither Promtail nor Alloy is
    installed. If Loki wants a user and a password, they belong in ~/.netrc.
    """
    from smolcluster.observability.shipping.command import ship  # noqa: PLC0415 - takes time

    return ship(_logs(run), loki, only or [], once=once, stop_on_stdin_eof=stop_on_stdin_eof)


def _logs(run: str) -> Path:
    """The folder of a run's logs; of a worker's run folder little else may be there."""
    from smolcluster.launch.find import find  # noqa: PLC0415 - takes time

    logs = Path(run).expanduser() / "logs"
    return logs.resolve() if "/" in run and logs.is_dir() else find(run).logs
