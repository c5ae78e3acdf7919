"""Training in one process as a run: what it reports and leaves behind."""

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness import digits_config
from smolcluster.algorithms import owner
from smolcluster.configs.schema import (
    ClusterConfig,
    GradientClipping,
    NodeConfig,
    Settings,
    TrainConfig,
)
from smolcluster.data.dataset import Batch, Place
from smolcluster.errors import CheckpointError, NonFiniteLoss
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.asked import ASKED
from smolcluster.runs.events import (
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    EventRecord,
    RunEnded,
    RunStarted,
    read_events,
)
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import STOPPED, read_status
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.server import report
from smolcluster.training import builtin, compute
from smolcluster.training.buffers import ModelBuffers
from smolcluster.training.build import TrainingContext
from smolcluster.training.builtin import accuracy
from smolcluster.training.checkpoint import CheckpointStore
from smolcluster.training.compute import BatchLoss, Microbatch
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction, Terms, Workload
from smolcluster.utils.stopping import Interrupted
from texts import train_alone

SEED = 42
SAMPLES = 1438


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "write_artifacts", lambda *_: None)


def run(
    folder: Path,
    train: TrainConfig,
    node: NodeConfig | None = None,
    resume: str | None = None,
    workload: Workload | None = None,
) -> tuple[Summary, list[MetricRecord], list[EventRecord], RunPaths]:
    cluster = ClusterConfig(
        host_ip={"me": "127.0.0.1", "you": "127.0.0.1"},
        num_workers=1,
        workers=("you",),
        server="me",
        seed=SEED,
    )
    node = (node or NodeConfig(device="cpu")).model_copy(update={"runs_dir": folder})
    settings = Settings(cluster=cluster, train=train, node=node)
    train_alone(settings, "single-test", resume=resume, workload=workload)
    paths = RunPaths(folder / "single-test")
    records = [line.record for line in follow_metrics(paths.metrics).poll()]
    return read_summary(paths.summary), records, read_events(paths.events), paths


def test_no_more_samples_are_loaded_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TrainingContext] = []

    def close(training: TrainingContext) -> None:
        closed.append(training)

    monkeypatch.setattr(TrainingContext, "close", close)
    run(tmp_path, digits_config(num_epochs=1))
    assert len(closed) == 1


def test_a_buffer_that_no_checkpoint_holds_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelBuffers, "unsaved", ["table"])
    run(tmp_path, digits_config(num_epochs=1))
    assert "in no checkpoint: buffers table" in capsys.readouterr().err


def test_a_step_takes_the_global_batch_when_there_is_one(tmp_path: Path) -> None:
    summary, _, events, _ = run(tmp_path, digits_config(batch_size=10, global_batch_size=100))
    started = events[0].event
    assert isinstance(started, RunStarted)
    assert started.batch_size == 100
    assert summary.steps == 30


def test_the_node_says_how_many_samples_it_computes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    microbatches: list[int | None] = []
    real = compute.forward_backward

    def noted(
        replica: Replica,
        loss: LossFunction,
        parts: list[Microbatch],
        begin: Callable[[Place], None],
    ) -> BatchLoss:
        microbatches.append(parts[0].num_samples)
        return real(replica, loss, parts, begin)

    monkeypatch.setattr("smolcluster.training.build.forward_backward", noted)
    run(tmp_path, digits_config(num_epochs=1), NodeConfig(device="cpu", microbatch=7))
    assert set(microbatches) == {7}


def test_the_summary_says_what_was_done(tmp_path: Path) -> None:
    summary = run(tmp_path, digits_config(learning_rate=0.01, num_epochs=8))[0]

    assert (summary.algorithm, summary.run_id) == ("single", "single-test")
    assert (summary.epochs, summary.steps, summary.train_samples) == (8, 120, SAMPLES)
    assert summary.samples_applied == 8 * SAMPLES
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy > 0.9
    assert summary.final.train_loss is not None
    assert summary.final.train_loss < 0.3


def test_the_events_tell_the_run_from_start_to_end(tmp_path: Path) -> None:
    _, _, events, _ = run(tmp_path, digits_config(eval_steps=20))
    told = [type(record.event) for record in events]
    assert told.count(CheckpointSaved) == 1
    assert [kind for kind in told if kind is not CheckpointSaved] == [
        RunStarted,
        EpochFinished,
        Evaluated,
        EpochFinished,
        Evaluated,
        RunEnded,
    ]


def test_steps_and_evaluations_are_reported_and_the_status_says_how_the_run_stood_at_its_end(
    tmp_path: Path,
) -> None:
    summary, records, events, paths = run(tmp_path, digits_config())
    steps = [record for record in records if record.kind == "step"]
    evaluations = [record for record in records if record.kind == "eval"]
    assert [record.step for record in steps] == list(range(1, 31))
    assert [record.step for record in evaluations] == [10, 20, 30]
    assert evaluations[-1].values["val_loss"] == summary.final.val_loss
    last = steps[-1].values
    assert last["samples_applied"] == last["total_samples"] == 2 * SAMPLES
    assert {"loss", "lr", "samples_per_s", "grad_norm", "grad_norm/fc1.weight"} <= set(last)
    status = read_status(paths.status)
    assert (status.state, status.algorithm, status.workers) == ("ended", "single", [])
    assert (status.step, status.total_steps) == (summary.steps, 30)
    assert status.samples_applied == status.total_samples == 2 * SAMPLES
    assert (status.epoch, status.num_epochs) == (1, 2)
    assert status.val_accuracy == summary.final.val_accuracy
    assert status.incarnation == events[0].incarnation
    end = events[-1].event
    assert isinstance(end, RunEnded)
    assert status.reason == end.reason


def test_a_diverging_run_ends_with_an_event_and_without_a_summary(tmp_path: Path) -> None:
    train = digits_config(
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
    assert read_status(paths.status).state == "failed"
    assert read_status(paths.status).reason == end.reason
    assert json.loads(paths.events.read_text().splitlines()[-1])["kind"] == "run_ended"


def test_a_run_whose_last_step_is_not_saved_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to who waits for it nor to who resumes it; here it had ended well before."""
    *_, paths = run(tmp_path, digits_config(num_epochs=1))
    with (
        monkeypatch.context() as disk,
        pytest.raises(CheckpointError, match="step 30, the last one of run single-test"),
    ):
        disk.setattr(CheckpointStore, "save", Mock(side_effect=CheckpointError("a full disk")))
        run(tmp_path, digits_config(num_epochs=2), resume="single-test")
    assert read_status(paths.status).trouble == "step 30 is not saved: a full disk"
    assert not paths.summary.exists()
    summary, *_ = run(tmp_path, digits_config(num_epochs=2), resume="single-test")
    assert summary.steps == 30


def test_norms_of_layers_are_measured_as_often_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "NUM_LAYERED_FIRST", 3)
    measured: list[Replica] = []
    measure = Replica.layer_norms

    def measuring(replica: Replica, *pieces: Any) -> dict[str, float]:
        measured.append(replica)
        return measure(replica, *pieces)

    monkeypatch.setattr(Replica, "layer_norms", measuring)
    _, records, _, _ = run(tmp_path, digits_config())
    kept = [record for record in records if "grad_norm/fc1.weight" in record.values]
    assert len(kept) == len(measured) == 3


@pytest.mark.parametrize("eval_steps", [10, 1000])
def test_a_signal_ends_an_evaluation_also_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_steps: int
) -> None:
    monkeypatch.setattr(builtin, "EVAL_SAMPLES", 10)
    batches: list[int] = []

    def computing(model: nn.Module, batch: Batch) -> Terms:
        batches.append(len(batch))
        if len(batches) == 1:
            signal.raise_signal(signal.SIGTERM)
        return accuracy(model, batch)

    monkeypatch.setattr(builtin, "accuracy", computing)
    with pytest.raises(Interrupted) as stopped:
        run(tmp_path, digits_config(eval_steps=eval_steps))
    assert stopped.value.is_orderly
    assert len(batches) == 1
    *_, saved, ended = (line.event for line in read_events(tmp_path / "single-test/events.jsonl"))
    assert isinstance(saved, CheckpointSaved)
    assert isinstance(ended, RunEnded)
    assert not ended.ok
    assert saved.step == ended.steps == min(eval_steps, 30)


def test_a_run_that_goes_on_and_is_stopped_has_not_failed_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher had ended it, and said why; now it goes on without one."""
    _, _, _, paths = run(tmp_path, digits_config(num_epochs=1))
    (paths.root / ASKED).mkdir()
    (paths.root / ASKED / "server-mini1.4711").write_text("worker 1 (pi0) is gone")

    def computing(model: nn.Module, batch: Batch) -> Terms:
        signal.raise_signal(signal.SIGTERM)
        return accuracy(model, batch)

    monkeypatch.setattr(builtin, "accuracy", computing)
    with pytest.raises(Interrupted):
        run(tmp_path, digits_config(num_epochs=2), resume="single-test")
    status = read_status(paths.status)
    assert (status.word, status.reason) == ("stopped", STOPPED)


@pytest.mark.parametrize(
    ("changed", "order", "told"),
    [
        (None, [0, 1, 2, 3], None),
        (2, [0, 1, 2, 3], "other training data than it had: sample 2 is another one; each"),
        (None, [3, 2, 1, 0], "other training data than it had: the sampler gives another order"),
    ],
)
def test_a_run_that_goes_on_with_other_data_says_so_once(
    tmp_path: Path, changed: int | None, order: list[int], told: str | None
) -> None:
    def workload(changed: int | None, order: list[int]) -> Workload:
        data = [torch.full((3,), float(number + 10 * (number == changed))) for number in range(4)]
        loader: Any = DataLoader(data, batch_size=2, sampler=order)  # type: ignore[arg-type]
        return Workload(lambda: nn.Linear(3, 1), lambda m, b: m(b).square().mean(), loader)

    train = digits_config(num_epochs=1, batch_size=2)
    run(tmp_path, train, workload=workload(None, [0, 1, 2, 3]))
    more = train.model_copy(update={"num_epochs": 2})
    *_, paths = run(tmp_path, more, resume="single-test", workload=workload(changed, order))
    lines = [
        line
        for file in paths.logs.glob("trainer*.log")
        for line in file.read_text().splitlines()
        if "training data" in line
    ]
    assert len(lines) == (told is not None)
    assert told is None or told in lines[0]


def test_what_is_saved_is_what_was_evaluated_though_a_weight_strays(tmp_path: Path) -> None:
    """One that leaves the flat memory between two looks at the model is never stepped."""
    data: Any = [torch.full((3,), float(number)) for number in range(1, 13)]
    batches: list[Tensor] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, Tensor)
        if model.training:
            batches.append(batch)
            if len(batches) == 8:
                weight = model.get_parameter("weight")
                weight.data = weight.data + 1.0
        squares: Tensor = model(batch).square()
        return squares.mean()

    own = Workload(lambda: nn.Linear(3, 1), loss, data, data)
    train = digits_config(num_epochs=1, batch_size=1, eval_steps=1000)
    *_, events, paths = run(tmp_path, train, workload=own)
    assert len(batches) >= len(data)
    saved = nn.Linear(3, 1)
    saved.load_state_dict(load_file(paths.checkpoints / "latest" / "model.safetensors"))
    [evaluated] = [line.event for line in events if isinstance(line.event, Evaluated)]
    expected = loss(saved.eval(), torch.stack(data)).item()
    assert evaluated.val_loss == pytest.approx(expected, rel=1e-4)


class Endless:
    """A stream that asks this process to stop as it is read for the first time."""

    def __iter__(self) -> Iterator[Tensor]:
        for number in itertools.count():
            if number == 5:
                signal.raise_signal(signal.SIGINT)
            if number > 5:  # whichever thread reads it, the main one takes the signal
                time.sleep(0.01)
            assert number < 6000, "it is still counted after a minute"
            yield torch.zeros(3)


def test_the_first_ctrl_c_ends_a_run_that_counts_an_endless_stream(tmp_path: Path) -> None:
    own = Workload(lambda: nn.Linear(3, 1), lambda m, b: m(b).square().mean(), Endless())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new process
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, digits_config(), workload=own)
    finally:
        signal.signal(signal.SIGINT, before)
