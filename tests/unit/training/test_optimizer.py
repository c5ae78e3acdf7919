import pytest
import torch

from smolcluster.configs.schema import FLAT_OPTIMIZERS
from smolcluster.errors import ConfigError
from smolcluster.training import optimizer
from smolcluster.training.optimizer import FlatOptimizer

WEIGHTS = torch.linspace(-1, 1, 50)


def gradient(step: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(step))


def train(rule: FlatOptimizer, grads: torch.Tensor, steps: range) -> None:
    for step in steps:
        grads.copy_(gradient(step))
        rule.step(0.01)


@pytest.mark.parametrize("name", FLAT_OPTIMIZERS)
def test_a_device_without_fused_kernels_takes_the_same_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain, grads = WEIGHTS.clone(), WEIGHTS.clone(), torch.zeros(50)
    train(FlatOptimizer(name, fused, grads, 0.1), grads, range(20))
    monkeypatch.setattr(optimizer, "FUSED_DEVICES", frozenset())
    train(FlatOptimizer(name, plain, grads, 0.1), grads, range(20))

    torch.testing.assert_close(fused, plain)
    assert not torch.equal(fused, WEIGHTS)


@pytest.mark.parametrize("name", FLAT_OPTIMIZERS)
def test_only_the_first_weights_decay_however_the_gradient_is_cut(name: str) -> None:
    found, grads = WEIGHTS.clone(), gradient(1)
    rule = FlatOptimizer(name, found, grads, 0.1, num_decayed=20)
    rule.step(0.01)
    parts = []
    for place, decay in ((slice(0, 20), 0.1), (slice(20, 50), 0.0)):
        part = WEIGHTS[place].clone()
        FlatOptimizer(name, part, grads[place], decay).step(0.01)
        parts.append(part)
    assert torch.equal(found, torch.cat(parts))

    for places in ((slice(0, 7), slice(7, 31), slice(31, 50)), (slice(0, 20), slice(20, 50))):
        cut = WEIGHTS.clone()
        again = FlatOptimizer(name, cut, grads, 0.1, num_decayed=20)
        for rule_of_part in [again.part(place) for place in places]:
            rule_of_part.step(0.01)
        torch.testing.assert_close(cut, found)
        for key, tensor in rule.state.items():
            torch.testing.assert_close(again.state[key], tensor)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer is 'lion', allowed: adam, adamw, sgd"):
        FlatOptimizer("lion", WEIGHTS.clone(), torch.zeros(50), 0.0)
