"""Commands about machines and what runs beside a run: doctor, init, advise, plan, config, observe, ship."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from smolcluster.cli.options import (
    ClusterFile,
    Json,
    Local,
    NoSync,
    Overrides,
    Run,
    TrainFile,
    Workers,
    Workload,
    Yes,
    below,
    below_training,
)
from smolcluster.errors import ConfigError
from smolcluster.utils.stopping import STOP_ON_STDIN_EOF

app = typer.Typer(rich_markup_mode=None)
config_app = typer.Typer(
    rich_markup_mode=None, epilog=below("smolcluster config check --config my.yaml")
)
app.add_typer(config_app, name="config", help="Look at configuration files.")
mesh_app = typer.Typer(rich_markup_mode=None)
app.add_typer(mesh_app, name="mesh", help="Look at meshes of equal machines.")


@mesh_app.callback()
def _mesh() -> None:
    """Hold the commands, of which there is one."""


@app.command(
    "doctor",
    epilog=below(
        "smolcluster doctor --config my.yaml",
        "smolcluster doctor --json | jq",
        "smolcluster doctor --autostart         what lets machines join again after a restart",
    ),
)
def _doctor(
    *,
    config: ClusterFile = None,
    as_json: Json = False,
    autostart: Annotated[
        bool,
        typer.Option(
            "--autostart",
            help="Only print, for each worker's systemd or launchd, what joins the run after a restart.",
        ),
    ] = False,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="FILE:FUNCTION",
            help="Also see that all machines have the packages that this workload imports.",
        ),
    ] = None,
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

    return doctor(config, override or [], as_json, workload)


@app.command(
    "init",
    epilog=below(
        "smolcluster init                       asks for the machines",
        "smolcluster init --server mini1 --worker pi5=pi@192.168.50.2 --worker macbook=local",
        "smolcluster init --hetero --server 10.0.0.1 --worker 10.0.0.2 --layers 32",
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
    port: Annotated[
        int | None,
        typer.Option("--port", help="The server's TCP port.  [default: 65432; with --hetero 9999]"),
    ] = None,
    hetero: Annotated[
        bool,
        typer.Option(
            "--hetero",
            help="Write hetero_config.json instead, of addresses, for a pipeline's example program.",
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", min=1, metavar="N", help="With --hetero: the model's.  [default: 32]"
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The file to write.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", help="The algorithm whose file it is.")
    ] = None,
    project_dir: Annotated[
        str | None, typer.Option("--project-dir", help="The machines' own clone of the project.")
    ] = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="Look for machines that announce themselves (mDNS).")
    ] = False,
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
) -> int:
    """Write a cluster file for your machines.

    Logs in to each of them, measures every way from each worker to the server, and chooses the best.
    """
    from smolcluster.launch.hetero.file import DEFAULT_PORT as HETERO_PORT  # noqa: PLC0415
    from smolcluster.launch.hetero.init import init_hetero  # noqa: PLC0415
    from smolcluster.launch.setup.init import DEFAULT_PORT, InitOptions, init  # noqa: PLC0415

    usual = HETERO_PORT if hetero else DEFAULT_PORT
    options = InitOptions(
        server=server,
        workers=tuple(worker or ()),
        port=usual if port is None else port,
        to=to,
        algorithm=algorithm,
        yes=yes,
        force=force,
        project_dir=project_dir,
        discover=discover,
    )
    return init_hetero(options, layers) if hetero else init(options)


@app.command(
    "advise",
    epilog=below_training(
        "smolcluster advise --config my.yaml --train-config gpt",
        "smolcluster advise --local --json | jq .advice",
        "smolcluster advise --config my.yaml --workload my_project/train.py:workload",
    ),
)
def _advise(
    *,
    config: ClusterFile = None,
    train_config: TrainFile = None,
    workload: Workload = None,
    local: Local = False,
    workers: Workers = None,
    no_sync: NoSync = False,
    as_json: Json = False,
    override: Overrides = None,
) -> int:
    """Measure machines and links, and say whether and how to distribute a training.

    Trains for some seconds on each machine and sends for some more, then prints what each algorithm would
    reach beside the fastest machine alone, and what to launch. Keys set by --override are kept as they are.
    Exits with 0 if it is worth distributing, with 4 if it is not.
    """
    from smolcluster.launch.advise.run import advise_command  # noqa: PLC0415 - takes time
    from smolcluster.launch.requests import request_of  # noqa: PLC0415

    request = request_of(
        local=local,
        num_workers=workers,
        config=config,
        train_config=train_config,
        overrides=override or [],
        workload=workload,
    )
    return advise_command(request, local=local, in_json=as_json, sync=not no_sync)


@app.command(
    "plan",
    epilog=below_training(
        "smolcluster plan --config my.yaml --train-config gpt",
        "smolcluster plan --config my.yaml --workload my_project/train.py:workload --codec int8",
        "smolcluster plan --config my.yaml --model '~/models/llama' --recompute",
        "smolcluster plan --local --workers 3 --json > plan.json",
    ),
)
def _plan(
    *,
    config: ClusterFile = None,
    train_config: TrainFile = None,
    workload: Workload = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="A causal language model's folder, fine-tuned by adapters (workload_args.lora_rank; 0: all "
            "weights); the same path on every machine.",
        ),
    ] = None,
    local: Local = False,
    workers: Workers = None,
    schedule: Annotated[
        str, typer.Option("--schedule", help="gpipe, 1f1b, eager-1f1b or zero-bubble.")
    ] = "1f1b",
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            metavar="M",
            help="Parts of a step's batch.  [default: up to 4 a machine, dividing the batch]",
        ),
    ] = None,
    codec: Annotated[
        str, typer.Option("--codec", help="How activations travel: fp32, bf16 or int8.")
    ] = "fp32",
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute", help="Stages keep their input alone, and compute the rest again."
        ),
    ] = False,
    no_sync: NoSync = False,
    as_json: Json = False,
    override: Overrides = None,
) -> int:
    """Cut a model into the stages of a pipeline over the machines there are.

    Measures each layer on each machine, their memory, and the links between them, then prints the order,
    the cut, the step that it predicts, its bottleneck, each stage's memory, and what one more machine would
    bring.
    """
    from smolcluster.launch.advise.layer_plan import Wanted  # noqa: PLC0415 - takes time
    from smolcluster.launch.advise.show_layer_plan import plan_command  # noqa: PLC0415
    from smolcluster.launch.requests import request_of  # noqa: PLC0415

    overrides = override or []
    if model is not None:
        if workload is not None:
            raise ConfigError("--model and --workload both say what is planned: name one of them")
        workload = "smolcluster.training.finetune:model_alone"
        overrides = [f"workload_args.folder={json.dumps(model)}", *overrides]
    request = request_of(
        local=local,
        num_workers=workers,
        config=config,
        train_config=train_config,
        overrides=overrides,
        workload=workload,
    )
    wanted = Wanted(schedule, microbatches, codec, recompute)
    return plan_command(request, wanted, local=local, in_json=as_json, sync=not no_sync)


@app.command(
    "diagram",
    epilog=below(
        "smolcluster diagram my_cluster.yaml --format svg --to cluster.svg",
        "smolcluster diagram plan.json --format mmd",
        "smolcluster diagram hetero_config.json --format png --to architecture.png",
        "smolcluster diagram latest --format png --to architecture.png",
    ),
)
def _diagram(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|PLAN|CONFIG",
            help="A run, what plan --json printed, a hetero_config.json, or a cluster file (.yaml).",
        ),
    ],
    form: Annotated[
        Literal["svg", "pdf", "png", "mmd"],
        typer.Option("--format", help="svg, pdf and png need Graphviz; mmd is Mermaid."),
    ] = "svg",
    to: Annotated[
        Path | None, typer.Option("--to", help="The file.  [default: the terminal]")
    ] = None,
) -> int:
    """Draw machines, layers, links and devices."""
    from smolcluster.commands.diagram import diagram_command  # noqa: PLC0415 - takes time

    return diagram_command(source, form, to)


@mesh_app.command(
    "schedule",
    epilog=below(
        "smolcluster mesh schedule --pp 4 --microbatches 8 --schedule zb-v --csv zb-v.csv --svg zb-v.svg"
    ),
)
def _mesh_schedule(
    *,
    schedule: Annotated[
        str, typer.Option("--schedule", help="gpipe, 1f1b, interleaved, zero-bubble, zb-v, …")
    ] = "1f1b",
    pp: Annotated[int, typer.Option("--pp", min=1, help="Ranks of the pipeline.")],
    microbatches: Annotated[
        int, typer.Option("--microbatches", min=1, help="Microbatches of a step.")
    ],
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write what each rank does when.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write it as a picture.")] = None,
) -> int:
    """Show what each rank of a pipeline computes when, and what it waits."""
    from smolcluster.commands.schedules import schedule_command  # noqa: PLC0415 - takes time

    return schedule_command(schedule, pp, microbatches, csv, svg)


@mesh_app.command("trace", epilog=below("smolcluster mesh trace instructions/ --svg step.svg"))
def _mesh_trace(
    folder: Annotated[Path, typer.Argument(help="What instruction_log names.")],
    *,
    step: Annotated[int | None, typer.Option("--step", help="[default: the last one]")] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write what each rank did when.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write it as a picture, above its simulation.")
    ] = None,
) -> int:
    """Show what each rank of a mesh computed in a step, and how that compares with its simulation."""
    from smolcluster.commands.schedules import trace_command  # noqa: PLC0415 - takes time

    return trace_command(folder, step, csv, svg)


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


observe_app = typer.Typer(rich_markup_mode=None, epilog=below("smolcluster observe up"))
app.add_typer(observe_app, name="observe", help="Grafana, Loki and Prometheus in Docker.")


@observe_app.command("up", epilog=below("GRAFANA_PASSWORD=secret smolcluster observe up"))
def _up() -> int:
    """Start them and wait until they answer. A launch does it with --observe.

    Grafana's user is admin; the password is what GRAFANA_PASSWORD was at the first start, else the random one
    in ~/.config/smolcluster/grafana-password.
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
    stop_on_stdin_eof: Annotated[bool, typer.Option(STOP_ON_STDIN_EOF, hidden=True)] = False,
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
