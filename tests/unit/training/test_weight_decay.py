"""Weight decay is the matrices' alone: two groups of PyTorch's own AdamW are the reference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from computing import forward_backward
from smolcluster.configs.schema import GPTConfig
from smolcluster.models.gpt import GPT
from smolcluster.training.optimizer import FlatOptimizer
from smolcluster.training.replica import Replica

STEPS = 20
DECAY = 0.3
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-8}
"""The gradient of the keys' bias is 0 but for rounding, which Adam makes 1e-10 of."""
SIZES = GPTConfig(model_dim=16, num_layers=1, num_heads=2, ff_dim=32, max_seq_len=8, dropout=0.0)
VOCAB = 11


def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(SIZES, VOCAB).double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that decay would move biases and norms
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Reference:
    """AdamW over separate parameters, whose biases and norms are a group without decay."""

    def __init__(self, optimizer: str = "adamw") -> None:
        self.model = gpt()
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        self.optimizer = kinds[optimizer](groups, lr=1.0)

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> None:
        self.optimizer.zero_grad()
        (self.model.loss(inputs, targets) / targets.numel()).backward()  # type: ignore[no-untyped-call]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def assert_same(self, replica: Replica) -> None:
        for name, place in replica.layers:
            expected = self.model.get_parameter(name).detach().flatten()
            torch.testing.assert_close(replica.params[place], expected, **CLOSE, msg=name)


def batches() -> Iterator[tuple[Tensor, Tensor, float]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(0, VOCAB, (3, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:], 0.01 * (1 + step % 3)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_training_equals_pytorchs_optimizer_with_two_groups(optimizer: str) -> None:
    replica, reference = Replica(gpt(), optimizer, weight_decay=DECAY), Reference(optimizer)
    for inputs, targets, rate in batches():
        forward_backward(replica, inputs, targets)
        replica.step(rate)
        reference.step(inputs, targets, rate)
    reference.assert_same(replica)


def test_matrices_come_first_in_the_flat_tensors() -> None:
    replica = Replica(gpt(), "adamw", weight_decay=DECAY)
    dims = [replica.model.get_parameter(name).ndim for name, _ in replica.layers]
    assert dims == sorted(dims, reverse=True)
    assert set(dims) == {1, 2}


def test_with_a_gradient_of_zero_only_the_matrices_shrink() -> None:
    replica = Replica(gpt(), "adamw", weight_decay=DECAY)
    before = replica.snapshot()
    replica.grads.zero_()
    replica.step(0.1)
    for name, place in replica.layers:
        factor = 1 - 0.1 * DECAY if replica.model.get_parameter(name).ndim > 1 else 1.0
        torch.testing.assert_close(replica.params[place], before[place] * factor, msg=name)


@pytest.mark.parametrize("num_decayed", range(7))
@pytest.mark.parametrize("start", range(6))
def test_a_border_may_lie_anywhere_in_a_piece(num_decayed: int, start: int) -> None:
    params = torch.ones(6, dtype=torch.float64)
    optimizer = FlatOptimizer("adamw", params, torch.zeros_like(params), 0.5, num_decayed)
    zeros = torch.zeros(6, dtype=torch.float64)
    for place in (slice(0, start), slice(start, 6)):
        optimizer.part(place).step_with(zeros[place], 0.1)
    expected = [0.95 if index < num_decayed else 1.0 for index in range(6)]
    assert params.tolist() == pytest.approx(expected)
