"""A loop of a user's own that attaches, as the workers of a run on three hosts."""

import pytest

from launching import ENDLESS, STORIES_TIMEOUT_S, Launching

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]
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


def test_a_script_is_the_workers_of_a_cluster(launching: Launching) -> None:
    controller, run = launching.controller, launching.run
    controller.write(f"{FOLDER}/train.py", SCRIPT)
    controller.write(f"{FOLDER}/sizes.py", "NUM_SAMPLES = 320\n")
    words = ("launch", "edp", "--config", "~/cluster.yaml", "--script", f"'{FOLDER}/train.py' 3")
    overrides = (*ENDLESS, "heartbeat_timeout_s=3")
    plan = run(launching.command(*words, "--dry-run", "--override", *overrides))
    assert plan.returncode == 0, plan.stderr
    assert "2 files" in plan.stdout

    launched = run(launching.command(*words, "--detach", "--override", *overrides))
    assert launched.returncode == 0, launched.stderr
    run_id = launching.run_id
    launching.goes_on()
    assert launching.num_params() == 5 * 3

    # A machine that is started again joins with the script that the run has.
    controller.write(f"{FOLDER}/train.py", "raise SystemExit(1)")
    launching.end_worker(1, "pi5")
    launching.join_again(1, "pi5")
    assert run(launching.command("stop", run_id)).returncode == 0
    launching.wait_until_clean()
