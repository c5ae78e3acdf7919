"""Commands that look at runs: status, logs, runs, fetch."""

from typing import Annotated

import typer

from smolcluster.cli.options import Run, below

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "status",
    epilog=below(
        "smolcluster status                     the run that is running, else the newest",
        "smolcluster status edp-20261120-1350-3f9c --watch",
        "smolcluster status --json | jq .state",
    ),
)
def _status(
    run: Run = "latest",
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it anew every 2 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> int:
    """How a run stands: a row a process, with step, loss, speed and last heartbeat.

    All machines are asked at once; one that cannot be reached is a row that says so.
    """
    from smolcluster.launch.watch.status import status  # noqa: PLC0415 - takes time

    return status(run, as_json=as_json, watch=watch)


@app.command(
    "logs",
    epilog=below(
        "smolcluster logs --level WARNING       what went wrong, on all machines",
        "smolcluster logs --node pi5 --follow   what one machine says, as it says it",
        "smolcluster logs --since 10m",
    ),
)
def _logs(
    run: Run = "latest",
    *,
    node: Annotated[str | None, typer.Option("--node", help="Only this machine's.")] = None,
    worker: Annotated[
        int | None, typer.Option("--worker", metavar="N", help="Only this worker's, from 1.")
    ] = None,
    level: Annotated[str, typer.Option("--level", help="This level and above.")] = "INFO",
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is over.")] = False,
    since: Annotated[
        str | None, typer.Option("--since", help="Such as 10m, 2h or 2026-11-22T10:00.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> int:
    """Print the log lines of all processes of a run, in the order of time."""
    from smolcluster.launch.watch.logs import logs  # noqa: PLC0415

    rank = None if worker is None else worker - 1
    return logs(run, node=node, rank=rank, level=level, follow=follow, since=since, as_json=as_json)


@app.command("runs", epilog=below("smolcluster runs"))
def _runs(
    *, as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False
) -> int:
    """List the runs that this machine knows, the newest last; those elsewhere are asked for there."""
    from smolcluster.launch.watch.listing import runs  # noqa: PLC0415

    return runs(as_json=as_json)


@app.command(
    "fetch",
    epilog=below("smolcluster fetch", "smolcluster fetch edp-20261120-1350-3f9c --no-checkpoints"),
)
def _fetch(
    run: Run = "latest",
    *,
    no_checkpoints: Annotated[
        bool, typer.Option("--no-checkpoints", help="Leave the checkpoints where they are.")
    ] = False,
) -> int:
    """Bring a run's logs, metrics and checkpoints home from its machines."""
    from smolcluster.launch.watch.fetch import fetch  # noqa: PLC0415

    return fetch(run, checkpoints=not no_checkpoints)
