"""A run's language model: read from a checkpoint, it goes on from a text."""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

import torch
from psutil import virtual_memory

from smolcluster.configs.resolve import load_resolved
from smolcluster.configs.schema import GPTConfig
from smolcluster.data.tokenizer import Tokenizer, load_tokenizer
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.launch.saved import store_of
from smolcluster.launch.watch.fetch import brought
from smolcluster.models.gpt import GPT
from smolcluster.models.sampling import sample
from smolcluster.runs.paths import RunPaths
from smolcluster.training.checkpoint import LATEST, Checkpoint, evaluated
from smolcluster.utils.units import format_bytes

EMBEDDING = "wte.weight"
"""Its rows are the vocabulary."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the decoded text ends with while bytes of its last character are missing."""


@dataclass(frozen=True)
class GenerateOptions:
    """What shall be written: up to `max_tokens` tokens, chosen as `sample` does."""

    max_tokens: int
    temperature: float
    top_k: int | None
    seed: int


class LanguageModel:
    """The language model of a run's checkpoint in evaluation mode, with its tokenizer.

    Attributes:
        step: of the checkpoint.

    Raises:
        ConfigError: the run trained no language model.
        CheckpointError: it has no good checkpoint, there is too little memory for it, or its tokenizer is
            another one now.
    """

    def __init__(self, run: str, *, best: bool | None = None) -> None:
        """Read it; `best`: see `saved_model`."""
        paths, checkpoint = saved_model(run, best=best)
        self.run_id, self.step = paths.run_id, checkpoint.state.step
        self.gpt = gpt_of(paths, checkpoint)
        self.tokenizer = _tokenizer_of(paths, self.gpt)


class Author:
    """Writes with a language model, from what it has read and written so far.

    Raises:
        ConfigError: a wish cannot be met.
    """

    def __init__(self, model: LanguageModel, options: GenerateOptions) -> None:
        self._model = model.gpt
        self._tokenizer = model.tokenizer
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

    def write(self, *, stops_at_end: bool = False) -> Generator[str]:
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


def saved_model(run: str, *, best: bool | None) -> tuple[RunPaths, Checkpoint]:
    """A run, brought here if need be, and its best checkpoint or its newest good one.

    None: the best, or the newest where no one has a validation loss.

    Raises:
        CheckpointError: there is none, or too little memory for it.
    """
    paths = brought(run, checkpoints=True)
    _check_memory(paths)
    store = store_of(paths)
    checkpoint = store.newest_good() if best is False else store.best()
    checkpoint = checkpoint or (store.newest_good() if best is None else None)
    if checkpoint is None:
        kind = "good checkpoint with a validation loss" if best else "good checkpoint"
        raise CheckpointError(f"run {paths.run_id} has no {kind} in {paths.checkpoints}")
    return paths, checkpoint


def _check_memory(paths: RunPaths) -> None:
    """A run's checkpoints are all about as large as its latest, and are read whole."""
    nbytes = 0
    with suppress(FileNotFoundError):  # a server has deleted it meanwhile
        nbytes = sum(file.stat().st_size for file in (paths.checkpoints / LATEST).glob("*"))
    free_nbytes = virtual_memory().available
    if nbytes > free_nbytes:
        raise CheckpointError(
            f"a checkpoint of run {paths.run_id} takes {format_bytes(nbytes)} of memory, and "
            f"{format_bytes(free_nbytes)} are free: end what else runs here"
        )


def gpt_config(paths: RunPaths) -> GPTConfig:
    """The sizes of the language model that a run trained.

    Raises:
        ConfigError: it trained none.
    """
    train = load_resolved(paths.config).train
    if train.workload is not None:
        raise ConfigError(
            f"run {paths.run_id} trained the workload {train.workload_label}, which is no GPT of ours"
        )
    config = train.model
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"run {paths.run_id} trained a {config.type}, which is no language model")
    return config


def gpt_of(paths: RunPaths, checkpoint: Checkpoint) -> GPT:
    """The language model of a checkpoint with the weights that the run evaluates, in evaluation mode.

    Raises:
        ConfigError: it is none.
        CheckpointError: its tensors are not those of the run's configuration.
    """
    config = gpt_config(paths)
    try:
        model = GPT(config, len(checkpoint.model[EMBEDDING]))
        model.load_state_dict(dict(evaluated(checkpoint)))
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path} is of another model: {reason}") from error
    return model.eval()


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
