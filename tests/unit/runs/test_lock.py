import os
import signal
from pathlib import Path

import pytest

from smolcluster.errors import ConfigError, RunBusy
from smolcluster.runs.lock import RunLock

ME = os.getpid()


def test_a_run_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "edp-1" / ".lock"
    path.parent.mkdir()
    with RunLock(path), pytest.raises(RunBusy) as refused, RunLock(path):
        pass
    assert str(refused.value) == (
        f"run edp-1 is being written by process {ME}: "
        "wait until that ends, or stop it, then try again"
    )
    with RunLock(path):
        assert path.read_text() == f"{ME}\n"


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with pytest.raises(ZeroDivisionError), RunLock(path):
        raise ZeroDivisionError
    with RunLock(path):
        pass


def test_a_file_left_behind_locks_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("99999999999999999999")
    with RunLock(path):
        assert path.read_text() == f"{ME}\n"


def test_a_holder_that_has_not_said_its_name_is_another_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with RunLock(path):
        path.write_text("")
        with pytest.raises(RunBusy, match="written by another process"), RunLock(path):
            pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        with RunLock(path):
            os.write(say_ready, b"x")
            signal.pause()
    os.read(ready, 1)
    with pytest.raises(RunBusy, match=f"written by process {pid}:"), RunLock(path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with RunLock(path):
        pass
    os.close(ready)
    os.close(say_ready)


def test_a_started_program_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """Or the run would stay locked for as long as a sink of the killed server lives."""
    with RunLock(tmp_path / ".lock") as lock:
        assert lock._descriptor is not None
        assert not os.get_inheritable(lock._descriptor)


def test_a_place_that_cannot_be_locked_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot lock .*no/\.lock: No such file.*set runs_dir"):
        RunLock(tmp_path / "no" / ".lock").__enter__()
