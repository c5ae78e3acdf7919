"""Options that several commands have, and what stands below each command's help."""

from typing import Annotated

import typer

OVERRIDE = "--override"
EXIT_CODES = """Exit codes:

\b
  0    done
  1    the run failed, all launched workers have failed, or its end could not be saved
  2    a flag, a file, a key or a value is wrong
  3    your own code (model, loss, data, hook) failed; the message names file and line
  4    advise, launch --auto: do not distribute this, one machine alone is about as fast
  70   an internal error; the message names the traceback
  71   the device's driver failed (CUDA error); with restarts the worker is started again
  72   a process of a worker that has several (ranks) has ended or hangs; started again as well
  75   try again: no server answered, the port or the run is in use, no worker came, or all have gone
  77   the cluster's secret is missing, open to others, or not the server's
  78   the server refused this worker, or ranks of a mesh have different data
  130  interrupted (Ctrl-C);  143  terminated"""


def below(*examples: str) -> str:
    """What stands below a command's help: examples."""
    lines = "".join(f"\n  {example}" for example in examples)
    return f"Examples:\n\n\b{lines}"


def below_training(*examples: str) -> str:
    """The same of a command that trains: also the exit codes."""
    return f"{below(*examples)}\n\n{EXIT_CODES}"


Local = Annotated[bool, typer.Option("--local", help="Run everything on this machine.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Number of workers; needs --local.  [default: as many as the cluster file lists]",
    ),
]
Place = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="ssh|slurm|kubernetes",
        help="What starts it: ssh on the machines of the cluster file, or a scheduler.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the plan: processes, commands, memory, bytes; start nothing."
    ),
]
NoTmux = Annotated[
    bool,
    typer.Option(
        "--no-tmux", help="No window; with --local plain child processes, which need no tmux."
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="NODE",
        help="Leave this machine of the cluster file out; it may join later. Repeatable.",
    ),
]
NoSync = Annotated[
    bool,
    typer.Option("--no-sync", help="Bring the machines no code and make no environment there."),
]
Observe = Annotated[
    bool | None,
    typer.Option(
        "--observe/--no-observe",
        help="Start Grafana, Loki and Prometheus in Docker beside the run; --no-observe ignores those that "
        "run, too.  [default: observe of the cluster file, else show the run in those that run]",
    ),
]
Invite = Annotated[
    bool,
    typer.Option(
        "--invite",
        help="Let other machines join without SSH: print a code, which `smolcluster join` asks for there. "
        "With --local the server then listens at all addresses of this machine.",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Leave the run alone as soon as all workers have joined.")
]
ClusterFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Cluster file or shipped name.  [default: cluster_config_ALGORITHM.yaml in this folder, "
        "else the shipped one]",
    ),
]
TrainFile = Annotated[
    str | None,
    typer.Option(
        "--train-config",
        metavar="FILE",
        help="Training file or shipped name.  [default: nn_config.yaml beside the cluster file, else the "
        "shipped one if it is edited, else digits; of a GPT gpt_config.yaml and stdlib]",
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="FILE:FUNCTION",
        help="Train what a function of your own returns, a Workload; also package.module:function. Its "
        "arguments are workload_args of the configuration.",
    ),
]
TrustedWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="FILE:FUNCTION",
        help="Import this function for it.  [default: the run's, if it was trained on this machine]",
    ),
]
Script = Annotated[
    str | None,
    typer.Option(
        "--script",
        metavar="FILE",
        help="A script that says smolcluster.attach, and its arguments, in quotes: every worker runs it. "
        "Its folder goes along to the machines of a cluster.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Yes = Annotated[bool, typer.Option("--yes", help="Ask for no confirmation.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        OVERRIDE,
        metavar="KEY=VALUE …",
        help="Set keys of the configuration, such as num_epochs=5 model.hidden=64.",
    ),
]
NumSteps = Annotated[
    int | None,
    typer.Option(
        "--num-steps",
        metavar="N",
        min=1,
        help="End after so many steps.  [default: after num_epochs]",
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Name of a run, or its folder; latest: the one that is running, else the newest.",
    ),
]


def stated_keys(override: list[str] | None, num_steps: int | None) -> list[str]:
    """The overrides of a command line that may also say `--num-steps`."""
    return [*(override or []), *([] if num_steps is None else [f"num_steps={num_steps}"])]
