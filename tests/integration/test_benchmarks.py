"""Benchmarks run, and what they measure is nobody's to pass or fail; what the soak calls flat and exact."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any
from xml.etree import ElementTree

import pytest

from made_runs import summary_of
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import MetricLine
from smolcluster.runs.summary import Pushes, WorkerShare

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def measured(name: str, results: Path, *options: str) -> Any:
    """What a benchmark leaves in its file of results."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


@pytest.mark.parametrize(
    ("name", "options", "table", "columns"),
    [
        pytest.param(
            "exchange",
            "--workers=2 --megabytes=1 --steps=1 --rounds=1 --codec=int8 --digests=on",
            "cases",
            ("ms", "gloo_ms", "copies"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "scale",
            "--workers=2 --megabytes=1 --rate=20 --seconds=1",
            "cases",
            ("workers", "pushes", "p99_ms"),
            marks=pytest.mark.bench,
        ),
        pytest.param(
            "pipeline",
            "--schedules=1f1b --megabytes=0.01 --unit=1 --steps=1 --cases schedules",
            "schedules",
            ("simulated_s", "measured_s", "torch_s"),
            marks=pytest.mark.bench,
        ),
    ],
)
def test_it_is_measured(
    file: Path, name: str, options: str, table: str, columns: tuple[str, ...]
) -> None:
    row, *_ = measured(name, file, f"--json={file}", *options.split())[table]
    assert all(row[column] > 0 for column in columns), row


@pytest.mark.bench
def test_honest_work_is_measured_under_attack() -> None:
    command = [sys.executable, str(BENCHMARKS / "attacks.py"), "--json"]
    options = ["--seconds=2", "--latency=10", "--algorithm=edp", "--case=hung"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, timeout=300)
    (case,) = json.loads(done.stdout)["cases"]
    assert (case["algorithm"], case["case"]) == ("edp", "hung")
    assert case["samples_per_s"] >= 0


@pytest.mark.bench
def test_time_to_loss_is_measured_beside_one_machine(file: Path) -> None:
    if reason := no_namespaces():
        pytest.skip(reason)
    options = ("--seeds=1", "--seconds=10", "--limit=1", "--lr=1e-3", "--scale=4", "--mbit=2000")
    arms = ("--arms", "one", "edp-int8")
    alone, edp = measured("time_to_loss", file, f"--out={file}", *options, *arms)["runs"]
    assert alone["reached"]["loss"] == alone["points"][-1]["loss"]
    assert set(edp["computing"]) == {"fast1", "fast2", "fast3", "slow"}
    assert not edp["failure"]
    assert "one fast machine alone" in file.with_suffix(".md").read_text()


def no_namespaces() -> str:
    """Why no network namespace can be had here; "" where one can."""
    if sys.platform != "linux" or os.geteuid() != 0 or not (which("ip") and which("tc")):
        return "network namespaces need Linux, root, and ip and tc"
    name = f"test-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        return "no network namespace can be made here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@pytest.mark.bench
def test_the_check_of_gpus_runs_without_one(file: Path) -> None:
    page = file.with_suffix(".md")
    only = ("--only", "one process, float32", "mesh of all GPUs")
    found = measured("gpu", file, "--device", "cpu", *only, "--to", str(page))
    assert [row["state"] for row in found["rows"]] == ["ok", "ok"]
    assert "on the CPU" in page.read_text()


@pytest.mark.bench
def test_a_soak_ends_well_and_writes_what_it_saw(file: Path) -> None:
    chart = file.with_name("soak.svg")
    options = ("--minutes=0.15", "--faults-per-minute=60", "--workers=2", "--seed=0")
    files = (f"--json={file}", f"--chart={chart}", f"--folder={file.parent / 'files'}")
    (soak,) = measured("soak", file, "--algorithm", "edp", *options, *files)["soaks"]
    assert len(soak["faults"]) >= 4
    assert soak["exit_codes"] == {"server": 0, "worker 1": 0, "worker 2": 0}
    assert soak["summary"]["samples_applied"] == 1438 * soak["num_epochs"]
    assert soak["restarts"]["server"] >= 1
    assert all(life["samples"] for life in soak["lives"] if life["name"] == "worker 1")
    drawing = ElementTree.parse(chart).getroot()  # noqa: S314 - we have just written it
    marks = [element for element in drawing.iter() if element.get("id") == "fault"]
    assert len(marks) == len(soak["faults"])


@pytest.mark.parametrize(
    ("memory", "num_threads", "num_files", "is_flat"),
    [("warms up", 0, 0, True), ("leaks", 0, 0, False), ("", 1, 0, False), ("", 0, 1, False)],
)
def test_a_leak_of_memory_threads_or_files_is_not_flat(
    monkeypatch: pytest.MonkeyPatch, memory: str, num_threads: int, num_files: int, *, is_flat: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from soak import Sample, trend

    samples = []
    for age in range(300):
        used = {"warms up": 2e8 * min(1.0, age / 30), "leaks": 2e8 + 2e5 * age}.get(memory, 10)
        counts = 5 + num_threads * age // 10, 5 + num_files * age // 10
        samples.append(Sample(float(age), int(used), int(used), *counts))
    found = trend("server", samples)
    assert found is not None
    assert found.is_flat == is_flat


def test_samples_steps_and_pushes_of_a_soak_must_fit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from soak import problems_of

    def num_problems(algorithm: str, applied: int, steps: int, pushes: int, epochs: int = 2) -> int:
        worker = WorkerShare(rank=0, node="pi5", samples=applied, mean_staleness=0.0, share=1.0)
        made = summary_of(
            algorithm=algorithm,
            train_samples=100,
            samples_applied=applied,
            steps=steps,
            pushes=Pushes(applied=pushes),
            workers=[worker],
        )
        return len(problems_of(made, 32, epochs))

    assert num_problems("edp", 200, 8, 8) == num_problems("syncps", 200, 8, 15) == 0
    assert num_problems("edp", 199, 8, 8) == 2
    assert num_problems("syncps", 200, 9, 15) == num_problems("edp", 200, 8, 9) == 1
    assert num_problems("edp", 200, 8, 8, epochs=3) == 3


def test_samples_that_are_applied_again_after_a_resume_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from soak import Applied

    applied = Applied()

    def add(incarnation: str, step: int, epoch: int, start: int) -> None:
        values = {"start": float(start), "stop": start + 10.0}
        applied.add(MetricLine("", incarnation, MetricRecord("step", step, epoch, values)))

    for step in range(1, 6):
        add("first", step, 0, 10 * step)
    for step in range(3, 8):
        add("second", step, 0, 10 * step)
    add("second", 8, 1, 10)
    assert applied.num_twice == 0
    add("second", 9, 0, 15)
    assert applied.num_twice == 2
