"""A small GPT on the bytes of tiny Shakespeare: `--workload benchmarks/shakespeare.py:workload`."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from smolcluster import Workload
from smolcluster.configs.schema import GPTConfig
from smolcluster.models.gpt import GPT, build_gpt

LENGTH = 64
"""Bytes of a sample."""
NUM_TRAINED, NUM_VALIDATED = 16_000, 512
"""Samples: the text's first, and its last."""


def workload(text: str, model_dim: int = 64, num_layers: int = 2) -> Workload:
    """Windows of the file `text`; 64 and 2 give 120,576 parameters, 192 and 4 give 1.84 million."""
    data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()
    windows = data[: (len(data) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    config = GPTConfig.model_validate(
        {
            "model_dim": model_dim,
            "num_layers": num_layers,
            "num_heads": 4,
            "ff_dim": 4 * model_dim,
            "dropout": 0.0,
            "max_seq_len": LENGTH,
        }
    )
    return Workload(
        lambda: build_gpt(config, vocab_size=256),
        loss,
        TensorDataset(windows[:NUM_TRAINED]),
        TensorDataset(windows[-NUM_VALIDATED:]),
        tokens_per_sample=LENGTH,
    )


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """Sum over the bytes that follow each one of int64 (batch, LENGTH + 1), and their number."""
    assert isinstance(model, GPT)  # noqa: S101 - for the type checker
    (windows,) = batch
    targets = windows[:, 1:]
    return model.loss(windows[:, :-1], targets), targets.numel()
