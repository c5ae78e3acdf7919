"""A device that runs out of memory: the batch is computed again, in smaller pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness import digits_config
from peers import logger
from smolcluster.configs.schema import DatasetPlace
from smolcluster.errors import OutOfMemory
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.workload import Workload

OUT_OF_MEMORY: list[type[Exception] | Any] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    lambda: RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB)"),
    MemoryError,
]
DATA = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))


class Model(nn.Module):
    """Counts the batches that it sees, and drops some of its inputs."""

    num_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 1))
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 4) to (batch, 1)."""
        if self.training:
            self.num_seen += 1
        output: Tensor = self.layers(inputs)
        return output


class Memory:
    """A device that takes `fits` samples at once, whose loss fails after the forward pass if it has more."""

    def __init__(self, fits: int, error: Any = OUT_OF_MEMORY[0]) -> None:
        self.fits, self.error = fits, error
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        (inputs,) = batch
        self.sizes.append(len(inputs))
        total = model(inputs).square().sum()
        if len(inputs) > self.fits:
            raise self.error()
        return total, len(inputs)


def training_with(memory: Memory, **options: Any) -> tuple[TrainingContext, list[str]]:
    lines: list[str] = []
    workload = Workload(Model, memory, DATA, DATA)
    train, cpu = digits_config(batch_size=16), torch.device("cpu")
    training = build(train, 0, DatasetPlace(), cpu, workload=workload, log=logger(lines), **options)
    return training, lines


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_the_batch_is_halved_until_it_fits_and_that_is_remembered(error: Any) -> None:
    memory = Memory(4, error)
    training, lines = training_with(memory)
    indices = torch.arange(16)
    loss = training.compute(indices)
    assert memory.sizes[:6] == [16, 8, 4, 4, 4, 4]
    assert set(memory.sizes[6:]) == {1, 3, 4}, "looked at afterwards: what fits, whole and cut"
    assert training.microbatch.size == 4
    assert [line.partition(": f")[0] for line in lines] == [
        "WARNING out of memory with 16 samples at once",
        "WARNING out of memory with 8 samples at once",
    ]
    assert "from now on it is 4 (microbatch)" in lines[1]
    roomy, _ = training_with(Memory(16), microbatch=4)
    assert roomy.compute(indices) == loss
    assert torch.equal(roomy.replica.grads, training.replica.grads)
    memory.sizes.clear()
    training.compute(indices)
    assert memory.sizes[:4] == [4, 4, 4, 4], "the next batch begins with what fits"
    assert len(lines) == 2


def test_what_the_failed_attempt_did_to_buffers_is_undone() -> None:
    memory = Memory(16)
    training, _ = training_with(memory)
    training.compute(torch.arange(16))
    training.replica.buffers.find()
    memory.fits = 8
    training.compute(torch.arange(16))
    assert training.replica.model.get_buffer("num_seen") == 1 + 2, "and not 1 + 1 + 2"


def test_in_the_first_batch_as_well() -> None:
    training, _ = training_with(Memory(8))
    training.compute(torch.arange(16))
    assert training.replica.model.get_buffer("num_seen") == 2


def test_an_evaluation_is_done_with_fewer_samples_at_once() -> None:
    memory = Memory(5)
    training, lines = training_with(memory)
    evaluation = training.evaluate()
    assert memory.sizes == [16, 8, 4, 4, 4, 4, 4]
    assert evaluation == training_with(Memory(20), microbatch=4)[0].evaluate()
    assert training.microbatch.size is None
    assert len(lines) == 2


def test_where_one_sample_is_too_much_it_ends_with_one_line() -> None:
    training, _ = training_with(Memory(0))
    with pytest.raises(OutOfMemory, match=r"one sample at a time: CUDA out of memory") as caught:
        training.compute(torch.arange(16))
    assert "\n" not in str(caught.value)


def test_any_other_error_is_not_tried_again() -> None:
    memory = Memory(4, lambda: RuntimeError("shapes cannot be multiplied"))
    training, lines = training_with(memory)
    with pytest.raises(Exception, match="shapes cannot be multiplied"):
        training.compute(torch.arange(16))
    assert memory.sizes == [16]
    assert lines == []
