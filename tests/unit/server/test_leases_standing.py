"""A dispatcher that is stopped anywhere and goes on elsewhere: still every sample exactly once."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.errors import CheckpointError
from smolcluster.server.leases import Dispatcher, DispatcherState, Lease
from smolcluster.training.checkpoint import parse_progress
from smolcluster.wire.messages import LeaseKey

HONEST = 99
MOVES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=60)


def dispatcher(
    num_samples: int = 10, num_epochs: int = 2, batch_size: int = 4, incarnation: str = "here"
) -> Dispatcher:
    return Dispatcher(
        incarnation=incarnation,
        num_samples=num_samples,
        total_samples=num_epochs * num_samples,
        batch_size=batch_size,
        permutation=lambda epoch: (
            (torch.arange(num_samples, dtype=torch.int32) * 7 + epoch) % num_samples
            if num_samples % 7
            else torch.arange(num_samples, dtype=torch.int32).flip(0)
        ),
    )


def must(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def through_json(state: DispatcherState) -> DispatcherState:
    """What a checkpoint's file makes of it."""
    return parse_progress(DispatcherState, json.loads(json.dumps(state.model_dump(mode="json"))), 1)


@dataclass
class History:
    """Random doings of holders with a dispatcher, and what was applied in all."""

    leases: Dispatcher
    applied: dict[int, Counter[int]]
    now: float = 0.0
    granted: list[tuple[int, Lease]] = field(default_factory=list)

    def grant(self, holder: int) -> Lease | None:
        """Give a lease, if there is one."""
        lease = self.leases.grant(holder, self.now)
        if lease is not None:
            self.granted.append((holder, lease))
        return lease

    def push(self, holder: int, lease: Lease) -> None:
        """Apply a lease's samples if they may be applied."""
        if self.leases.judge(lease.key, holder) == "open":
            self.leases.commit(lease.key, holder, self.now)
            self.applied[lease.key.epoch].update(lease.indices.tolist())

    def go(self, moves: list[tuple[int, int]]) -> None:
        """Take, push, repeat, lose and outstay leases."""
        for move, which in moves:
            self.now += 1.0
            holder = which % 3
            some = self.granted[which % len(self.granted)] if self.granted else None
            if move <= 1:
                self.grant(holder)
            elif move in (2, 3) and some:
                self.push(*some)
            elif move == 4:
                self.leases.release_all(holder)
            elif move == 5 and some:
                self.leases.release(some[1].key, some[0])
            elif move == 6:
                self.now += 40.0
                self.leases.expire(self.now)

    def finish(self) -> None:
        """All others have gone; one holder does what is left."""
        for holder in range(3):
            self.leases.release_all(holder)
        while (lease := self.grant(HONEST)) is not None:
            self.push(HONEST, lease)


def begun(leases: Dispatcher) -> History:
    return History(
        leases, {epoch: Counter() for epoch in range(leases.total_samples // leases.num_samples)}
    )


@settings(max_examples=100)
@given(
    num_samples=st.integers(1, 30),
    batch_sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    num_epochs=st.integers(1, 3),
    more_epochs=st.integers(0, 2),
    lives=st.lists(MOVES, min_size=1, max_size=3),
)
def test_every_sample_is_applied_once_wherever_the_server_was_stopped(
    num_samples: int,
    batch_sizes: tuple[int, int],
    num_epochs: int,
    more_epochs: int,
    lives: list[list[tuple[int, int]]],
) -> None:
    """Several starts, the last one perhaps with other batches and more epochs."""
    history = begun(dispatcher(num_samples, num_epochs, batch_sizes[0], "life-0"))
    for number, moves in enumerate(lives, start=1):
        history.go(moves)
        stood, count = through_json(history.leases.state), history.leases.samples_applied
        assert count == sum(map(Counter.total, history.applied.values()))
        void = history.granted
        is_last = number == len(lives)
        new = dispatcher(
            num_samples,
            num_epochs + (more_epochs if is_last else 0),
            batch_sizes[is_last],
            f"life-{number}",
        )
        new.resume(stood, count)
        assert new.samples_applied == count
        assert new.epoch == history.leases.epoch
        assert new.state == stood
        assert all(new.judge(lease.key, holder) == "late" for holder, lease in void)
        assert new.done == (count == new.total_samples)
        history.leases, history.granted = new, []
    for epoch in range(num_epochs, num_epochs + more_epochs):
        history.applied[epoch] = Counter()
    history.finish()
    once = Counter(range(num_samples))
    assert history.leases.done
    assert history.applied == dict.fromkeys(range(num_epochs + more_epochs), once)


def test_what_was_open_is_handed_out_first_and_in_order() -> None:
    leases = dispatcher()
    granted = [must(leases.grant(holder, 0.0)) for holder in (1, 2, 3, 1)]
    leases.commit(granted[1].key, 2, 1.0)
    leases.release(granted[2].key, 3)
    new = dispatcher(incarnation="there")
    new.resume(through_json(leases.state), leases.samples_applied)
    again = [must(new.grant(5, 0.0)) for _ in range(5)]
    places = [(lease.key.epoch, lease.key.start, lease.key.stop) for lease in again]
    assert places == [(0, 0, 4), (0, 8, 10), (1, 0, 4), (1, 4, 8), (1, 8, 10)]
    expected = [granted[number].indices.tolist() for number in (0, 2, 3)]
    assert [lease.indices.tolist() for lease in again[:3]] == expected
    assert {lease.key.incarnation for lease in again} == {"there"}


def test_a_range_with_two_holders_stands_once() -> None:
    leases = dispatcher(num_epochs=1, batch_size=10)
    must(leases.grant(1, 0.0))
    must(leases.grant(2, 100.0))
    assert leases.state == DispatcherState(cursor=(0, 0, 10), waiting=[(0, 0, 10)])


def test_a_finished_dispatcher_has_no_more_unless_there_are_more_epochs() -> None:
    history = begun(dispatcher())
    history.finish()
    same, longer = dispatcher(), dispatcher(num_epochs=3)
    for new in (same, longer):
        new.resume(through_json(history.leases.state), history.leases.samples_applied)
    assert same.done
    assert same.grant(1, 0.0) is None
    assert not longer.done
    key: LeaseKey = must(longer.grant(1, 0.0)).key
    assert (key.epoch, key.start) == (2, 0)


# What is not its own standing


def halfway() -> tuple[DispatcherState, int]:
    """Of 2 epochs of 10 samples: 8 applied, 6 that wait, 6 not cut yet."""
    leases = dispatcher()
    granted = [must(leases.grant(1, 0.0)) for _ in range(4)]
    leases.commit(granted[0].key, 1, 1.0)
    leases.commit(granted[3].key, 1, 1.0)
    state = leases.state
    assert state == DispatcherState(cursor=(1, 0, 4), waiting=[(0, 4, 8), (0, 8, 10)])
    return state, leases.samples_applied


@pytest.mark.parametrize(
    ("changes", "samples_applied"),
    [
        ({}, 7),
        ({}, 9),
        ({}, 0),
        ({"cursor": (1, 0, 8)}, 8),
        ({"cursor": (0, 0, 4)}, 8),
        ({"cursor": (2, 0, 4)}, 18),
        ({"cursor": (-1, 0, 4)}, -12),
        ({"cursor": (1, 8, 4)}, 8),
        ({"cursor": (1, 4, 11)}, 15),
        ({"cursor": (1, -1, 4)}, 8),
        ({"waiting": []}, 8),
        ({"waiting": [(0, 4, 8)]}, 8),
        ({"waiting": [(0, 4, 8), (0, 8, 11)]}, 7),
        ({"waiting": [(0, 4, 8), (0, 8, 10), (2, 0, 4)]}, 4),
        ({"waiting": [(-1, 4, 8), (0, 8, 10)]}, 8),
        ({"waiting": [(0, 8, 4), (0, 0, 10)]}, 8),
        ({"waiting": [(0, -2, 4)]}, 8),
    ],
)
def test_a_standing_of_something_else_is_refused(
    changes: dict[str, Any], samples_applied: int
) -> None:
    state, count = halfway()
    dispatcher().resume(state, count)
    changed = state.model_copy(update=changes)
    with pytest.raises(CheckpointError) as caught:
        dispatcher().resume(changed, samples_applied)
    for words in ("20 samples in epochs of 10", "own dataset", "as many epochs or steps or more"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        "standing",
        {},
        {"cursor": [0, 0, 0]},
        {"waiting": []},
        {"cursor": [0, 0], "waiting": []},
        {"cursor": [0, 0, 0.5], "waiting": []},
        {"cursor": [0, 0, None], "waiting": []},
        {"cursor": [0, 0, 0], "waiting": [[0, 0]]},
        {"cursor": [0, 0, 0], "waiting": [0]},
        {"cursor": [0, 0, 0], "waiting": [], "applied": []},
    ],
)
def test_what_is_no_standing_is_a_checkpoint_error_of_that_step(stored: Any) -> None:
    with pytest.raises(CheckpointError, match="the progress of step 7 cannot be read"):
        parse_progress(DispatcherState, stored, 7)
