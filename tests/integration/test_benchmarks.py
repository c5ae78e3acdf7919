"""The benchmarks run; what they measure is nobody's to pass or fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_the_exchange_is_measured_beside_gloo(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(PROJECT / "benchmarks" / "exchange.py"), "--json", str(file)]
    options = ["--workers=2", "--megabytes=1", "--steps=1", "--rounds=1", "--codec=int8"]
    subprocess.run(
        [*command, *options, "--digests=on"], check=True, capture_output=True, timeout=300
    )
    (case,) = json.loads(file.read_text())["cases"]
    assert case["ms"] > 0
    assert case["gloo_ms"] > 0
    assert case["copies"] > 0


@pytest.mark.bench
def test_honest_work_is_measured_under_attack() -> None:
    command = [sys.executable, str(PROJECT / "benchmarks" / "attacks.py"), "--json"]
    options = ["--seconds=2", "--latency=10", "--algorithm=edp", "--case=hung"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, timeout=300)
    (case,) = json.loads(done.stdout)["cases"]
    assert (case["algorithm"], case["case"]) == ("edp", "hung")
    assert case["samples_per_s"] >= 0


@pytest.mark.bench
def test_what_a_worker_costs_a_coordinator_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(PROJECT / "benchmarks" / "scale.py"), "--json", str(file)]
    options = ["--workers=2", "--megabytes=1", "--rate=20", "--seconds=1"]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=300)
    (case,) = json.loads(file.read_text())["cases"]
    assert case["workers"] == 2
    assert case["pushes"] > 0
    assert case["p99_ms"] > 0


@pytest.mark.bench
def test_time_to_loss_is_measured_beside_one_machine(tmp_path: Path) -> None:
    if reason := no_namespaces():
        pytest.skip(reason)
    file = tmp_path / "results.json"
    command = [sys.executable, str(PROJECT / "benchmarks" / "time_to_loss.py"), f"--out={file}"]
    options = ["--seeds=1", "--seconds=10", "--limit=1", "--lr=1e-3", "--scale=4", "--mbit=2000"]
    arms = ["--arms", "one", "edp-int8"]
    subprocess.run([*command, *options, *arms], check=True, capture_output=True, timeout=550)
    alone, edp = json.loads(file.read_text())["runs"]
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
def test_a_pipelines_step_is_measured_beside_torchs(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(PROJECT / "benchmarks" / "pipeline.py"), "--json", str(file)]
    options = ["--schedules=1f1b", "--megabytes=0.01", "--unit=1", "--steps=1"]
    subprocess.run(
        [*command, *options, "--cases", "schedules"], check=True, capture_output=True, timeout=300
    )
    first, *_ = json.loads(file.read_text())["schedules"]
    assert first["schedule"] == "1f1b"
    assert first["simulated_s"] == pytest.approx(0.033)
    assert first["measured_s"] > 0.033
    assert first["torch_s"] > 0.033


@pytest.mark.bench
def test_the_check_of_gpus_runs_without_one(tmp_path: Path) -> None:
    file = tmp_path / "gpu.md"
    command = [sys.executable, str(PROJECT / "benchmarks" / "gpu.py"), "--device", "cpu"]
    only = ("--only", "one process, float32", "mesh of all GPUs")
    done = subprocess.run([*command, *only, "--to", str(file)], timeout=550, check=False)
    assert done.returncode == 0
    rows = json.loads(file.with_suffix(".json").read_text())["rows"]
    assert [row["state"] for row in rows] == ["ok", "ok"]
    assert "on the CPU" in file.read_text()
