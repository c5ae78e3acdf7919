"""The command `smolcluster`.

Importing this package takes no torch and little time: what a command needs is imported when it runs. Whatever
happens, the console gets one line, never a traceback.
"""

import os
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from smolcluster.cli import launching, machines, models, watching
from smolcluster.cli.options import EXIT_CODES, OVERRIDE
from smolcluster.errors import SmolclusterError
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.bugs import describe_bug
from smolcluster.utils.replaced import say_what_replaces
from smolcluster.utils.stopping import STOP_ON_STDIN_EOF, signals_as_raised
from smolcluster.version import __version__

GROUPS = {
    "Run": ("launch", "train", "serve", "invite", "join", "attach", "stop", "resume"),
    "Look": (
        *("status", "top", "logs", "dashboard", "runs", "report", "compare", "trace"),
        *("observe", "ship"),
    ),
    "Machines": (
        *("init", "doctor", "advise", "plan", "diagram", "mesh", "config", "fetch", "clean"),
    ),
    "Model": ("generate", "chat", "checkpoints", "export", "merge"),
}
"""The commands as the help lists them."""


OVERWRITE = "--overwrite"
"""A flag of launches of before, which scripts may have."""


class _InGroups(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        order = list(chain.from_iterable(GROUPS.values()))
        return sorted(super().list_commands(ctx), key=order.index)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: each for name, each in found.items() if each and not each.hidden}
        limit = formatter.width - 6 - max(map(len, shown))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, shown[name].get_short_help_str(limit))
                        for name in names
                        if name in shown
                    ]
                )


app = typer.Typer(
    cls=_InGroups,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on the machines you already own, over plain TCP.",
    epilog=EXIT_CODES,
)
for part in (launching, watching, machines, models):
    app.add_typer(part.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smolcluster {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _smolcluster(
    ctx: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Without a command, show the three that fit what is here."""
    if ctx.invoked_subcommand is None:
        from smolcluster.launch.first_commands import show_first_commands  # noqa: PLC0415 - takes time

        show_first_commands()


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
    if arguments[:1] in (["launch"], ["join"], ["resume"]) and OVERWRITE in arguments:
        arguments.remove(OVERWRITE)
        sys.stderr.write(f"{OVERWRITE} has no effect: a launch replaces nothing on a machine\n")
    if arguments[:1] in (["launch"], ["train"], ["serve"]) and STOP_ON_STDIN_EOF not in arguments:
        say_what_replaces(os.environ)
    try:
        with signals_as_raised():
            code: int | None = app(args=arguments, prog_name="smolcluster", standalone_mode=False)
        sys.stdout.flush()
    except SmolclusterError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(_usage(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
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
