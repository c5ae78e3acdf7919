"""Ranks that one process has started on its machine."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rank_bodies
from processes import is_alive
from rank_bodies import ends_with_2, greets, is_killed, loads_in_a_process
from smolcluster.algorithms.children import SAFE_PATH
from smolcluster.algorithms.Mesh.child_ranks import ChildRanks
from smolcluster.algorithms.Mesh.ranks import Ranks
from waiting import DEADLINE_S, eventually


@contextmanager
def started(*bodies: Callable[[Ranks, str], None]) -> Iterator[ChildRanks]:
    log = logging.getLogger("test")
    ranks = ChildRanks(bodies, node="gpubox", timeout_s=DEADLINE_S, log=log)
    try:
        yield ranks
    finally:
        ranks.end()


def test_it_meets_rank_0_by_a_secret_of_its_own_and_takes_no_modules_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SAFE_PATH, raising=False)
    (tmp_path / "pickle.py").write_text("raise SystemExit('of the folder')")
    with started(greets) as ranks:
        eventually(lambda: ranks.ended() or ranks.store.check(["rank 1 of 2"]))
        assert ranks.ended() is None
        assert str(tmp_path) not in ranks.store.get("rank 1 of 2").decode().split(":")
        eventually(lambda: ranks.ended() is not None)
        assert str(ranks.failed()) == "rank 1 on gpubox failed first: it ended with code 0"
        assert ranks.store.get(SAFE_PATH) == b"not set", "it is of what a rank starts, too"
    assert SAFE_PATH not in os.environ


def test_ctrl_c_while_it_begins_is_for_the_process_that_has_started_it() -> None:
    with started(ends_with_2) as ranks:
        [process] = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        eventually(lambda: ranks.code_of(1) == 2)


def test_one_that_has_ended_badly_is_named() -> None:
    with started(is_killed, ends_with_2) as ranks:
        eventually(lambda: ranks.ended() == (1, -signal.SIGKILL))
        assert str(ranks.failed()).startswith(
            "rank 1 on gpubox failed first: it was ended by SIGKILL"
        )
        eventually(lambda: ranks.code_of(2) == 2)


def test_it_may_have_processes_of_its_own() -> None:
    with started(loads_in_a_process) as ranks:
        eventually(lambda: ranks.ended() == (1, 3))
        assert str(ranks.failed()).endswith("it ended with code 3: its message is above")


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_it_ends_with_the_process_that_has_started_it(end: str) -> None:
    """One that is waited for by nobody, and hears no signal."""
    program = [sys.executable, rank_bodies.__file__, end]
    starter = subprocess.run(
        program, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert starter.returncode == (-signal.SIGKILL if end == "kill" else 0), starter.stderr
    [pid] = map(int, starter.stdout.split())
    eventually(lambda: not is_alive(pid))
