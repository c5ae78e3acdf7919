"""A causal language model of transformers trained on text: a workload that a training file can name.

workload: smolcluster.training.finetune:workload
workload_args: {folder: ~/models/llama, text: ~/books, lora_rank: 16}
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.corpus import load_corpus
from smolcluster.data.dataset import Batch
from smolcluster.errors import ConfigError
from smolcluster.training.builtin import EVAL_TOKENS, cross_entropy_of, perplexity
from smolcluster.training.pretrained import Pretrained
from smolcluster.training.workload import OfLoss, Terms, Workload

NUM_RANDOM = 1024
"""Samples of random tokens: as many as any batch that is planned for."""


def workload(
    *,
    folder: str,
    text: str,
    length: int = 256,
    lora_rank: int = 8,
    lora_alpha: float | None = None,
    lora_targets: list[str] | None = None,
    lora_dropout: float = 0.0,
    dtype: str | None = None,
    four_bit: bool = False,
) -> Workload:
    """Fine-tune the language model in `folder` on a text file, or on all files below a folder.

    Args:
        folder: of the model and its tokenizer.
        text: what is trained on; its last tenth, or some of its files, are held out.
        length: tokens a sample.
        lora_rank: of the adapters; 0: all weights are trained.
        lora_alpha: the adapters' scale times their rank; None: twice the rank.
        lora_targets: names of modules that get adapters; None: peft's choice for the architecture.
        lora_dropout: of what the adapters are given.
        dtype: of the model's weights, such as bfloat16; None: as the folder says.
        four_bit: keep the frozen matrices in 4 bits, on CUDA.

    Raises:
        ConfigError: the folder or the adapters cannot be used.
        DataError: the text or the tokenizer cannot be used.
    """
    lora = lora_config(lora_rank, lora_alpha, lora_targets, lora_dropout) if lora_rank else None
    model = Pretrained(folder, lora=lora, dtype=dtype, four_bit=four_bit)
    dataset = DatasetConfig(name="text", root=Path(text).expanduser(), tokenizer=str(model.folder))
    data = load_corpus(dataset, length, logging.getLogger(__name__))
    return Workload(
        model,
        next_token_loss,
        data.train,
        data.validation,
        fingerprint=data.fingerprint,
        metrics={"perplexity": OfLoss(perplexity)},
        tokens_per_sample=length,
        vocab_size=data.num_classes,
        eval_batch_size=max(1, EVAL_TOKENS // length),
    )


def model_alone(
    *,
    folder: str,
    length: int = 256,
    lora_rank: int = 8,
    lora_targets: list[str] | None = None,
    dtype: str | None = None,
    four_bit: bool = False,
) -> Workload:
    """The same model with random tokens, which take as long: what `smolcluster plan --model` measures.

    Raises:
        ConfigError: the folder or the adapters cannot be used.
    """
    lora = lora_config(lora_rank, None, lora_targets, 0.0) if lora_rank else None
    model = Pretrained(folder, lora=lora, dtype=dtype, four_bit=four_bit)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (NUM_RANDOM, length + 1), generator=generator)
    samples = [(each[:-1], each[1:]) for each in tokens]
    return Workload(
        model,
        next_token_loss,
        samples,
        tokens_per_sample=length,
        vocab_size=model.vocab_size,
    )


def lora_config(rank: int, alpha: float | None, targets: list[str] | None, dropout: float) -> Any:
    """peft's configuration of adapters for a causal language model.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig  # noqa: PLC0415 - optional
    except ImportError:
        raise ConfigError("LoRA needs the package peft: uv pip install peft") from None
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
    )


def next_token_loss(model: nn.Module, batch: Batch) -> Terms:
    """Cross-entropy of each next token, summed, and their number.

    Args:
        model: a causal language model of transformers.
        batch: inputs and targets, both (batch, seq).
    """
    inputs, targets = batch
    return cross_entropy_of(model(input_ids=inputs).logits, targets)
