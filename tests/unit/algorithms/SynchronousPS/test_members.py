"""Who is free, what each gets, and what a worker is told of a push whose fate it does not know."""

import math
from collections.abc import Mapping
from itertools import count

import pytest
import torch

from peers import opened, small_replica
from smolcluster.algorithms.SynchronousPS.members import (
    FIRST_PAUSE_S,
    Members,
    StepMember,
)
from smolcluster.algorithms.SynchronousPS.sharing import FIRST_PROBE
from smolcluster.algorithms.SynchronousPS.step import Part, PartAssignment, Step
from smolcluster.data.permutation import Range
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import (
    Buffers,
    Cancel,
    Commit,
    LeaseKey,
    Message,
    Park,
    Skip,
    State,
    frame_of,
)
from unit.algorithms.SynchronousPS.actors import (
    commit_of,
    post_of,
    push_of,
    worker_at,
)

LEASE = LeaseKey(incarnation="here", epoch=0, start=0, stop=8, grant=77)
NODES = ("pi5", "win", "macbook", "mini1")


@pytest.fixture
def replica() -> Replica:
    return small_replica("adam")


class House:
    """Members with sessions that go nowhere, and a step to hand out."""

    def __init__(self, replica: Replica, shares: Mapping[str, float] | None = None) -> None:
        self.replica = replica
        self.members = Members(replica, shares, "here", num_buffers=2)
        self.step = Step(1, Range(0, 0, 32), [8, 8, 16], 3, "here")
        self.grants = count(1)

    def newcomer(
        self, session_id: int, samples_per_s: float = 1000.0, node: str = "macbook"
    ) -> StepMember:
        """A member whose session holds the whole state."""
        worker = worker_at(session_id, node, samples_per_s=samples_per_s)
        member = self.members.welcome(worker)
        self.members.send_state(member, 0, [])
        return member

    def member(
        self, session_id: int, samples_per_s: float = 1000.0, node: str = "macbook"
    ) -> StepMember:
        """A member that has the whole state, and whose session is empty."""
        member = self.newcomer(session_id, samples_per_s, node)
        clear(member)
        self.members.note_joined()
        assert member.joined
        return member

    def give(self, member: StepMember, part: Part, now: float = 0.0) -> PartAssignment:
        assignment = self.step.grant(part, member.worker, next(self.grants), now)
        member.unanswered[assignment.key] = assignment
        return assignment

    def answer(self, assignment: PartAssignment, now: float = 1.0, bucket: int = 2) -> None:
        self.members.take_back(assignment, push_of(assignment.key, bucket), now)

    def claim(self, assignment: PartAssignment, *buckets: int, **told: float) -> None:
        for bucket in buckets:
            push = push_of(assignment.key, bucket).model_copy(update=told)
            self.step.claim(assignment.session_id, push)


def clear(member: StepMember) -> None:
    """All that is queued has been sent."""
    post = post_of(member.worker)
    post.num_gone = post.num_queued
    post.frames.clear()


def said(member: StepMember) -> list[Message]:
    return post_of(member.worker).said


def cancels(member: StepMember) -> list[tuple[LeaseKey, int | None]]:
    return [(each.lease, each.num_buckets) for each in said(member) if isinstance(each, Cancel)]


@pytest.fixture
def house(replica: Replica) -> House:
    return House(replica)


def commit(house: House, version: int) -> None:
    """A step: three buckets of its mean, and its commit."""
    for _ in range(3):
        house.members.send_mean(frame_of_commit(version))
    house.members.broadcast(frame_of_commit(version))


def test_the_state_is_whole_and_copied_once_for_all_who_are_sent_it(house: House) -> None:
    one, other = house.newcomer(1), house.newcomer(2)
    states = [each for each in said(one) if isinstance(each, State)]
    assert [(each.content, each.bucket) for each in states] == [
        (content, bucket) for content in ("weights", "exp_avg", "exp_avg_sq") for bucket in range(3)
    ]
    pairs = zip(post_of(one.worker).frames, post_of(other.worker).frames, strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    house.members.broadcast(frame_of_commit(1))
    third = house.newcomer(3)
    assert post_of(third.worker).frames[0] is not post_of(one.worker).frames[0], "they have changed"


def test_a_joiner_gets_its_buffers_before_the_state_and_the_open_mean_after_it(
    house: House,
) -> None:
    member = house.members.welcome(worker_at(1))
    after, changed = frame_of_commit(8), {0: torch.ones(2, dtype=torch.float64)}
    house.replica.buffers.values = lambda: changed  # type: ignore[method-assign]
    house.members.send_state(member, 6, [after])
    frames = post_of(member.worker).frames
    assert isinstance(opened(frames[0])[0], Buffers)
    assert (frames[-1], len(frames)) == (after, 11)
    assert member.last_mean == 11


def test_a_joiner_gets_no_part_before_the_state_has_left(house: House) -> None:
    member = house.newcomer(1)
    post_of(member.worker).num_gone = 8
    house.members.note_joined()
    assert house.members.free == []
    post_of(member.worker).num_gone = 9
    house.members.note_joined()
    assert house.members.free == [member]


def test_a_joiner_whose_link_takes_five_frames_a_step_joins(house: House) -> None:
    """Means wait behind the state, longer than those of a member may: it would be parked for ever."""
    joiner = house.newcomer(1)
    post = post_of(joiner.worker)
    for version in range(1, 5):
        post.num_gone = min(post.num_gone + 5, post.num_queued)
        commit(house, version)
        assert house.members.laggards == []
        house.members.note_joined()
    assert joiner.joined


def test_a_joiner_whose_link_takes_less_than_a_mean_a_step_is_parked(house: House) -> None:
    joiner = house.newcomer(1)
    for version in range(1, 10):
        post_of(joiner.worker).num_gone += 2
        commit(house, version)
        house.members.note_joined()
    assert not joiner.joined
    assert house.members.laggards == [(joiner, "it is 6 steps behind")]


def test_who_has_not_answered_gets_no_new_part(house: House) -> None:
    one, other = house.member(1), house.member(2)
    assignment = house.give(one, house.step.parts[0])
    assert house.members.free == [other]
    skip = Skip(lease=assignment.key, compute_s=0.0)
    assert house.members.take_back(assignment, skip, 1.0) is one
    assert house.members.free == [one, other]


def test_measured_speeds_decide_who_gets_how_much(house: House) -> None:
    members = [house.member(1, 4000.0), house.member(2, 1000.0), house.member(3, 4000.0)]
    assert house.members.sizes(members, 90)[0] == [40, 10, 40]
    for _ in range(80):
        for member, compute_s in zip(members, (0.04, 0.04, 0.01), strict=True):
            member.pace.measured(40, compute_s, compute_s)  # the first is a fast one no more
    assert house.members.sizes(members, 60)[0] == [10, 10, 40]


def test_who_has_not_been_measured_is_not_believed_to_be_faster_than_the_others(
    house: House,
) -> None:
    """It would get nearly the whole batch, and nobody knows whether it computes at all."""
    members = [house.member(1), house.member(2), house.member(3, 1e6), house.member(4, 10.0)]
    assert house.members.sizes(members, 90)[1] == math.inf
    for member in members[:2]:
        member.pace.measured(10, 0.1, 0.1 + 0.02)
    sizes, step_s = house.members.sizes(members, 90)
    assert sizes == [30, 29, 29, 2]
    assert step_s == pytest.approx(0.32)


def test_a_member_without_a_part_is_measured_now_and_then(house: House) -> None:
    members = [house.member(1, 1000.0), house.member(2, 1.0)]
    sizes = [house.members.sizes(members, 100)[0] for _ in range(FIRST_PROBE)]
    assert sizes == [[100, 0]] * (FIRST_PROBE - 1) + [[99, 1]]


@pytest.mark.parametrize(
    ("present", "sizes"),
    [
        ((1, 2, 3), [50, 30, 20]),
        ((1, 3), [71, 29]),  # the others take over what is left: 0.5 : 0.2
        ((4,), [100]),
        ((1, 4), [100, 0]),  # who is not in the file has no share
    ],
)
def test_stated_shares_decide_who_gets_how_much(
    replica: Replica, present: tuple[int, ...], sizes: list[int]
) -> None:
    house = House(replica, {"pi5": 0.5, "win": 0.3, "macbook": 0.2})
    members = [
        house.member(session_id, 10.0**session_id, NODES[session_id - 1]) for session_id in present
    ]
    assert house.members.sizes(members, 100)[0] == sizes


def test_an_answer_is_taken_once(house: House) -> None:
    member = house.member(1)
    assignment = house.give(member, house.step.parts[0])
    assert house.members.unanswered(2, assignment.key) is None, "nobody sits there"
    assert house.members.unanswered(1, LEASE) is None, "it was never given"
    assert house.members.unanswered(1, assignment.key) is assignment
    house.answer(assignment)
    assert house.members.unanswered(1, assignment.key) is None


def test_an_answer_measures_the_member_unless_it_did_nothing(house: House) -> None:
    member = house.member(1, 1000.0)
    before = member.pace.cost
    skipped = house.give(member, house.step.parts[0], now=10.0)
    house.members.take_back(skipped, Skip(lease=skipped.key, compute_s=0.0), 99.0)
    assert member.pace.cost == before
    pushed = house.give(member, house.step.parts[1], now=10.0)
    house.answer(pushed, 10.4)  # 0.25 s of it for 8 samples
    assert member.pace.cost.fixed_s == pytest.approx(0.15)
    assert member.pace.cost.each_s > before.each_s


def test_loops_step_at_the_learning_rate_of_the_one_that_has_computed_most(house: House) -> None:
    """The first one is slow: in most steps it has no part, so its schedule is behind."""
    slow, fast = house.member(1), house.member(2)
    house.answer(house.give(fast, house.step.parts[2]))
    for member, part, rate in zip((slow, fast), house.step.parts, (0.5, 0.25), strict=False):
        assignment = house.give(member, part)
        house.claim(assignment, 0, 1, 2, learning_rate=rate)
        house.answer(assignment)
    assert house.members.learning_rate(house.step) == 0.25


def back(house: House, session_id: int, unacknowledged: LeaseKey, instance: int = 1) -> StepMember:
    """A process connects again, and asks."""
    instance_id = f"{instance:016x}"
    worker = worker_at(session_id, instance=instance_id, unacknowledged=unacknowledged)
    return house.members.welcome(worker)


def test_who_returns_steps_later_is_told_how_much_of_its_push_counted(house: House) -> None:
    member, helper = house.member(1), house.member(2)
    assignment = house.give(member, house.step.parts[0])
    house.claim(assignment, 0)
    backup = house.give(helper, house.step.parts[0])
    house.claim(backup, 1, 2)
    house.members.settle(house.step)
    house.members.forget(member.worker)
    assert cancels(back(house, 5, assignment.key)) == [(assignment.key, 1)]


def test_what_is_told_is_of_that_push_and_that_process(house: House) -> None:
    assignment = house.give(house.member(1), house.step.parts[0])
    house.claim(assignment, 0, 1, 2)
    house.answer(assignment)
    assert cancels(back(house, 5, LEASE)) == [(LEASE, 0)]
    assert cancels(back(house, 6, assignment.key, instance=2)) == [(assignment.key, 0)]


def test_nothing_is_kept_of_a_process_in_whose_place_another_has_come(house: House) -> None:
    """A push holds its session, with all the memory of that."""
    assignment = house.give(house.member(1), house.step.parts[0])
    house.claim(assignment, 0, 1, 2)
    house.answer(assignment)
    house.members.welcome(worker_at(1, instance=f"{2:016x}"))
    assert cancels(back(house, 5, assignment.key)) == [(assignment.key, 0)]


def test_a_new_part_of_which_nothing_came_does_not_hide_what_became_of_the_push_before_it(
    house: House,
) -> None:
    """The commit, and the next part with it, may be on the way when the connection breaks."""
    member = house.member(1)
    first = house.give(member, house.step.parts[0])
    house.claim(first, 0, 1, 2)
    house.answer(first)
    house.members.remember(house.give(member, house.step.parts[1]))
    assert cancels(back(house, 5, first.key)) == [(first.key, 3)]


def test_a_backup_does_not_hide_what_became_of_the_push_before_it(house: House) -> None:
    """It owes nothing, so nobody asks for it."""
    member = house.member(1)
    own = house.give(member, house.step.parts[0])
    house.claim(own, 0, 1, 2)
    house.answer(own)
    house.give(house.member(2), house.step.parts[1])
    backup = house.give(member, house.step.parts[1])
    house.claim(backup, 0, 1, 2)
    house.answer(backup)
    assert cancels(back(house, 5, own.key)) == [(own.key, 3)]


def test_those_whose_parts_others_have_finished_are_told(house: House) -> None:
    slow, fast, third, gone = (house.member(session_id) for session_id in (1, 2, 3, 4))
    mine = house.give(slow, house.step.parts[0])
    house.claim(mine, 0)
    backup = house.give(fast, house.step.parts[0])
    house.claim(backup, 1, 2)
    won = house.give(third, house.step.parts[1])
    lost = house.give(fast, house.step.parts[1])
    house.claim(lost, 0)
    house.claim(won, 0)
    done = house.give(fast, house.step.parts[2])
    house.claim(done, 0, 1, 2)
    house.give(gone, house.step.parts[2])
    house.members.forget(gone.worker)
    for member in (slow, fast, third, gone):
        clear(member)
    house.claim(lost, 1, 2)
    house.members.settle(house.step)
    assert cancels(slow) == [(mine.key, 1)], "its first bucket counted"
    assert cancels(fast) == [], "it finished all it had"
    assert cancels(third) == [(won.key, 0)]
    assert cancels(gone) == []


def test_a_backup_that_was_not_needed_is_called_off_and_owes_nothing(house: House) -> None:
    """However many of its buckets counted."""
    skipped, first, second = (house.member(session_id) for session_id in (1, 2, 3))
    part = house.step.parts[0]
    house.step.give_up(house.give(skipped, part))
    superseded, backup = house.give(first, part), house.give(second, part)
    house.claim(superseded, 0)
    house.claim(backup, 0, 1, 2)
    house.members.settle(house.step)
    assert cancels(first) == [(superseded.key, 0)]
    assert cancels(second) == cancels(skipped) == []


def test_nothing_has_counted_of_the_pushes_of_a_step_that_is_skipped(house: House) -> None:
    """Its residuals are of a gradient that nobody takes; also if the overflow came last."""
    slow, fast, other = (house.member(session_id) for session_id in (1, 2, 3))
    superseded = house.give(slow, house.step.parts[0])
    house.claim(superseded, 0)
    backup = house.give(fast, house.step.parts[0])
    house.claim(backup, 1, 2)
    whole = house.give(other, house.step.parts[1])
    house.claim(whole, 0, 1, 2)
    house.answer(whole)
    house.claim(house.give(fast, house.step.parts[2]), 0, 1, 2, overflow=1024.0)
    house.members.settle(house.step)
    assert cancels(slow) == [(superseded.key, 0)]
    house.members.park(other, 0.0)
    assert said(other)[-1] == Park(lease=whole.key, num_buckets=0)
    assert cancels(back(house, 3, whole.key)) == [(whole.key, 0)]
    assert cancels(back(house, 1, superseded.key)) == [(superseded.key, 0)]


def test_what_is_expected_of_a_member_is_of_all_that_it_holds(house: House) -> None:
    """Of one that has not been measured, at least the time of the others in the middle."""
    fast, slow, *others = (
        house.member(each, speed) for each, speed in enumerate((1e6, 1, 1, 1, 1))
    )
    for member, compute_s in zip(others, (1.0, 2.0, 9.0), strict=True):
        member.pace.measured(10, compute_s, compute_s + 1.0)
    members = fast, slow, others[2]
    for member in members:
        house.give(member, house.step.parts[0])
    expected = [house.members.expected_s(each) for each in members]
    assert expected == pytest.approx([2.6, 9.0, 8.2])
    house.give(fast, house.step.parts[2])
    assert house.members.expected_s(fast) == pytest.approx(2.6 + 4.2)


def test_who_was_waited_for_in_vain_is_the_last_to_get_an_orphan(house: House) -> None:
    stuck, busy = house.member(1, 1e6), house.member(2)
    house.give(stuck, house.step.parts[1]).term.is_told = True
    for part in house.step.parts[1:]:
        house.give(busy, part)
    assert house.members.best_for(house.step.parts[0]) is busy
    house.members.forget(busy.worker)
    assert house.members.best_for(house.step.parts[0]) is stuck


def test_who_is_to_rest_gets_no_part_unless_all_are(house: House) -> None:
    one, other = house.member(1), house.member(2)
    other.rests_until = 5
    assert [house.members.awake(version) for version in (4, 5)] == [[one], [one, other]]
    one.rests_until = 6
    assert house.members.awake(4) == [one, other]


def test_an_orphan_goes_to_the_least_busy_and_of_these_to_the_fastest(house: House) -> None:
    part, others = house.step.parts[0], house.step.parts[1:]
    assert house.members.best_for(part) is None
    house.newcomer(9, 1e6)
    assert house.members.best_for(part) is None, "it does not have the weights"
    slow, fast = house.member(1, 100.0), house.member(2, 1000.0)
    assert house.members.best_for(part) is fast
    house.give(fast, others[0])
    assert house.members.best_for(part) is slow
    house.give(slow, others[1])
    assert house.members.best_for(part) is fast
    house.give(fast, part)
    assert house.members.best_for(part) is slow, "who has it already cannot finish it"
    house.give(slow, part)
    assert house.members.best_for(part) is None


def test_a_late_part_goes_to_the_fastest_that_has_nothing_to_do(house: House) -> None:
    part, other = house.step.parts[:2]
    house.give(house.member(1, 1e6), part)
    assert house.members.idle_for(part) is None
    slow, fast = house.member(2, 100.0), house.member(3, 1000.0)
    assert house.members.idle_for(part) is fast
    house.give(fast, other)
    assert house.members.idle_for(part) is slow


def frame_of_commit(version: int) -> Frame:
    return frame_of(commit_of(version))


def test_a_commit_is_one_frame_for_all(house: House) -> None:
    members = [house.member(1), house.member(2), house.newcomer(3)]
    frame = frame_of_commit(1)
    house.members.broadcast(frame)
    assert all(post_of(each.worker).frames[-1] is frame for each in members)


@pytest.mark.parametrize("num_missing", [0, 1, 5])
def test_who_has_not_been_sent_the_step_before_the_last_lags(
    house: House, num_missing: int
) -> None:
    """Its frames refer to the memory that the next step needs."""
    member, quick = house.member(1), house.member(2)
    post = post_of(member.worker)
    before = post.num_queued
    for version in (1, 2):
        commit(house, version)
        post_of(quick.worker).num_gone = post_of(quick.worker).num_queued
    post.num_gone = before + 3 - num_missing  # nothing of step 2, and so many frames less of step 1
    assert house.members.laggards == ([(member, "it is 2 steps behind")] if num_missing else [])
    assert not post.is_cut


def test_who_has_no_room_for_another_step_lags(house: House) -> None:
    """With a small model many steps may wait, more than its queue is long."""
    member = house.member(1)
    post_of(member.worker).is_full = True
    assert house.members.laggards == [(member, "0 frames wait for it")]


def test_who_is_parked_hears_of_no_step_until_it_has_asked_and_its_link_has_drained(
    house: House,
) -> None:
    member = house.member(1)
    assignment = house.give(member, house.step.parts[0])
    for _ in range(3):
        house.members.send_mean(frame_of_commit(1))
    house.members.park(member, now=100.0)
    kinds = [type(each) for each in said(member)]
    assert kinds == [Commit, Park], "the frame that is being sent, and that no more comes"
    assert (house.members.free, house.members.laggards) == ([], [])
    house.members.broadcast(frame_of_commit(1))
    house.members.send_mean(frame_of_commit(1))
    house.members.cancel(assignment)
    assert [type(each) for each in said(member)] == kinds

    assert house.members.returning(1e9, at_once=True) == []
    member.has_asked = True
    assert house.members.returning(1e9, at_once=True) == [], "two frames wait for it"
    clear(member)
    soon = 100.0 + FIRST_PAUSE_S - 1
    assert house.members.returning(soon, at_once=False) == [], "others need no help"
    assert house.members.returning(soon, at_once=True) == [member]
    assert house.members.returning(soon + 1, at_once=False) == [member]


def parked_for(house: House, member: StepMember, now: float) -> float:
    """For how long it is parked."""
    house.members.park(member, now)
    paused_s = member.resumed_at - now
    member.has_asked = True
    clear(member)
    assert house.members.returning(member.resumed_at, at_once=False) == [member]
    house.members.send_state(member, 0, [])
    return paused_s


def test_who_is_parked_again_and_again_waits_ever_longer_until_it_has_kept_up_for_long(
    house: House,
) -> None:
    member, now, paused = house.member(1), 1000.0, []
    for followed_s in (1.0, 1.0, 1.0, 1e4, 1.0):
        paused.append(parked_for(house, member, now))
        now += paused[-1] + followed_s
    assert paused == [5.0, 10.0, 20.0, 40.0, 5.0]


def test_weights_are_copied_once_for_all_who_ask_at_one_version(house: House) -> None:
    house.members.broadcast()
    one, other = house.member(1), house.member(2)
    house.members.broadcast()
    assert house.members.send_weights(1, 5, (2, 0)) is one
    assert house.members.send_weights(2, 5, (0, 1)) is other
    mine, theirs = post_of(one.worker).frames, post_of(other.worker).frames
    assert [getattr(each, "bucket", None) for each in said(one)] == [2, 0]
    assert mine[1] is theirs[0]
    state = said(one)[1]
    assert isinstance(state, State)
    assert (state.content, state.version, state.incarnation) == ("weights", 5, "here")
    first = house.replica.params[house.replica.buckets[0]].clone()
    house.replica.params.zero_()
    assert torch.equal(torch.frombuffer(mine[1].payload, dtype=torch.float32), first)
    house.members.broadcast()
    house.members.send_weights(1, 6, (0,))
    assert bytes(mine[2].payload) == bytes(4 * 256), "the next version's are others"


def test_weights_are_for_members_and_of_buckets_that_exist(house: House) -> None:
    member, joiner = house.member(1), house.newcomer(2)
    assert house.members.send_weights(9, 0, (0,)) is None
    assert house.members.send_weights(2, 0, (0,)) is None
    assert (len(said(joiner)), post_of(joiner.worker).cut_because) == (9, "")
    assert house.members.send_weights(1, 0, (0, 3)) is None
    assert said(member) == []
    assert "does not exist" in post_of(member.worker).cut_because
