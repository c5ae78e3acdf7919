"""A run's language model as a command: it goes on from a prompt."""

import sys
from dataclasses import dataclass

import torch
from rich.console import Console

from smolcluster.configs.resolve import load_resolved
from smolcluster.data.tokenizer import Tokenizer, load_tokenizer
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.launch.saved import gpt_of, store_of
from smolcluster.launch.watch.fetch import brought
from smolcluster.models.gpt import GPT
from smolcluster.models.sampling import sample
from smolcluster.observability.terminal import shown_text
from smolcluster.runs.paths import RunPaths


@dataclass(frozen=True)
class GenerateOptions:
    """What shall be written: up to `max_tokens` tokens after `prompt`, chosen as `sample` does."""

    prompt: str
    max_tokens: int
    temperature: float
    top_k: int | None
    seed: int


def generate(run: str, options: GenerateOptions) -> int:
    """Write the prompt and what the run's best model makes of it; returns the exit code.

    Raises:
        ConfigError: the run trained no language model, or a wish cannot be met.
        CheckpointError: it has no good checkpoint, or its tokenizer is another one now.
    """
    paths = brought(run, checkpoints=True)
    store = store_of(paths)
    checkpoint = store.best() or store.newest_good()
    if checkpoint is None:
        raise CheckpointError(f"run {paths.run_id} has no good checkpoint in {paths.checkpoints}")
    model = gpt_of(paths, checkpoint)
    tokenizer = _tokenizer_of(paths, model)
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not text in this terminal's encoding") from None
    tokens = [tokenizer.end_of_text, *tokenizer.encode_batch([options.prompt])[0].tolist()]
    written = sample(
        model,
        tokens,
        options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=torch.Generator().manual_seed(options.seed),
    )
    text = options.prompt + tokenizer.decode(list(written)) + "\n"
    # A model may write what moves a terminal's cursor, or more.
    if sys.stdout.isatty():
        text = shown_text(Console(), text).plain + "\n"
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    return 0


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
