"""The command `smolcluster`.

Importing this package takes no torch and little time: what a command needs is imported when it runs. Whatever
happens, the console gets one line, never a traceback.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import smolcluster
from smolcluster.cli import launching, machines, models, watching
from smolcluster.cli.options import EXIT_CODES, OVERRIDE
from smolcluster.errors import SmolclusterError
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.bugs import describe_bug
from smolcluster.utils.replaced import say_what_replaces
from smolcluster.utils.stopping import STOP_ON_STDIN_EOF

ORDER = (
    *("launch", "status", "logs", "top", "dashboard", "attach", "join", "stop", "resume"),
    *(
        "runs",
        "fetch",
        "clean",
        "report",
        "compare",
        "trace",
        "checkpoints",
        "generate",
        "export",
        "merge",
    ),
    *(
        "train",
        "serve",
        "init",
        "doctor",
        "advise",
        "plan",
        "diagram",
        "mesh",
        "config",
        "observe",
        "ship",
    ),
)
"""How the help lists the commands: in the order in which one meets them."""


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    cls=_InOrder,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on the machines you already own, over plain TCP.",
    epilog=EXIT_CODES,
)
for part in (launching, watching, machines, models):
    app.add_typer(part.app)


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
    if arguments[:1] in (["launch"], ["train"], ["serve"]) and STOP_ON_STDIN_EOF not in arguments:
        say_what_replaces(os.environ)
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
        return _fail(describe_bug(error), BUG)
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
