"""Ranks that one process has started on its machine."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rank_bodies import ends_with_2, greets, is_killed
from smolcluster.algorithms.Mesh.children import ChildRanks
from smolcluster.algorithms.Mesh.ranks import Ranks
from waiting import DEADLINE_S, eventually


@contextmanager
def started(*bodies: Callable[[Ranks, str], None]) -> Iterator[ChildRanks]:
    log = logging.getLogger("test")
    ranks = ChildRanks(bodies, node="gpubox", timeout_s=DEADLINE_S, log=log)
    try:
        yield ranks
    finally:
        ranks.end(0.0)


def test_it_meets_rank_0_by_a_secret_of_its_own_and_takes_no_modules_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "pickle.py").write_text("raise SystemExit('of the folder')")
    with started(greets) as ranks:
        eventually(lambda: ranks.ended() or ranks.store.check(["rank 1 of 2"]))
        assert ranks.ended() is None
        assert str(tmp_path) not in ranks.store.get("rank 1 of 2").decode().split(":")
        assert ranks.code_of(1) == 0
        assert ranks.failed() is None
    assert "PYTHONSAFEPATH" not in os.environ


def test_one_that_has_ended_badly_is_named() -> None:
    with started(is_killed, ends_with_2) as ranks:
        eventually(lambda: ranks.ended() == (1, -signal.SIGKILL))
        assert str(ranks.failed()) == "rank 1 on gpubox failed first: it was ended by SIGKILL"
        assert ranks.code_of(2) == 2
