"""A machine joins a run by itself, with an address and the secret; a run of one machine is joined there."""

import os
import re
import signal
from pathlib import Path

import pytest

from harness import free_port
from processes import Child, Processes
from smolcluster.launch.sessions import exit_code
from smolcluster.runs.launched import read_launched
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import RunStatus, read_status
from waiting import eventually

pytestmark = pytest.mark.nightly


class Joined:
    """A run, and who has joined it."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    @property
    def status(self) -> RunStatus | None:
        file = self._processes.runs / "latest/status.json"
        return read_status(file) if file.exists() else None

    def wait_for(self, *numbers: int) -> None:
        def are_there() -> bool:
            workers = [] if self.status is None else self.status.workers
            return {each.rank + 1 for each in workers if each.state == "joined"} == set(numbers)

        eventually(are_there)

    def join(self, *words: str) -> Child:
        return self._processes.smolcluster("join", *words)


@pytest.fixture
def run(processes: Processes) -> Joined:
    return Joined(processes)


def test_a_machine_joins_with_address_and_secret(
    run: Joined, processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--local", "--override", f"port={port}", "threads=1", "metrics_port=null")
    server = processes.server(*options, "num_epochs=100000")
    server.wait_for("listening")  # and has made the secret
    mine = (f"127.0.0.1:{port}", "--override", "threads=1", "metrics_port=null")
    worker = run.join(*mine, "--name", "mini9", "--wait", "60")
    run.wait_for(4)  # the first three are the list's

    taken = run.join(*mine, "--name", "mini9", "--wait", "1")
    assert taken.wait() == 78
    assert "mini9 is taken" in taken.output
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("ab" * 32)
    stranger = run.join(*mine, "--name", "toaster", "--secret-file", str(other))
    assert stranger.wait() == 77
    for refused in (taken, stranger):
        assert refused.output.count("error") == 1
        assert "Traceback" not in refused.output

    log = find_run(processes.runs).log_file("worker", "mini9", 3)
    pids = re.findall(r'"process (\d+):', log.read_text())
    os.kill(int(pids[0]), signal.SIGKILL)
    eventually(lambda: len(re.findall(r'"process \d+:', log.read_text())) == 2)
    run.wait_for(4)
    worker.kill(signal.SIGTERM)
    assert worker.wait() == 143
    server.kill(signal.SIGTERM)
    assert server.wait() == 143
    late = run.join("latest")
    assert (late.wait(), "is over" in late.output) == (1, True)
    nobody = run.join(*mine, "--wait", "0.1")
    assert nobody.wait() == 75


def test_a_run_of_this_machine_is_joined_here_and_stopped(
    run: Joined, processes: Processes
) -> None:
    stated = (f"port={free_port()}", "num_epochs=100000", "metrics_port=null")
    launch = processes.smolcluster(
        *("launch", "edp", "--local", "--no-tmux", "--workers", "1", "--override"), *stated
    )
    run.wait_for(1)
    joining = run.join("--name", "mini9", "--detach", "--override", "metrics_port=null")
    assert joining.wait() == 0, joining.output
    assert "is of this machine alone: mini9 starts here" in joining.output
    run.wait_for(1, 2)
    started = read_launched(find_run(processes.runs).launched).processes
    assert [(each.node, each.rank) for each in started][2:] == [("mini9", 1)]
    processes.ended("stop")
    assert exit_code(started[2]) is not None
    launch.wait()
