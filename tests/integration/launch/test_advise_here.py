"""`advise` and `launch --auto` on this machine alone, with real steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smolcluster.runs.advice import ADVICE
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import read_summary

SMALL = (
    *("--train-config", "digits", "--workers", "2", "--local"),
    *("--override", "num_epochs=1", "--override", "metrics_port=null"),
)

pytestmark = pytest.mark.nightly


def smolcluster(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "smolcluster.cli", *words],
        env={**os.environ, "SMOLCLUSTER_RUNS_DIR": str(tmp_path / "runs")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_launch_that_follows_keeps_what_was_predicted(tmp_path: Path) -> None:
    done = smolcluster(tmp_path, "launch", "--auto", "--no-tmux", *SMALL)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    if done.returncode == 4:  # on this machine, now, it is not worth it: nothing was launched
        assert "do not distribute this" in done.stdout
        assert not (tmp_path / "runs").exists()
        return
    [run] = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    paths = RunPaths(run)
    prediction = ADVICE.read(paths.advice)
    assert read_summary(paths.summary).algorithm == prediction.algorithm
    assert "Predicted" in paths.report.read_text()
