import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import is_alive, pid_in
from smolcluster.launch.interrupts import Interrupts, interrupts, uv_around
from waiting import eventually


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_collected_instead_of_obeyed(signum: int, code: int) -> None:
    handler = signal.getsignal(signum)
    with interrupts() as asked:
        before = bool(asked)
        os.kill(os.getpid(), signum)
        assert (before, bool(asked), asked.repeated) == (False, True, False)
        assert asked.exit_code == code
        os.kill(os.getpid(), signal.SIGINT)
        assert (asked.repeated, asked.exit_code) == (True, code)
    assert signal.getsignal(signum) is handler


@pytest.mark.parametrize(
    ("received", "repeated", "hung_up"),
    [
        ([signal.SIGINT, signal.SIGINT], True, False),
        ([signal.SIGINT, signal.SIGHUP], False, True),
        ([signal.SIGHUP, signal.SIGHUP], False, True),
        ([signal.SIGHUP, signal.SIGTERM], True, True),
    ],
)
def test_who_closes_the_terminal_is_not_impatient(
    received: list[int], repeated: bool, hung_up: bool
) -> None:
    asked = Interrupts(received)
    assert (asked.repeated, asked.hung_up) == (repeated, hung_up)


def test_under_nohup_a_lost_terminal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_end_of_the_uv_around_us_counts_as_a_signal() -> None:
    assert not Interrupts(wrapper=os.getppid())
    gone = Interrupts(wrapper=2**22 + 1)
    assert gone
    assert gone.exit_code == 143


@pytest.fixture
def bash_named(tmp_path: Path) -> Callable[[str], Path]:
    """A bash under another name."""

    def link(name: str) -> Path:
        tmp_path.joinpath(name).symlink_to(shutil.which("bash") or "bash")
        return tmp_path / name

    return link


@pytest.mark.parametrize(("name", "is_uv"), [("uv", True), ("uvx-like", False)])
def test_only_uv_is_taken_for_uv(bash_named: Callable[[str], Path], name: str, is_uv: bool) -> None:
    command = [str(bash_named(name)), "-c", "echo ready; read"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert uv_around(process.pid) == (process.pid if is_uv else None)


def test_a_killed_uv_takes_the_launcher_with_it(
    tmp_path: Path, bash_named: Callable[[str], Path]
) -> None:
    """uv is played by a shell that waits for the launcher, as uv does."""
    pid = tmp_path / "pid"
    program = f"""
import os, time
from smolcluster.launch.interrupts import interrupts
with interrupts() as asked:
    open({str(pid)!r}, "w").write(str(os.getpid()) + chr(10))
    while not asked:
        time.sleep(0.01)
"""
    wrapper = subprocess.Popen(
        [str(bash_named("uv")), "-c", f'"{sys.executable}" -c "$0"; exit', program]
    )
    launcher = pid_in(pid)
    wrapper.kill()
    wrapper.wait()
    eventually(lambda: not is_alive(launcher))
