"""A workload or a loop of a user's own, in a run on three hosts: its code goes along."""

import shlex

import pytest

from launching import ENDLESS, STORIES_TIMEOUT_S, Launching
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]
TRAIN = """
import time
import torch
from torch import nn
from smolcluster.training.workload import Workload
from sizes import NUM_SAMPLES

def loss(model, batch):
    time.sleep(0.02)  # others want the cores
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

def workload(width: int = 4):
    rows = torch.randn(NUM_SAMPLES, 4).unbind()
    return Workload(nn.Linear(4, width), loss, rows, rows[:32], name="sums")
"""
SCRIPT = """
import sys
import time
import torch
from torch import nn
from torch.utils.data import DataLoader
import smolcluster
from sizes import NUM_SAMPLES

torch.manual_seed(0)  # each process makes the same samples
data = torch.utils.data.TensorDataset(torch.randn(NUM_SAMPLES, 4))
model = nn.Linear(4, int(sys.argv[1]))
optimizer = torch.optim.Adam(model.parameters())
with smolcluster.attach(model, optimizer) as cluster:
    for (rows,) in DataLoader(data, batch_sampler=cluster.sampler(data)):
        time.sleep(0.02)  # others want the cores
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        cluster.loss = loss
        optimizer.step()
"""
FOLDER = "my project"
LAUNCH = "launch", "edp", "--config", "~/cluster.yaml"


def launched(launching: Launching, code: str, *words: str) -> str:
    """Launch what `train.py` holds, which imports its neighbour; returns what a dry run has said."""
    launching.controller.write(f"{FOLDER}/train.py", code)
    launching.controller.write(f"{FOLDER}/sizes.py", "NUM_SAMPLES = 320\n")
    overrides = ("--override", *ENDLESS, "heartbeat_timeout_s=3")
    plan, begun = (
        launching.run(launching.command(*LAUNCH, how, *words, *overrides))
        for how in ("--dry-run", "--detach")
    )
    assert plan.returncode == 0, plan.stderr
    assert "2 files" in plan.stdout
    assert begun.returncode == 0, begun.stderr
    return plan.stdout


def test_the_code_of_a_workload_goes_along_and_stays_with_its_run(launching: Launching) -> None:
    controller, run = launching.controller, launching.run
    words = ("--workload", f"{FOLDER}/train.py:workload", "--override")
    plan = launched(launching, TRAIN, *words, "workload_args.width=3")
    assert plan.count("launch/workload/train.py:workload") == 3
    refused = run(launching.command(*LAUNCH, *words, "workload_args.widht=3"))
    assert refused.returncode == 2
    assert "did you mean width?" in refused.stderr

    run_id = launching.run_id
    for node in launching.projects:
        sent = launching.folder(node, run_id) / "launch/workload"
        assert (sent / "train.py").read_text() == TRAIN, node
    launching.goes_on()
    assert launching.num_params() == 5 * 3

    # A machine that is started again joins with the code of the run, whatever has become of the user's.
    controller.write(f"{FOLDER}/sizes.py", "NUM_SAMPLES = 640\n")
    launching.end_worker(1, "pi5")
    launching.join_again(1, "pi5")

    # On the machine itself, which knows the code that was brought there.
    server, pi5 = launching.lab["mini1"], launching.lab["pi5"]
    launching.end_worker(1, "pi5")
    project = shlex.quote(launching.projects["pi5"])
    program = f"cd ~/{project} && .venv/bin/python -m smolcluster.cli"
    itself = pi5.run(f"{program} join {server.address}:6000 --name pi5 --detach", timeout_s=120)
    assert itself.returncode == 0, itself.stderr
    eventually(lambda: launching.presence(1) == "joined", lambda: str(launching.status()))
    pi5.end_processes()
    stopped = run(launching.command("stop", run_id))
    assert stopped.returncode == 0, stopped.stdout

    # A run goes on with the user's file as it is now.
    controller.write(f"{FOLDER}/sizes.py", "NUM_SAMPLES = 320\n# a comment more\n")
    went_on = run(launching.command("resume", run_id, "--detach"))
    assert went_on.returncode == 0, went_on.stderr
    now = launching.folder("pi5", run_id) / "launch/workload/sizes.py"
    assert now.read_text().endswith("# a comment more\n")
    launching.goes_on()
    assert run(launching.command("stop", run_id)).returncode == 0
    launching.wait_until_clean()


def test_a_script_is_the_workers_of_a_cluster(launching: Launching) -> None:
    launched(launching, SCRIPT, "--script", f"'{FOLDER}/train.py' 3")
    launching.goes_on()
    assert launching.num_params() == 5 * 3

    # A machine that is started again joins with the script that the run has.
    launching.controller.write(f"{FOLDER}/train.py", "raise SystemExit(1)")
    launching.end_worker(1, "pi5")
    launching.join_again(1, "pi5")
    assert launching.run(launching.command("stop")).returncode == 0
    launching.wait_until_clean()
