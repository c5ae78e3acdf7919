"""What a run has measured, as the page's columns."""

import math
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from made_runs import BEGAN, MadeRun
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.view.curves import Points, smooth
from smolcluster.observability.view.measured import columns_of
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import SeriesReader


def columns(paths: RunPaths) -> dict[str, Any]:
    return columns_of(SeriesReader(paths).poll_all())


def test_a_run_as_columns(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 4)
    values = {"cpu": 1.5, "memory_bytes": 1e9, "rtt_s": 0.001, "queue": 1.0}
    run.metric(MetricRecord("worker", 4, 0, values, rank=0, node="pi5"))
    found = columns(run.paths)
    assert found["steps"]["step"] == [1, 2, 3, 4]
    assert found["steps"]["loss"] == [2.0, 1.0, 0.666667, 0.5]
    assert found["steps"]["t"] == pytest.approx([BEGAN + each / 10 for each in (1, 2, 3, 4)])
    assert "grad_norm" not in found["steps"]
    [process] = found["processes"]
    assert "queue" not in process, "there is no curve of it"
    assert (process["rank"], process["node"], process["cpu"]) == (0, "pi5", [1.5])


def test_curves_are_smoothed_as_in_the_picture_and_the_report(tmp_path: Path) -> None:
    run, noise = MadeRun(tmp_path), random.Random(5)  # noqa: S311
    for step in range(1, 301):
        run.steps(step, step, loss=math.nan if step == 200 else noise.random())
    found = columns(run.paths)
    known = [value for value in found["steps"]["loss"] if value is not None]
    drawn = smooth(Points(known, known)).y
    assert found["smoothed"]["loss"].pop(199) is None
    assert found["smoothed"]["loss"] == pytest.approx(drawn, rel=1e-5)


def test_points_are_put_together_once_for_all_who_ask(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 2)
    ticks = iter(range(100))
    view = View(Folder(run.paths), clock=lambda: next(ticks))
    first = view.columns()
    assert view.columns() is first
    run.steps(3, 3)
    assert view.columns()["steps"]["step"] == [1, 2, 3]
    run.paths.metrics.write_bytes(b"")
    assert view.columns()["steps"]["step"] == []


def test_a_long_runs_loss_is_as_high_as_it_was(tmp_path: Path) -> None:
    noise = random.Random(7)  # noqa: S311 - no secret
    losses = [noise.gauss(2.0, 0.3) for _ in range(20_000)]
    losses[10_011] = 200.0
    head = '"ts": "2026-11-22T06:00:00Z", "kind": "step", "incarnation": "a1", "epoch": 0'
    lines = (f'{{{head}, "step": {n}, "loss": {loss}}}\n' for n, loss in enumerate(losses))
    paths = RunPaths(tmp_path)
    paths.metrics.write_text("".join(lines))
    shown = columns(paths)["steps"]["loss"]
    assert shown.count(200.0) == 1
    assert mean(loss for loss in shown if loss < 200.0) == pytest.approx(2.0, rel=0.02)
