"""The members of a SyncPS run: who is free, how much each gets, and what became of their pushes.

Only the server's loop calls this. A worker is a member once it has the whole state; from then on it follows
every step, also those in which it has no part. It gets a new part only when it has answered for all it was
given, so a stopped one is waited for once at most; one that was waited for again and again has no part for
ever more steps. One that does not keep up with the steps is parked: it hears of none until it can be sent the
newest state.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smolcluster.algorithms.shares import Cost
from smolcluster.algorithms.SynchronousPS.sharing import (
    Pace,
    all_to_one,
    sizes_by_cost,
    sizes_by_share,
    with_probes,
)
from smolcluster.algorithms.SynchronousPS.step import Part, PartAssignment, Step
from smolcluster.server.buffers import buffer_frames
from smolcluster.server.slices import slice_frames
from smolcluster.server.store import state_of
from smolcluster.server.worker import Worker
from smolcluster.training.replica import Replica
from smolcluster.utils.units import format_count
from smolcluster.wire.frames import Frame
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import (
    WEIGHTS,
    Cancel,
    LeaseKey,
    Park,
    PartKey,
    Push,
    Skip,
)
from smolcluster.wire.session import Session

FIRST_PAUSE_S, MOST_PAUSE_S = 5.0, 320.0
"""How long a parked member waits for the state at least: twice as long each time, up to the second."""
SETTLED = 10.0
"""A member that has followed for so many times its last pause begins anew with the first one."""


@dataclass
class StepMember:
    """What SyncPS remembers of a worker that takes part, or is about to."""

    worker: Worker
    pace: Pace
    state_end: int | None = None
    """Frames that had been queued for it with the last one of the state; None: it hears of no step."""
    allowance: int = 0
    """Steps by which a joiner may be further behind than others: means wait behind the state."""
    joined: bool = False
    """Whether the whole state has been sent to it, and it keeps up with the steps since."""
    has_asked: bool = False
    """Whether a parked one has forgotten what it had, and waits for the state."""
    unanswered: dict[LeaseKey, PartAssignment] = field(default_factory=dict)
    num_drifts: int = 0
    """How often its weights differed from the server's."""
    num_overdue: int = 0
    """How often a part of its was overdue."""
    rests_until: int = 0
    """The first version from which on a step has a part for it again."""
    pause_s: float = 0.0
    resumed_at: float = -math.inf
    last_mean: int = 0
    """Frames that had been queued for it with the last one of a mean, whose memory is the reduction's."""
    commit_marks: deque[int] = field(default_factory=deque)
    """The same at each of the last commits, for as long as that memory is not used again."""

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def session(self) -> Session:
        return self.worker.live_session

    @property
    def is_parked(self) -> bool:
        return self.state_end is None

    @property
    def idle(self) -> bool:
        """Whether it could work at once: all that it was given has arrived, if not been answered for."""
        waits = all(assignment.won for assignment in self.unanswered.values())
        return self.joined and waits and not self.session.is_cut

    @property
    def is_stuck(self) -> bool:
        """Whether it has not answered for a part that was overdue."""
        return any(assignment.term.is_told for assignment in self.unanswered.values())

    @property
    def num_gone(self) -> int:
        """Frames of those that were queued for it which need no memory any more."""
        return self.session.num_gone

    def is_behind(self, num_steps: int) -> bool:
        """Whether it has not been sent the mean of `num_steps` commits ago; 1: of the last one."""
        marks = self.commit_marks
        return len(marks) >= num_steps and self.num_gone < marks[-num_steps]

    def has_caught_up(self, num_buffers: int) -> bool:
        """Whether all of the state has been sent to it, and all means but those of the newest steps.

        These are fewer than `num_buffers`.
        """
        has_state = self.state_end is not None and self.num_gone >= self.state_end
        return has_state and not self.is_behind(num_buffers)

    def lag(self, num_buffers: int) -> str:
        """Why it has to be parked; empty: it need not.

        A step takes the memory of the mean that was sent `num_buffers` steps before it.
        """
        num_steps = num_buffers + self.allowance
        if self.is_parked:
            return ""
        if self.is_behind(num_steps):
            return f"it is {format_count(num_steps, 'step')} behind"
        return f"{self.session.backlog} frames wait for it" if self.session.is_crowded else ""

    def returns(self, now: float, *, at_once: bool) -> bool:
        """Whether it is parked, and is sent the state now."""
        waits = not self.has_asked or self.session.backlog
        return self.is_parked and not waits and (at_once or now >= self.resumed_at)

    def send_mean(self, frame: Frame) -> None:
        self.session.send_frame(frame)
        self.last_mean = self.session.num_queued


class Members:
    """All members, by session id."""

    def __init__(
        self,
        replica: Replica,
        batch_share: Mapping[str, float] | None,
        incarnation: str,
        num_buffers: int,
        *,
        is_whole: bool = False,
    ) -> None:
        """`num_buffers`: steps after which the memory of a mean gradient is used again.

        `is_whole`: a step's batch is one part.
        """
        self._is_whole = is_whole
        self._num_buffers = num_buffers
        self._replica = replica
        self._batch_share = batch_share
        self._incarnation = incarnation
        self._members: dict[int, StepMember] = {}
        self._last_pushes: dict[str, PartAssignment] = {}
        """By instance, what a worker's newest process last pushed."""
        self._num_computed: Counter[str] = Counter()
        """By instance, the parts that its worker has computed: so far has its loop's schedule come."""
        self._state = state_of(replica)
        self._copies: dict[str, list[Frame]] = {}
        """Frames of tensors of the state, as they are since the last commit, for all who are sent them."""

    @property
    def free(self) -> list[StepMember]:
        return [member for member in self._members.values() if member.idle]

    def get(self, session_id: int) -> StepMember | None:
        return self._members.get(session_id)

    def send_mean(self, frame: Frame) -> None:
        for member in self._members.values():
            if not member.is_parked:
                member.send_mean(frame)

    def welcome(self, worker: Worker) -> StepMember:
        """Let a worker in, and tell it what counted of a push that it is unsure of; `send_state` follows."""
        ready = worker.ready
        assert ready is not None  # noqa: S101 - it takes part
        member = StepMember(worker, Pace(ready.samples_per_s))
        self._members[worker.member.session_id] = member
        self._forget_processes_before(worker.member)
        if ready.unacknowledged is not None:
            last = self._last_pushes.get(worker.member.instance)
            counted = last.num_settled if last and last.key == ready.unacknowledged else 0
            member.session.send(Cancel(lease=ready.unacknowledged, num_buckets=counted))

        return member

    def _forget_processes_before(self, newest: Member) -> None:
        """Nobody asks about their pushes any more, and these hold sessions with all their memory."""
        held = [(instance, push.holder.member) for instance, push in self._last_pushes.items()]
        for instance, member in held:
            if member.worker_id == newest.worker_id and instance != newest.instance:
                del self._last_pushes[instance]

    def send_state(self, member: StepMember, version: int, means: Sequence[Frame]) -> None:
        """Send a member the whole state of `version`, and what the open step has of its `means`.

        It hears of all that follows.
        """
        replica = self._replica
        buffers = buffer_frames(replica.buffers.values(), replica.bucket_bytes, version=version)
        for frames in (buffers, *(self._copy(name, version) for name in self._state)):
            for frame in frames:
                member.session.send_frame(frame)
        member.state_end = member.last_mean = member.session.num_queued
        member.allowance = len(self._state) + 1
        for frame in means:
            member.send_mean(frame)

    def note_joined(self) -> None:
        """Those that have been sent the state may have parts from now on."""
        for member in self._members.values():
            if not member.joined and member.has_caught_up(self._num_buffers):
                member.joined, member.allowance = True, 0

    def unanswered(self, session_id: int, lease: LeaseKey) -> PartAssignment | None:
        """What a member was given and has not answered for."""
        member = self._members.get(session_id)
        return None if member is None else member.unanswered.get(lease)

    def unanswered_by(self, key: PartKey) -> PartAssignment | None:
        """The same, by the process that a store has heard."""
        for member in self._members.values():
            if member.worker.member.instance == key.instance and isinstance(key.of, LeaseKey):
                return member.unanswered.get(key.of)
        return None

    @property
    def workers(self) -> list[Worker]:
        return [member.worker for member in self._members.values()]

    def forget(self, worker: Worker) -> StepMember | None:
        return self._members.pop(worker.member.session_id, None)

    def sizes(self, members: Sequence[StepMember], num_samples: int) -> tuple[list[int], float]:
        """How many samples of a batch each of these members gets, and how many seconds the step should take.

        Nobody knows the latter (infinite) before a member has been measured.
        """
        costs = [self.cost_of(member) for member in members]
        if self._is_whole:
            sizes = probed = all_to_one(costs, num_samples)
        elif self._batch_share is not None:
            shares = [self._batch_share.get(each.worker.member.node, 0.0) for each in members]
            sizes = probed = sizes_by_share(shares, num_samples)
        else:
            sizes = sizes_by_cost(costs, num_samples)
            probed = with_probes([member.pace for member in members], sizes)
        if not self.any_measured:
            return probed, math.inf
        parts = zip(costs, sizes, strict=True)
        return probed, max(cost.seconds(size) for cost, size in parts if size)

    @property
    def any_measured(self) -> bool:
        return any(member.pace.is_measured for member in self._members.values())

    def cost_of(self, member: StepMember) -> Cost:
        """What a part is believed to cost a member.

        One that has not been measured is believed to be as fast as it says, but not faster than the others.
        """
        own = member.pace.cost
        known = [each.pace.cost for each in self._members.values() if each.pace.is_measured]
        if member.pace.is_measured or not known:
            return own
        per_sample_s = statistics.median(cost.each_s for cost in known)
        return Cost(
            statistics.median(cost.fixed_s for cost in known), max(own.each_s, per_sample_s)
        )

    def expected_s(self, member: StepMember) -> float:
        """How long a member will take for all that it was given and has not brought."""
        cost = self.cost_of(member)
        waiting = [each.part for each in member.unanswered.values() if not each.won]
        return sum(cost.seconds(part.num_samples) for part in waiting)

    def taker_of(self, part: Part, *, is_orphan: bool) -> StepMember | None:
        """Who gets a part: the member for which it was cut, or else one that can take it over."""
        if part.meant_for is not None and part.meant_for in self._members:
            return self._members[part.meant_for]
        return self.best_for(part) if is_orphan else self.idle_for(part)

    def best_for(self, part: Part) -> StepMember | None:
        """Who takes over a part that nobody works on: one that answers, the least busy, the fastest."""
        holders = {assignment.session_id for assignment in part.assignments}
        able = [
            member
            for session_id, member in self._members.items()
            if member.joined and session_id not in holders
        ]
        return min(
            able,
            key=lambda each: (
                each.is_stuck,
                len(each.unanswered),
                each.pace.cost.seconds(part.num_samples),
            ),
            default=None,
        )

    def idle_for(self, part: Part) -> StepMember | None:
        """Who works on a late part as well: the fastest that has nothing else to do."""
        return min(
            self.free,
            key=lambda each: each.pace.cost.seconds(part.num_samples),
            default=None,
        )

    def awake(self, version: int) -> list[StepMember]:
        """The free ones that get parts of the step after `version`: all, if all were to rest."""
        return [each for each in self.free if each.rests_until <= version] or self.free

    def take_back(self, assignment: PartAssignment, answer: Push | Skip, now: float) -> StepMember:
        """Note that a member has answered for a part, and how long that took it; returns the member."""
        member = self._members[assignment.session_id]
        del member.unanswered[assignment.key]
        self.remember(assignment)
        if answer.compute_s > 0:
            self._num_computed[member.worker.member.instance] += 1
            member.pace.measured(
                assignment.num_samples,
                answer.compute_s,
                now - assignment.term.since,
                answer.held_s,
                whole=isinstance(answer, Push),
            )
        return member

    def remember(self, assignment: PartAssignment) -> None:
        """Keep a push, should its worker lose its connection and ask how much of it counted.

        One of which nothing counted is left out: its worker may yet ask about the one before.
        """
        if assignment.num_counted and not assignment.backup:
            self._last_pushes[assignment.holder.member.instance] = assignment

    def learning_rate(self, step: Step) -> float | None:
        """What the workers' own schedules have come to; None: they have none.

        One that is slow or came late has taken fewer steps: it is that of the one that has computed most.
        """

        def num_computed(part: Part) -> int:
            holder = part.finished_by and part.finished_by.holder
            return self._num_computed[holder.member.instance] if holder else 0

        return max(step.parts, key=num_computed).loss.learning_rate

    def settle(self, step: Step) -> None:
        """Tell those whose parts others have finished that nothing more of them is wanted."""
        for assignment in step.assignments:
            self.remember(assignment)
            if not assignment.won:
                self.cancel(assignment)

    def cancel(self, assignment: PartAssignment) -> None:
        """Tell a holder, once, that no more of its push will count than has."""
        member = self._members.get(assignment.session_id)
        if member is not None and not assignment.push.is_cancelled:
            assignment.push.is_cancelled = True
            num_buckets = assignment.num_settled
            member.session.send_urgent(Cancel(lease=assignment.key, num_buckets=num_buckets))

    def broadcast(self, *frames: Frame) -> None:
        """Send a commit, and the buffers before it, to all, also to joiners."""
        for member in self._members.values():
            if member.is_parked:
                continue
            for frame in frames:
                member.session.send_frame(frame)
            member.commit_marks.append(member.last_mean)
            while len(member.commit_marks) > self._num_buffers + member.allowance:
                member.commit_marks.popleft()
        self._copies.clear()

    @property
    def laggards(self) -> list[tuple[StepMember, str]]:
        """Those that do not keep up with the steps, and why."""
        found = ((each, each.lag(self._num_buffers)) for each in self._members.values())
        return [(member, reason) for member, reason in found if reason]

    def park(self, member: StepMember, now: float) -> None:
        """Send it no more steps: take back what is queued, and say what counted of its last push.

        What it holds is called off.
        """
        last = self._last_pushes.get(member.worker.member.instance)
        lease, num_buckets = (last.key, last.num_settled) if last else (None, 0)
        member.session.drop_queued()
        member.session.send(Park(lease=lease, num_buckets=num_buckets))
        for assignment in member.unanswered.values():
            assignment.push.is_cancelled = True
        member.state_end, member.joined, member.has_asked = None, False, False
        member.commit_marks.clear()
        has_settled = now - member.resumed_at > SETTLED * member.pause_s
        member.pause_s = FIRST_PAUSE_S if has_settled else min(2 * member.pause_s, MOST_PAUSE_S)
        member.resumed_at = now + member.pause_s

    @property
    def parked(self) -> list[StepMember]:
        return [member for member in self._members.values() if member.is_parked]

    def returning(self, now: float, *, at_once: bool) -> list[StepMember]:
        """Parked members that are sent the newest state now; `at_once`: nobody's time has to come."""
        back = [each for each in self._members.values() if each.returns(now, at_once=at_once)]
        for member in back:
            member.resumed_at = now
        return back

    def send_weights(
        self, session_id: int, version: int, buckets: Sequence[int]
    ) -> StepMember | None:
        """Send a member these buckets of the weights; None if it is none, or they do not exist."""
        member = self._members.get(session_id)
        if member is None or not member.joined or not buckets:
            return None
        if max(buckets) >= len(self._replica.buckets):
            member.session.cut("it asked for a bucket that does not exist")
            return None
        frames = self._copy(WEIGHTS, version)
        for number in buckets:
            member.session.send_frame(frames[number])
        member.num_drifts += 1
        return member

    def _copy(self, name: str, version: int) -> list[Frame]:
        """Frames of a tensor of the state at `version`, the last one that was committed."""
        if name not in self._copies:
            scaler = self._replica.scaler
            self._copies[name] = slice_frames(
                {name: self._state[name]},
                self._replica.buckets,
                incarnation=self._incarnation,
                version=version,
                num_skipped=0 if scaler is None else scaler.num_overflows,
            )
        return self._copies[name]
