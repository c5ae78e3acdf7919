"""A run's language model as commands: it goes on from a prompt, or from what a person types."""

import sys

from rich.console import Console

from smolcluster.launch.language_model import Author, GenerateOptions, LanguageModel
from smolcluster.observability.terminal import shown_text


def generate(run: str, prompt: str, options: GenerateOptions) -> int:
    """Write the prompt and what the run's best model makes of it; returns the exit code.

    Raises:
        ConfigError, CheckpointError: as `LanguageModel` and `Author` say.
    """
    author = Author(LanguageModel(run), options)
    author.read(prompt)
    _print("".join([prompt, *author.write(), "\n"]))
    return 0


def chat(run: str, options: GenerateOptions) -> int:
    """Let the run's best model go on from each line that is typed, until the input ends; returns 0.

    Raises:
        ConfigError, CheckpointError: as `LanguageModel` and `Author` say.
    """
    model = LanguageModel(run)
    author = Author(model, options)
    if sys.stdin.isatty():
        _print(f"{model.run_id} goes on from what you type. Ctrl-D ends it.\n")
    while (line := _typed()) is not None:
        author.read(f"{line}\n")
        for piece in author.write(stops_at_end=True):
            _print(piece)
        _print("\n")
        author.read("\n")
    return 0


def _typed() -> str | None:
    """The next line of the input; None: there is none."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _print(text: str) -> None:
    # A model may write what moves a terminal's cursor, or more.
    if sys.stdout.isatty():
        lines = text.split("\n")
        text = "\n".join(shown_text(Console(), line).plain for line in lines)
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
