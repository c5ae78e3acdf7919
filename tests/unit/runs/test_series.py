"""`series.json`: bounded, small, and what `metrics.jsonl` says."""

import json
import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from smolcluster.runs.files import utc_timestamp
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import (
    MAX_NBYTES,
    MAX_REPORTS,
    MAX_STEPS,
    ProcessSeries,
    Series,
    SeriesFile,
    SeriesReader,
    Total,
    loaded,
)


def step_of(number: int, loss: float, incarnation: str = "a") -> dict[str, Any]:
    return {
        "ts": utc_timestamp(1000.0 + number),
        "kind": "step",
        "incarnation": incarnation,
        "step": number,
        "loss": loss,
        "lr": 0.001,
        "samples_applied": 32 * number,
        "samples_per_s": 123.456789,
        "mb_per_s": 1.23456789,
        "staleness": number % 3,
        "grad_norm": 0.123456789,
    }


def report_of(number: int, rank: int) -> dict[str, Any]:
    values = {"samples_per_s": 1.5 * number, "cpu": 0.123456, "memory_bytes": 1e9 + number}
    return {
        "ts": utc_timestamp(1000.0 + number),
        "kind": "worker",
        "incarnation": "a",
        "step": number,
        "rank": rank,
        "node": f"n{rank}",
        "gpu/utilization": 0.987654,
        **values,
    }


def append(path: Path, *entries: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def test_a_million_steps_are_few_points_in_a_small_file() -> None:
    series = Series()
    for number in range(25, 1_000_001, 25):
        entry = {**step_of(1, 1.0), "step": number, "samples_applied": 32 * number}
        entry["loss"] = 50.0 if number == 777_775 else 1.0 + number % 2
        series.take(entry)
        if number % 1000 == 0:
            series.take({**entry, "kind": "eval", "val_loss": 1.0 / number})
            for rank in range(4):
                series.take({**report_of(1, rank), "step": number})
    content = series.document(7)
    assert len(content) <= MAX_NBYTES
    assert len(series.steps.buckets) <= MAX_STEPS
    assert max(bucket.high for bucket in series.steps.buckets) == 50.0
    assert series.steps.buckets[-1].samples == 32_000_000
    assert sum(bucket.num for bucket in series.steps.buckets) == 40_000


def test_as_many_processes_as_there_may_be_fit() -> None:
    series = Series()
    for number in range(1, 30):
        for rank in range(300):
            series.take(report_of(number, rank) | {f"share/phase{i}": 0.123456 for i in range(20)})
    assert len(series.document(0)) <= MAX_NBYTES


@pytest.mark.parametrize("num_metrics", [0, 40])
def test_curves_of_many_metrics_leave_room_for_the_processes(num_metrics: int) -> None:
    series, value = Series(), -1.23456789e-05
    metrics = {f"val_own{number}": value for number in range(num_metrics)}
    own = {"lr": value, "drift": value, "grad_norm": value, "val_loss": value} | metrics
    for number in range(1, 1201):
        entry = step_of(number, value) | own
        series.take(entry)
        series.take(report_of(number, 1))
        if number % 4 == 0:
            series.take(entry | {"kind": "eval"})
    content = series.document(0)
    assert len(content) <= MAX_NBYTES
    found = loaded(content)
    assert found is not None
    again = found[0]
    assert again.steps.buckets[-1].step == again.evaluations.buckets[-1].step == 1200
    assert sum(bucket.num for bucket in again.steps.buckets) == 1200
    assert len(again.steps.buckets) >= 300
    assert again.processes[1, "n1"].curve.buckets


def test_what_a_loop_has_logged_is_no_report_of_its_process() -> None:
    series, logged = Series(), Series()
    for number in range(1, 5):
        for each in (series, logged):
            each.take(report_of(2 * number, 1))
        own = {"kind": "worker", "step": 2 * number, "rank": 1, "node": "n1", "train_acc": 0.5}
        logged.take({"ts": utc_timestamp(1001.0 + 2 * number), "samples_per_s": 9e9, **own})
    assert logged.document(0) == series.document(0)


def test_points_are_the_means_of_their_steps() -> None:
    series = Series()
    losses = {number: math.sin(number) for number in range(1, 5001)}
    for number, loss in losses.items():
        series.take(step_of(number, loss))
    first = 1
    for bucket in series.steps.buckets:
        own = [losses[number] for number in range(first, bucket.step + 1)]
        assert bucket.num == len(own)
        assert bucket.mean("loss") == pytest.approx(sum(own) / len(own))
        assert (bucket.low, bucket.high) == (min(own), max(own))
        first = bucket.step + 1


@pytest.mark.parametrize(("incarnation", "starts"), [("b", [0, 1]), ("a", [0, 0])])
def test_what_a_later_start_or_a_pipeline_has_undone_is_forgotten(
    incarnation: str, starts: list[int]
) -> None:
    series = Series()
    for number in range(1, 11):
        series.take(step_of(number, 1.0))
        series.take({**step_of(number, 1.0), "kind": "eval", "val_loss": 3.0})
        series.take(report_of(number, 1))
    series.take(report_of(5, 1))
    series.take(step_of(6, 2.0, incarnation))
    steps = series.steps.columns()
    assert steps["step"] == [1, 2, 3, 4, 5, 6]
    assert steps["loss"] == [1, 1, 1, 1, 1, 2]
    assert series.evaluations.columns()["step"] == [1, 2, 3, 4, 5]
    assert series.processes[1, "n1"].curve.columns()["step"] == [1, 2, 3, 4, 5, 5]
    assert [series.start_of(number) for number in (5, 6)] == starts


def test_numbers_that_are_not_finite_are_null() -> None:
    series = Series()
    for loss in (math.nan, None, math.inf, "much", True):
        series.take({**step_of(1, 0.0), "loss": loss, "step": 1 if loss != "much" else "x"})
    document = orjson.loads(series.document(0))
    assert set(document["steps"].get("loss", [None])) <= {None, 1.0}


def test_what_is_no_finite_number_spoils_no_total() -> None:
    process = ProcessSeries("worker", 1, "n1")
    for cpu in (0.5, None, math.nan, math.inf):
        process.add({"step": 1, "cpu": cpu}, 0.0)
    assert process.totals == {"cpu": Total(mean=0.5, seconds=1.0, most=0.5, newest=0.5)}


def test_a_file_is_read_as_it_was_written() -> None:
    series = Series()
    for number in range(1, 3 * MAX_REPORTS):
        series.take(step_of(number, 1 / number))
        series.take(report_of(number, 1))
        series.take({**step_of(number, 1.0), "kind": "eval", "val_loss": 3.0})
    found = loaded(series.document(99))
    assert found is not None
    again, nbytes = found
    assert nbytes == 99
    assert orjson.loads(again.document(99)) == orjson.loads(series.document(99))
    for each in (series, again):
        each.take(step_of(5000, 0.5))
        each.take(report_of(5000, 1))
    assert again.steps.columns() == series.steps.columns()
    assert again.processes[1, "n1"].newest() == series.processes[1, "n1"].newest()


def test_a_file_that_names_no_roles_is_read() -> None:
    series = Series()
    series.take(report_of(1, 1))
    series.take({**report_of(1, 1), "kind": "server", "rank": None})
    document = orjson.loads(series.document(0))
    roles = [each.pop("role") for each in document["processes"]]
    found = loaded(orjson.dumps(document))
    assert found is not None
    assert [each.role for each in found[0].processes.values()] == roles == ["worker", "server"]


def test_evaluations_of_a_file_without_places_are_thinned_as_before() -> None:
    series, rare = Series(), {"kind": "eval", "val_loss": 3.0}
    for number in range(1, 201):
        series.take({**step_of(1000 * number, 1.0), **rare})
    document = orjson.loads(series.document(0))
    for each in (document["steps"], document["evaluations"]):
        del each["places"]
    found = loaded(orjson.dumps(document))
    assert found is not None
    for each in (again := found[0], series):
        for number in range(201, 1201):
            each.take({**step_of(1000 * number, 1.0), **rare})
    assert again.evaluations.columns() == series.evaluations.columns()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"t0": "x"}', b"\xff"])
def test_a_damaged_file_is_none(content: bytes) -> None:
    assert loaded(content) is None


class TestReader:
    def test_takes_what_the_file_tells_and_what_came_after_it(self, paths: RunPaths) -> None:
        append(paths.metrics, step_of(1, 1.0), step_of(2, 2.0))
        writer = SeriesFile(paths, warn=pytest.fail)
        writer.close()
        append(paths.metrics, step_of(3, 3.0))
        assert SeriesReader(paths).poll_all().steps.columns()["loss"] == [1, 2, 3]

    def test_needs_the_small_file_only(self, paths: RunPaths) -> None:
        append(paths.metrics, step_of(1, 1.0))
        SeriesFile(paths, warn=pytest.fail).close()
        newer = Series()
        newer.take(step_of(9, 9.0))
        paths.metrics.unlink()
        reader = SeriesReader(paths)
        assert reader.series.steps.columns()["loss"] == [1]
        assert not reader.poll()
        paths.series.write_bytes(newer.document(5))
        assert reader.poll()
        assert reader.series.steps.columns()["loss"] == [9]

    def test_begins_anew_with_another_file(self, paths: RunPaths) -> None:
        append(paths.metrics, *(step_of(number, 1.0) for number in range(1, 9)))
        reader = SeriesReader(paths)
        reader.poll_all()
        paths.metrics.write_text("")
        append(paths.metrics, step_of(1, 7.0))
        assert reader.poll_all().steps.columns()["loss"] == [7]


def test_the_owner_writes_every_ten_seconds_and_at_the_end(paths: RunPaths) -> None:
    now = 0.0
    file = SeriesFile(paths, warn=pytest.fail, clock=lambda: now)
    append(paths.metrics, step_of(1, 1.0))
    now = 9.9
    file.tick()
    assert not paths.series.exists()
    now = 10.0
    file.tick()
    assert SeriesReader(paths).offset > 0
    append(paths.metrics, step_of(2, 2.0))
    file.close()
    found = loaded(paths.series.read_bytes())
    assert found is not None
    assert found[0].steps.columns()["step"] == [1, 2]


def test_a_file_that_cannot_be_written_is_one_warning(paths: RunPaths) -> None:
    said: list[str] = []
    file = SeriesFile(RunPaths(paths.root / "gone"), warn=said.append)
    file.close()
    file.close()
    assert len(said) == 1
