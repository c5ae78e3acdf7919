"""Curves from `metrics.jsonl`: whole, sampled, live, and without what was undone."""

import functools
import math
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from made_runs import BEGAN, MadeRun
from smolcluster.observability.curves import Series, smooth
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.view import measured
from smolcluster.observability.view.measured import Measured
from smolcluster.observability.view.run import RunView, files_here
from smolcluster.observability.view.sampling import sampled
from smolcluster.runs.events import Evaluated, RunResumed, read_events
from smolcluster.runs.paths import RunPaths


def series(measured: Measured, paths: RunPaths) -> dict[str, Any]:
    while measured.poll():
        pass
    found: dict[str, Any] = measured.series(read_events(paths.events))
    return found


def report(step: int, cpu: float) -> MetricRecord:
    return MetricRecord(
        "worker", step, 0, {"cpu": cpu, "rtt_s": 0.001, "queue": 1.0}, rank=0, node="pi5"
    )


def test_a_run_as_columns(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 4)
    run.metric(report(4, 1.5))
    found = series(Measured(run.paths.metrics), run.paths)
    assert found["steps"]["step"] == [1, 2, 3, 4]
    assert found["steps"]["loss"] == [2.0, 1.0, 0.666667, 0.5]
    assert found["steps"]["t"] == pytest.approx([BEGAN + each / 10 for each in (1, 2, 3, 4)])
    assert "grad_norm" not in found["steps"]
    [process] = found["processes"]
    assert "queue" not in process, "there is no curve of it"
    assert (process["rank"], process["node"], process["cpu"]) == (0, "pi5", [1.5])


def test_what_is_no_finite_number_is_null(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 1)
    run.steps(2, 2, loss=math.nan)
    run.steps(3, 3, loss=math.inf)
    assert series(Measured(run.paths.metrics), run.paths)["steps"]["loss"] == [2.0, None, None]


def test_curves_are_smoothed_as_in_the_picture_and_the_report(tmp_path: Path) -> None:
    run, noise = MadeRun(tmp_path), random.Random(5)  # noqa: S311
    for step in range(1, 301):
        run.steps(step, step, loss=math.nan if step == 200 else noise.random())
    found = series(Measured(run.paths.metrics), run.paths)
    known = [value for value in found["steps"]["loss"] if value is not None]
    drawn = smooth(Series(known, known)).y
    assert found["smoothed"]["loss"].pop(199) is None
    assert found["smoothed"]["loss"] == pytest.approx(drawn, rel=1e-5)


def test_new_lines_are_taken_and_the_version_grows(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    own = Measured(run.paths.metrics)
    assert series(own, run.paths) == {
        **{"steps": {"t": [], "step": []}, "smoothed": {}, "processes": []}
    }
    run.steps(1, 2)
    assert series(own, run.paths)["steps"]["step"] == [1, 2]
    version = own.version
    run.steps(3, 3)
    assert series(own, run.paths)["steps"]["step"] == [1, 2, 3]
    assert own.version == version + 1


def test_points_are_put_together_once_for_all_who_ask(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 2)
    ticks = iter(range(100))
    view = RunView(files_here(run.paths), clock=lambda: next(ticks))
    first = view.series()
    assert view.series() is first
    run.steps(3, 3)
    assert view.series()["steps"]["step"] == [1, 2, 3]
    run.paths.metrics.write_bytes(b"")
    assert view.series()["steps"]["step"] == []


def test_an_abandoned_time_line_is_left_out(tmp_path: Path) -> None:
    before = MadeRun(tmp_path)
    before.started()
    before.steps(1, 9)
    after = MadeRun(tmp_path, incarnation="b2")
    after.now = before.now
    after.event(RunResumed(step=5, samples_applied=160))
    after.steps(6, 7, loss=7.0)
    found = series(Measured(before.paths.metrics), before.paths)
    assert found["steps"]["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert found["steps"]["loss"][5:] == [7.0, 7.0]


def test_a_long_runs_loss_is_as_high_as_it_was(tmp_path: Path) -> None:
    noise = random.Random(7)  # noqa: S311 - no secret
    losses = [noise.gauss(2.0, 0.3) for _ in range(60_000)]
    losses[30_011] = 200.0
    head = '"ts": "2026-11-22T06:00:00Z", "kind": "step", "incarnation": "a1", "epoch": 0'
    lines = (f'{{{head}, "step": {n}, "loss": {loss}}}\n' for n, loss in enumerate(losses))
    paths = RunPaths(tmp_path)
    paths.metrics.write_text("".join(lines))
    shown = series(Measured(paths.metrics), paths)["steps"]["loss"]
    assert shown.count(200.0) == 1
    assert mean(loss for loss in shown if loss < 200.0) == pytest.approx(2.0, rel=0.02)


def test_a_resumed_part_is_there_although_its_clock_was_earlier(tmp_path: Path) -> None:
    """A Raspberry Pi has no clock of its own while it is off."""
    before = MadeRun(tmp_path)
    before.now = 3600.0
    before.started()
    before.steps(1, 100)
    before.event(*(Evaluated(epoch=0, step=step, val_loss=1.0) for step in (50, 100)))
    after = MadeRun(tmp_path, incarnation="b2")
    after.started()
    after.event(RunResumed(step=100, samples_applied=3200))
    after.steps(101, 300)
    after.event(*(Evaluated(epoch=0, step=step, val_loss=1.0) for step in (200, 300)))
    found = RunView(files_here(before.paths)).series()
    assert found["steps"]["step"] == list(range(1, 301))
    assert found["evaluations"]["step"] == [50, 100, 200, 300]


def test_a_damaged_file_has_the_lines_that_are_whole(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 2)
    with run.paths.metrics.open("ab") as file:
        file.write(b'\xff\xfe\x00\n{"kind": "step"}\n[1]\n{"kind":\n')
        for whose in (b'"rank": "x"', b'"rank": 0, "node": [1]'):
            file.write(
                b'{"ts": "", "kind": "worker", "incarnation": "a1", "step": 1, "epoch": 0, %s}\n'
                % whose
            )
    run.steps(3, 3)
    run.metric(report(3, 1.0))
    found = series(Measured(run.paths.metrics), run.paths)
    assert found["steps"]["step"] == [1, 2, 3]
    assert [process["rank"] for process in found["processes"]] == [0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "READ_WHOLE_NBYTES", 64 << 10)


def test_a_large_file_is_sampled_from_end_to_end_and_then_followed(
    tmp_path: Path, small: None
) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 2000)
    run.metric(report(2000, 2.5))
    own = Measured(run.paths.metrics)
    steps = series(own, run.paths)["steps"]["step"]
    assert steps[0] == 1
    assert steps[-1] == 2000
    assert steps == sorted(set(steps))
    run.steps(2001, 2001)
    found = series(own, run.paths)
    assert found["steps"]["step"][-1] == 2001
    assert found["processes"][0]["cpu"] == [2.5]


def test_where_a_large_file_was_abandoned_is_found_exactly(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new start had no checkpoint: only its first step says what it has undone."""
    monkeypatch.setattr(measured, "sampled", functools.partial(sampled, num_places=5))
    before = MadeRun(tmp_path)
    before.started()
    before.steps(1, 900)
    after = MadeRun(tmp_path, incarnation="b2")
    after.started()
    after.steps(1, 1500, loss=7.0)
    found = series(Measured(before.paths.metrics), before.paths)
    assert found["steps"]["step"][0] == 1
    assert set(found["steps"]["loss"]) == {7.0}
