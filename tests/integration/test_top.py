"""`smolcluster top` on a run that goes on, as a person types it."""

import sys

import pytest

from harness import free_port
from processes import Processes
from smolcluster.runs.status import read_status
from waiting import eventually

pytestmark = pytest.mark.slow


def test_a_run_is_shown_while_it_goes_on_and_when_it_is_over(processes: Processes) -> None:
    port = f"port={free_port()}"
    overrides = (port, "num_epochs=100000", "checkpoint_steps=null")  # whose news would hide others
    processes.server("--local", "--workers", "2", "--override", *overrides)
    for rank, node in enumerate(("pi5", "win")):
        processes.worker(rank + 1, node, "--local", "--override", port, "threads=1")
    status = processes.runs / "latest" / "status.json"
    eventually(lambda: status.is_file() and len(read_status(status).workers) == 2)
    eventually(lambda: read_status(status).step > 50)
    shown = frame(processes)
    assert " · training · for " in shown
    assert " left · step " in shown
    assert "worker 1 (pi5) joined" in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line}
    assert rows["node"][:4] == ["#", "state", "samples/s", "time"]
    assert [rows[node][:2] for node in ("pi5", "win")] == [["1", "joined"], ["2", "joined"]]
    server = processes.children[0]
    server.kill()
    server.wait()
    assert " · broken off" in frame(processes)


def frame(processes: Processes) -> str:
    """What `smolcluster top --once` prints."""
    command = processes.start(sys.executable, "-m", "smolcluster.cli", "top", "--once")
    assert command.wait() == 0, command.output
    return command.output
