"""A part of a model has the initial weights of the whole, and nothing else is made."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from smolcluster.configs.schema import GPTConfig
from smolcluster.models.gpt import GPT
from smolcluster.training.stages.recording import CannotRecord, recording


def many() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.Conv2d(3, 4, 3), nn.LSTM(5, 6), nn.MultiheadAttention(16, 4)
    )


def initialised() -> nn.Module:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9)]
    nn.init.orthogonal_(layers[2].weight)
    nn.init.trunc_normal_(layers[0].weight)
    nn.init.sparse_(layers[1].weight, 0.5)
    return nn.Sequential(*layers)


def derived() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9))
    model[1].register_buffer("frequencies", 1.0 / (10 ** (torch.arange(0, 8, 2) / 8)))
    model[1].weight.data = torch.randn(8, 9).t() * 2
    return model


def gpt() -> nn.Module:
    return GPT(GPTConfig(type="GPT", model_dim=16, num_layers=4, num_heads=2, max_seq_len=8), 11)


def seeded() -> nn.Module:
    first = nn.Linear(8, 8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        frozen = [nn.Linear(8, 8), nn.Linear(8, 8)]
    behind = nn.Linear(8, 8)
    own = torch.Generator().manual_seed(7)
    nn.init.normal_(behind.weight, generator=own)
    nn.init.trunc_normal_(behind.bias, generator=own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(first, *frozen, behind, nn.Linear(8, 9))


def rounded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9))
    model[1].weight.data = model[1].weight.data.to(torch.bfloat16).to(torch.float32)
    return model


@pytest.mark.parametrize("make", [many, initialised, derived, gpt, seeded, rounded])
def test_a_part_has_the_weights_of_the_whole(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    whole = make()
    after = torch.rand(2)
    torch.manual_seed(3)
    with recording() as tape:
        model = make()
    part = list(model.children())[1:]
    tape.fill(part)
    assert torch.equal(torch.rand(2), after)  # the generator is where it would have been
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    made = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "cpu":
            assert torch.equal(tensor, values[name])
            made += 1
    assert 0 < made < len(values)
    assert not any(tensor.is_meta for each in part for tensor in each.parameters())


def test_what_is_not_wanted_takes_no_memory() -> None:
    with recording() as tape:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    assert all(each.is_meta for each in model.parameters())
    tape.fill([model[0]])
    assert [each.is_meta for each in model.parameters()] == [False] * 2 + [True] * 14


def test_values_that_meta_drops_are_no_silent_zeros() -> None:
    with recording() as tape:
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.empty(2, 2))
    with pytest.raises(CannotRecord):
        tape.fill([model])
