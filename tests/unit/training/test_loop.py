"""Training in a single process, step by step."""

import subprocess
import sys
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from harness import digits_config
from smolcluster.configs.schema import (
    DatasetPlace,
    GradientClipping,
    LrSchedule,
    TrainConfig,
)
from smolcluster.data.dataset import Batch, Dataset
from smolcluster.data.digits import load_digits
from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import NonFiniteLoss
from smolcluster.training import compute
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload
from smolcluster.training.compute import BatchLoss, Part
from smolcluster.training.loop import TrainingStep, training_steps
from smolcluster.training.replica import Replica
from smolcluster.training.schedule import learning_rate
from smolcluster.training.workload import LossFunction

CPU = torch.device("cpu")
SEED = 42
SAMPLES = 1438


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_digits(SEED)


def bench_for(
    train: TrainConfig, digits: Dataset, microbatch: int | None = None
) -> TrainingContext:
    return build(
        train,
        SEED,
        DatasetPlace(),
        CPU,
        microbatch=microbatch,
        workload=builtin_workload(train, digits),
    )


def take_all(
    train: TrainConfig, digits: Dataset, microbatch: int | None = None
) -> tuple[Replica, list[TrainingStep]]:
    training = bench_for(train, digits, microbatch)
    return training.replica, list(training_steps(training, train))


def test_every_sample_of_every_epoch_is_applied_once_in_the_seeded_order(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    real = type(digits.train).batch

    def spy(split: object, indices: torch.Tensor) -> Batch:
        asked.append(indices.clone())
        return real(digits.train, indices)

    monkeypatch.setattr(type(digits.train), "batch", spy)
    _, steps = take_all(digits_config(), digits)

    orders = [epoch_permutation(SEED, epoch, SAMPLES) for epoch in range(2)]
    assert torch.equal(torch.cat(asked), torch.cat(orders))
    assert [step.num_samples for step in steps] == ([100] * 14 + [38]) * 2
    assert len(steps) == 30
    assert [step.epoch for step in steps] == [0] * 15 + [1] * 15
    assert [step.start for step in steps] == list(range(0, SAMPLES, 100)) * 2
    assert sum(step.num_samples for step in steps) == 2 * SAMPLES


def test_a_step_takes_the_global_batch_when_there_is_one(digits: Dataset) -> None:
    train = digits_config(batch_size=10, global_batch_size=100)
    _, steps = take_all(train, digits)
    assert steps == take_all(digits_config(), digits)[1]


def test_it_goes_on_after_what_has_been_applied(digits: Dataset) -> None:
    train = digits_config(optimizer="sgd")
    _, whole = take_all(train, digits)
    training = bench_for(train, digits)
    steps = training_steps(training, train)
    first = [next(steps) for _ in range(17)]
    applied = sum(step.num_samples for step in first)
    rest = list(training_steps(training, train, samples_applied=applied, step=17))
    assert [*first, *rest] == whole


def test_it_says_when_the_weights_are_about_to_change(digits: Dataset) -> None:
    train = digits_config(num_epochs=1)
    training = bench_for(train, digits)
    seen: list[Tensor] = []
    steps = training_steps(
        training, train, before_step=lambda: seen.append(training.replica.snapshot())
    )
    before = training.replica.snapshot()
    for step in steps:
        assert step.loss > 0
        assert torch.equal(seen[-1], before)
        before = training.replica.snapshot()
    assert len(seen) == 15


class Spy:
    """Replicas whose `forward_backward` notes how many samples it was to compute at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.microbatches: list[int | None] = []
        real = compute.forward_backward

        def noted(replica: Replica, loss: LossFunction, parts: list[Part]) -> BatchLoss:
            self.microbatches.append(parts[0].num_samples)
            return real(replica, loss, parts)

        monkeypatch.setattr("smolcluster.training.build.forward_backward", noted)


def test_a_microbatch_is_what_is_computed_at_once_and_changes_nothing_else(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, spy = digits_config(num_epochs=1), Spy(monkeypatch)
    expected = take_all(train, digits)[1]
    found = take_all(train, digits, microbatch=33)[1]
    assert spy.microbatches == [100] * 14 + [38] + [33] * 15
    assert [step.loss for step in found] == pytest.approx(
        [step.loss for step in expected], rel=1e-4
    )
    assert [step.num_samples for step in found] == [step.num_samples for step in expected]


def test_it_learns_the_digits(digits: Dataset) -> None:
    _, steps = take_all(digits_config(learning_rate=0.01, num_epochs=8), digits)
    assert steps[0].loss > 2.0
    assert steps[-1].loss < 0.3


def test_two_runs_of_one_seed_are_equal_bit_for_bit(digits: Dataset) -> None:
    first, again = take_all(digits_config(), digits), take_all(digits_config(), digits)
    assert first[1] == again[1]
    assert torch.equal(first[0].params, again[0].params)


def test_the_schedule_follows_the_samples_applied(digits: Dataset) -> None:
    train = digits_config(lr_schedule=LrSchedule(warmup_iters=3, min_lr=1e-5))
    _, steps = take_all(train, digits)
    before = accumulate((step.num_samples for step in steps[:-1]), initial=0)
    assert [step.learning_rate for step in steps] == [
        learning_rate(train, applied, 2 * SAMPLES) for applied in before
    ]


def test_clipping_bounds_the_gradient_that_is_applied(digits: Dataset) -> None:
    loose = digits_config(optimizer="sgd", gradient_clipping=GradientClipping(enabled=False))
    tight = digits_config(optimizer="sgd", gradient_clipping=GradientClipping(max_norm=0.01))
    moved = []
    for train in (loose, tight):
        training = bench_for(train, digits)
        before = training.replica.snapshot()
        step = next(training_steps(training, train))
        moved.append((training.replica.snapshot() - before).norm().item())
        assert step.grad_norm > 0.1
    assert moved[1] == pytest.approx(0.01 * 0.001, rel=1e-3)
    assert moved[0] > 10 * moved[1]


def test_layer_norms_are_those_of_the_gradient_before_it_is_clipped(digits: Dataset) -> None:
    _, plain = take_all(digits_config(num_epochs=1), digits)
    training = bench_for(digits_config(num_epochs=1), digits)
    tracked = list(
        training_steps(
            training, digits_config(num_epochs=1), layer_norms=training.replica.layer_norms
        )
    )

    norms = torch.tensor(list(tracked[0].layer_norms.values()))
    assert set(tracked[0].layer_norms) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert norms.norm().item() == pytest.approx(tracked[0].grad_norm, rel=1e-5)
    assert plain[0].layer_norms == {}
    assert [step.loss for step in plain] == [step.loss for step in tracked]


def test_a_diverging_run_stops_naming_step_and_layer(digits: Dataset) -> None:
    train = digits_config(
        learning_rate=1e30, optimizer="sgd", gradient_clipping=GradientClipping(enabled=False)
    )
    with pytest.raises(NonFiniteLoss, match=r"^step [23]: .* at layer fc\d.*lower learning_rate"):
        take_all(train, digits)


def test_training_on_the_digits_loads_no_library_that_is_slow_to_import() -> None:
    code = """
import sys
import torch
from smolcluster.configs.schema import DatasetConfig, DatasetPlace, SimpleNNConfig, TrainConfig
from smolcluster.training.build import build
from smolcluster.training.loop import training_steps
train = TrainConfig(model=SimpleNNConfig(input_dim=None), dataset=DatasetConfig(name="digits"))
bench = build(train, 1, DatasetPlace(), torch.device("cpu"))
next(training_steps(bench, train))
bench.evaluate()
print(sorted({"torchvision", "sklearn", "scipy", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
