"""The command that brings a machine into a run: join."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import NoSync, Overrides, Overwrite, below_training

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "join",
    epilog=below_training(
        "smolcluster join --name mini2                      a returned machine, from where you launched",
        "smolcluster join --name mini9 --ssh me@10.0.0.9    a new one",
        "smolcluster join 10.10.0.1:65432 --detach          on the machine itself",
    ),
)
def _join(
    run: Annotated[
        str, typer.Argument(metavar="[RUN|ADDRESS]", help="The run, or the server's host[:port].")
    ] = "latest",
    *,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NODE", help="The machine's name in the run.")
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option("--ssh", metavar="DEST", help="Where ssh finds it.  [default: its name]"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST",
            help="Where it reaches the server.  [default: the first of the run's addresses that it reaches]",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", help="With ADDRESS: where the cluster's secret is."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="S", help="With ADDRESS: wait so long for the server."),
    ] = 20.0,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="With ADDRESS: leave the worker alone, and say its process."),
    ] = False,
    no_sync: NoSync = False,
    overwrite: Overwrite = False,
    override: Overrides = None,
) -> int:
    """Bring a new or returned machine into a living run.

    From the machine that launched it, over SSH: code, environment, secret, then the worker. Or on the machine
    itself, with the server's address and the cluster's secret: the worker runs in this terminal, unless it is
    to be left alone. Either way it is started again when it dies. What belongs to the machine is set by
    --override.
    """
    from smolcluster.launch.join import join  # noqa: PLC0415 - takes time
    from smolcluster.launch.take_in import Wanted  # noqa: PLC0415

    stated = [] if ssh is None else [f"ssh={ssh}"]
    return join(
        run,
        Wanted(
            name=name,
            address=address,
            secret_file=secret_file,
            wait_s=wait,
            detach=detach,
            sync=not no_sync,
            overwrite=overwrite,
            overrides=(*stated, *(override or [])),
        ),
    )
