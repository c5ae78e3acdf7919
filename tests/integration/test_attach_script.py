"""`launch --script`: real processes, one of which is killed and started again."""

import os
import subprocess
import sys
from pathlib import Path

from harness import free_port
from smolcluster.runs.summary import read_summary

SCRIPT = """
import os
import pathlib
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smolcluster

marker = pathlib.Path(sys.argv[1])
data = TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
model = nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
with smolcluster.attach(model, optimizer) as cluster:
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_sampler=cluster.sampler(data))):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        if number == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
print("the script ends in", cluster.run_id, "as", os.environ["SMOLCLUSTER_NAME"])
"""


def test_a_killed_script_is_started_again_and_every_sample_counts_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    marker = tmp_path / "killed"
    ended = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "smolcluster.cli",
                "launch",
                "edp",
                "--local",
                "--workers",
                "1",
            ),
            *("--no-tmux", "--script", f"{script} {marker}", "--override", f"port={free_port()}"),
            *("batch_size=10", "num_epochs=2", "metrics_port=null"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "SMOLCLUSTER_RUNS_DIR": str(tmp_path / "runs"),
            "SMOLCLUSTER_SECRET_FILE": str(tmp_path / "secret"),
            "WANDB_MODE": "disabled",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert marker.exists()
    assert "it is started again" in said
    [summary_file] = (tmp_path / "runs").glob("edp-*/summary.json")
    summary = read_summary(summary_file)
    assert (summary.samples_applied, summary.steps) == (120, 12)
    assert "the script ends in edp-" in said
