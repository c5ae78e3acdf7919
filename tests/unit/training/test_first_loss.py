"""The loss of a model that has just been built, and what two machines conclude from it."""

import math
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset

from smolcluster.configs.schema import DatasetConfig, DatasetPlace, TrainConfig
from smolcluster.data.dataset import Batch
from smolcluster.training import first_loss
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.first_loss import FirstLosses, difference, first_losses
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from waiting import DEADLINE_S

SIZE = 9


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_loss, "PATIENCE_S", math.inf)


def rows(dtype: torch.dtype = torch.float32) -> TensorDataset:
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs.to(dtype), torch.arange(SIZE) % 2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())

    def __len__(self) -> int:
        return SIZE


class Scaled(nn.Module):
    """A factor that no parameter or buffer shows, batch norm, and dropout."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.num_calls = 0
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        out: Tensor = self.layers(inputs * self.factor)
        return out


def mean(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    return mean(model, batch) + torch.randn(())


def pythons_noise(model: nn.Module, batch: Batch) -> Tensor:
    return mean(model, batch) + random.SystemRandom().random()


def endless(model: nn.Module, batch: Batch) -> Tensor:
    return mean(model, batch) * float("inf")


def of_two(model: nn.Module, batch: Any) -> Tensor:
    first, second = batch[0]
    return mean(model, ((first + second)[None], batch[1][:1]))


def in_double(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0].float()), batch[1])


def built(
    loss: Any = mean, data: Any = None, model: Any = Scaled, **options: Any
) -> TrainingContext:
    workload = Workload(model, loss, rows() if data is None else data)
    return build(
        *(TrainConfig(dataset=DatasetConfig(name="own")), 42, DatasetPlace(), torch.device("cpu")),
        workload=workload,
        **options,
    )


def losses(*args: Any, **options: Any) -> FirstLosses:
    made = built(*args, **options)
    return first_losses(made.workload, made.replica)


def told(ours: FirstLosses, theirs: FirstLosses) -> str | None:
    return difference(ours, theirs.weights, theirs.losses)


def test_the_same_model_is_told_by_its_losses_of_three_samples() -> None:
    ours, theirs = losses(), losses()
    assert ours.samples == (0, 4, 8)
    assert ours == theirs
    assert None not in ours.losses
    assert told(ours, theirs) is None


@pytest.mark.parametrize(
    "other",
    [
        {"model": lambda: Scaled(1.5)},
        {"data": TensorDataset(-rows().tensors[0], rows().tensors[1])},
    ],
)
def test_another_model_of_the_same_layout_is_named_with_both_losses(other: dict[str, Any]) -> None:
    """One that computes in another way, and one whose samples are prepared in another way."""
    ours, theirs = losses(), losses(**other)
    said = told(ours, theirs)
    assert said is not None
    for loss in (ours.losses[0], theirs.losses[0]):
        assert f"{loss:.6g}" in said
    assert "training sample 0" in said


def test_rounding_of_another_device_is_no_difference() -> None:
    ours = losses()
    near = tuple(each and each * 1.003 for each in ours.losses)
    assert told(ours, ours._replace(losses=near)) is None
    far = tuple(each and each * 1.03 for each in ours.losses)
    assert told(ours, ours._replace(losses=far)) is not None


def test_losses_of_other_first_weights_say_nothing() -> None:
    """They are the server's before anybody computes."""
    ours, theirs = losses(), losses(model=lambda: [torch.rand(7), Scaled()][1])
    assert ours.losses != theirs.losses
    assert told(ours, theirs) is None


@pytest.mark.parametrize("loss", [noisy, pythons_noise, endless, of_two])
def test_a_loss_that_is_random_or_fails_on_one_sample_is_not_compared(loss: Any) -> None:
    found = losses(loss)
    assert found.losses == (None,) * 3
    assert told(found, losses()) is None


def test_samples_in_float64_are_computed_in_either_way() -> None:
    """As they are, and lowered for a model that takes nothing else."""
    lowered, kept = losses(data=rows(torch.float64)), losses(in_double, rows(torch.float64))
    assert lowered == losses()
    assert kept.losses == lowered.losses


def test_there_are_none_of_an_outline_or_a_stream() -> None:
    assert losses(is_outline=True) == FirstLosses()
    assert losses(data=Stream()) == FirstLosses()


def test_what_takes_long_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_loss, "PATIENCE_S", 0.0)
    assert losses().losses == (None,) * 3


def test_model_loss_and_generators_are_left_as_they_were() -> None:
    centre = nn.BatchNorm1d(6, affine=False)

    def centred(model: nn.Module, batch: Any) -> Tensor:
        return mean(model, (centre.train()(batch[0].repeat(2, 1))[:1], batch[1]))

    made = built(centred)
    model, replica = made.replica.model, made.replica
    before = replica.digest(), torch.get_rng_state(), random.getstate()
    assert None not in first_losses(made.workload, replica).losses
    assert replica.digest() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert isinstance(model, Scaled)
    assert (model.num_calls, model.training) == (0, True)
    assert not any(bool(each.any()) for name, each in centre.named_buffers() if "var" not in name)
    assert all(each.parameter.grad is not None for each in replica._trained)


def test_two_threads_leave_the_compiler_as_it_was() -> None:
    """A server and a worker may be threads of one process: the first one ends while the other computes."""
    begun, inside, ended = threading.Event(), threading.Event(), threading.Event()
    asked: list[str] = []

    def backend(graph: Any, _inputs: object) -> Any:
        asked.append("to compile")
        return graph.forward

    compiled = torch.compile(nn.Linear(2, 2), backend=backend)

    def first(model: nn.Module, batch: Batch) -> Tensor:
        begun.set()
        inside.wait(0.3)  # nobody comes
        return mean_of(model, batch)

    def second(model: nn.Module, batch: Batch) -> Tensor:
        inside.set()
        ended.wait(DEADLINE_S)
        return mean_of(model, batch)

    def compute(loss: Any) -> None:
        workload = Workload(lambda: nn.Linear(6, 2), loss, rows())
        first_losses(workload, Replica(workload.new_model(), "sgd"))

    threads = [threading.Thread(target=compute, args=(loss,)) for loss in (first, second)]
    threads[0].start()
    assert begun.wait(DEADLINE_S)
    threads[1].start()
    threads[0].join(DEADLINE_S)
    ended.set()
    threads[1].join(DEADLINE_S)
    compiled(torch.ones(1, 2))
    assert asked == ["to compile"]


def mean_of(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(batch[0]).square().mean()
    return result
