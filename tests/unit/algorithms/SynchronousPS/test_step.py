"""The books of a step: every bucket of every part counts once, whoever brings it, and whenever."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.SynchronousPS.step import (
    MAX_HOLDERS,
    Need,
    Part,
    PartAssignment,
    Step,
    is_overdue,
    needs_holder,
)
from smolcluster.data.permutation import Range
from smolcluster.errors import ProtocolError
from smolcluster.wire.messages import LeaseKey
from unit.algorithms.SynchronousPS.actors import push_of, worker_at

ONE, OTHER = worker_at(1), worker_at(2)
DEADLINE_S = 60.0


def step_of(*sizes: int, num_buckets: int = 3) -> Step:
    return Step(7, Range(2, 64, 64 + sum(sizes)), sizes, num_buckets, "here")


def orphans(step: Step) -> list[Part]:
    return [part for part in step.parts if needs_holder(part, 0.0, is_late=False) is Need.ORPHAN]


def late(step: Step, now: float, *, is_late: bool) -> list[Part]:
    """Parts that shall have one more holder, though somebody works on them."""
    needs = {part.start: needs_holder(part, now, is_late=is_late) for part in step.parts}
    return [part for part in step.parts if needs[part.start] in (Need.LATE, Need.OVERDUE)]


def claim(step: Step, assignment: PartAssignment, *buckets: int) -> list[bool]:
    """Which of these buckets count."""
    pushes = [push_of(assignment.key, bucket, step.num_buckets) for bucket in buckets]
    return [step.claim(assignment.session_id, push) is not None for push in pushes]


def test_a_grant_names_the_part_and_is_a_backup_from_the_second_one_on() -> None:
    step = step_of(5, 11)
    first = step.grant(step.parts[1], ONE, 17, 3.5)
    assert first.key == LeaseKey(incarnation="here", epoch=2, start=69, stop=80, grant=17)
    assert (first.session_id, first.first_bucket, first.backup, first.term.since) == (
        1,
        0,
        False,
        3.5,
    )
    claim(step, first, 0, 1)
    second = step.grant(step.parts[1], OTHER, 18, 4.0)
    assert (second.key.grant, second.first_bucket, second.backup) == (18, 2, True)
    assert step.assignments == [first, second]


@pytest.mark.parametrize(
    "change",
    [{"start": 65}, {"stop": 71}, {"epoch": 1}, {"incarnation": "there"}, {"grant": 99}],
    ids=["start", "stop", "epoch", "incarnation", "grant"],
)
def test_what_was_not_granted_does_not_count(change: dict[str, object]) -> None:
    """Such as what an earlier step has granted."""
    step = step_of(8)
    assignment = step.grant(step.parts[0], ONE, 1, 0.0)
    odd = push_of(assignment.key.model_copy(update=change), 0)
    assert step.claim(1, odd) is None
    assert claim(step, assignment, 0) == [True], "and does no harm"


def test_a_push_that_leaves_a_missing_bucket_out_is_refused() -> None:
    step = step_of(8)
    assignment = step.grant(step.parts[0], worker_at(1), 1, 0.0)
    with pytest.raises(ProtocolError, match="leaves out bucket 0"):
        step.claim(1, push_of(assignment.key, 2))
    assert step.parts[0].num_counted == 0


def test_a_part_that_has_just_been_finished_is_granted_from_behind_its_end() -> None:
    """So the server sees that there is nothing to do."""
    step = step_of(8)
    assignment = step.grant(step.parts[0], worker_at(1), 1, 0.0)
    assert claim(step, assignment, 0, 1, 2) == [True] * 3
    assert step.grant(step.parts[0], worker_at(2), 2, 0.0).first_bucket == step.num_buckets


def test_a_backup_that_was_beaten_may_yet_finish_the_part() -> None:
    """It is lossless, so that it owes nothing."""
    step = step_of(8)
    first = step.grant(step.parts[0], ONE, 1, 0.0)
    second = step.grant(step.parts[0], OTHER, 2, 0.0)
    assert claim(step, first, 0) == [True]
    assert claim(step, second, 0, 1, 2) == [False, True, True]
    assert step.parts[0].finished_by is second


def test_a_first_holder_that_is_ahead_of_its_backup_is_not_beaten() -> None:
    step = step_of(8)
    first = step.grant(step.parts[0], ONE, 1, 0.0)
    second = step.grant(step.parts[0], OTHER, 2, 0.0)
    for bucket in range(3):
        assert claim(step, first, bucket) == [True]
        assert claim(step, second, bucket) == [False]
    assert step.parts[0].finished_by is first


def test_a_part_is_an_orphan_until_somebody_who_may_finish_it_has_it() -> None:
    step = step_of(8, 8)
    one, other = step.parts
    assert orphans(step) == [one, other]
    step.grant(one, ONE, 1, 0.0)
    assert orphans(step) == [other]
    step.grant(other, OTHER, 2, 0.0)
    assert orphans(step) == []
    step.drop(1)
    assert orphans(step) == [one]


def test_a_beaten_holder_is_no_hope() -> None:
    step = step_of(8)
    first = step.grant(step.parts[0], ONE, 1, 0.0)
    second = step.grant(step.parts[0], OTHER, 2, 0.0)
    claim(step, second, 0)
    claim(step, first, 0)
    assert first.push.is_beaten
    step.drop(2)
    assert orphans(step) == step.parts, "its holder cannot finish it"


def test_a_late_part_gets_one_more_holder_and_not_two() -> None:
    step = step_of(8, 8)
    slow, done = step.parts
    step.grant(slow, ONE, 1, 0.0)
    claim(step, step.grant(done, OTHER, 2, 0.0), 0, 1, 2)
    assert late(step, 0.0, is_late=False) == []
    assert late(step, 0.0, is_late=True) == [slow]
    step.grant(slow, OTHER, 3, 0.0)
    assert late(step, 0.0, is_late=True) == []
    step.drop(2)
    assert late(step, 0.0, is_late=True) == [slow]


@pytest.mark.parametrize("is_late", [False, True])
def test_holders_that_are_overdue_do_not_count_however_many_they_are(*, is_late: bool) -> None:
    step = step_of(8)
    (part,) = step.parts
    for number in range(3):
        assignment = step.grant(part, worker_at(number + 1), number, 10.0 * number)
        assignment.term.due_at = assignment.term.say_at = 10.0 * number + 9.0
        alone = number == 0 and is_late
        assert late(step, 10.0 * number + 8.0, is_late=is_late) == ([part] if alone else [])
        assert late(step, 10.0 * number + 9.0, is_late=is_late) == [part]
    claim(step, assignment, 0, 1, 2)
    assert late(step, 1e9, is_late=is_late) == []
    assert [is_overdue(each, 1e9) for each in step.assignments] == [None] * 3


def test_what_a_departed_member_held_is_told_and_it_counts_no_more() -> None:
    step = step_of(8, 8)
    mine = [step.grant(part, ONE, number, 0.0) for number, part in enumerate(step.parts)]
    theirs = step.grant(step.parts[1], OTHER, 9, 0.0)
    claim(step, mine[0], 0)
    assert step.drop(1) == mine
    assert step.assignments == [theirs]
    assert claim(step, mine[0], 1) == [False]
    assert step.drop(1) == []


def test_what_is_given_up_counts_no_more_and_can_be_given_up_twice() -> None:
    step = step_of(8)
    assignment = step.grant(step.parts[0], ONE, 1, 0.0)
    stranger = step_of(8)
    step.give_up(stranger.grant(stranger.parts[0], ONE, 1, 0.0))
    assert step.assignments == [assignment], "another step's holding of the same number is not it"
    for _ in range(2):
        step.give_up(assignment)
    assert claim(step, assignment, 0) == [False]
    assert orphans(step) == step.parts


def test_of_a_step_that_is_done_again_no_residual_is_kept() -> None:
    """Also of a push that had been answered for."""
    step = step_of(8, 8)
    done, open_one = (step.grant(part, ONE, n, 0.0) for n, part in enumerate(step.parts))
    for each in (done, open_one):
        claim(step, each, 0, 1, 2)
    step.give_up(done)
    assert (done.num_settled, open_one.num_settled) == (3, 3)
    step.abandon()
    assert (done.num_settled, open_one.num_settled) == (0, 0)


def test_what_has_counted_of_a_push_is_not_known_unless_it_is_all_or_nothing_on_all_hosts() -> None:
    step = Step(7, Range(2, 64, 72), [8], 3, "here", others={"win": 1})
    (part,) = step.parts
    one, backup = (step.grant(part, worker, n, 0.0) for n, worker in enumerate((ONE, OTHER)))
    settled = [one.num_settled]
    claim(step, one, 0, 1)
    settled.append(one.num_settled)
    claim(step, backup, 2)
    one.push.awaited.clear()
    settled.append(one.num_settled)
    step.num_counted[one.key] = 4
    settled.append(one.num_settled)
    step.num_counted[one.key] = 0
    assert [*settled, one.num_settled] == [None, None, None, 4, 0]
    assert backup.num_settled == 0, "it was lossless"


def test_the_loss_is_the_mean_over_samples_not_over_parts() -> None:
    step = step_of(1, 3, 12)
    for number, (part, loss) in enumerate(zip(step.parts, (8.0, 4.0, 1.0), strict=True)):
        assignment = step.grant(part, ONE, number, 0.0)
        for bucket in range(3):
            step.claim(1, push_of(assignment.key, bucket, loss=loss))
    assert step.loss.mean == pytest.approx((1 * 8 + 3 * 4 + 12 * 1) / 16)


@dataclass
class Sending:
    """A member that pushes what it holds, bucket after bucket."""

    assignment: PartAssignment
    next_bucket: int
    counted: list[int] = field(default_factory=list)


class Chaos:
    """Members that push, leave, skip and take over in any order."""

    def __init__(self, sizes: list[int], num_buckets: int, draw: random.Random) -> None:
        self.step = step_of(*sizes, num_buckets=num_buckets)
        self.draw = draw
        self.members = [worker_at(session_id) for session_id in range(1, 5)]
        self.sending: list[Sending] = []
        self.counted: Counter[tuple[int, int]] = Counter()
        self.num_grants = 0

    @property
    def under_way(self) -> list[Sending]:
        """Those that are not through; also who was dropped may still have some in its socket."""
        return [each for each in self.sending if each.next_bucket < self.step.num_buckets]

    @property
    def over(self) -> bool:
        return not self.under_way and all(part.finished_by for part in self.step.parts)

    def grant(self, part: Part) -> None:
        holders = {assignment.session_id for assignment in part.assignments}
        able = [member for member in self.members if member.member.session_id not in holders]
        if able:
            self.num_grants += 1
            assignment = self.step.grant(part, self.draw.choice(able), self.num_grants, 0.0)
            self.sending.append(Sending(assignment, assignment.first_bucket))

    def push(self) -> None:
        """Somebody sends its next bucket."""
        if not self.under_way:
            return
        each = self.draw.choice(self.under_way)
        push = push_of(each.assignment.key, each.next_bucket, self.step.num_buckets)
        claimed = self.step.claim(each.assignment.session_id, push)
        if claimed is not None:
            assert claimed is each.assignment
            self.counted[(claimed.part.start, push.bucket)] += 1
            each.counted.append(push.bucket)
        each.next_bucket += 1
        if each.next_bucket == self.step.num_buckets:
            self.step.give_up(each.assignment)  # it has answered

    def meddle(self) -> None:
        assignments = self.step.assignments
        if assignments and self.draw.random() < 0.5:
            self.step.give_up(self.draw.choice(assignments))
        else:
            self.step.drop(self.draw.choice(self.members).member.session_id)

    def take_over(self) -> None:
        for part in orphans(self.step):
            self.grant(part)
        for part in late(self.step, 0.0, is_late=True):
            if self.draw.random() < 0.5:
                self.grant(part)
        assert all(len(part.hopeful) <= MAX_HOLDERS for part in self.step.parts)

    def check(self) -> None:
        assert all(count == 1 for count in self.counted.values())
        for each in self.sending:
            assert each.assignment.num_counted == len(each.counted)
            if not each.assignment.backup:
                assert each.counted == list(range(len(each.counted))), "a prefix"
        for part in self.step.parts:
            done = [bucket for start, bucket in self.counted if start == part.start]
            assert sorted(done) == list(range(part.num_counted)), "a prefix of the part, too"


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    num_buckets=st.integers(1, 5),
    draw=st.randoms(use_true_random=False),
    calm=st.floats(0.0, 1.0),
)
def test_whatever_happens_each_bucket_of_each_part_counts_once(
    sizes: list[int], num_buckets: int, draw: random.Random, calm: float
) -> None:
    chaos = Chaos(sizes, num_buckets, draw)
    for _ in range(40):
        chaos.take_over()
        chaos.push()
        if draw.random() > calm:
            chaos.meddle()
        chaos.check()
    for _ in range(2000):
        if chaos.over:
            break
        chaos.take_over()
        chaos.push()
    chaos.check()
    expected = {(part.start, bucket) for part in chaos.step.parts for bucket in range(num_buckets)}
    assert set(chaos.counted) == expected
    assert all(part.finished_by is not None for part in chaos.step.parts)
    assert orphans(chaos.step) == late(chaos.step, 0.0, is_late=True) == []


class Hesitant(Part):
    """A part of which a reader looks at the count, and is interrupted then."""

    looked = threading.Event()
    go_on = threading.Event()
    hesitates = False

    @property
    def num_counted(self) -> int:
        count = self._count
        if self.hesitates:
            self.hesitates = False
            self.looked.set()
            self.go_on.wait(0.1)
        return count

    @num_counted.setter
    def num_counted(self, count: int) -> None:
        self._count = count


def test_readers_that_claim_at_the_same_time_never_both_count() -> None:
    step = step_of(4)
    part = Hesitant(2, 64, 68)
    first, second = (step.grant(step.parts[0], who, who.rank, 0.0) for who in (ONE, OTHER))
    first.part = second.part = part
    part.hesitates = True
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(claim, step, first, 0)
        assert part.looked.wait(DEADLINE_S)
        other = pool.submit(claim, step, second, 0)
        other.add_done_callback(lambda _: part.go_on.set())
        assert one.result(DEADLINE_S) + other.result(DEADLINE_S) == [True, False]
    assert (part.num_counted, first.num_counted, second.num_counted) == (1, 1, 0)
