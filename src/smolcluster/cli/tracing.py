"""The command that traces a run's steps."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import Run, below

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "trace",
    epilog=below("smolcluster trace", "smolcluster trace latest --steps 50 --out trace.json"),
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
) -> int:
    """Write a trace of a run's newest steps: what each process did when, all on one clock.

    Open it at ui.perfetto.dev or in chrome://tracing.
    """
    from smolcluster.launch.watch.fetch import brought  # noqa: PLC0415 - takes time
    from smolcluster.observability.trace import write_trace  # noqa: PLC0415

    paths = brought(run, checkpoints=False)
    file = out or paths.trace
    num_steps = write_trace(paths, steps, file)
    typer.echo(f"{num_steps} steps of {paths.run_id}: {file}")
    return 0
