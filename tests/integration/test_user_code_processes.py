"""Real processes whose user's code fails, or whose device does."""

import json
from pathlib import Path

import pytest

from harness import free_port
from processes import Processes
from smolcluster.runs.events import WorkerJoined, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status

pytestmark = pytest.mark.nightly

PROGRAM = """
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from smolcluster import Workload

CALLS = iter(range(1_000_000))
FLAG = Path(__file__).with_name("has-failed")

def loss(model, batch):
    if next(CALLS) == 20 and not FLAG.exists():
        FLAG.touch()
        fail(batch)
    return model(batch[0]).square().mean()

def fail(batch):
    {failure}

def workload():
    return Workload(lambda: nn.Linear(4, 1), loss, TensorDataset(torch.randn(640, 4)))
"""


def start(processes: Processes, failure: str) -> tuple[str, ...]:
    """What server and worker are told of a workload that fails so, once, in its twentieth batch."""
    program = processes.folder / "train.py"
    program.write_text(PROGRAM.format(failure=failure))
    options = ("--local", "--workers", "1", "--workload", f"{program}:workload")
    return (*options, "--override", f"port={free_port()}", "threads=1")


def exception_in(log: Path) -> str:
    entries = map(json.loads, log.read_text().splitlines())
    return "".join(entry.get("exception", "") for entry in entries)


@pytest.mark.timeout(300)
def test_an_error_in_the_loss_ends_both_with_its_sentence(processes: Processes) -> None:
    options = start(processes, "return batch['y']")
    server = processes.server(*options, "num_epochs=20")
    worker = processes.worker(1, "pi5", *options, "--restarts", "3")
    assert server.wait() == 3, server.output
    assert worker.wait() == 3, worker.output
    run = find_run(processes.runs)
    sentence = "loss, in fail (train.py:18): TypeError: list indices must be integers or slices"
    assert f"worker 1 (pi5): {sentence}" in (read_status(run.status).reason or "")
    assert sentence in server.output
    assert sentence in worker.output
    assert "started again" not in worker.output
    shown = exception_in(run.log_file("worker", "pi5", 0))
    assert [line.split(", ")[-1] for line in shown.splitlines() if "File" in line] == [
        "in loss",
        "in fail",
    ]


@pytest.mark.timeout(300)
def test_a_worker_whose_device_fails_is_started_again_under_its_number(
    processes: Processes,
) -> None:
    options = start(processes, "raise RuntimeError('CUDA error: an illegal memory access')")
    server = processes.server(*options, "num_epochs=20")
    worker = processes.worker(1, "pi5", *options, "--restarts", "3")
    assert server.wait() == 0, server.output
    assert worker.wait() == 0, worker.output
    assert "the device failed: CUDA error: an illegal memory access" in worker.output
    assert "lost its device; it is started again" in worker.output
    run = find_run(processes.runs)
    joined = [r.event for r in read_events(run.events) if isinstance(r.event, WorkerJoined)]
    assert [(each.rank, each.node) for each in joined] == [(0, "pi5")] * 2
    status = read_status(run.status)
    assert status.samples_applied == status.total_samples == 20 * 640
