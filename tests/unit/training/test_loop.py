import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from smolcluster.configs.resolve import Settings
from smolcluster.configs.schema import (
    ClusterConfig,
    DatasetConfig,
    GradientClipping,
    LrSchedule,
    ModelConfig,
    NodeConfig,
    TrainConfig,
)
from smolcluster.data.dataset import Dataset
from smolcluster.data.permutation import epoch_permutation
from smolcluster.data.registry import load_dataset
from smolcluster.errors import NonFiniteLoss
from smolcluster.observability.metrics import MetricRecord, Metrics
from smolcluster.runs.events import (
    EpochFinished,
    Evaluated,
    EventLog,
    EventRecord,
    RunEnded,
    RunStarted,
    read_events,
)
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.build import build_replica
from smolcluster.training.loop import TrainingStep, train_single, training_steps
from smolcluster.training.replica import Replica
from smolcluster.training.schedule import learning_rate

CPU = torch.device("cpu")
SEED = 42
SAMPLES = 1438


def config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "batch_size": 100,
        "num_epochs": 2,
        "eval_steps": 10,
        "model": ModelConfig(input_dim=None, hidden=16),
        "dataset": DatasetConfig(name="digits"),
    }
    return TrainConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DatasetConfig(name="digits"), SEED)


def take_all(train: TrainConfig, digits: Dataset) -> tuple[Replica, list[TrainingStep]]:
    replica = build_replica(train, SEED, digits, CPU)
    return replica, list(training_steps(replica, digits, train, SEED))


class Seen:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    def log(self, record: MetricRecord) -> None:
        self.records.append(record)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


def run(
    folder: Path, train: TrainConfig, node: NodeConfig | None = None
) -> tuple[Summary, list[MetricRecord], list[EventRecord], RunPaths]:
    paths = create_run(folder, "single-test")
    cluster = ClusterConfig(
        host_ip={"me": "127.0.0.1", "you": "127.0.0.1"},
        num_workers=1,
        workers=("you",),
        server="me",
        seed=SEED,
    )
    settings = Settings(cluster=cluster, train=train, node=node or NodeConfig(device="cpu"))
    seen = Seen()
    events = EventLog(paths.events, "i1", warn=pytest.fail)
    try:
        summary = train_single(settings, paths, Metrics([seen]), events, logging.Logger("test"))
    finally:
        events.close()
    return summary, seen.records, read_events(paths.events), paths


def test_every_sample_of_every_epoch_is_applied_once_in_the_seeded_order(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    real = type(digits.train).batch

    def spy(split: object, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(indices.clone())
        return real(digits.train, indices)

    monkeypatch.setattr(type(digits.train), "batch", spy)
    _, steps = take_all(config(), digits)

    orders = [epoch_permutation(SEED, epoch, SAMPLES) for epoch in range(2)]
    assert torch.equal(torch.cat(asked), torch.cat(orders))
    assert [step.num_samples for step in steps] == ([100] * 14 + [38]) * 2
    assert [step.step for step in steps] == list(range(1, 31))
    assert [step.epoch for step in steps] == [0] * 15 + [1] * 15
    assert steps[-1].samples_applied == 2 * SAMPLES


def test_a_step_takes_the_global_batch_when_there_is_one(digits: Dataset, tmp_path: Path) -> None:
    train = config(batch_size=10, global_batch_size=100)
    _, steps = take_all(train, digits)
    assert steps == take_all(config(), digits)[1]
    started = run(tmp_path, train)[2][0].event
    assert isinstance(started, RunStarted)
    assert started.batch_size == 100


class Spy:
    """Replicas whose `forward_backward` notes how many samples it was to compute at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.microbatches: list[int | None] = []
        real = Replica.forward_backward

        def noted(
            replica: Replica, inputs: Tensor, targets: Tensor, microbatch: int | None = None
        ) -> float:
            self.microbatches.append(microbatch)
            return real(replica, inputs, targets, microbatch)

        monkeypatch.setattr(Replica, "forward_backward", noted)


def test_a_microbatch_is_what_is_computed_at_once_and_changes_nothing_else(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, spy = config(num_epochs=1), Spy(monkeypatch)
    whole, split = (build_replica(train, SEED, digits, CPU) for _ in range(2))
    expected = list(training_steps(whole, digits, train, SEED))
    found = list(training_steps(split, digits, train, SEED, microbatch=33))
    assert spy.microbatches == [None] * 15 + [33] * 15
    assert [step.loss for step in found] == pytest.approx(
        [step.loss for step in expected], rel=1e-4
    )
    assert [step.num_samples for step in found] == [step.num_samples for step in expected]


def test_the_node_says_how_many_samples_it_computes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    run(tmp_path, config(num_epochs=1), NodeConfig(device="cpu", microbatch=7))
    assert set(spy.microbatches) == {7}


def test_it_learns_the_digits(digits: Dataset) -> None:
    _, steps = take_all(config(learning_rate=0.01, num_epochs=8), digits)
    assert steps[0].loss > 2.0
    assert steps[-1].loss < 0.3


def test_two_runs_of_one_seed_are_equal_bit_for_bit(digits: Dataset) -> None:
    first, again = take_all(config(), digits), take_all(config(), digits)
    assert first[1] == again[1]
    assert torch.equal(first[0].params, again[0].params)


def test_the_schedule_follows_the_samples_applied(digits: Dataset) -> None:
    train = config(lr_schedule=LrSchedule(warmup_iters=3, min_lr=1e-5))
    _, steps = take_all(train, digits)
    before = [0, *(step.samples_applied for step in steps[:-1])]
    assert [step.learning_rate for step in steps] == [
        learning_rate(train, applied, 2 * SAMPLES) for applied in before
    ]


def test_clipping_bounds_the_gradient_that_is_applied(digits: Dataset) -> None:
    loose = config(optimizer="sgd", gradient_clipping=GradientClipping(enabled=False))
    tight = config(optimizer="sgd", gradient_clipping=GradientClipping(max_norm=0.01))
    moved = []
    for train in (loose, tight):
        replica = build_replica(train, SEED, digits, CPU)
        before = replica.snapshot()
        step = next(training_steps(replica, digits, train, SEED))
        moved.append((replica.snapshot() - before).norm().item())
        assert step.grad_norm > 0.1
    assert moved[1] == pytest.approx(0.01 * 0.001, rel=1e-3)
    assert moved[0] > 10 * moved[1]


def test_layer_norms_are_measured_when_gradients_are_tracked(digits: Dataset) -> None:
    _, tracked = take_all(config(num_epochs=1), digits)
    _, plain = take_all(config(num_epochs=1, track_gradients=False), digits)

    norms = torch.tensor(list(tracked[0].layer_norms.values()))
    assert set(tracked[0].layer_norms) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert norms.norm().item() == pytest.approx(tracked[0].grad_norm, rel=1e-5)
    assert plain[0].layer_norms == {}
    assert [step.loss for step in plain] == [step.loss for step in tracked]


def test_a_diverging_run_stops_naming_step_and_layer(digits: Dataset) -> None:
    train = config(
        learning_rate=1e30, optimizer="sgd", gradient_clipping=GradientClipping(enabled=False)
    )
    with pytest.raises(NonFiniteLoss, match=r"^step [23]: .* at layer fc\d.*lower learning_rate"):
        take_all(train, digits)


def test_the_summary_says_what_was_done(tmp_path: Path) -> None:
    summary, _, _, paths = run(tmp_path, config(learning_rate=0.01, num_epochs=8))

    assert read_summary(paths.summary) == summary
    assert (summary.algorithm, summary.run_id) == ("single", "single-test")
    assert (summary.epochs, summary.steps, summary.train_samples) == (8, 120, SAMPLES)
    assert summary.samples_applied == 8 * SAMPLES
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy > 0.9
    assert summary.final.train_loss is not None
    assert summary.final.train_loss < 0.3


def test_every_step_and_evaluation_is_reported(tmp_path: Path) -> None:
    summary, records, _, _ = run(tmp_path, config())
    steps = [record for record in records if record.kind == "step"]
    evaluations = [record for record in records if record.kind == "eval"]

    assert [record.step for record in steps] == list(range(1, 31))
    assert [record.step for record in evaluations] == [10, 20, 30]
    assert evaluations[-1].values["val_loss"] == summary.final.val_loss
    last = steps[-1].values
    assert last["samples_applied"] == last["total_samples"] == 2 * SAMPLES
    assert {"loss", "lr", "samples_per_s", "grad_norm", "grad_norm/fc1.weight"} <= set(last)


def test_the_final_weights_are_evaluated_whatever_eval_steps_says(tmp_path: Path) -> None:
    summary, records, _, _ = run(tmp_path, config(eval_steps=1000))
    assert [record.step for record in records if record.kind == "eval"] == [30]
    assert summary.final.val_accuracy is not None


def test_the_events_tell_the_run_from_start_to_end(tmp_path: Path) -> None:
    _, _, events, _ = run(tmp_path, config(eval_steps=20))
    assert [type(record.event) for record in events] == [
        RunStarted,
        EpochFinished,
        Evaluated,
        EpochFinished,
        Evaluated,
        RunEnded,
    ]


def test_a_diverging_run_ends_with_an_event_and_without_a_summary(tmp_path: Path) -> None:
    train = config(
        learning_rate=1e30, optimizer="sgd", gradient_clipping=GradientClipping(enabled=False)
    )
    with pytest.raises(NonFiniteLoss):
        run(tmp_path, train)

    paths = RunPaths(tmp_path / "single-test")
    end = read_events(paths.events)[-1].event
    assert isinstance(end, RunEnded)
    assert not end.ok
    assert "layer fc" in end.reason
    assert not paths.summary.exists()
    assert json.loads(paths.events.read_text().splitlines()[-1])["kind"] == "run_ended"


def test_training_on_the_digits_loads_no_library_that_is_slow_to_import() -> None:
    code = """
import sys
import torch
from smolcluster.configs.schema import DatasetConfig, DatasetPlace, ModelConfig, TrainConfig
from smolcluster.training.build import build
from smolcluster.training.evaluate import evaluate
from smolcluster.training.loop import training_steps
train = TrainConfig(model=ModelConfig(input_dim=None), dataset=DatasetConfig(name="digits"))
bench = build(train, 1, DatasetPlace(), torch.device("cpu"))
next(training_steps(bench.replica, bench.dataset, train, 1))
evaluate(bench.replica.copy_model(), bench.dataset.validation, bench.replica.device)
print(sorted({"torchvision", "sklearn", "scipy", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
