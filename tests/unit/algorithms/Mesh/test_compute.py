"""Microbatches of a stage of a mesh, in one process."""

import pytest
import torch
from torch import Tensor

from smolcluster.algorithms.Mesh.compute import adding_up, stage_compute
from smolcluster.algorithms.Mesh.config import config_of
from smolcluster.algorithms.Mesh.parallel import seed_parts
from smolcluster.configs.schema import GPTConfig
from smolcluster.data.dataset import Place
from smolcluster.models.gpt import GPT
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.cut import Stage
from smolcluster.training.workload import Workload

SEED = 5
SIZES = GPTConfig(model_dim=8, num_heads=2, num_layers=2, ff_dim=16, max_seq_len=8, dropout=0.5)


def gradients(recompute: str) -> Tensor:
    """Of the first of two stages that have parts of sequences: both forwards, then both backwards."""
    torch.manual_seed(SEED)
    gpt = GPT(SIZES, 11)
    stage = Stage(gpt, gpt.stages(), 0, 1).train()
    seeds = LayerSeeds(SEED, torch.device("cpu"), part=1)
    seed_parts(stage, seeds)
    workload = Workload(lambda: gpt, cross_entropy, [(torch.zeros(8), 0)])
    config = config_of({"activation_checkpointing": recompute})
    compute = stage_compute(stage, workload, seeds, config, "fp32")
    batch = torch.arange(8).view(1, 8), torch.zeros(1, 8).long()
    with adding_up(stage):
        outputs = [compute.forward(each, Place(SEED, 0, each), None, batch) for each in (0, 1)]
        for number, output in enumerate(outputs):
            assert not torch.equal(output, outputs[1 - number])
            compute.backward(number, [torch.ones_like(output)])
    return torch.cat([each.grad.flatten() for each in stage.parameters() if each.grad is not None])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_has_the_dropout_of_its_own_microbatch(recompute: str) -> None:
    assert torch.equal(gradients(recompute), gradients("none"))
