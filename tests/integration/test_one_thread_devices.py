"""Devices that only one thread may use (MPS): who computes on them in whole runs."""

import sys
from pathlib import Path

import pytest

import pretend_device
from harness import free_port
from processes import Child, Processes
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary

pytestmark = pytest.mark.nightly

OFTEN = ("eval_steps=5", "track_gradients=true", "num_epochs=1", "batch_size=100", "threads=1")


def threads(notes: Path) -> set[tuple[str, str]]:
    """Process and name of every thread that has touched the device."""
    pairs = (line.split()[:2] for line in notes.read_text().splitlines())
    return {(pid, name) for pid, name in pairs}


def end_well(*children: Child) -> None:
    for child in children:
        assert child.wait() == 0, child.output


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("edp", ()),
        ("syncps", ("worker_update_interval=3", "use_quantization=true")),
    ],
)
def test_only_the_main_threads_of_server_and_worker_compute(
    processes: Processes, algorithm: str, overrides: tuple[str, ...]
) -> None:
    notes, port = processes.folder / "notes", f"port={free_port()}"
    program = (sys.executable, pretend_device.__file__, str(notes), algorithm)
    server = processes.start(
        *(*program, "server", "--local", "--workers", "1"),
        *("--override", port, *OFTEN, "checkpoint_steps=7", *overrides),
        forked=False,
    )
    worker = processes.start(
        *(*program, "worker", "1", "macbook", "--local", "--override", port, "threads=1"),
        forked=False,
    )
    end_well(server, worker)
    summary = read_summary(find_run(processes.runs).summary)
    assert summary.final.val_accuracy is not None
    pids = {str(child.process.pid) for child in (server, worker)}
    assert threads(notes) == {(pid, "MainThread") for pid in pids}, notes.read_text()


def test_only_the_main_thread_of_train_computes(processes: Processes) -> None:
    notes = processes.folder / "notes"
    train = processes.start(
        *(sys.executable, pretend_device.__file__, str(notes), "train", "--config", "digits"),
        *("--override", *OFTEN, "checkpoint_steps=7"),
        forked=False,
    )
    end_well(train)
    assert threads(notes) == {(str(train.process.pid), "MainThread")}, notes.read_text()
