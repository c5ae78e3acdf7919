"""Commands that start, show and stop a run: launch, resume, attach, stop, join."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from smolcluster.cli.options import (
    EXIT_CODES,
    ClusterFile,
    Detach,
    DryRun,
    Invite,
    Local,
    NoSync,
    NoTmux,
    NumSteps,
    Observe,
    Overrides,
    Place,
    Run,
    Script,
    TrainFile,
    TrustedWorkload,
    Without,
    Workers,
    Workload,
    below,
    below_training,
    stated_keys,
)
from smolcluster.errors import ConfigError
from smolcluster.utils.stopping import STOP_ON_STDIN_EOF

if TYPE_CHECKING:
    from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand

app = typer.Typer(rich_markup_mode=None)

AUTO = "--auto"
AUTO_HELP = (
    "Measure machines and links, then launch what `smolcluster advise` says; also `launch --auto`. "
    "Starts nothing, and exits with 4, where one machine alone is about as fast."
)
AUTO_EXAMPLES = (
    "smolcluster launch --auto --config my.yaml --train-config gpt",
    "smolcluster launch --auto --local --workers 2",
)


class _Algorithms(TyperGroup):
    """A command for each that the installed algorithms name; looked up when `launch` is used.

    `--auto` stands for one that chooses the algorithm.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if AUTO in args:
            args = [AUTO.lstrip("-"), *(each for each in args if each != AUTO)]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's
        return list(_launch_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - click's
        found = _launch_commands().get(cmd_name)
        return None if found is None else _launch_command(*found)


launch_app = typer.Typer(cls=_Algorithms, rich_markup_mode=None, epilog=EXIT_CODES)
app.add_typer(launch_app, name="launch", help="Start a server and its workers.")


@launch_app.callback()
def _launch() -> None:
    pass


def _launch_commands() -> dict[str, tuple["AlgorithmSpec", "LaunchCommand"]]:
    from smolcluster.configs.spec import (  # noqa: PLC0415 - see above
        LaunchCommand,
        algorithms,
        default_algorithm,
    )

    found = {
        command.name: (spec, command) for spec in algorithms().values() for command in spec.commands
    }
    auto = LaunchCommand(AUTO.lstrip("-"), AUTO_HELP)
    return {**found, auto.name: (default_algorithm(), auto)}


def _launch_command(spec: "AlgorithmSpec", launched: "LaunchCommand") -> Any:
    """`launch NAME`, as typer has it; `--auto` takes no script."""
    name = launched.name
    is_auto = name == AUTO.lstrip("-")

    def command(
        *,
        local: Local = False,
        on: Place = "ssh",
        workers: Workers = None,
        without: Without = None,
        dry_run: DryRun = False,
        detach: Detach = False,
        invite: Invite = False,
        no_sync: NoSync = False,
        no_tmux: NoTmux = False,
        observe: Observe = None,
        config: ClusterFile = None,
        train_config: TrainFile = None,
        workload: Workload = None,
        script: Script = None,
        num_steps: NumSteps = None,
        override: Overrides = None,
    ) -> int:
        from smolcluster.launch.advise.run import launch_advised, launch_as_stated  # noqa: PLC0415 - see above
        from smolcluster.launch.flow import LaunchOptions, place_of  # noqa: PLC0415
        from smolcluster.launch.requests import request_of  # noqa: PLC0415

        request = request_of(
            spec,
            launched,
            local=local,
            num_workers=workers,
            config=config,
            train_config=train_config,
            overrides=stated_keys(override, num_steps),
            workload=workload,
            script=script,
        )
        left_out = tuple(dict.fromkeys(without or ()))
        request = replace(request, without=left_out, is_open=local and invite)
        how = LaunchOptions(
            dry_run,
            not no_sync,
            not no_tmux,
            detach,
            observe,
            on=place_of(on, local=local, without=left_out),
            invite=invite,
        )
        start = launch_advised if is_auto else launch_as_stated
        return start(request, how, local=local)

    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(
        name,
        help=launched.help,
        epilog=below_training(*(AUTO_EXAMPLES if is_auto else _examples(name))),
    )(command)
    found = typer.main.get_command(alone)
    unknown = [*["script"] * is_auto, *["on"] * (not spec.is_group)]
    found.params = [each for each in found.params if each.name not in unknown]
    return found


def _examples(name: str) -> tuple[str, ...]:
    return (
        f"smolcluster launch {name} --local              on this machine alone",
        f"smolcluster launch {name} --local --workload my_project/train.py:workload",
        f"smolcluster launch {name} --config my.yaml --dry-run",
        f"smolcluster launch {name} --config my.yaml --detach --override num_epochs=5",
    )


@app.command(
    "resume",
    epilog=below_training(
        "smolcluster resume", "smolcluster resume edp-20261120-1350-3f9c --detach"
    ),
)
def _resume(
    run: Run = "latest",
    *,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Number of workers.  [default: as before]"),
    ] = None,
    without: Without = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    invite: Invite = False,
    no_sync: NoSync = False,
    no_tmux: NoTmux = False,
    observe: Observe = None,
    workload: TrustedWorkload = None,
    num_steps: NumSteps = None,
    override: Overrides = None,
) -> int:
    """Start a whole run again on its machines, from its newest good checkpoint."""
    from smolcluster.configs.overrides import workload_overrides  # noqa: PLC0415 - see above
    from smolcluster.launch.flow import LaunchOptions  # noqa: PLC0415 - see above
    from smolcluster.launch.saved import resume  # noqa: PLC0415

    how = LaunchOptions(dry_run, not no_sync, not no_tmux, detach, observe, invite=invite)
    overrides = [*stated_keys(override, num_steps), *workload_overrides(workload)]
    return resume(run, workers, overrides, how, without=tuple(dict.fromkeys(without or ())))


@app.command("attach", epilog=below("smolcluster attach"))
def _attach(run: Run = "latest") -> int:
    """Show a launched run in a tmux window, a pane a process. Ctrl-B d leaves it, the run goes on."""
    from smolcluster.launch.flow import attach  # noqa: PLC0415 - see above

    return attach(run)


@app.command(
    "serve",
    epilog=below_training(
        "smolcluster serve cluster.yaml", "smolcluster serve cluster.yaml --algorithm syncps"
    ),
)
def _serve(
    config: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Cluster file or shipped name.")
    ] = "cluster.yaml",
    *,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm", metavar="NAME", help="[default: the file's algorithm, else edp]"
        ),
    ] = None,
    local: Local = False,
    workers: Workers = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Name of the run.  [default: from the time]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Go on with a run: its name, latest or auto."),
    ] = None,
    train_config: Annotated[
        str | None,
        typer.Option(
            "--train-config", metavar="FILE", help="Settings that no process tells.  [default: few]"
        ),
    ] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", hidden=True)] = False,
    stop_on_stdin_eof: Annotated[bool, typer.Option(STOP_ON_STDIN_EOF, hidden=True)] = False,
    override: Overrides = None,
) -> int:
    """Serve loops of your own: scripts that say smolcluster.attach(model, optimizer, CLUSTER).

    The first process that attaches tells what is trained, and with which weights it begins.
    """
    from smolcluster.algorithms.entry import guarded  # noqa: PLC0415 - see above

    def body() -> None:
        from smolcluster.algorithms.serving import serve_attached  # noqa: PLC0415

        serve_attached(
            config,
            algorithm,
            overrides=override or (),
            train_config=train_config,
            run_id=run_id,
            resume=resume,
            local=local,
            num_workers=workers,
            has_progress=not no_progress,
            named=not stop_on_stdin_eof,
        )

    return guarded(body, stop_on_stdin_eof=stop_on_stdin_eof)


@app.command(
    "stop", epilog=below("smolcluster stop", "smolcluster stop edp-20261120-1350-3f9c --now")
)
def _stop(
    run: Run = "latest",
    *,
    now: Annotated[bool, typer.Option("--now", help="Kill it, without a checkpoint.")] = False,
) -> int:
    """Stop a run: it saves a checkpoint and ends; then see that nothing of it is left on any machine."""
    from smolcluster.launch.flow import stop  # noqa: PLC0415 - see above

    return stop(run, now=now)


@app.command("invite", epilog=below("smolcluster invite"))
def _invite(
    run: Run = "latest",
    *,
    stop_on_stdin_eof: Annotated[bool, typer.Option(STOP_ON_STDIN_EOF, hidden=True)] = False,
) -> int:
    """Let other machines join a living run without SSH: print a code, good for 10 minutes.

    `smolcluster join` finds the run there by mDNS, and asks for the code. Three wrong codes end it.
    """
    from smolcluster.launch.invite.inviting import invite  # noqa: PLC0415 - takes time

    return invite(run, stop_on_stdin_eof=stop_on_stdin_eof)


@app.command(
    "join",
    epilog=below_training(
        "smolcluster join                                   where nothing runs: by an invitation's code",
        "smolcluster join --name mini2                      a returned machine, from where you launched",
        "smolcluster join --name mini9 --ssh me@10.0.0.9    a new one",
        "smolcluster join 10.10.0.1:65432 --detach          on the machine itself",
    ),
)
def _join(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|ADDRESS]",
            help="The run, or the server's host[:port].  [default: the run that lives here, else the one "
            "that a machine of this network invites into, by its code]",
            show_default=False,
        ),
    ] = None,
    *,
    invited_run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="By a code: the run, if several are announced."),
    ] = None,
    invitation: Annotated[
        str | None,
        typer.Option(
            "--invitation",
            metavar="HOST:PORT",
            help="By a code: where the invitation is, if mDNS does not reach it.",
        ),
    ] = None,
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
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="FILE:FUNCTION",
            help="With ADDRESS: the function of the run's workload, in this machine's copy of its code.",
        ),
    ] = None,
    override: Overrides = None,
) -> int:
    """Bring a new or returned machine into a living run.

    From the machine that launched it, over SSH: code, environment, secret, then the worker. Or on the machine
    itself, with the server's address and the cluster's secret, or with the code of an invitation, by which it
    gets both: the worker runs in this terminal, unless it is to be left alone. Either way it is started
    again when it dies. What belongs to the machine is set by --override.
    """
    from smolcluster.launch.invite.coming import come  # noqa: PLC0415 - takes time
    from smolcluster.launch.join import join  # noqa: PLC0415
    from smolcluster.launch.take_in import JoinOptions  # noqa: PLC0415

    if run is not None and (invited_run or invitation):
        raise ConfigError(
            "--run and --invitation name an invitation: leave out the run, or its address"
        )
    stated = [] if ssh is None else [f"ssh={ssh}"]
    wanted = JoinOptions(
        name=name,
        address=address,
        secret_file=secret_file,
        wait_s=wait,
        detach=detach,
        sync=not no_sync,
        workload=workload,
        overrides=(*stated, *(override or [])),
    )
    return come(wanted, invited_run, invitation) if run is None else join(run, wanted)
