"""Training in a single process, step by step."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import digits_config
from processes import Processes
from smolcluster.configs.schema import (
    DatasetPlace,
    GradientClipping,
    TrainConfig,
)
from smolcluster.data.dataset import Batch, Dataset, Place
from smolcluster.data.digits import load_digits
from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload
from smolcluster.training.loop import StepTaken, training_steps
from smolcluster.training.replica import Replica

CPU = torch.device("cpu")
SEED = 42
SAMPLES = 1438


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_digits(SEED)


def bench_for(train: TrainConfig, digits: Dataset) -> TrainingContext:
    return build(train, SEED, DatasetPlace(), CPU, workload=builtin_workload(train, digits))


def take_all(train: TrainConfig, digits: Dataset) -> tuple[Replica, list[StepTaken]]:
    training = bench_for(train, digits)
    return training.replica, list(training_steps(training, train))


def test_every_sample_of_every_epoch_is_applied_once_in_the_seeded_order(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    real = type(digits.train).batch

    def spy(split: object, indices: torch.Tensor, place: Place) -> Batch:
        asked.append(indices.clone())
        return real(digits.train, indices)

    monkeypatch.setattr(type(digits.train), "batch", spy)
    _, steps = take_all(digits_config(), digits)

    orders = [epoch_permutation(SEED, epoch, SAMPLES) for epoch in range(2)]
    assert torch.equal(torch.cat(asked), torch.cat(orders))
    assert [step.samples.num_samples for step in steps] == ([100] * 14 + [38]) * 2
    assert len(steps) == 30
    assert [step.samples.epoch for step in steps] == [0] * 15 + [1] * 15
    assert [step.samples.start for step in steps] == list(range(0, SAMPLES, 100)) * 2
    assert sum(step.samples.num_samples for step in steps) == 2 * SAMPLES


def test_a_step_takes_the_global_batch_when_there_is_one(digits: Dataset) -> None:
    train = digits_config(batch_size=10, global_batch_size=100)
    _, steps = take_all(train, digits)
    assert steps == take_all(digits_config(), digits)[1]


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


def test_layer_norms_are_those_of_the_gradient_before_it_is_clipped(digits: Dataset) -> None:
    train = digits_config(num_epochs=1)
    _, plain = take_all(train, digits)
    training = bench_for(train, digits)
    tracked = list(training_steps(training, train, layer_norms=training.replica.layer_norms))

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


def test_training_on_the_digits_loads_no_library_that_is_slow_to_import(tmp_path: Path) -> None:
    program = tmp_path / "digits.py"
    program.write_text("""
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
""")
    with Processes(tmp_path) as processes:
        child = processes.start(sys.executable, str(program))
        assert (child.wait(), child.output.strip()) == (0, "[]")
