"""A report that goes on where a checkpoint stood: as if the server had never been started again."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import local_settings
from peers import Parts, report_of, server_parts, step_taken
from smolcluster.data.permutation import Range
from smolcluster.errors import CheckpointError
from smolcluster.runs.events import RunResumed, RunStarted
from smolcluster.server import rates as room
from smolcluster.server.rates import SteadyRate
from smolcluster.server.report import Report
from smolcluster.server.tally import COUNTS
from smolcluster.server.worker import Worker
from smolcluster.training.checkpoint import TrainingState
from smolcluster.training.evaluate import Evaluation
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import LeaseKey

WORKERS = [
    Worker(Member(session_id=5, worker_id=2, node="pi5", instance="abcdef01")),
    Worker(Member(session_id=6, worker_id=1, node="win", instance="abcdef02")),
]
LEASE = LeaseKey(incarnation="here", epoch=0, start=0, stop=32, grant=1)

DOINGS = st.lists(
    st.one_of(
        st.tuples(
            st.just("step"), st.integers(0, 1), st.integers(1, 40), st.floats(0, 1e6), st.just(0)
        ),
        st.tuples(st.just("push"), st.integers(0, 1), st.integers(1, 40), st.just(0.0), st.just(3)),
        st.tuples(
            st.sampled_from(["stale", "late", "duplicate", "lost", "returned"]),
            st.integers(0, 1),
            st.just(0),
            st.just(0.0),
            st.just(0),
        ),
    ),
    max_size=20,
)
Doing = tuple[str, int, int, float, int]


class Clock:
    """A clock that the test moves, instead of the module's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with server_parts(local_settings("num_epochs=2", "track_gradients=false"), tmp_path) as parts:
        yield parts


@pytest.fixture(scope="module")
def shared_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    overrides = ("num_epochs=2", "track_gradients=false")
    with server_parts(local_settings(*overrides), tmp_path_factory.mktemp("server")) as parts:
        yield parts


def step(
    report: Report, num_samples: int, *, epoch: int = 0, loss: float = 0.5, start: int = 0
) -> None:
    samples = Range(epoch, start, start + num_samples)
    version = report.counts.version + 1
    report.step_taken(step_taken(version, samples, WORKERS[0], loss, staleness=0))


def do(report: Report, doing: Doing) -> None:
    what, which, number, loss, staleness = doing
    worker = WORKERS[which]
    match what:
        case "step":
            step(report, number, epoch=which, loss=loss)
        case "push":
            report.contributed(worker, number, 0.5, staleness)
        case "stale" | "late" | "duplicate":
            report.dropped(worker, LEASE, what, staleness)
        case "lost":
            report.lost_push(worker.name, "its connection broke")
        case "returned":
            report.lease_returned(worker, Range(0, 0, 32), "its worker has gone")


def through_json(state: TrainingState) -> TrainingState:
    """What a checkpoint's file makes of it."""
    return TrainingState.model_validate_json(json.dumps(json.loads(state.model_dump_json())))


def resumed(
    parts: Parts,
    state: TrainingState,
    moved: tuple[int, int] = (0, 0),
    incarnation: str = "there",
) -> Report:
    report = report_of(parts, incarnation, moved)
    report.resume(through_json(state))
    return report


def without_times(state: TrainingState) -> dict[str, Any]:
    counted = dict(state.model_dump())
    counted["progress"] = dict(counted["progress"])
    counted["progress"][COUNTS] = {**counted["progress"][COUNTS], "wall_s": None}
    return {**counted, "incarnation": None}


@settings(max_examples=60)
@given(before=DOINGS, after=DOINGS)
def test_a_report_that_was_resumed_counts_as_one_that_went_on(
    shared_parts: Parts, before: list[Doing], after: list[Doing]
) -> None:
    steady = report_of(shared_parts)
    for doing in before:
        do(steady, doing)
    again = resumed(shared_parts, steady.training_state({}), moved=(0, 0))
    for doing in after:
        do(steady, doing)
        do(again, doing)
    assert without_times(again.training_state({})) == without_times(steady.training_state({}))
    one, other = steady.summary(), again.summary()
    assert other.model_copy(update={"wall_s": one.wall_s}) == one


def test_a_checkpoint_keeps_no_sums_of_epochs_that_are_over(parts: Parts) -> None:
    """Else a run of very many short epochs could be saved no more."""
    report = report_of(parts)
    size = report.counts.epoch_size

    def counted() -> Any:
        state = report.training_state({})
        assert state.train_loss == 0.25, "that of the newest epoch"
        return state.progress[COUNTS]

    step(report, size - 1)
    step(report, 10, epoch=1, loss=0.25)
    assert list(counted()["epoch_samples"]) == ["0", "1"], "a sample of the first one is to come"
    step(report, 1)
    for sums in ("epoch_samples", "epoch_loss", "epoch_terms"):
        assert list(counted()[sums]) == ["1"]


def test_a_standing_says_whose_it_is_and_where(parts: Parts) -> None:
    report, context = report_of(parts), parts.context
    step(report, 30, epoch=0, loss=2.0)
    step(report, 10, epoch=1, loss=1.0)
    step(report, 30, epoch=1, loss=5.0)
    state = report.training_state({"dispatcher": {"cursor": [0, 1, 2]}})
    assert (state.run_id, state.algorithm, state.incarnation) == ("test-run", "edp", "here")
    assert (state.step, state.samples_applied, state.epoch) == (3, 70, 1)
    assert state.dataset_fingerprint == context.training.workload.fingerprint
    assert state.codec == "fp32"
    assert state.train_loss == pytest.approx(4.0), "the mean of the newest epoch"
    assert state.val_loss is None
    assert state.progress.keys() == {"dispatcher", COUNTS}
    assert state.progress["dispatcher"] == {"cursor": [0, 1, 2]}


def test_a_standing_does_not_change_when_the_run_goes_on(parts: Parts) -> None:
    report = report_of(parts)
    report.contributed(WORKERS[0], 30, 0.5)
    step(report, 30)
    state = report.training_state({})
    kept = state.model_dump_json()
    report.contributed(WORKERS[0], 30, 0.5)
    report.contributed(WORKERS[1], 30, 0.5)
    report.dropped(WORKERS[1], LEASE, "late", 0)
    step(report, 30)
    assert state.model_dump_json() == kept


def test_the_resumption_is_an_event_after_the_start(parts: Parts) -> None:
    first = report_of(parts)
    step(first, 30)
    step(first, 30)
    resumed(parts, first.training_state({}))
    assert parts.happened(RunResumed) == [RunResumed(step=2, samples_applied=60)]
    assert len(parts.happened(RunStarted)) == 2


def test_time_and_traffic_are_those_of_all_starts(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    first = report_of(parts, moved=(100, 7))
    clock.now += 10.0
    step(first, 30)
    second = resumed(parts, first.training_state({}), moved=(20, 1))
    clock.now += 500.0
    second.rates.begin()
    clock.now += 5.0
    third = resumed(parts, second.training_state({}), (3, 4), "elsewhere")
    clock.now += 1.0
    summary = third.summary()
    assert summary.wall_s == pytest.approx(16.0), "without the time that nobody trained"
    assert (summary.bytes.sent, summary.bytes.received) == (123, 12)


def test_traffic_counts_once_where_a_process_goes_on_from_its_own_checkpoint(parts: Parts) -> None:
    first = report_of(parts, moved=(100, 7))
    step(first, 30)
    second = resumed(parts, first.training_state({}), moved=(20, 1))
    for _ in range(2):
        second.resume(through_json(second.training_state({})))
    assert second.rates.traffic == (120, 8)


def test_the_rate_begins_with_the_resumption(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was applied before is no sign of speed."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(SteadyRate.__init__, "__defaults__", (lambda: clock.now,))
    first = report_of(parts)
    step(first, 1000)
    second = resumed(parts, first.training_state({}))
    clock.now += 2.0
    step(second, 40)
    values = parts.metrics.steps[-1].values
    assert values["samples_per_s"] == pytest.approx(20.0)
    assert values["samples_applied"] == 1040


def test_a_worker_that_comes_back_has_one_share(parts: Parts) -> None:
    first = report_of(parts)
    first.contributed(WORKERS[0], 30, 0.5, staleness=4)
    step(first, 30)
    second = resumed(parts, first.training_state({}))
    moved = Worker(Member(session_id=1, worker_id=2, node="mini2", instance="abcdef09"))
    second.contributed(moved, 10, 0.5, staleness=0)
    step(second, 10)
    (share,) = second.summary().workers
    assert (share.rank, share.node, share.samples) == (1, "mini2", 40)
    assert share.mean_staleness == 2.0
    assert share.share == 1.0


def test_an_evaluation_of_before_is_not_known_any_more(parts: Parts) -> None:
    first = report_of(parts)
    step(first, 30)
    first.evaluated(1, 0, Evaluation(0.25, {"accuracy": 0.5}))
    second = resumed(parts, first.training_state({}))
    assert second.evaluated_version == 0
    assert second.with_evaluation(first.training_state({})).val_loss is None


# What is not its own


def state_with(parts: Parts, **changes: Any) -> TrainingState:
    report = report_of(parts)
    report.contributed(WORKERS[0], 30, 0.5)
    step(report, 30)
    state = report.training_state({})
    counts = state.progress[COUNTS]
    assert isinstance(counts, dict)
    changed = {name: value for name, value in (counts | changes).items() if value is not ...}
    return state.model_copy(update={"progress": {COUNTS: changed}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_s", "a while"),
        ("wall_s", None),
        ("wall_s", math.inf),
        ("wall_s", ...),
        ("traffic", [1]),
        ("traffic", [1, 2, 3]),
        ("epoch_samples", [30]),
        ("epoch_samples", {"first": 30}),
        ("epoch_loss", {"0": math.nan}),
        ("pushes", {"applied": "many"}),
        ("leases_returned", 0.5),
        ("workers", {"2": {"rank": 1}}),
        ("workers", {"2": None}),
        ("more", 1),
    ],
)
def test_counts_that_cannot_be_read_are_a_checkpoint_error(
    parts: Parts, name: str, value: Any
) -> None:
    report = report_of(parts, "there")
    with pytest.raises(CheckpointError, match="the progress of step 1 cannot be read"):
        report.resume(state_with(parts, **{name: value}))
    assert (report.counts.version, report.counts.samples_applied) == (0, 0)
    assert parts.happened(RunResumed) == []


def test_counts_of_before_loss_terms_were_counted_have_one_a_sample(parts: Parts) -> None:
    report = report_of(parts, "there")
    report.resume(state_with(parts, epoch_terms=...))
    assert report.training_state({}).train_loss == 0.5


@pytest.mark.parametrize("progress", [{}, {COUNTS: None}, {COUNTS: []}, {COUNTS: "30"}])
def test_a_checkpoint_without_counts_is_a_checkpoint_error(
    parts: Parts, progress: dict[str, Any]
) -> None:
    state = state_with(parts).model_copy(update={"progress": progress})
    with pytest.raises(CheckpointError, match="the progress of step 1 cannot be read"):
        report_of(parts, "there").resume(state)
