"""Commands for Grafana, Loki and Prometheus: observe up, down, status."""

import typer

from smolcluster.cli.options import below

app = typer.Typer(rich_markup_mode=None)
observe_app = typer.Typer(rich_markup_mode=None, epilog=below("smolcluster observe up"))
app.add_typer(observe_app, name="observe", help="Grafana, Loki and Prometheus in Docker.")


@observe_app.command("up", epilog=below("GRAFANA_PASSWORD=secret smolcluster observe up"))
def _up() -> int:
    """Start them and wait until they answer. A launch does it with --observe.

    Grafana's user is admin; the password is what GRAFANA_PASSWORD was at the first start, or admin.
    """
    from smolcluster.launch.observe.commands import observe_up  # noqa: PLC0415 - takes time

    return observe_up()


@observe_app.command("down", epilog=below("smolcluster observe down"))
def _down() -> int:
    """Stop them; what they have collected is kept."""
    from smolcluster.launch.observe.commands import observe_down  # noqa: PLC0415

    return observe_down()


@observe_app.command("status", epilog=below("smolcluster observe status"))
def _status() -> int:
    """Tell how each of them is: whether it answers, and what Docker says of its container.

    Exits with 0 if all three answer.
    """
    from smolcluster.launch.observe.commands import observe_status  # noqa: PLC0415

    return observe_status()
