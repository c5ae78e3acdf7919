"""Two runs of an earlier version, of three epochs each, are read and gone on from as it left them."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from harness import local_settings, places_applied
from own_workloads import run
from smolcluster.cli import main
from smolcluster.configs.schema import AlgorithmName

HERE = Path(__file__).parent
RUNS: list[tuple[AlgorithmName, int]] = [("edp", 135), ("syncps", 69)]
"""What trained, and how many steps."""
NUM_SAMPLES = 1438


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs with copies of both."""
    for algorithm, _ in RUNS:
        shutil.copytree(HERE / algorithm, tmp_path / "runs" / algorithm)
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize(("algorithm", "num_steps"), RUNS)
def test_a_run_is_shown(
    golden: Path, algorithm: str, num_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((golden / algorithm / "summary.json").read_text())
    assert main(["status", algorithm, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == num_steps
    assert {each["node"]: each["process"] for each in shown["processes"]} == dict.fromkeys(
        ("mini1", "pi5", "win"), "ended"
    )
    assert main(["checkpoints", algorithm]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["report", algorithm]) == 0
    page = (golden / algorithm / "report.html").read_text()
    assert f"{summary['final']['val_accuracy']:.1%}" in page


def test_two_runs_are_compared(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "edp", "syncps"]) == 0
    shown = capsys.readouterr().out
    assert "edp" in shown
    assert "syncps" in shown


@pytest.mark.parametrize(("algorithm", "num_steps"), RUNS)
def test_a_run_goes_on_from_its_checkpoint(
    golden: Path, algorithm: AlgorithmName, num_steps: int
) -> None:
    overrides = ("num_epochs=4", "model.hidden=8", "min_workers=2")
    settings = local_settings(*overrides, workers=2, algorithm=algorithm)
    cluster = run(settings, golden / algorithm, algorithm, resume=True)
    assert cluster.metrics.steps[0].step == num_steps + 1
    assert places_applied(cluster.metrics.records) == {3: Counter(range(NUM_SAMPLES))}
