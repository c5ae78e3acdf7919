import fcntl
import os
import threading
from pathlib import Path

import pytest

from smolcluster.utils import locks
from waiting import DEADLINE_S


class BusyError(Exception):
    pass


def refuse(holder: str) -> None:
    raise BusyError(holder)


def test_who_comes_second_hears_who_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError):
        locks.is_taken(path)
    with locks.held(path, refuse):
        assert locks.is_taken(path)
        with pytest.raises(BusyError, match=f"process {os.getpid()}"), locks.held(path, refuse):
            pass
        assert path.read_text() == f"{os.getpid()}\n", "the second one has changed nothing"
    assert not locks.is_taken(path)
    assert path.read_text() == ""


def test_who_is_patient_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    path, heard, got = tmp_path / "lock", threading.Event(), threading.Event()

    def wait() -> None:
        with locks.held(path, lambda _: heard.set()):
            got.set()

    waiting = threading.Thread(target=wait, daemon=True)
    with locks.held(path, refuse):
        waiting.start()
        assert heard.wait(DEADLINE_S)
        assert not got.is_set()
    assert got.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)


@pytest.mark.parametrize("text", ["1\n", "99999999999999999999"])
def test_a_file_that_was_left_behind_locks_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    with locks.held(path, refuse):
        assert path.read_text() == f"{os.getpid()}\n"


def test_who_only_looks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    with locks.held(path, refuse):
        assert locks.is_taken(path)
    os.close(looking)
