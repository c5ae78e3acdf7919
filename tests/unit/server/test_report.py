"""What the server tells the world of a run: metrics, events, and the summary."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness import local_settings
from peers import Parts, report_of, server_parts, step_taken
from smolcluster.data.permutation import Range
from smolcluster.runs.events import (
    EpochFinished,
    Evaluated,
    LeaseReturned,
    PushDropped,
    RunStarted,
)
from smolcluster.runs.series import RESERVED
from smolcluster.server.report import Report
from smolcluster.server.worker import Worker
from smolcluster.training.evaluate import Evaluation
from smolcluster.training.loop import StepTaken
from smolcluster.wire.clocks import Clocks
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import LeaseKey, Logged
from smolcluster.wire.session import Session

WORKER = Worker(Member(session_id=5, worker_id=2, node="pi5", instance="abcdef01"))
OTHER = Worker(Member(session_id=6, worker_id=1, node="win", instance="abcdef02"))


@pytest.fixture
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Parts]:
    overrides = getattr(request, "param", ("track_gradients=false",))
    with server_parts(local_settings("num_epochs=2", *overrides), tmp_path) as parts:
        yield parts


@pytest.fixture
def report(parts: Parts) -> Report:
    return report_of(parts)


def step(
    start: int,
    stop: int,
    *,
    epoch: int = 0,
    version: int = 1,
    worker: Worker | None = WORKER,
    staleness: int | None = 0,
    **more: Any,
) -> StepTaken:
    return step_taken(version, Range(epoch, start, stop), worker, staleness=staleness, **more)


def lease(start: int, stop: int) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=1)


def test_a_run_begins_with_what_is_trained(parts: Parts, report: Report) -> None:
    (started,) = parts.happened(RunStarted)
    assert isinstance(started, RunStarted)
    assert (started.run_id, started.algorithm, started.dataset) == ("test-run", "edp", "digits")
    assert started.num_params == parts.context.training.replica.num_params
    assert started.train_samples == parts.context.training.num_samples
    assert started.batch_size == parts.context.run.train.batch_size


def test_where_workers_share_a_batch_its_size_is_that_of_all_parts(parts: Parts) -> None:
    settings = parts.context.settings
    report_of(parts, run=settings.run_config("test-run", "syncps"))
    (started,) = parts.happened(RunStarted)
    assert isinstance(started, RunStarted)
    assert started.batch_size == 3 * settings.train.batch_size


def test_a_step_that_one_worker_made_is_one_record_of_it(parts: Parts, report: Report) -> None:
    report.step_taken(step(32, 64, version=7, staleness=2, loss=0.25))
    (record,) = parts.metrics.steps
    assert (record.step, record.epoch, record.rank, record.node) == (7, 0, 1, "pi5")
    size, batch_size = parts.context.training.num_samples, parts.context.run.train.batch_size
    for name, value in {
        "total_steps": 2 * -(-size // batch_size),
        "loss": 0.25,
        "lr": 1e-3,
        "staleness": 2,
        "start": 32,
        "stop": 64,
        "samples_applied": 32,
        "grad_norm": 2.5,
    }.items():
        assert record.values[name] == value, name
    assert not any(name.startswith("grad_norm/") for name in record.values)


def test_a_step_that_all_made_together_is_nobodys_record_and_not_stale(
    parts: Parts, report: Report
) -> None:
    report.step_taken(step(0, 96, worker=None, staleness=None))
    (record,) = parts.metrics.steps
    assert (record.rank, record.node) == (None, None)
    assert record.values["samples_applied"] == 96
    assert "staleness" not in record.values


@pytest.mark.parametrize("parts", [("track_gradients=true",)], indirect=True)
def test_gradients_are_tracked_by_layer_when_asked_for(parts: Parts, report: Report) -> None:
    replica = parts.context.training.replica
    ones = torch.ones(replica.num_params)
    norms = report.layer_norms(ones)
    report.step_taken(step(0, 32, layer_norms=norms))
    values = parts.metrics.steps[0].values
    for name, place in replica.layers:
        assert values[f"grad_norm/{name}"] == pytest.approx((place.stop - place.start) ** 0.5)


def test_who_contributed_is_counted_apart_from_the_steps(parts: Parts, report: Report) -> None:
    """Three pushes, of which two made one step and one is still to become one."""
    report.contributed(WORKER, 64, 0.5)
    report.contributed(OTHER, 32, 0.5)
    report.step_taken(step(0, 96, worker=None, staleness=None))
    report.contributed(WORKER, 50, 0.5)
    assert len(parts.metrics.steps) == 1
    assert report.counts.tally.pushes == {"applied": 3}
    shares = {
        worker.node: (worker.samples, worker.pushes)
        for worker in report.counts.tally.workers.values()
    }
    assert shares == {"pi5": (114, 2), "win": (32, 1)}


def test_an_epoch_is_finished_once_when_its_last_sample_is_applied(
    parts: Parts, report: Report
) -> None:
    size = parts.context.training.num_samples
    report.step_taken(step(0, 100, version=1))
    report.step_taken(step(0, 50, version=2, epoch=1))
    report.step_taken(step(100, size - 1, version=3))
    assert parts.happened(EpochFinished) == []
    report.step_taken(step(size - 1, size, version=4))
    expected = EpochFinished(epoch=0, step=4, samples_applied=size + 50)
    assert parts.happened(EpochFinished) == [expected]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [("stale", "staleness.bound"), ("late", "taken back"), ("duplicate", "applied already")],
)
def test_a_dropped_push_is_counted_and_written_down_with_its_reason(
    parts: Parts, report: Report, outcome: str, words: str
) -> None:
    report.dropped(WORKER, lease(0, 32), outcome, staleness=4)  # type: ignore[arg-type]
    assert report.counts.tally.pushes == {outcome: 1}
    (event,) = parts.happened(PushDropped)
    assert isinstance(event, PushDropped)
    assert (event.outcome, event.rank, event.node, event.staleness) == (outcome, 1, "pi5", 4)
    assert words in event.reason
    assert any("worker 2 (pi5)" in line and words in line for line in parts.log_lines)


def test_a_lease_that_comes_back_names_its_last_holder_though_it_has_gone(
    parts: Parts, report: Report
) -> None:
    report.lease_returned(WORKER, Range(1, 32, 64), "its worker has gone")
    assert report.counts.tally.leases_returned == 1
    assert parts.happened(LeaseReturned) == [
        LeaseReturned(rank=1, node="pi5", epoch=1, start=32, stop=64, reason="its worker has gone")
    ]


def test_the_summary_adds_up(parts: Parts, report: Report) -> None:
    training = parts.context.training
    size = training.num_samples
    half = size // 2
    for worker, staleness, taken in (
        (WORKER, 0, step(0, size, version=1, loss=9.0)),
        (WORKER, 4, step(0, half, epoch=1, version=2, loss=1.0)),
        (OTHER, 0, step(half, size, epoch=1, version=3, loss=3.0)),
    ):
        report.contributed(worker, taken.samples.num_samples, taken.loss, staleness)
        report.step_taken(taken)
    report.dropped(WORKER, lease(0, 32), "late", 0)
    report.lost_push("worker 1", "its connection broke")
    summary = report.summary()
    assert (summary.steps, summary.epochs, summary.samples_applied) == (3, 2, 2 * size)
    assert summary.pushes.model_dump() == {
        "applied": 3,
        "stale": 0,
        "late": 1,
        "duplicate": 0,
        "non_finite": 0,
        "lost": 1,
    }
    assert (summary.bytes.sent, summary.bytes.received) == (1000, 2000)
    assert [(share.rank, share.samples) for share in summary.workers] == [
        (0, size - half),
        (1, size + half),
    ]
    assert sum(share.share for share in summary.workers) == pytest.approx(1.0)
    assert summary.workers[1].mean_staleness == 2.0
    expected = (1.0 * half + 3.0 * (size - half)) / size
    assert summary.final.train_loss == pytest.approx(expected), "the mean of the last epoch only"
    by_hand = training.evaluate()
    assert by_hand is not None
    assert summary.final.val_loss == by_hand.loss
    assert len(parts.happened(Evaluated)) == 1


@pytest.mark.parametrize("parts", [("patience=2", "num_epochs=1")], indirect=True)
def test_patience_that_ends_with_the_last_sample_has_not_ended_the_run(
    parts: Parts, report: Report
) -> None:
    for version, loss in enumerate((1.0, 2.0, 2.0)):
        if version == 2:
            report.step_taken(step(0, parts.context.training.num_samples))
        report.evaluated(version, 0, Evaluation(loss, {"accuracy": 0.5}))
    assert report.counts.is_over
    assert report.counts.ending == "every sample of every epoch has been applied"
    summary = report.summary()
    assert (summary.epochs, summary.num_bad_evals) == (1, None)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (("patience=1",), "an evaluation has not lowered the validation loss"),
        (("patience=2",), "2 evaluations in a row have not lowered the validation loss"),
    ],
    indirect=["parts"],
)
def test_a_run_out_of_patience_says_so(parts: Parts, report: Report, reason: str) -> None:
    patience = parts.context.run.train.patience
    assert patience is not None
    for version in range(patience + 1):
        assert not report.counts.is_over
        report.evaluated(version, 0, Evaluation(1.0, {"accuracy": 0.5}))
    assert report.counts.is_over
    assert report.counts.ending == reason


@pytest.mark.parametrize("parts", [("patience=2",)], indirect=["parts"])
def test_patience_counts_the_evaluations_of_one_worker(parts: Parts, report: Report) -> None:
    connection = SimpleNamespace(address="", last_byte_at=0.0, bytes_received=0, bytes_sent=0)
    first, second = (
        Worker(
            worker.member, cast("Session", SimpleNamespace(connection=connection, clocks=Clocks()))
        )
        for worker in (WORKER, OTHER)
    )
    for worker in (first, second):
        report.board.joined(worker, "cpu")
        report.heard(worker, Logged(values={"val_loss": 1.0}))
    for _ in range(2):
        report.heard(second, Logged(values={"val_loss": 2.0}))
    assert not report.counts.is_over
    report.flush()
    assert len(parts.happened(Evaluated)) == 1
    report.board.departed(first, "left")
    for _ in range(2):
        report.heard(second, Logged(values={"val_loss": 2.0}))
    assert report.counts.is_over, "the next worker's evaluations count when the first has gone"


def test_a_loop_s_own_step_and_epoch_do_not_end_the_run(parts: Parts, report: Report) -> None:
    own = dict.fromkeys(sorted(RESERVED), 3.0)
    report.heard(OTHER, Logged(values={"train_acc": 0.9, **own}))
    report.heard(OTHER, Logged(values=own))
    report.heard(WORKER, Logged(values={"val_loss": 1.0, **own}))
    assert [dict(record.values) for record in parts.metrics.records] == [
        {"train_acc": 0.9},
        {"val_loss": 1.0},
    ]
