"""A rank that is out of memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.errors import OutOfMemory


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "CUDA out of memory"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_rank_that_is_out_of_memory_is_named_with_what_takes_less(
    error: Exception, words: str
) -> None:
    sizes = SimpleNamespace(num_shares=2)
    trainer: Any = SimpleNamespace(
        _train=SimpleNamespace(samples_per_step=8),
        _config=MeshConfig.model_validate({}),
        groups=SimpleNamespace(device="cpu", rank=1, sizes=sizes),
    )
    expected = rf"cpu of rank 1 is out of memory: {words}; .*take more ranks along"
    with pytest.raises(OutOfMemory, match=expected), MeshTrainer._memory_named(trainer):
        raise error
