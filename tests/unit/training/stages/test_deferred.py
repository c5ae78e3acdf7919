"""A backward in two halves equals one in one piece, and computes nothing twice."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from smolcluster.training.stages.deferred import backward_input

ran: Counter[str] = Counter()


class Counted(torch.autograd.Function):
    """The identity, which counts its backward passes by name."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ran[ctx.name] += 1
        return gradient, None


class CountedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, value: Tensor) -> Any:
        return Counted.apply(value, "input") @ Counted.apply(self.weight, "weight")


class Shared(nn.Module):
    """A layer that is used twice, between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, value: Tensor) -> Any:
        value = torch.tanh(self.twice(self.first(value)))
        return self.last(self.twice(value))


class TwoOutputs(nn.Module):
    """A hidden state, and an auxiliary loss that depends on weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(value) * self.router(value).mean(), self.router.weight.square().sum()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, value: Tensor) -> Any:
        return checkpoint(self.block, value, use_reentrant=False)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def entering(output: Any) -> list[tuple[GradientEdge, Tensor]]:
    outputs = output if isinstance(output, tuple) else (output,)
    generator = torch.Generator().manual_seed(1)
    return [
        (get_gradient_edge(each), torch.randn(each.shape, generator=generator)) for each in outputs
    ]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        encoder,
        Shared,
        TwoOutputs,
        Recomputed,
        lambda: nn.Sequential(*map(nn.Linear, [4] * 3, [4] * 3)),
    ],
)
def test_both_halves_together_are_a_backward(make: Any, *, is_first: bool) -> None:
    torch.manual_seed(0)
    stage = make()
    value = torch.randn(3, 2, 4, requires_grad=not is_first)
    for edge, gradient in entering(stage(value)):
        torch.autograd.backward([edge], [gradient], retain_graph=True)
    expected = [2 * each.grad for each in stage.parameters()]
    expected_input = value.grad
    inputs = [] if is_first else [value.detach().requires_grad_()]
    stage.zero_grad()
    for _ in range(2):  # gradients add up in place
        pairs = entering(stage(*inputs or [value]))
        kept = [each.grad for each in stage.parameters()]
        found, deferred = backward_input(pairs, inputs, list(stage.parameters()))
        if not is_first:
            assert expected_input is not None
            torch.testing.assert_close(found[0], expected_input)
        deferred.run()
        assert all(a is None or a is b.grad for a, b in zip(kept, stage.parameters(), strict=True))
    for parameter, gradient in zip(stage.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_nothing_is_computed_twice() -> None:
    ran.clear()
    stage = nn.Sequential(*(CountedLayer() for _ in range(3)))
    value = torch.randn(2, 4, requires_grad=True)
    _, deferred = backward_input(entering(stage(value)), [value], list(stage.parameters()))
    assert ran == {"input": 3}
    deferred.run()
    assert ran == {"input": 3, "weight": 3}


def test_an_input_that_nothing_depends_on_has_no_gradient() -> None:
    stage, unused = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    value = torch.ones(2, 4, requires_grad=True)
    pairs = entering(stage(value))
    found, _ = backward_input(pairs, [value, unused], list(stage.parameters()))
    assert found[0] is not None
    assert found[1] is None
