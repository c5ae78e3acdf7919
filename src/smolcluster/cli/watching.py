"""Commands that look at runs, from status to compare and trace, and the one that removes them."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import Json, Run, Yes, below
from smolcluster.errors import ConfigError
from smolcluster.utils.units import format_count

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
    as_json: Json = False,
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
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="Only this rank's of a mesh, from 0.")
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

    if worker is not None and rank is not None:
        raise ConfigError("--worker and --rank: a run has workers, or ranks: give one of them")
    return logs(
        run,
        node=node,
        rank=rank if worker is None else worker - 1,
        role="worker" if rank is None else "rank",
        level=level,
        follow=follow,
        since=since,
        as_json=as_json,
    )


@app.command("runs", epilog=below("smolcluster runs"))
def _runs(*, as_json: Json = False) -> int:
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


@app.command(
    "dashboard",
    epilog=below(
        "smolcluster dashboard                  the run that is running, else the newest",
        "smolcluster dashboard edp-20261120-1350-3f9c --open",
        "ssh -L 8265:127.0.0.1:8265 lab         then open the address here",
    ),
)
def _dashboard(
    run: Run = "latest",
    *,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=1,
            max=65535,
            help="Where to listen.  [default: 8265, or any that is free]",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; 0.0.0.0 is all of them.")
    ] = "127.0.0.1",
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> int:
    """Show a run on a web page: live, or one that is over.

    Prints an address with a token, without which nothing is shown. Runs on other machines are read there
    over SSH. Ctrl-C ends the page; training goes on.
    """
    from smolcluster.launch.watch.page import dashboard  # noqa: PLC0415 - takes time

    return dashboard(run, host=host, port=port, opens=opens)


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
    as_json: Json = False,
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


@app.command(
    "trace",
    epilog=below(
        "smolcluster trace",
        "smolcluster trace latest --steps 50 --out trace.json",
        "smolcluster trace latest --timeline step.svg     one step of a pipeline",
    ),
)
def _trace(
    run: Run = "latest",
    *,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, max=1000, help="So many steps.")
    ] = 20,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to.  [default: trace.json of the run]"),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Of a pipeline instead: draw its newest step, as measured and as simulated (svg, png, pdf), "
            "or write its times (csv).",
        ),
    ] = None,
) -> int:
    """Write a trace of a run's newest steps: what each process did when, all on one clock.

    Open it at ui.perfetto.dev or in chrome://tracing.
    """
    from smolcluster.commands.trace import write_trace  # noqa: PLC0415
    from smolcluster.launch.watch.fetch import brought  # noqa: PLC0415 - takes time

    paths = brought(run, checkpoints=False)
    if timeline is not None:
        from smolcluster.commands.timeline import write_timeline  # noqa: PLC0415

        view = write_timeline(paths, timeline)
        measured, simulated = view.measured.makespan_s, view.simulated.makespan_s
        typer.echo(f"{1e3 * measured:.4g} ms, simulated {1e3 * simulated:.4g} ms: {timeline}")
        return 0
    file = out or paths.trace
    num_steps = write_trace(paths, steps, file)
    typer.echo(f"{format_count(num_steps, 'step')} of {paths.run_id}: {file}")
    return 0


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
    yes: Yes = False,
) -> int:
    """Remove failed starts, old runs and old code, here and on their machines, after showing them.

    With both --older-than and --keep, runs to which both apply. A run that lives stays, and so does the one
    that `latest` points to, unless it is named. Exits with 1 if a machine does not answer or something stays.
    """
    from smolcluster.launch.clean import clean, parse_age  # noqa: PLC0415 - takes time

    return clean(run or (), older_than_s=parse_age(older_than), keep=keep, here=here, yes=yes)
