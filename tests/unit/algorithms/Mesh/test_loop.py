"""What the ranks of a run begin with."""

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import mesh_rank
from mesh_rank import ADAM, Case
from smolcluster.algorithms.Mesh import loop
from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import WEIGHTS, MeshTrainer
from smolcluster.configs.schema import DatasetPlace
from smolcluster.training.build import build
from smolcluster.training.loop import training_steps
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer


@pytest.fixture
def one_rank() -> Iterator[Groups]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Groups(Case({}).config.mesh, mesh_rank.CPU, Mock())
    dist.destroy_process_group()


def test_they_go_on_with_the_weights_and_moments_that_rank_0_has(
    one_rank: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MOST_SHARED", 100)  # elements, of which a parameter has more
    case = Case({}, train=ADAM)
    work, train = mesh_rank.workload(case), case.training
    training = build(train, mesh_rank.SEED, DatasetPlace(), mesh_rank.CPU, workload=work)
    steps = training_steps(training, train)
    next(steps), next(steps)
    replica, optimizer = training.replica, training.replica.optimizer
    assert isinstance(optimizer, FlatOptimizer)
    trainer = MeshTrainer(work, train, case.config, one_rank, seed=mesh_rank.SEED)
    shards = Shards(trainer, replica.layers)
    loop.share_state(trainer, shards, {WEIGHTS: replica.params, **optimizer.state})
    places = dict(replica.layers)

    def is_like(part: Tensor, name: str, whole: Tensor) -> bool:
        return torch.equal(part.flatten(), whole[places[name]])

    for number, slot in enumerate(trainer.slots):
        assert is_like(slot.local, slot.name, replica.params)
        moments = trainer.optimizer.moments(number)
        assert moments.keys() == optimizer.state.keys() - {STEP_COUNT}
        assert all(is_like(each, slot.name, optimizer.state[key]) for key, each in moments.items())
    assert trainer.optimizer.num_steps == 2
