"""What is said of a model, or a loss, that keeps in attributes what nobody else knows."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.training.attributes import AttributeCheck
from smolcluster.training.build import TrainingContext
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction, Workload

ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).unbind()


class Model(nn.Module):
    """Counts its batches, keeps their running mean and its last output; `uses` is what it computes with."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.out, self.uses = nn.Linear(6, 1), uses
        self.num_batches, self.mean = 0, torch.zeros(6)
        self.last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.num_batches += 1
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0) + 1
        if self.uses == "mean":
            inputs = inputs - self.mean
        out: Tensor = self.out(inputs)
        if self.uses == "num_batches":
            out = out * 0.9**self.num_batches
        self.last = out
        return out


class Growing:
    """A loss whose second term weighs more with each batch."""

    def __init__(self) -> None:
        self.weight = 0.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.weight += 0.1
        return square(model, batch) * (1 + self.weight)


def following() -> LossFunction:
    """Of a teacher that follows the model."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        teacher = nn.Linear(6, 1).requires_grad_(False)

    def loss(model: Any, batch: Any) -> Tensor:
        if model.training:
            with torch.no_grad():
                for own, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                    own.lerp_(theirs, 0.5)
        return functional.mse_loss(model(batch), teacher(batch))

    return loss


def square(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch), torch.ones(len(batch), 1))


def training(make: Callable[[], nn.Module], loss: LossFunction) -> TrainingContext:
    torch.manual_seed(0)
    workload = Workload(make, loss, ROWS)
    replica = Replica(workload.new_model(), "sgd")
    check = AttributeCheck(replica, loss, logging.getLogger("smolcluster.test"))
    return TrainingContext(workload, replica, 1, attributes=check)


@pytest.mark.parametrize(
    ("uses", "loss", "named"),
    [
        ("mean", square, "(mean)"),
        ("num_batches", square, "(num_batches)"),
        ("nothing", square, None),
        ("nothing", Growing(), "(loss.weight)"),
        ("nothing", following(), "(loss.weight, loss.bias)"),
    ],
    ids=["a running mean", "a count", "to no effect", "a loss's own", "a teacher"],
)
def test_attributes_that_a_loss_depends_on_are_named_once(
    uses: str, loss: LossFunction, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    context = training(partial(Model, uses), loss)
    before = None
    for _ in range(4):
        context.compute(context.order(0))
        before = dict(vars(context.replica.model))
        context.examine(partial(context.few, context.order(0), 0, 0))
        assert vars(context.replica.model) == before, "looking changes nothing"
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == (named is not None)
    assert all(named in each and "register_buffer" in each for each in told if named)
