"""Commands about the machines and their configuration: doctor, init, config."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import ClusterFile, Local, Overrides, TrainFile, below

app = typer.Typer(rich_markup_mode=None)
config_app = typer.Typer(
    rich_markup_mode=None, epilog=below("smolcluster config check --config my.yaml")
)
app.add_typer(config_app, name="config", help="Look at configuration files.")


@app.command(
    "doctor",
    epilog=below(
        "smolcluster doctor --config cluster_config_edp.yaml",
        "smolcluster doctor --json | jq",
        "smolcluster doctor --autostart         what lets machines join again after a restart",
    ),
)
def _doctor(
    *,
    config: ClusterFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    autostart: Annotated[
        bool,
        typer.Option(
            "--autostart",
            help="Only print, for each worker's systemd or launchd, what joins the run after a restart.",
        ),
    ] = False,
    override: Overrides = None,
) -> int:
    """Examine all machines of a cluster at once, and say what mends what is wrong.

    SSH, tools, disk, memory, clock, code and environment, PyTorch and its device, ports, and the way from
    every worker to the server, its bandwidth and latency. Exits with 1 if anything would keep a run from
    starting.
    """
    if autostart:
        from smolcluster.launch.doctor.autostart import autostart as jobs  # noqa: PLC0415

        return jobs(config, override or [])
    from smolcluster.launch.doctor.examine import doctor  # noqa: PLC0415 - takes time

    return doctor(config, override or [], as_json)


@app.command(
    "init",
    epilog=below(
        "smolcluster init                       asks for the machines",
        "smolcluster init --server mini1 --worker pi5=pi@192.168.50.2 --worker macbook=local",
    ),
)
def _init(
    *,
    server: Annotated[
        str | None, typer.Option("--server", metavar="NODE[=SSH]", help="The server's machine.")
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", metavar="NODE[=SSH]", help="A worker's machine; once for each."),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The server's TCP port.")] = 65432,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The file to write.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", help="edp or syncps.")] = None,
    project_dir: Annotated[
        str | None, typer.Option("--project-dir", help="The project's folder on the machines.")
    ] = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="Look for machines that announce themselves (mDNS).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask for no confirmation.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
) -> int:
    """Write a cluster file for your machines.

    Logs in to each of them, measures every way from each worker to the server, and chooses the best.
    """
    from smolcluster.launch.setup.init import InitOptions, init  # noqa: PLC0415

    return init(
        InitOptions(
            server=server,
            workers=tuple(worker or ()),
            port=port,
            to=to,
            algorithm=algorithm,
            yes=yes,
            force=force,
            project_dir=project_dir,
            discover=discover,
        )
    )


@config_app.command(
    "schema", epilog=below("smolcluster config schema cluster > cluster.schema.json")
)
def _schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="cluster or training.")] = "cluster",
) -> int:
    """Print the JSON schema of configuration files, for editors."""
    from smolcluster.launch.setup.config_commands import schema  # noqa: PLC0415

    return schema(kind)


@config_app.command("show", epilog=below("smolcluster config show --node pi5"))
def _show(
    *,
    config: ClusterFile = None,
    train_config: TrainFile = None,
    node: Annotated[str | None, typer.Option("--node", help="As this machine sees it.")] = None,
    local: Local = False,
    override: Overrides = None,
) -> int:
    """Print the configuration that a run would have, with all defaults."""
    from smolcluster.launch.setup.config_commands import show  # noqa: PLC0415

    return show(config, train_config, node, override or [], local=local)


@config_app.command("check", epilog=below("smolcluster config check --config my_cluster.yaml"))
def _check(
    *,
    config: ClusterFile = None,
    train_config: TrainFile = None,
    override: Overrides = None,
) -> int:
    """Check configuration files as every machine would read them."""
    from smolcluster.launch.setup.config_commands import check  # noqa: PLC0415

    return check(config, train_config, override or [])
