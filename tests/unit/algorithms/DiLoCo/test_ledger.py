"""The books of leases and requests: nothing is counted twice, and nothing is forgotten."""

import random
from collections import Counter

import pytest

from smolcluster.algorithms.DiLoCo.ledger import Ledger, Request
from smolcluster.data.permutation import Range
from smolcluster.errors import CheckpointError
from smolcluster.wire.messages import LeaseKey, Stepped

NUM_HOLDERS = 3


def key(start: int, grant: int) -> LeaseKey:
    return LeaseKey(incarnation="a", epoch=0, start=start, stop=start + 10, grant=grant)


def step(ledger: Ledger, lease: LeaseKey, holder: int) -> bool:
    return ledger.stepped(
        holder, Stepped(lease=lease, loss=1.0, num_terms=10, grad_norm=1.0, compute_s=0.1)
    )


def give(ledger: Ledger, lease: LeaseKey, holder: int) -> None:
    ledger.assign(lease, holder, 0.1)
    assert step(ledger, lease, holder)


def ask(ledger: Ledger, holder: int, fragment: int) -> Request:
    request = ledger.request(holder, fragment)
    assert request is not None
    return request


def test_a_request_covers_what_was_given_before_it_and_not_covered_yet() -> None:
    ledger = Ledger(1)
    first, second = key(0, 1), key(10, 2)
    give(ledger, first, 7)
    earlier = ask(ledger, 7, 0)
    give(ledger, second, 7)
    assert earlier.leases == (first,)
    assert ask(ledger, 7, 0).leases == (second,)
    assert ledger.request(7, 0) is None


def test_samples_count_when_they_are_applied_in_every_fragment() -> None:
    ledger, lease = Ledger(2), key(0, 1)
    give(ledger, lease, 7)
    requests = [ask(ledger, 7, fragment) for fragment in (0, 1)]
    for request in requests:
        ledger.arrived(request)
    assert ledger.apply(requests[:1]) == []
    assert ledger.num_open_samples == 10
    [applied] = ledger.apply(requests[1:])
    assert (applied.key, applied.holder, ledger.num_open_samples) == (lease, 7, 0)


def test_a_lost_worker_s_samples_go_back_for_the_fragments_that_have_not_arrived() -> None:
    ledger = Ledger(2)
    give(ledger, key(0, 1), 7)
    request = ask(ledger, 7, 0)
    ledger.arrived(request)
    give(ledger, key(10, 2), 7)
    assert set(ledger.take_back(7)) == {key(0, 1), key(10, 2)}
    assert ledger.num_open_samples == 0
    assert ledger.assign(key(0, 3), 8, 0.1) == {1}
    assert ledger.assign(key(10, 4), 8, 0.1) == {0, 1}
    assert ledger.apply([request]) == []


def test_what_has_arrived_whole_outlives_its_worker() -> None:
    ledger = Ledger(1)
    give(ledger, key(0, 1), 7)
    request = ask(ledger, 7, 0)
    ledger.arrived(request)
    assert ledger.take_back(7) == []
    assert [each.holder for each in ledger.apply([request])] == [7]


def test_answers_to_nobody_s_request_are_known() -> None:
    ledger = Ledger(1)
    give(ledger, key(0, 1), 7)
    request = ask(ledger, 7, 0)
    assert ledger.asked(request.number, 7, 0) is request
    assert ledger.asked(request.number, 8, 0) is None
    ledger.take_back(7)
    assert ledger.asked(request.number, 7, 0) is None
    assert not step(ledger, key(0, 1), 7)
    assert not ledger.is_waiting(0)


def test_a_step_is_noted_once_and_none_of_what_has_arrived() -> None:
    ledger, lease = Ledger(1), key(0, 1)
    give(ledger, lease, 7)
    assert not step(ledger, lease, 7)
    assert ledger.holds(7, lease)
    ledger.arrived(ask(ledger, 7, 0))
    assert not ledger.holds(7, lease)


def test_a_resumed_run_repeats_only_the_fragments_that_are_missing() -> None:
    before, after = Ledger(3), Ledger(3)
    give(before, key(0, 1), 7)
    request = ask(before, 7, 1)
    before.arrived(request)
    assert before.apply([request]) == []
    after.resume(before.partly_applied)
    assert after.assign(key(0, 1), 8, 0.1) == {0, 2}
    with pytest.raises(CheckpointError):
        Ledger(1).resume(before.partly_applied)


class Chance:
    """Workers that get samples, are asked, answer, are applied and are lost in any order."""

    def __init__(self, num_fragments: int, seed: int) -> None:
        self.draw, self.ledger = random.Random(seed), Ledger(num_fragments)  # noqa: S311
        self.num_fragments, self.num_grants = num_fragments, 0
        self.waiting = [Range(0, 10 * place, 10 * place + 10) for place in range(40)]
        self.asked: list[Request] = []
        self.arrived: list[Request] = []
        self.meant: dict[LeaseKey, frozenset[int]] = {}
        self.counted: Counter[int] = Counter()
        self.in_fragment: Counter[tuple[int, int]] = Counter()

    def give(self, holder: int) -> None:
        if self.waiting:
            self.num_grants += 1
            lease = key(self.waiting.pop().start, self.num_grants)
            self.meant[lease] = self.ledger.assign(lease, holder, 0.1)
            assert step(self.ledger, lease, holder)

    def ask(self, holder: int) -> None:
        fragment = self.draw.randrange(self.num_fragments)
        if (request := self.ledger.request(holder, fragment)) is not None:
            self.asked.append(request)

    def answer(self, _holder: int) -> None:
        if self.asked:
            request = self.asked.pop(self.draw.randrange(len(self.asked)))
            if self.ledger.asked(request.number, request.holder, request.fragment):
                self.ledger.arrived(request)
                self.arrived.append(request)

    def apply(self, _holder: int) -> None:
        for request in self.arrived:
            for lease in request.leases:
                assert request.fragment in self.meant[lease]
                self.in_fragment[lease.start, request.fragment] += 1
        self.counted.update(each.key.start for each in self.ledger.apply(self.arrived))
        self.arrived = []

    def lose(self, holder: int) -> None:
        if self.draw.random() < 0.3:
            self.waiting += [Range.of(each) for each in self.ledger.take_back(holder)]

    def lose_store(self, _holder: int) -> None:
        """With it a part of all changes that wait; those who hold their samples begin again."""
        if self.draw.random() < 0.1:
            holders = self.ledger.lose(self.arrived)
            self.arrived = []
            for holder in holders:
                self.waiting += [Range.of(each) for each in self.ledger.take_back(holder)]


def test_a_lost_change_goes_back_to_who_has_its_samples_though_another_had_sent_it() -> None:
    """The first worker was lost when it had sent one fragment, the second when the other was applied."""
    ledger = Ledger(2)
    give(ledger, key(0, 1), 7)
    first = ask(ledger, 7, 0)
    ledger.arrived(first)
    assert ledger.take_back(7) == [key(0, 1)]
    give(ledger, key(0, 2), 8)
    second = ask(ledger, 8, 1)
    ledger.arrived(second)
    assert ledger.apply([second]) == []
    assert ledger.take_back(8) == [], "all of it is here"
    assert ledger.lose([first]) == {8}
    assert ledger.take_back(8) == [key(0, 2)]
    assert ledger.assign(key(0, 3), 9, 0.1) == {0}


@pytest.mark.parametrize("num_fragments", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_counts_once_in_every_fragment_whoever_is_lost(
    num_fragments: int, seed: int
) -> None:
    chance = Chance(num_fragments, seed)
    acts = [chance.give, chance.give, chance.ask, chance.answer, chance.apply, chance.lose]
    acts.append(chance.lose_store)
    while sum(chance.counted.values()) < 40:
        chance.draw.choice(acts)(chance.draw.randrange(NUM_HOLDERS))
    assert set(chance.counted.values()) == {1}
    assert len(chance.in_fragment) == 40 * num_fragments
    assert set(chance.in_fragment.values()) == {1}
