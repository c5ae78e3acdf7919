"""The processes of a run, begun and ended by shell scripts of their machine, here this one."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest

from reading import server
from smolcluster.errors import LaunchError
from smolcluster.launch import sessions
from smolcluster.launch.host import Done, Host
from smolcluster.launch.sessions import (
    Ending,
    ask_to_end,
    begin,
    exit_code,
    kill,
    start_script,
    stderr_tail,
    wait_to_end,
)
from smolcluster.runs.launched import LaunchedProcess
from waiting import DEADLINE_S, eventually


@pytest.fixture
def process(tmp_path: Path) -> LaunchedProcess:
    return server(ssh=None, run_dir=str(tmp_path / "r1"))


@pytest.fixture
def run(process: LaunchedProcess) -> Path:
    folder = Path(process.run_dir)
    (folder / "pids").mkdir(parents=True)
    return folder


Spawn = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn(process: LaunchedProcess, run: Path, counting: Callable[..., Any]) -> Spawn:
    """Start the process without tmux, as its group's leader, with the number that its script leaves."""

    def start() -> "subprocess.Popen[bytes]":
        child: subprocess.Popen[bytes] = counting(run, f"{run}/launch/{process.stem}.sh")
        (run / "pids" / process.stem).write_text(f"{child.pid}\n")
        return child

    return start


def wait_for_signals(run: Path) -> None:
    """Until it has noted the first one."""
    eventually(lambda: (run / "signals").exists() and (run / "signals").read_text())


def test_who_has_been_asked_to_end_is_not_asked_again(
    process: LaunchedProcess, run: Path, spawn: Spawn
) -> None:
    child = spawn()
    for _ in range(2):
        assert ask_to_end(process, 0.4) is Ending.REMAINS
        wait_for_signals(run)
    assert wait_to_end(process, 0.2) is Ending.REMAINS
    assert (run / "signals").read_text() == "1"
    (run / "saved").touch()
    assert ask_to_end(process, DEADLINE_S) in (Ending.ENDED, Ending.WAS_OVER)
    assert child.wait() == 0
    assert ask_to_end(process, 0.2) is Ending.WAS_OVER
    (run / "signals").unlink()
    child = spawn()  # the same run once more: what it was asked then does not count
    assert ask_to_end(process, DEADLINE_S) is Ending.ENDED
    assert (run / "signals").read_text() == "1"


def test_of_two_who_ask_at_the_same_time_one_is_heard(
    process: LaunchedProcess, run: Path, spawn: Spawn
) -> None:
    spawn()
    asking = [threading.Thread(target=ask_to_end, args=(process, 0.4)) for _ in range(4)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    wait_for_signals(run)
    assert (run / "signals").read_text() == "1"


def test_where_it_cannot_be_noted_it_is_asked_all_the_same(
    process: LaunchedProcess, run: Path, spawn: Spawn
) -> None:
    spawn()
    (run / "saved").touch()
    (run / "asked").write_text("in the way of the folder")
    assert ask_to_end(process, DEADLINE_S) is Ending.ENDED


def test_who_has_been_asked_can_be_killed(
    process: LaunchedProcess, run: Path, spawn: Spawn
) -> None:
    child = spawn()
    assert ask_to_end(process, 0.2) is Ending.REMAINS
    assert kill(process) is Ending.ENDED
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("broken", ["put", "start"])
def test_a_start_that_fails_leaves_no_script_with_its_keys(
    process: LaunchedProcess, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    ran: list[str] = []

    def note(_host: Host, script: str, **_: object) -> Done:
        ran.append(script)
        return Done(0, "", "")

    fails = Mock(side_effect=LaunchError("the connection was closed"))
    monkeypatch.setattr(sessions, broken, fails)
    monkeypatch.setattr(Host, "run", note)
    with pytest.raises(LaunchError, match="was closed"):
        begin(process, {"WANDB_API_KEY": "secret"})
    assert ran[-1] == f"rm -f {process.run_dir}/launch/{process.stem}.sh"


def test_a_variable_of_the_users_does_not_keep_a_process_from_starting(
    process: LaunchedProcess, run: Path
) -> None:
    told = process.model_copy(
        update={"project_dir": str(run), "argv": ("sh", "-c", 'echo "$asked" > told')}
    )
    script = run / "launch.sh"
    script.write_text(start_script(told, {"asked": "for", "code": "7"}))
    env = os.environ | {"TMUX_PANE": "%0"}
    assert subprocess.run(["sh", str(script)], env=env, check=False).returncode == 0
    assert (run / "told").read_text() == "for\n"
    assert (run / "exits" / process.stem).read_text() == "0\n"
    assert "export PYTHONHASHSEED=" in start_script(told, {}), "the same for all of a launch"


def test_a_process_of_this_machine_has_the_environment_of_its_own_launch_only(
    process: LaunchedProcess, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = process.model_copy(update={"project_dir": str(run), "argv": ("sh", "-c", "env > told")})
    monkeypatch.setattr(sessions, "start", Mock())
    before = {
        "SMOLCLUSTER_LEARNING_RATE": "0.1",
        "OLD": "c\nPATH=d",
        "HELD": "then",
        "TERM": "dumb",
    }
    file = f"{run}/launch/{process.stem}.sh"
    for shell in filter(shutil.which, ("sh", "dash", "bash")):
        begin(told, {"PATH": os.environ["PATH"], "NEW": "a\nb\udce9", "HELD": "now"})
        done = subprocess.run(
            [shell, "-c", 'readonly OLD; . "$0"', file], env=os.environ | before, check=False
        )
        assert done.returncode == 0
        lines = (run / "told").read_bytes().splitlines()
        assert {b"NEW=a", b"b\xe9", b"HELD=now", b"TERM=dumb"} < {*lines}
        assert not [line for line in lines if line.startswith(b"SMOLCLUSTER_")]


def test_where_a_session_begins_its_run_is_its_users_alone(
    process: LaunchedProcess, tmp_path: Path
) -> None:
    folder = Path(process.run_dir)
    ends = process.model_copy(update={"project_dir": str(tmp_path), "argv": ("true",)})
    (tmp_path / "launch.sh").write_text(start_script(ends, {}))
    subprocess.run(["sh", str(tmp_path / "launch.sh")], umask=0, check=True, timeout=60)
    made = [folder, *(folder / name for name in ("pids", "exits", "logs"))]
    assert [each.stat().st_mode & 0o777 for each in made] == [0o700] * 4


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_last_line_is_whole_however_narrow_the_pane_was(
    process: LaunchedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMUX", raising=False)
    line = f"error: MNIST could not be fetched ({'Tried a mirror, no route to host; ' * 20})"
    ends = process.model_copy(
        update={"project_dir": str(tmp_path), "argv": ("sh", "-c", f"echo '{line}'; exit 1")}
    )
    with TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMUX_TMPDIR", folder)
        begin(ends, {})
        eventually(lambda: exit_code(ends) is not None)
        subprocess.run(["tmux", "kill-server"], check=False, capture_output=True, timeout=60)
    assert stderr_tail(ends) == line


def test_a_process_whose_session_was_killed_still_runs(
    spawn: Spawn, process: LaunchedProcess, run: Path
) -> None:
    """tmux may go before its commands do; then `stop` must still be told of them."""
    child = spawn()
    assert exit_code(process) is None
    child.kill()
    child.wait()
    assert exit_code(process) == 1
    (run / "exits").mkdir()
    (run / "exits" / process.stem).write_text("0\n")
    assert exit_code(process) == 0


def test_the_name_of_a_run_s_folder_is_no_pattern_of_other_processes(
    spawn: Spawn, process: LaunchedProcess
) -> None:
    child = spawn()
    for name in (".*", "r[1]", "r1|x"):
        other = process.model_copy(update={"run_dir": f"/theirs/{name}", "pid": child.pid})
        assert exit_code(other) == 1, "it is gone, and so is nobody's to end"
        assert kill(other) is Ending.WAS_OVER
    own = process.model_copy(update={"pid": child.pid})
    assert exit_code(own) is None
    assert kill(own) is Ending.ENDED
    child.wait(DEADLINE_S)
