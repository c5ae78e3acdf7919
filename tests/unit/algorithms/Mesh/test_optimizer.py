"""The rules of a mesh's rank: their state goes out and comes back by name."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from smolcluster.algorithms.Mesh.optimizer import MeshOptimizer, MuonRule
from smolcluster.algorithms.Mesh.parallel import Slot
from smolcluster.configs.schema import GradientClipping
from smolcluster.training.recipe import OptimizerSpec

RATE = 0.01


def rule_of(weights: list[nn.Parameter]) -> MuonRule:
    matrix, embedding, bias = weights
    groups = [
        {"params": [matrix], "weight_decay": 0.1, "is_muon": True},
        {"params": [embedding], "weight_decay": 0.1},
        {"params": [bias]},
    ]
    return MuonRule(groups, {"momentum": 0.9})


def train(rule: MuonRule, weights: list[nn.Parameter], steps: range) -> None:
    for group in rule.param_groups:
        group["lr"] = RATE
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for each in weights:
            each.grad = torch.randn(each.shape, generator=generator)
        rule.step()


def fresh() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(9)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 6), (5, 3), 7)]


def test_it_goes_on_with_a_state_that_was_given_back() -> None:
    whole, resumed = fresh(), fresh()
    one, other = rule_of(whole), rule_of(resumed)
    train(one, whole, range(4))
    train(other, resumed, range(2))  # leaves nothing behind
    for mine, its in zip(resumed, whole, strict=True):
        mine.data.copy_(its.data)
        kept: dict[str, Tensor] = {
            name: each.clone() for name, each in one.state[its].items() if name != "step"
        }
        other.state[mine] = kept | {"step": torch.tensor(4.0)}
    train(one, whole, range(4, 8))
    train(other, resumed, range(4, 8))
    assert all(map(torch.equal, whole, resumed))


def test_an_empty_state_begins_anew() -> None:
    one, two = fresh(), fresh()
    first, second = rule_of(one), rule_of(two)
    train(first, one, range(3))
    for mine, its in zip(one, two, strict=True):
        mine.data.copy_(its.data)
        first.state[mine] = {}
    train(first, one, range(3))
    train(second, two, range(3))
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize(
    ("kind", "arguments"), [("adam", {}), ("adamw", {}), ("sgd", {"momentum": 0.9}), ("sgd", {})]
)
def test_a_rank_goes_on_as_if_it_had_not_been_interrupted(
    kind: str, arguments: dict[str, float]
) -> None:
    def made(weights: list[nn.Parameter]) -> MeshOptimizer:
        slots = [Slot(str(n), each, tuple(each.shape)) for n, each in enumerate(weights)]
        return MeshOptimizer(slots, OptimizerSpec(kind, arguments), 0.1, Mock())

    def step(rule: MeshOptimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        gradients = [torch.randn(slot.shape, generator=generator) for slot in rule.slots]
        rule.step(gradients, 1.0, GradientClipping(enabled=False), RATE)

    whole, resumed = fresh(), fresh()
    one, other = made(whole), made(resumed)
    for number in range(4):
        step(one, number)
    for mine, its in zip(resumed, whole, strict=True):
        mine.data.copy_(its.data)
    other.resume([one.moments(place) for place in range(len(whole))], one.num_steps)
    for number in range(4, 8):
        step(one, number)
        step(other, number)
    assert all(map(torch.equal, whole, resumed))
    assert other.num_steps == 8
