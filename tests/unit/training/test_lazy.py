"""Lazy modules get their shapes from the first samples, or one sentence says that they have none."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from smolcluster.data.dataset import Elsewhere
from smolcluster.errors import ConfigError
from smolcluster.server.offering import Plan
from smolcluster.training.lazy import give_shapes, without_shape
from smolcluster.training.stages.build import outline
from smolcluster.training.workload import Workload
from smolcluster.utils.isolated_rng import forked_rng

SEED = 3


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0])[:, 0], batch[1])


def lazy(last: nn.Module | None = None) -> Workload:
    inputs = torch.randn(8, 6)

    def model() -> nn.Module:
        layers = nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Dropout(), nn.LazyLinear(1)
        return nn.Sequential(*layers, *([last] if last is not None else []))

    return Workload(model, loss, TensorDataset(inputs, inputs.sum(1)))


def made(workload: Workload) -> nn.Module:
    with forked_rng():
        torch.manual_seed(SEED)
        model = workload.new_model()
        give_shapes(model, workload, SEED)
    return model


def test_the_first_samples_give_shapes_and_the_seed_gives_weights() -> None:
    first, second = made(lazy()), made(lazy())
    assert first.get_parameter("0.weight").shape == (4, 6)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert first.get_buffer("1.running_mean").abs().sum() == 0, "nothing is trained"
    assert first.training


def test_a_lazy_module_that_nobody_calls_is_named() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.LazyLinear(2)

        def forward(self, value: Tensor) -> Tensor:
            return value

    with pytest.raises(ConfigError, match=r"4\.never\.weight has no shape"):
        made(lazy(Unused()))


def test_who_has_no_samples_or_makes_no_whole_model_refuses_in_one_sentence() -> None:
    workload = lazy()
    with pytest.raises(ConfigError, match="call the model once on an example"):
        outline(workload)
    with pytest.raises(ConfigError, match="call the model once on an example"):
        Plan.of(workload.new_model(), 8, is_counted=False)
    workload.train = Elsewhere(8)
    with pytest.raises(ConfigError, match="call the model once on an example"):
        made(workload)


def test_a_model_without_lazy_modules_is_left_alone() -> None:
    assert without_shape(nn.Linear(2, 1)) is None
