"""Microbatches of a stage, in one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from smolcluster.algorithms.Mesh.compute import Part, StageCompute
from smolcluster.algorithms.Mesh.config import Recompute
from smolcluster.algorithms.Mesh.parallel import seed_parts
from smolcluster.configs.schema import GPTConfig
from smolcluster.data.dataset import Place
from smolcluster.errors import UserCodeError
from smolcluster.models.gpt import GPT
from smolcluster.training.compute import autocast
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.cut import Stage

SEED = 5


def gradients(recompute: Recompute) -> Tensor:
    """Of the first of two stages that have parts of sequences: both forwards, then both backwards."""
    config = GPTConfig(
        model_dim=8, num_heads=2, num_layers=2, ff_dim=16, max_seq_len=8, dropout=0.5
    )
    torch.manual_seed(SEED)
    gpt = GPT(config, 11)
    stage = Stage(gpt, gpt.stages(), 0, 1).train()
    seeds = LayerSeeds(SEED, torch.device("cpu"), part=1)
    seed_parts(stage, seeds)
    compute = StageCompute(
        stage,
        lambda *_: torch.zeros(()),
        lambda *_: torch.zeros(()),
        seeds=seeds,
        autocast=nullcontext,
        recompute=recompute,
    )
    compute.begin(1.0)
    tokens = torch.arange(8).view(1, 8)
    outputs = [
        compute.forward(each, Part(Place(SEED, 0, each), 1, tokens), None) for each in (0, 1)
    ]
    for number, output in enumerate(outputs):
        assert output is not None
        compute.backward(number, torch.ones_like(output))
    return torch.cat([each.grad.flatten() for each in stage.parameters() if each.grad is not None])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_has_the_dropout_of_its_own_microbatch(
    recompute: Recompute,
) -> None:
    assert torch.equal(gradients(recompute), gradients("none"))


def test_a_stage_that_cannot_compute_in_fewer_bits_is_told_what_to_do() -> None:
    """As in one process."""

    class Mixing(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.zeros(1, 1).index_copy_(0, torch.zeros(1).long(), super().forward(inputs))

    model = nn.Sequential(Mixing(2, 1))
    compute = StageCompute(
        Stage(model, list(model), 0, 1),
        lambda output, _: output.sum(),
        lambda *_: torch.zeros(()),
        seeds=LayerSeeds(SEED, torch.device("cpu")),
        autocast=lambda: autocast("bf16", torch.device("cpu")),
        recompute="none",
    )
    compute.begin(1.0)
    with pytest.raises(UserCodeError, match=r"Mixing\.forward.*; precision is bf16.*x\.float\(\)"):
        compute.forward(0, Part(Place(SEED, 0, 0), 1, torch.ones(1, 2)), None)
