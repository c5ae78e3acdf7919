"""A run's curves over the samples applied."""

from collections.abc import Iterable, Sequence

import pytest

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.view.curves import (
    Curves,
    Points,
    curves_of,
    smooth,
    window_means,
)
from smolcluster.runs.events import Event, EventRecord, RunStarted, WorkerJoined, WorkerLost
from smolcluster.runs.files import utc_timestamp
from smolcluster.runs.series import MAX_STEPS, Series

BATCH = 32
STARTED = RunStarted(
    run_id="edp-1",
    algorithm="edp",
    node="mini1",
    num_workers=3,
    num_epochs=2,
    train_samples=3200,
    batch_size=BATCH,
    codec="fp32",
    dataset="digits",
    model="SimpleNN",
    num_params=9610,
)


def step(number: int, **more: float) -> MetricRecord:
    values = {"loss": 2.0 / number, "lr": 1e-3, "samples_applied": float(BATCH * number)}
    return MetricRecord("step", number, 0, values | more)


def evaluation(number: int, **values: float) -> MetricRecord:
    return MetricRecord("eval", number, 0, {"val_loss": 1.5 / (number + 1)} | values)


def event(incarnation: str, what: Event, at_s: float = 0) -> EventRecord:
    return EventRecord(utc_timestamp(at_s), incarnation, what)


def taken(starts: dict[str, Iterable[MetricRecord]]) -> Series:
    """What these starts have measured, each record at the second of its step's number."""
    series = Series()
    for incarnation, records in starts.items():
        for each in records:
            stamp = {"ts": utc_timestamp(each.step), "kind": each.kind, "step": each.step}
            series.take({**stamp, "incarnation": incarnation, **each.values})
    return series


def curves_from(*records: MetricRecord, events: Sequence[EventRecord] = ()) -> Curves:
    return curves_of("r", taken({"a": records}), events, num_workers=3)


@pytest.mark.parametrize(
    ("records", "left", "right"),
    [
        (
            [step(1, staleness=0.0), evaluation(1, val_accuracy=0.5)],
            ["loss", "val_accuracy"],
            ["lr", "staleness"],
        ),
        ([step(1), evaluation(1, val_perplexity=90.0)], ["loss", "val_perplexity"], ["lr"]),
        ([step(1, samples_per_s=5.0)], ["loss"], ["lr", "samples_per_s"]),
        ([step(1, drift=0.01)], ["loss"], ["lr", "drift"]),
        ([evaluation(1)], [], []),
    ],
)
def test_a_run_gets_the_panels_that_it_has_values_for(
    records: list[MetricRecord], left: list[str], right: list[str]
) -> None:
    assert curves_from(*records).panels == [names for names in (left, right) if names]


def test_the_title_says_what_was_trained() -> None:
    title = curves_from(step(1), events=[event("a", STARTED)]).title
    assert title == "r  ·  edp  ·  SimpleNN on digits  ·  3 workers"
    assert curves_from(step(1)).title == "r"


def test_values_lie_over_the_samples_applied() -> None:
    records = [step(1), step(2), evaluation(2), step(3), evaluation(5), evaluation(0, val_loss=9.0)]
    series = curves_from(*records).series
    assert series["loss"] == Points([32.0, 64.0, 96.0], [2.0, 1.0, 2.0 / 3])
    assert series["val_loss"] == Points([0.0, 64.0, 96.0], [9.0, 0.5, 0.25])


def test_of_a_long_run_a_point_has_its_lowest_and_its_highest_step() -> None:
    records = [step(number, loss=7.0 if number == 99 else 1.0) for number in range(1, 5000)]
    curves = curves_from(*records)
    assert len(curves.series["loss"].x) <= MAX_STEPS
    assert len(curves.single.x) <= 2 * MAX_STEPS
    assert (min(curves.single.y), max(curves.single.y)) == (1.0, 7.0)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ({"a": range(1, 101), "b": range(81, 121)}, [*range(1, 121)]),
        ({"a": range(1, 11), "b": range(9, 21), "c": range(5, 31)}, [*range(1, 31)]),
        ({"a": range(1, 11), "b": range(1, 4)}, [1, 2, 3]),
    ],
)
def test_what_later_starts_undid_is_left_out(starts: dict[str, range], expected: list[int]) -> None:
    series = taken({name: map(step, own) for name, own in starts.items()})
    curves = curves_of("r", series, [], num_workers=3)
    assert curves.series["loss"].x == [float(BATCH * number) for number in expected]
    firsts = [own[0] for name, own in starts.items() if name != "a"]
    known = {float(BATCH * first) for first in firsts if first == min(firsts)} - {32.0}
    assert set(curves.marks.get("resumed", [])) == known


def test_workers_that_come_and_go_during_the_run_are_marked() -> None:
    joined = WorkerJoined(rank=0, node="pi", device="cpu", samples_per_s=10.0)
    lost = WorkerLost(rank=1, node="pi", reason="silent")
    events = [
        event("a", what, at_s)
        for what, at_s in ((joined, 0.5), (lost, 3.5), (joined, 6.5), (lost, 10.5))
    ]
    curves = curves_from(*map(step, range(1, 11)), events=events)
    assert curves.marks == {"worker lost or left": [3.0 * BATCH], "worker joined": [6.0 * BATCH]}


def test_smoothing_follows_and_calms() -> None:
    x = [float(i) for i in range(1000)]
    noisy = Points(x, [1.0 + (-1) ** i for i in range(1000)])
    calm = smooth(noisy)
    assert (calm.x, calm.y[0]) == (x, noisy.y[0])
    assert all(abs(value - 1.0) < 0.15 for value in calm.y[100:])
    assert smooth(Points(x, [3.0] * 1000)).y == pytest.approx([3.0] * 1000)


def test_windows_have_their_means() -> None:
    points = Points([1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 2.0, 4.0, 4.0, 7.0])
    assert window_means(points, 2) == Points([1.5, 4.0], [1.0, 5.0])
    assert window_means(points, 99) == points
