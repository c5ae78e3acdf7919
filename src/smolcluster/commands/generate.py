"""A run's language model as commands: it goes on from a prompt, or from what a person types."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console

from smolcluster.commands.checkpoints import gpt_of, saved_model
from smolcluster.configs.resolve import load_resolved
from smolcluster.data.tokenizer import Tokenizer, load_tokenizer
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.models.gpt import GPT
from smolcluster.models.sampling import sample
from smolcluster.observability.terminal import shown_text
from smolcluster.runs.paths import RunPaths

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the decoded text ends with while bytes of its last character are missing."""


@dataclass(frozen=True)
class GenerateOptions:
    """What shall be written: up to `max_tokens` tokens, chosen as `sample` does."""

    max_tokens: int
    temperature: float
    top_k: int | None
    seed: int


class Author:
    """The best language model of a run, with its tokenizer; `text` is what it goes on from.

    Raises:
        ConfigError: the run trained no language model, or a wish cannot be met.
        CheckpointError: it has no good checkpoint, or its tokenizer is another one now.
    """

    def __init__(self, run: str, options: GenerateOptions) -> None:
        paths, checkpoint = saved_model(run, best=None)
        self.run_id = paths.run_id
        self._model = gpt_of(paths, checkpoint)
        self._tokenizer = _tokenizer_of(paths, self._model)
        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)
        self._tokens = [self._tokenizer.end_of_text]

    def read(self, text: str) -> None:
        """Put text behind what has been read and written so far.

        Raises:
            ConfigError: it is no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{text!a} is not text in this terminal's encoding") from None
        self._tokens += self._tokenizer.encode_batch([text])[0].tolist()

    def write(self, *, stops_at_end: bool = False) -> Iterator[str]:
        """Go on from there, piece by piece: a character may take several tokens.

        With `stops_at_end` the end of a document ends it.
        """
        options, written, shown = self._options, list[int](), ""
        for token in sample(
            self._model,
            self._tokens,
            options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            generator=self._generator,
        ):
            if stops_at_end and token == self._tokenizer.end_of_text:
                break
            written.append(token)
            text = self._tokenizer.decode(written)
            if not text.endswith(UNFINISHED):
                yield text[len(shown) :]
                shown = text
        self._tokens += written
        yield self._tokenizer.decode(written)[len(shown) :]


def generate(run: str, prompt: str, options: GenerateOptions) -> int:
    """Write the prompt and what the run's best model makes of it; returns the exit code.

    Raises:
        ConfigError, CheckpointError: as `Author` says.
    """
    author = Author(run, options)
    author.read(prompt)
    _print("".join([prompt, *author.write(), "\n"]))
    return 0


def chat(run: str, options: GenerateOptions) -> int:
    """Let the run's best model go on from each line that is typed, until the input ends; returns 0.

    Raises:
        ConfigError, CheckpointError: as `Author` says.
    """
    author = Author(run, options)
    if sys.stdin.isatty():
        _print(f"{author.run_id} goes on from what you type. Ctrl-D ends it.\n")
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


def _tokenizer_of(paths: RunPaths, model: GPT) -> Tokenizer:
    settings = load_resolved(paths.config)
    name, vocab_size = settings.train.dataset.tokenizer, model.wte.num_embeddings
    tokenizer = load_tokenizer(name, download=settings.node.dataset.download)
    if tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"run {paths.run_id} was trained with {vocab_size} tokens, the tokenizer {name} has "
            f"{tokenizer.vocab_size} now: give it back the files that it had then"
        )
    return tokenizer
