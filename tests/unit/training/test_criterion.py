"""A loss with parameters that nobody trains, or with buffers that it changes, is refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.errors import ConfigError
from smolcluster.training.criterion import WatchedLoss, modules_of
from smolcluster.training.stages.build import Answer
from smolcluster.training.workload import Workload

Loss = Callable[[nn.Module, Any], Any]
GLOBAL = nn.Linear(4, 8)
BATCH = torch.randn(3, 6), torch.tensor([0, 1, 2])


class Arc(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(8, 4), requires_grad=trained)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(-torch.cdist(model(batch[0]), self.centres), batch[1])


class Holds:
    def __init__(self) -> None:
        self.arc = Arc()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = self.arc(model, batch)
        return result


def of_global(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(GLOBAL(model(batch[0])), batch[1])


def closure() -> Loss:
    arc = Arc()
    return lambda model, batch: (arc(model, batch), 1)


def hidden() -> Loss:
    arcs = {"deep": {"deeper": [Arc().forward]}}
    return lambda model, batch: (arcs["deep"]["deeper"][0](model, batch), 1)


def tempered() -> Loss:
    temperature = torch.ones((), requires_grad=True)
    return lambda model, batch: functional.cross_entropy(model(batch[0]) * temperature, batch[1])


def weighed(scale: nn.Module, model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(scale(model(batch[0])), batch[1])


@pytest.mark.parametrize("loss", [Arc(), Arc().forward, partial(Arc())])
def test_a_loss_that_is_a_module_with_parameters_is_refused_at_once(loss: Loss) -> None:
    with pytest.raises(ConfigError, match=r"the loss Arc has parameters \(centres\)"):
        Workload(lambda: nn.Linear(6, 4), loss, [0])


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (Holds(), "arc.centres"),
        (closure(), "arc.centres"),
        (of_global, "GLOBAL.weight"),
        (partial(weighed, nn.Linear(4, 8)), "weight"),
        (hidden(), "one of shape (8, 4)"),
        (tempered(), "temperature"),
    ],
)
def test_parameters_that_only_the_loss_knows_are_found_in_its_first_value(
    loss: Loss, name: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        WatchedLoss(loss)(nn.Linear(6, 4), BATCH)
    assert name in str(raised.value)
    assert "make it a part of the model" in str(raised.value)


def test_what_stages_have_computed_stands_for_the_model() -> None:
    """Its own weights are known to nobody here, and those of the loss are found all the same."""
    stage = nn.Linear(6, 4)
    model = Answer(lambda: stage(BATCH[0]))
    plain = WatchedLoss(lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]))
    assert plain(model, BATCH).requires_grad
    for loss, name in ((closure(), "arc.centres"), (of_global, "GLOBAL.weight")):
        with pytest.raises(ConfigError, match=name):
            WatchedLoss(loss)(model, BATCH)


def test_what_gets_no_gradient_is_no_fault() -> None:
    teacher = nn.Linear(6, 4)
    model = nn.Linear(6, 4)

    def loss(trained: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return functional.mse_loss(trained(batch[0]), wanted)

    assert WatchedLoss(loss)(model, BATCH).requires_grad
    assert WatchedLoss(Arc(trained=False))(model, BATCH).requires_grad
    Workload(lambda: nn.Linear(6, 4), Arc(trained=False), [0])


def test_the_weights_of_classes_of_a_criterion_move_with_the_model() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = criterion(model(batch[0]), batch[1])
        return result

    model = nn.Linear(6, 4)
    workload = Workload(model, loss, [0], metrics={"same": lambda _m, _b: (model.weight.sum(), 1)})
    assert [name for name, _ in modules_of(loss)] == ["criterion"]
    workload.bring_losses(torch.device("meta"))
    assert criterion.weight is not None
    assert (criterion.weight.device.type, model.weight.device.type) == ("meta", "cpu")


class Centred(nn.Module):
    """As DINO's: what is subtracted follows the outputs."""

    centre: Tensor

    def __init__(self, pace: float) -> None:
        super().__init__()
        self.pace = pace
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        if model.training:
            self.centre.lerp_(outputs.detach().mean(0), self.pace)
        return (outputs - self.centre).square().mean()


@pytest.mark.parametrize("wrapped", [lambda loss: loss, partial])
def test_buffers_that_the_loss_changes_are_refused_by_name(wrapped: Callable[[Loss], Loss]) -> None:
    with pytest.raises(ConfigError, match=r"the loss changes its buffers \(centre\).*the model"):
        WatchedLoss(wrapped(Centred(0.1)))(nn.Linear(6, 4), BATCH)
    WatchedLoss(wrapped(Centred(0.0)))(nn.Linear(6, 4), BATCH)


def test_buffers_of_the_model_may_change_also_where_the_loss_refers_to_it() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    WatchedLoss(lambda _, batch: model(batch[0]).mean())(model, BATCH)
