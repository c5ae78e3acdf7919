import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from smolcluster.launch.watch import logs, probe
from smolcluster.runs.launched import Launched, LaunchedProcess
from waiting import DEADLINE_S, eventually

PRELUDE = """
import os, signal, sys, threading, time
def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
def wait_until(condition, timeout_s=240):
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            sys.exit("waited in vain")
        time.sleep(0.01)
def wait_for_ever():
    while os.read(0, 100):
        pass
"""

COUNTING = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signals = []
def note(signum, frame):
    signals.append(signum)
    (folder / "signals").write_text(str(len(signals)))
signal.signal(signal.SIGTERM, note)
(folder / "ready").touch()
while not (signals and (folder / "saved").exists()):
    time.sleep(0.02)
"""
"""Ends after it has been asked to, when the file `saved` is there; counts how often it is asked."""

FakePlan = Callable[..., Launched]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that only look may take as long as they want."""
    monkeypatch.setattr(probe, "LIMIT_S", DEADLINE_S)
    monkeypatch.setattr(logs, "PATIENCE_S", DEADLINE_S)


@pytest.fixture
def own_tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tmux server of the test's own, in a home of its own."""
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    yield
    panes = subprocess.run(
        ["tmux", "list-panes", "-a", "-F", "#{pane_pid}"],
        capture_output=True,
        text=True,
        check=False,
    )
    for pid in panes.stdout.split():
        with suppress(ProcessLookupError):
            os.killpg(int(pid), signal.SIGKILL)
    subprocess.run(["tmux", "kill-server"], capture_output=True, check=False)


@pytest.fixture
def fake_plan(tmp_path: Path) -> FakePlan:
    """A plan of small Python programs: `fake_plan(server, worker, …)`, of the run `edp-1`."""

    def make(server: str, *workers: str) -> Launched:
        def process(node: str, rank: int | None, program: str) -> LaunchedProcess:
            argv = (sys.executable, "-c", PRELUDE + program, "--run-id", "edp-1")
            role, run_dir = "server" if rank is None else "worker", str(tmp_path / "edp-1")
            return LaunchedProcess(node=node, role=role, rank=rank, run_dir=run_dir, argv=argv)

        members = [process(f"pi{rank}", rank, program) for rank, program in enumerate(workers)]
        processes = (process("mini1", None, server), *members)
        return Launched(run_id="edp-1", algorithm="edp", processes=processes)

    return make


@pytest.fixture
def console() -> Console:
    """A console that is no terminal; what was printed is in `console.file`."""
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def stays_open(tmp_path: Path) -> Iterator[str]:
    """A line of a shell program, whose standard error something in the background keeps open.

    It must be open still when the test is over.
    """
    pid = tmp_path / "open"
    yield f"sleep 600 >/dev/null </dev/null &\necho $! > '{pid}'"
    os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture
def counting() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start `COUNTING` in a folder, its command's further words given; it is reaped as soon as it ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
        (folder / "ready").unlink(missing_ok=True)
        argv = [sys.executable, "-c", COUNTING, str(folder), *words]
        process = subprocess.Popen(argv, start_new_session=True)
        started.append(process)
        threading.Thread(target=process.wait, daemon=True).start()
        eventually((folder / "ready").exists)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
