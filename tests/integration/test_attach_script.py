"""`launch --script`: real processes, one of which is killed and started again."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness import free_port
from processes import Processes
from smolcluster.runs.summary import read_summary

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def beside_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are given in the folder that has the scripts."""
    monkeypatch.chdir(tmp_path)


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
torch.manual_seed(0)
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


def test_a_script_that_never_attaches_is_told_of_at_once(
    tmp_path: Path, processes: Processes
) -> None:
    (tmp_path / "train.py").write_text("print('trained alone')")
    with pytest.raises(
        AssertionError, match=r"ended without smolcluster\.attach\(model, optimizer\)"
    ):
        processes.ended(
            *("launch", "edp", "--local", "--workers", "1", "--no-tmux", "--script", "train.py"),
            *("--override", f"port={free_port()}", "metrics_port=null", "start_timeout_s=3600"),
        )


TRAINER = """
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, sys.argv[1])
import trainer

folder = pathlib.Path(sys.argv[2])
killed, back = folder / "killed", folder / "back"


calls = iter(range(10_000))
llama = trainer.LlamaForCausalLM


def before_forward(model, inputs):
    is_fourth = next(calls) == 3
    if os.environ["SMOLCLUSTER_NAME"] == "worker1":
        if killed.exists():
            back.touch()
        elif is_fourth:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    elif is_fourth:
        until = time.monotonic() + 200
        while not back.exists() and time.monotonic() < until:
            time.sleep(0.05)


def mortal(config):
    model = llama(config)
    model.register_forward_pre_hook(before_forward)
    return model


trainer.LlamaForCausalLM = mortal
losses = trainer.main("the launcher says which", str(folder / "trained"))
"""


def test_a_trainer_on_two_workers_of_which_one_is_killed_counts_every_sample(
    tmp_path: Path, processes: Processes
) -> None:
    """The other one waits in its fourth step until the killed one is back."""
    (tmp_path / "train.py").write_text(TRAINER)
    examples = Path(__file__).resolve().parents[2] / "examples" / "attach"
    said = processes.ended(
        *("launch", "edp", "--local", "--workers", "2", "--no-tmux"),
        *("--script", f"train.py {examples} {tmp_path}"),
        *("--override", f"port={free_port()}", "min_workers=2", "metrics_port=null"),
    )
    assert (tmp_path / "back").exists()
    assert "it is started again" in said
    [summary_file] = (tmp_path / "runs").glob("edp-*/summary.json")
    summary = read_summary(summary_file)
    assert (summary.samples_applied, summary.steps) == (4 * 256, 4 * 16)
    assert {share.node for share in summary.workers} == {"worker1", "worker2"}
    assert summary.final.train_loss is not None
    assert summary.final.train_loss < 2.0, "it began with that of guessing one of 16, 2.8"


@pytest.mark.parametrize(
    ("algorithm", "num_workers"),
    [
        ("edp", 1),
        ("syncps", 1),
        ("diloco", 2),
    ],
)
def test_a_killed_script_is_started_again_and_a_resumed_run_goes_on(
    tmp_path: Path, processes: Processes, algorithm: str, num_workers: int
) -> None:
    """Every sample counts once, before and after."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    marker = tmp_path / "killed"
    overrides = (
        f"port={free_port()}",
        "batch_size=10",
        "num_epochs=2",
        "metrics_port=null",
        "checkpoint_steps=4",
    )
    said = processes.ended(
        *("launch", algorithm, "--local", "--workers", str(num_workers), "--no-tmux"),
        *("--script", f"train.py {marker}", "--override", *overrides),
        f"min_workers={num_workers}",
    )
    assert marker.exists()
    assert "it is started again" in said
    [summary_file] = (tmp_path / "runs").glob(f"{algorithm}-*/summary.json")
    summary = read_summary(summary_file)
    assert (summary.samples_applied, summary.steps) == (120, 12)
    assert f"the script ends in {algorithm}-" in said

    said = processes.ended("resume", "latest", "--override", "num_epochs=3")
    assert "at step 12, after 120 samples" in said
    assert f"the script ends in {summary.run_id}" in said
    summary = read_summary(summary_file)
    assert (summary.samples_applied, summary.steps) == (180, 18)
    kept = [*(tmp_path / "runs" / summary.run_id).glob("own/*/step-*.safetensors")]
    assert bool(kept) == (algorithm == "diloco")
    assert all("Adam/weight/exp_avg/Tensor" in load_file(file) for file in kept)
