"""A run ends after `num_steps` steps, within an epoch, and within one past those that are set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import local_settings
from own_workloads import NUM_SAMPLES, alone, losses_of, normed, run
from smolcluster.configs.schema import AlgorithmName
from tiers import at_night

STEPS_OF_AN_EPOCH = NUM_SAMPLES // 32
OWN: dict[AlgorithmName, tuple[str, ...]] = {
    "edp": ("worker_update_interval=1",),
    "syncps": ("global_batch_size=32",),
    "diloco": ("mode=sync", "outer_lr=1", "outer_momentum=0", "codec_up=null", "codec_down=null"),
}
DEADLINE_S = 120


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [3 * STEPS_OF_AN_EPOCH + 2, *at_night(3)])
@pytest.mark.parametrize("algorithm", OWN)
def test_a_run_ends_after_its_steps_whatever_its_epochs_are(
    tmp_path: Path, algorithm: AlgorithmName, num_steps: int
) -> None:
    """And its learning rate falls by them, as in one process."""
    schedule = ("lr_schedule.min_lr=0.0001", "lr_schedule.warmup_iters=1", "num_epochs=2")
    settings = local_settings(
        *(*schedule, *OWN[algorithm], f"num_steps={num_steps}", "min_workers=1", "batch_size=32"),
        workers=1,
        algorithm=algorithm,
    )
    cluster = run(settings, tmp_path, algorithm, normed(held_out=True))
    expected, _ = alone(settings, normed(), algorithm)
    assert len(expected) == num_steps
    assert losses_of(cluster) == pytest.approx(expected, rel=1e-5)
    summary = cluster.server.summary
    assert summary is not None
    assert summary.steps == num_steps
    assert summary.final.val_loss is not None
    assert f"{num_steps} steps have been taken" in cluster.log_lines[-1]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "smolcluster.cli", "train", *arguments, "--override")
    overrides = ("batch_size=100", "model.hidden=8", f"runs_dir={folder}", "metrics_port=null")
    return subprocess.run(
        [*command, *overrides], timeout=DEADLINE_S, check=False, capture_output=True, text=True
    )


@pytest.mark.nightly
def test_a_run_that_has_taken_its_steps_goes_on_only_for_more(tmp_path: Path) -> None:
    steps = ("--num-steps", "3")
    ended = train(tmp_path, "--run-id", "short", *steps)
    assert ended.returncode == 0, ended.stderr
    summary = tmp_path / "short" / "summary.json"
    assert json.loads(summary.read_text())["steps"] == 3
    assert json.loads(summary.read_text())["epochs"] == 1
    less = train(tmp_path, "--resume", "short", "--num-steps", "2")
    assert less.returncode != 0
    again = train(tmp_path, "--resume", "short", *steps)
    assert again.returncode != 0
    assert "raise num_steps above 3" in again.stderr
    more = train(tmp_path, "--resume", "short", "--num-steps", "5")
    assert more.returncode == 0, more.stderr
    assert json.loads(summary.read_text())["steps"] == 5
    whole = train(tmp_path, "--resume", "short", "--override", "num_steps=null", "num_epochs=1")
    assert whole.returncode == 0, whole.stderr
    assert json.loads(summary.read_text())["steps"] == 15, "the rest of the epoch that had begun"
