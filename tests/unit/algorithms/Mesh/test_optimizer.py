"""The rules of a mesh's rank: each steps its parts as one process does, and its state goes and comes back."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.algorithms.Mesh.optimizer import MeshOptimizer
from smolcluster.algorithms.Mesh.parallel import Slot
from smolcluster.configs.schema import GradientClipping, MeshSizes
from smolcluster.training.muon import Split
from smolcluster.training.recipe import OptimizerSpec

RATE, DECAY = 0.01, 0.1
SHAPES = {"matrix": (4, 6), "embedding": (5, 3), "bias": (7,)}
UNCLIPPED = GradientClipping(enabled=False)
SPECS = [
    OptimizerSpec("adamw"),
    OptimizerSpec("adam"),
    OptimizerSpec("sgd", {"momentum": 0.9}),
    OptimizerSpec("sgd"),
    OptimizerSpec("muon", {"momentum": 0.9}, split=Split(frozenset({"matrix"}))),
]


def slots() -> list[Slot]:
    generator = torch.Generator().manual_seed(9)
    return [
        Slot(name, nn.Parameter(torch.randn(shape, generator=generator)), shape)
        for name, shape in SHAPES.items()
    ]


def optimizer_of(spec: OptimizerSpec, own: list[Slot]) -> MeshOptimizer:
    groups = SimpleNamespace(sizes=MeshSizes(), total=lambda *values: list(values))
    return MeshOptimizer(own, spec, DECAY, cast("Groups", groups))


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def train(optimizer: MeshOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.step(gradients(step), 1.0, UNCLIPPED, RATE)


def weights(own: list[Slot]) -> list[Tensor]:
    return [slot.local for slot in own]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_goes_on_with_a_state_that_was_given_back(spec: OptimizerSpec) -> None:
    whole, resumed = slots(), slots()
    one, other = optimizer_of(spec, whole), optimizer_of(spec, resumed)
    train(one, range(4))
    train(other, range(2))  # leaves nothing behind
    for mine, its in zip(weights(resumed), weights(whole), strict=True):
        mine.copy_(its)
    kept = [{name: each.clone() for name, each in one.moments(i).items()} for i in range(3)]
    assert all(tuple(each) == tuple(one.moment_names) for each in kept)
    other.resume(kept, one.num_steps)
    train(one, range(4, 8))
    train(other, range(4, 8))
    assert all(map(torch.equal, weights(whole), weights(resumed)))
    assert other.num_steps == 8


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_empty_state_begins_anew(spec: OptimizerSpec) -> None:
    one, two = slots(), slots()
    first, second = optimizer_of(spec, one), optimizer_of(spec, two)
    train(first, range(3))
    for mine, its in zip(weights(one), weights(two), strict=True):
        mine.copy_(its)
    first.resume([{} for _ in one], 0)
    train(first, range(3))
    train(second, range(3))
    assert all(map(torch.equal, weights(one), weights(two)))


def test_the_norm_of_a_gradient_that_has_grown_out_of_bounds_is_infinite() -> None:
    own = [Slot("weight", nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)), (2, 2))]
    optimizer = optimizer_of(OptimizerSpec("sgd"), own)
    assert optimizer.norm([torch.full((2, 2), 3.0, dtype=torch.float64)]) == 6
    assert optimizer.norm([torch.full((2, 2), 1e200, dtype=torch.float64)]) == math.inf
