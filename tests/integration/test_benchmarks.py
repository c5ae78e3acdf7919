"""The benchmarks run; what they measure is nobody's to pass or fail."""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


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


def test_honest_work_is_measured_under_attack() -> None:
    command = [sys.executable, str(PROJECT / "benchmarks" / "attacks.py"), "--json"]
    options = ["--seconds=2", "--latency=10", "--algorithm=edp", "--case=hung"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, timeout=300)
    (case,) = json.loads(done.stdout)["cases"]
    assert (case["algorithm"], case["case"]) == ("edp", "hung")
    assert case["samples_per_s"] >= 0
