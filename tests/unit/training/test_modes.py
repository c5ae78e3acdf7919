"""A user's model is moved and put into its modes by methods that it may have overridden."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.training.build import TrainingContext
from smolcluster.training.modes import begin_training, evaluating, move
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.norm, self.last = nn.BatchNorm1d(2), nn.Linear(2, 1)


class FrozenNorm(Net):
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.norm.eval()


class Beginner(Net):
    def train(self, loader: Any, epochs: int) -> float:  # type: ignore[override]
        raise AssertionError(loader, epochs)


class Fails(Net):
    def train(self, mode: bool = True) -> "Fails":  # noqa: ARG002
        raise KeyError("phase")


def test_an_override_of_train_is_respected_and_what_it_returns_ignored() -> None:
    net = FrozenNorm()
    begin_training(net)
    assert (net.training, net.body.training, net.norm.training) == (True, True, False)
    with evaluating(net):
        assert not net.body.training
    assert (net.body.training, net.norm.training) == (True, False)


def test_a_method_called_train_that_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Beginner\.train needs arguments"):
        begin_training(Beginner())


def test_an_exception_of_train_is_the_users() -> None:
    with pytest.raises(UserCodeError, match="KeyError"):
        begin_training(Fails())


@pytest.mark.parametrize(
    ("rest", "resting"),
    [
        (lambda net: net.norm.eval(), ["norm"]),
        (lambda net: net.body.eval().requires_grad_(False), ["body"]),
        (lambda net: net.body.eval(), []),
        (lambda net: net.eval(), []),
    ],
    ids=["a norm", "a frozen backbone", "a trained part, as it was loaded", "all"],
)
def test_what_is_meant_to_be_in_evaluation_mode_stays_in_it(
    rest: Callable[[Net], object], resting: list[str]
) -> None:
    net = Net()
    rest(net)
    assert begin_training(net) == resting
    for name, child in net.named_children():
        assert child.training == (name not in resting)


class MovesNothing(Net):
    def to(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        return None


def test_what_to_returns_is_ignored_and_it_has_to_move_the_module() -> None:
    move(MovesNothing(), CPU)
    with pytest.raises(ConfigError, match=r"body\.0\.weight is on cpu after MovesNothing\.to"):
        move(MovesNothing(), torch.device("meta"))


class Silent(nn.Linear):
    """Overrides methods as old code does: they return nothing, and take what they took once."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def to(self, *where: Any, **told: Any) -> None:  # type: ignore[override]
        super().to(*where, **told)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def eval(self) -> None:  # type: ignore[override]
        self.train(False)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


def test_a_model_whose_own_methods_return_nothing_is_trained_and_evaluated() -> None:
    data = list(torch.randn(6, 4))
    workload = Workload(Silent, lambda model, batch: model(batch).square().mean(), data, data)
    training = TrainingContext(workload, Replica(workload.new_model(), "sgd"), 1)
    training.compute(torch.arange(6))
    for model in (None, training.new_copy()):
        evaluation = training.evaluate(model)
        assert evaluation is not None
        assert evaluation.loss > 0
