import fcntl
import os
import threading
from pathlib import Path

import pytest

from smolcluster.utils import locks


class BusyError(Exception):
    pass


def refuse(holder: str) -> None:
    raise BusyError(holder)


def test_who_comes_second_hears_who_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = locks.take(path, refuse)
    with pytest.raises(BusyError, match=f"process {os.getpid()}"):
        locks.take(path, refuse)
    assert path.read_text() == f"{os.getpid()}\n", "the second one has changed nothing"
    locks.release(held)
    locks.release(locks.take(path, refuse))


def test_who_is_patient_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    path, heard = tmp_path / "lock", threading.Event()
    held = locks.take(path, refuse)
    got: list[int] = []
    waiting = threading.Thread(
        target=lambda: got.append(locks.take(path, lambda _: heard.set())), daemon=True
    )
    waiting.start()
    assert heard.wait(30)
    assert not got
    locks.release(held)
    waiting.join(30)
    assert got
    locks.release(got[0])


def test_a_file_that_was_left_behind_locks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("1\n")
    locks.release(locks.take(path, refuse))
    assert path.read_text() == ""


def test_whether_a_lock_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError):
        locks.is_taken(path)
    descriptor = locks.take(path, lambda _holder: None)
    assert locks.is_taken(path)
    locks.release(descriptor)
    assert not locks.is_taken(path)


def test_who_only_looks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    held = locks.take(path, refuse)
    assert locks.is_taken(path)
    locks.release(held)
    os.close(looking)
