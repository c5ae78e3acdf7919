"""Ending a run whose processes are children of a launcher, on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reading import status_of, write
from smolcluster.errors import ConfigError
from smolcluster.launch.stop import WAITING, stop_children
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.processes import ProcessEntry, start_of, write_processes
from smolcluster.runs.status import read_status, write_status

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "edp-1")


@pytest.fixture
def spawn(tmp_path: Path, counting: Callable[..., Any]) -> Spawn:
    return partial(counting, tmp_path)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.01)


def listed(paths: RunPaths, server: int, *workers: int) -> None:
    entries = [ProcessEntry(node="mini1", role="server", pid=server)]
    entries += [
        ProcessEntry(node="pi5", role="worker", rank=rank, pid=pid)
        for rank, pid in enumerate(workers)
    ]
    write_processes(paths.processes, entries)


def test_the_process_of_somebody_else_with_a_used_number_is_left_alone(
    paths: RunPaths, spawn: Spawn, capsys: pytest.CaptureFixture[str]
) -> None:
    web = spawn("/srv/web/server.py")
    other = spawn("server.py", "--run-id", "edp-12", "smolcluster")
    listed(paths, web.pid, other.pid)
    assert stop_children(paths, now=True) == 0
    assert "it was over already" in capsys.readouterr().out
    assert [process.poll() for process in (web, other)] == [None, None]
    assert not (paths.root.parent / "signals").exists()


def test_an_id_that_another_run_of_this_project_has_by_now_gets_no_signal(
    paths: RunPaths, spawn: Spawn, tmp_path: Path
) -> None:
    """Its command line alone does not tell: workers of all local runs have the same."""
    words = ("/x/algorithms/EDP/worker.py", "1", "pi5", "--stop-on-stdin-eof")
    before, now = spawn(*words), spawn(*words)
    was = start_of(before.pid)
    assert was not in (None, start_of(now.pid))
    entry = ProcessEntry(node="pi5", role="worker", rank=0, pid=now.pid, started=was)
    write_processes(paths.processes, [entry])
    assert stop_children(paths, now=True) == 0
    assert now.poll() is None
    write_processes(paths.processes, [entry.model_copy(update={"started": start_of(now.pid)})])
    assert stop_children(paths, now=True) == 0
    assert now.wait() == -signal.SIGKILL
    assert before.poll() is None


def test_whoever_asks_again_waits_for_the_last_checkpoint(
    paths: RunPaths, spawn: Spawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = spawn("server.py", "--run-id", "edp-1")
    listed(paths, server.pid)
    codes: list[int] = []
    asking = [
        subprocess.Popen([sys.executable, "-c", STOP, str(paths.root)], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for each in asking:
        assert each.stdout is not None
        assert any(WAITING.encode() in line for line in iter(each.stdout.readline, b""))
    assert server.poll() is None
    write(tmp_path / "saved", "")
    for each in asking:
        said, _ = each.communicate(timeout=60)
        codes.append(each.returncode)
        assert WAITING not in said.decode(), "said once"
    assert codes == [0, 0, 0]
    assert (tmp_path / "signals").read_text() == "1"


STOP = """
import sys
from pathlib import Path
from smolcluster.launch.stop import stop_children
from smolcluster.runs.paths import RunPaths
raise SystemExit(stop_children(RunPaths(Path(sys.argv[1])), now=False))
"""


def test_a_mark_from_before_a_restart_does_not_count(
    paths: RunPaths, spawn: Spawn, tmp_path: Path
) -> None:
    server = spawn("server.py", "--run-id", "edp-1")
    listed(paths, server.pid)
    write(paths.root / "asked/server-mini1.4711", "")
    write(tmp_path / "saved", "")
    assert stop_children(paths, now=False) == 0
    assert server.wait() == 0


@pytest.mark.parametrize("has_status", [True, False])
def test_with_now_everybody_is_killed_without_being_asked(
    paths: RunPaths, spawn: Spawn, tmp_path: Path, has_status: bool
) -> None:
    if has_status:
        write_status(paths.status, status_of())
    server = spawn("server.py", "--run-id", "edp-1")
    worker = spawn("/x/algorithms/EDP/worker.py", "1", "pi5", "--stop-on-stdin-eof")
    listed(paths, server.pid, worker.pid)
    assert stop_children(paths, now=True) == 0
    assert [server.wait(), worker.wait()] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "signals").exists()
    status = read_status(paths.status)
    assert (status.word, status.step) == ("stopped", 120 if has_status else 0)


def test_a_run_that_ended_by_itself_is_not_called_stopped(paths: RunPaths, spawn: Spawn) -> None:
    write_status(paths.status, status_of())
    server = spawn("server.py", "--run-id", "edp-1")
    listed(paths, server.pid)
    server.kill()
    server.wait()
    assert stop_children(paths, now=True) == 0
    assert read_status(paths.status).state == "training"


def test_who_does_not_end_in_time_is_killed(paths: RunPaths, spawn: Spawn, tmp_path: Path) -> None:
    server = spawn("server.py", "--run-id", "edp-1")
    listed(paths, server.pid)
    assert stop_children(paths, now=False, server_grace_s=0.2) == 0
    assert server.wait() == -signal.SIGKILL
    assert (tmp_path / "signals").read_text() == "1"


def test_ctrl_c_ends_the_wait_for_the_last_checkpoint(
    paths: RunPaths, spawn: Spawn, tmp_path: Path
) -> None:
    server = spawn("server.py", "--run-id", "edp-1")
    listed(paths, server.pid)

    def press() -> None:
        wait_for(tmp_path / "signals")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert stop_children(paths, now=False) == 0
    assert server.wait() == -signal.SIGKILL


def test_a_run_from_elsewhere_is_refused(paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match="was not launched from here"):
        stop_children(paths, now=False)
