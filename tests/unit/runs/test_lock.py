import os
import subprocess
from pathlib import Path

import pytest

from smolcluster.errors import ConfigError, RunBusy
from smolcluster.runs.lock import is_held, run_lock

ME = os.getpid()


def test_a_run_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "edp-1" / ".lock"
    path.parent.mkdir()
    with run_lock(path), pytest.raises(RunBusy) as refused, run_lock(path):
        pass
    assert str(refused.value) == (
        f"run edp-1 is being written by process {ME}: "
        "wait until that ends, or stop it, then try again"
    )
    with run_lock(path):
        assert path.read_text() == f"{ME}\n"


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with pytest.raises(ZeroDivisionError), run_lock(path):
        raise ZeroDivisionError
    with run_lock(path):
        pass


def test_a_holder_that_has_not_said_its_name_is_another_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with run_lock(path):
        path.write_text("")
        with pytest.raises(RunBusy, match="written by another process"), run_lock(path):
            pass


def test_a_started_program_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """Or the run would stay locked for as long as a sink of the killed server lives."""
    path = tmp_path / ".lock"
    with run_lock(path):
        program = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert not is_held(path)
    finally:
        program.kill()
        program.wait()


def test_a_place_that_cannot_be_locked_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot lock .*no/\.lock: No such file.*set runs_dir"):
        run_lock(tmp_path / "no" / ".lock").__enter__()


def test_a_lock_that_is_a_link_leaves_the_other_file_as_it_is(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    (tmp_path / ".lock").symlink_to(treasure)
    with pytest.raises(ConfigError, match="cannot lock"), run_lock(tmp_path / ".lock"):
        pass
    assert treasure.read_text() == "gold"
