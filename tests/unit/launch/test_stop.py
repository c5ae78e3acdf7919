"""Ending a run whose processes are children of another launcher, on this machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from processes import fill_disk, small_disk
from reading import children_of, status_of, write
from smolcluster.errors import ConfigError
from smolcluster.launch import flow, sessions
from smolcluster.launch.run_in_sessions import RunInSessions
from smolcluster.launch.sessions import Ending, ask_to_end
from smolcluster.launch.stop import SERVER_GRACE_S
from smolcluster.runs.launched import LaunchedProcess, launched_of
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import RunStatus, read_status, write_status
from waiting import DEADLINE_S, eventually

Spawn = Callable[..., "subprocess.Popen[bytes]"]
SERVER = ("server.py", "--run-id", "edp-1")
WORKER = ("/x/algorithms/EDP/worker.py", "1", "pi5", "--run-id", "edp-1", "--stop-on-stdin-eof")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "edp-1")


@pytest.fixture
def spawn(tmp_path: Path, counting: Callable[..., Any]) -> Spawn:
    return partial(counting, tmp_path)


def stop(paths: RunPaths, *, now: bool, grace_s: float = SERVER_GRACE_S) -> int:
    launched = launched_of(paths)
    assert launched is not None
    run = RunInSessions(launched, paths, Console())
    run.server_grace_s = grace_s
    return run.stop(in_a_hurry=now)


def test_the_process_of_somebody_else_with_a_used_number_is_left_alone(
    paths: RunPaths, spawn: Spawn, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of another run of this project."""
    web = spawn("/srv/web/server.py")
    other = spawn("server.py", "--run-id", "edp-12", "smolcluster")
    dotted = spawn("server.py", "--run-id", "edpx1")
    children_of(paths, web.pid, other.pid, dotted.pid)
    assert stop(paths, now=True) == 0
    assert "it was over already" in capsys.readouterr().out
    assert [process.poll() for process in (web, other, dotted)] == [None] * 3
    assert not (paths.root.parent / "signals").exists()


@pytest.mark.parametrize("has_status", [True, False])
def test_with_now_everybody_is_killed_without_being_asked(
    paths: RunPaths, spawn: Spawn, tmp_path: Path, has_status: bool
) -> None:
    if has_status:
        write_status(paths.status, status_of())
    server, worker = spawn(*SERVER), spawn(*WORKER)
    children_of(paths, server.pid, worker.pid)
    assert stop(paths, now=True) == 0
    assert [server.wait(), worker.wait()] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "signals").exists()
    status = read_status(paths.status)
    assert (status.word, status.step) == ("stopped", 120 if has_status else 0)


def test_a_process_that_leads_no_group_is_ended_too(paths: RunPaths, spawn: Spawn) -> None:
    """A worker that has joined by a command in a terminal: its group is that of `uv run`."""
    program = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program, *WORKER]) as worker:
        assert os.getpgid(worker.pid) != worker.pid
        children_of(paths, spawn(*SERVER).pid, worker.pid)
        assert stop(paths, now=True) == 0
        assert worker.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_run_that_ended_by_itself_is_not_called_stopped(paths: RunPaths, spawn: Spawn) -> None:
    write_status(paths.status, status_of())
    server = spawn(*SERVER)
    children_of(paths, server.pid)
    server.kill()
    server.wait()
    assert stop(paths, now=True) == 0
    assert read_status(paths.status).state == "training"


def test_a_run_is_not_over_while_a_worker_goes_on(
    paths: RunPaths, spawn: Spawn, capsys: pytest.CaptureFixture[str]
) -> None:
    server, worker = spawn(*SERVER), spawn(*WORKER)
    children_of(paths, server.pid, worker.pid)
    server.kill()
    server.wait()
    assert stop(paths, now=True) == 0
    assert worker.wait() == -signal.SIGKILL
    assert "it was over already" not in capsys.readouterr().out


def test_workers_are_asked_when_the_server_has_saved_and_while_it_draws(
    paths: RunPaths, spawn: Spawn, tmp_path: Path
) -> None:
    """Here it draws until its worker has gone."""
    server = spawn(*SERVER)
    write_status(paths.status, status_of().model_copy(update={"state": "ended"}))
    program = f"""
import pathlib, signal, time
def end(*_):
    pathlib.Path({str(tmp_path / "saved")!r}).touch()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(tmp_path / "ready")!r}).touch()
time.sleep(600)
"""
    (tmp_path / "ready").unlink()
    worker = subprocess.Popen([sys.executable, "-c", program, *WORKER], start_new_session=True)
    with worker:
        eventually((tmp_path / "ready").exists)
        children_of(paths, server.pid, worker.pid)
        assert stop(paths, now=False) == 0
        assert worker.wait(DEADLINE_S) == 0
    assert server.wait() == 0


def test_workers_are_not_asked_before_the_server_has_saved(
    paths: RunPaths, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is not even asked before its status has been looked at twice."""
    write_status(paths.status, status_of())
    asked, looks = list[str](), list[LaunchedProcess]()

    def ask(process: LaunchedProcess, *args: Any) -> Ending:
        if process.role == "server":
            eventually(lambda: asked or len(looks) > 1)
        asked.append(process.role)
        return ask_to_end(process, *args)

    def look(process: LaunchedProcess) -> RunStatus | None:
        looks.append(process)
        return sessions.status_of(process)

    monkeypatch.setattr("smolcluster.launch.stop.LOOK_S", 0.01)
    monkeypatch.setattr("smolcluster.launch.stop.ask_to_end", ask)
    monkeypatch.setattr("smolcluster.launch.stop.status_of", look)
    children_of(paths, spawn(*SERVER).pid, spawn(*WORKER).pid)
    (tmp_path / "saved").touch()
    assert stop(paths, now=False) == 0
    assert asked == ["server", "worker"]


def test_who_does_not_end_in_time_is_killed(
    paths: RunPaths, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: Any) -> Ending:
        ending, signals = ask_to_end(*args), tmp_path / "signals"
        eventually(lambda: signals.exists() and signals.read_text())
        return ending

    monkeypatch.setattr("smolcluster.launch.stop.ask_to_end", ask)
    server = spawn(*SERVER)
    children_of(paths, server.pid)
    assert stop(paths, now=False, grace_s=0.2) == 0
    assert server.wait() == -signal.SIGKILL
    assert (tmp_path / "signals").read_text() == "1"


def test_ctrl_c_ends_the_wait_for_the_last_checkpoint(
    paths: RunPaths, spawn: Spawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = spawn(*SERVER)
    children_of(paths, server.pid)

    def press() -> None:
        eventually((tmp_path / "signals").exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert stop(paths, now=False) == 0
    assert server.wait() == -signal.SIGKILL
    assert "waiting for its last checkpoint" in capsys.readouterr().out


def test_a_run_from_elsewhere_is_refused(paths: RunPaths) -> None:
    write(paths.config, "")
    with pytest.raises(
        ConfigError, match="was not launched from here: Ctrl-C where it was started"
    ):
        flow.stop(str(paths.root), now=False)


def test_a_full_disk_is_named_with_the_checkpoint_that_there_is(
    tmp_path: Path, counting: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        paths = create_run(tmp_path / "disk", "edp-1")
        write_status(paths.status, status_of())
        for step in (40, 80):
            (paths.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        server = counting(tmp_path, *SERVER)
        children_of(paths, server.pid)
        fill_disk(tmp_path / "disk" / "filler")
        assert stop(paths, now=False, grace_s=0.2) == 1
        assert server.wait() is not None
    said = " ".join(capsys.readouterr().out.split())
    assert "no space is left on the disk of" in said
    assert "the newest checkpoint is of step 80" in said


def test_a_disk_that_was_filled_when_all_was_saved_is_no_fault_of_the_run(
    tmp_path: Path, counting: Callable[..., Any]
) -> None:
    """What its server has written at its end says that nothing is missing."""
    with small_disk(tmp_path / "disk", "1m"):
        paths = create_run(tmp_path / "disk", "edp-1")
        write_status(paths.status, status_of("ended", reason="it was stopped"))
        server = counting(tmp_path, *SERVER)
        children_of(paths, server.pid)
        fill_disk(tmp_path / "disk" / "filler")
        assert stop(paths, now=False, grace_s=0.2) == 0
        assert server.wait() is not None


def test_a_last_checkpoint_without_space_is_named_too(
    paths: RunPaths, spawn: Spawn, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its server has written at its end says so; there is space for small files."""
    trouble = "step 120 is not saved: no space is left on the disk of mini1"
    over = {"state": "ended", "reason": "it was stopped", "trouble": trouble}
    write_status(paths.status, status_of().model_copy(update=over))
    children_of(paths, spawn(*SERVER).pid)
    for how in ("stopped", "it was over already"):
        assert stop(paths, now=False, grace_s=0.2) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert f"{how}, but {trouble}; there is no checkpoint" in said
