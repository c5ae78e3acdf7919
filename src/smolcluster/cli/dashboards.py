"""The command that shows runs on a web page: dashboard."""

from typing import Annotated

import typer

from smolcluster.cli.options import Run, below

app = typer.Typer(rich_markup_mode=None)


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
