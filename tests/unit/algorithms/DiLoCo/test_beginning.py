"""How long a run begins synchronously."""

from types import SimpleNamespace
from typing import Any

import pytest

from smolcluster.algorithms.DiLoCo.rounds import SyncBeginning


def waiting(waited_s: float | None, step_s: float = 1.0) -> Any:
    return SimpleNamespace(waited_s=waited_s, step_s=step_s)


def test_it_is_over_when_its_share_of_the_samples_has_been_applied() -> None:
    beginning = SyncBeginning(num_samples=100, total_batches=1000)
    for applied in (0, 64, 99):
        beginning.begin_step(applied, [waiting(0.0)])
        beginning.stepped()
        assert not beginning.is_over
    beginning.begin_step(100, [waiting(0.0)])
    assert (beginning.is_over, beginning.reason, beginning.num_steps) == (True, "", 3)
    assert SyncBeginning(num_samples=0, total_batches=1000).is_over


@pytest.mark.parametrize(("waits", "num_steps"), [((3.0, 2.0), 3), ((0.2, 0.2), 100)])
def test_slow_links_leave_nothing_of_it(waits: tuple[float, float], num_steps: int) -> None:
    """Two workers of 1 and 3 s a batch compute 200 batches in 150 s; the first one's waits weigh 3."""
    beginning = SyncBeginning(num_samples=100, total_batches=200)
    workers = [waiting(500.0), waiting(700.0, 3.0)]
    beginning.begin_step(0, workers)  # they have waited for each other to come
    beginning.stepped()
    beginning.begin_step(1, workers)
    assert beginning.waited_s == 0.0
    workers = [waiting(waits[0]), waiting(waits[1], 3.0)]
    while not beginning.is_over:
        beginning.stepped()
        beginning.begin_step(beginning.num_steps, workers)
    assert beginning.num_steps == num_steps
    assert bool(beginning.reason) == (num_steps == 3)
    if beginning.reason:  # 2.75 s in each of two of three steps, of which 97 are left
        assert beginning.reason == "workers would wait 178 s for each other and its exchanges"


def test_waiting_for_who_was_lost_is_no_waiting_for_links() -> None:
    beginning = SyncBeginning(num_samples=10**6, total_batches=60)
    for _ in range(3):
        beginning.begin_step(0, [waiting(0.0)])
        beginning.stepped()
    beginning.disturb()
    beginning.begin_step(0, [waiting(30.0)])
    assert beginning.waited_s == 0.0
    beginning.stepped()
    beginning.begin_step(0, [waiting(0.5)])
    assert beginning.waited_s == 0.5


def test_it_ends_for_another_reason_when_the_step_has_been_taken() -> None:
    beginning = SyncBeginning(num_samples=100, total_batches=10)
    beginning.end("the weights lie on several hosts")
    assert not beginning.is_over
    beginning.begin_step(0, [])
    assert beginning.is_over
