"""The command `smolcluster`.

Importing this module takes no torch and little time: what a command needs is imported when it runs. Whatever
happens, the console gets one line, never a traceback.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import smolcluster
from smolcluster.errors import SmolclusterError
from smolcluster.utils.bugs import describe_bug

EXIT_CODES = """Exit codes:

\b
  0    done
  1    the run failed; the message says why
  2    a flag, a file, a key or a value is wrong
  75   try again: no server answered, the port is busy, or no worker came
  77   the cluster's secret is missing, open to others, or not the server's
  78   the server refused this worker
  130  interrupted (Ctrl-C);  143  terminated"""
OVERRIDE = "--override"

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on the machines you already own, over plain TCP.",
    epilog=EXIT_CODES,
)
launch_app = typer.Typer(rich_markup_mode=None, epilog=EXIT_CODES)
app.add_typer(launch_app, name="launch", help="Start a server and its workers.")

Local = Annotated[bool, typer.Option("--local", help="Run everything on this machine.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", help="Number of workers; needs --local.  [default: 3; edp-gpt: 2]"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands, start nothing.")]
NoTmux = Annotated[
    bool, typer.Option("--no-tmux", help="Plain child processes, which is the default.")
]
ClusterFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Cluster file or shipped name.  [default: the algorithm's name]",
    ),
]
TrainFile = Annotated[
    str | None,
    typer.Option(
        "--train-config",
        metavar="FILE",
        help="Training file or shipped name; gpt with --local means stdlib, a small GPT that needs no "
        "download.  [default: digits with --local, else nn; of edp-gpt stdlib with --local, else gpt]",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        OVERRIDE,
        metavar="KEY=VALUE …",
        help="Set keys of the configuration, such as num_epochs=5 model.hidden=64.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smolcluster {smolcluster.__version__}")
        raise typer.Exit


@app.callback()
def _smolcluster(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Hold the options that come before any command."""


@launch_app.command("edp", epilog=EXIT_CODES)
def _launch_edp(
    *,
    local: Local = False,
    workers: Workers = None,
    dry_run: DryRun = False,
    no_tmux: NoTmux = False,  # noqa: ARG001 - the only way there is until tmux panes come
    config: ClusterFile = None,
    train_config: TrainFile = None,
    override: Overrides = None,
) -> int:
    """Elastic Distributed Parallelism: an asynchronous parameter server and its workers."""
    return _launch(
        "edp",
        local=local,
        workers=workers,
        dry_run=dry_run,
        config=config,
        train_config=train_config,
        override=override,
    )


@launch_app.command("edp-gpt", epilog=EXIT_CODES)
def _launch_edp_gpt(
    *,
    local: Local = False,
    workers: Workers = None,
    dry_run: DryRun = False,
    no_tmux: NoTmux = False,  # noqa: ARG001 - as above
    config: ClusterFile = None,
    train_config: TrainFile = None,
    override: Overrides = None,
) -> int:
    """Train a GPT language model with EDP.

    With --local two workers pull the weights after each step: a GPT suffers more from old gradients than a
    perceptron, and two cores compute no faster with three.
    """
    if local and workers is None:
        workers = 2
    return _launch(
        "edp",
        local=local,
        workers=workers,
        dry_run=dry_run,
        config=config,
        train_config=train_config or "gpt",
        override=[*(["worker_update_interval=1"] if local else []), *(override or [])],
    )


@launch_app.command("syncps", epilog=EXIT_CODES)
def _launch_syncps(
    *,
    local: Local = False,
    workers: Workers = None,
    dry_run: DryRun = False,
    no_tmux: NoTmux = False,  # noqa: ARG001 - as above
    config: ClusterFile = None,
    train_config: TrainFile = None,
    override: Overrides = None,
) -> int:
    """Synchronous Parameter Server: exact synchronous training with a server and its workers."""
    return _launch(
        "syncps",
        local=local,
        workers=workers,
        dry_run=dry_run,
        config=config,
        train_config=train_config,
        override=override,
    )


def _launch(
    algorithm: str,
    *,
    local: bool,
    workers: int | None,
    dry_run: bool,
    config: str | None,
    train_config: str | None,
    override: list[str] | None,
) -> int:
    from smolcluster.algorithms.registry import get_algorithm  # noqa: PLC0415 - see above
    from smolcluster.launch.plan import Request  # noqa: PLC0415
    from smolcluster.launch.run import launch  # noqa: PLC0415

    if local and train_config == "gpt":
        train_config = "stdlib"
    request = Request(
        algorithm=get_algorithm(algorithm),
        config=config,
        train_config=train_config,
        overrides=tuple(override or ()),
        num_workers=workers,
    )
    return launch(request, local=local, dry_run=dry_run)


Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, latest, or a run's folder.")
]


@app.command("resume", epilog=EXIT_CODES)
def _resume(
    run: Run = "latest",
    *,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Number of workers.  [default: as before]"),
    ] = None,
    dry_run: DryRun = False,
    override: Overrides = None,
) -> int:
    """Start a whole local run again, from its newest good checkpoint."""
    from smolcluster.launch.saved import resume  # noqa: PLC0415 - see above

    return resume(run, workers, override or [], dry_run=dry_run)


@app.command("checkpoints", epilog=EXIT_CODES)
def _checkpoints(run: Run = "latest") -> int:
    """List a run's checkpoints: step, losses, size, good or damaged. Exits with 1 if one is damaged."""
    from smolcluster.launch.saved import show_checkpoints  # noqa: PLC0415 - see above

    return show_checkpoints(run)


@app.command("export", epilog=EXIT_CODES)
def _export(
    run: Run = "latest",
    *,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to write into.")],
    best: Annotated[
        bool, typer.Option("--best", help="Of the lowest validation loss, not the newest.")
    ] = False,
    transformers: Annotated[
        bool,
        typer.Option("--transformers", help="A GPT as GPT2LMHeadModel.from_pretrained reads it."),
    ] = False,
) -> int:
    """Write a run's model as a plain model.safetensors."""
    from smolcluster.launch.saved import export_model  # noqa: PLC0415 - see above

    return export_model(run, to, best=best, transformers=transformers)


@app.command("generate", epilog=EXIT_CODES)
def _generate(
    run: Run = "latest",
    *,
    prompt: Annotated[
        str, typer.Option("--prompt", help="Text to go on from.  [default: a new document]")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Tokens to write.")
    ] = 100,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the likeliest token each time.")
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="N", help="Choose among the N likeliest.  [default: all]"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")] = 0,
) -> int:
    """Let a language model write, from the best checkpoint of its run."""
    from smolcluster.launch.generate import Wish, generate  # noqa: PLC0415 - see above

    return generate(run, Wish(prompt, max_tokens, temperature, top_k, seed))


@app.command("train", epilog=EXIT_CODES)
def _train(
    *,
    config: Annotated[
        str, typer.Option("--config", metavar="FILE", help="Training file or shipped name.")
    ] = "digits",
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Name of the run.  [default: from the time]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on with a run: its name, latest, or auto."
        ),
    ] = None,
    override: Overrides = None,
) -> int:
    """Train in this single process: the baseline that a cluster is compared with."""
    from smolcluster.launch.single import train  # noqa: PLC0415 - see above

    return train(config, override or [], run_id=run_id, resume=resume)


def expand_overrides(argv: Sequence[str]) -> list[str]:
    """Turn `--override a=1 b=2` into `--override a=1 --override b=2`, which is what Typer understands."""
    expanded: list[str] = []
    open_ended = False
    for argument in argv:
        is_pair = "=" in argument and not argument.startswith("-")
        if open_ended and is_pair and expanded[-1] != OVERRIDE:
            expanded.append(OVERRIDE)
        open_ended = argument.partition("=")[0] == OVERRIDE or (open_ended and is_pair)
        expanded.append(argument)
    return expanded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` unless given) and return the exit code."""
    arguments = expand_overrides(sys.argv[1:] if argv is None else argv)
    try:
        code: int | None = app(
            args=arguments or ["--help"], prog_name="smolcluster", standalone_mode=False
        )
        sys.stdout.flush()
    except SmolclusterError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(_usage(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _fail(describe_bug(error), 1)
    return int(code or 0)


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return code


def _usage(error: typer.TyperException) -> str:
    """A usage error on one line, with where to read more."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "smolcluster"
    sentence = " ".join(error.format_message().split()).rstrip(".")
    return f"{sentence}; `{command} --help` says more"


if __name__ == "__main__":
    sys.exit(main())
