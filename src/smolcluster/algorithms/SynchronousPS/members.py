"""The members of a SyncPS run: who is free, how much each gets, and what became of their pushes.

Only the server's loop calls this. A worker is a member once it has the whole state; from then on it follows
every step, also those in which it has no part. It gets a new part only when it has answered for all it was
given, so a stopped one is waited for once at most; one that was waited for again and again has no part for
ever more steps. One that does not keep up with the steps is parked: it
hears of none until it can be sent the newest state.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.algorithms.SynchronousPS.sharing import (
    Cost,
    Pace,
    all_to_one,
    sizes_by_cost,
    sizes_by_share,
    with_probes,
)
from smolcluster.algorithms.SynchronousPS.step import Part, PartAssignment, Step
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.server.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.server.store import Stores
from smolcluster.server.worker import Worker
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import (
    WEIGHTS,
    Cancel,
    LeaseKey,
    Park,
    Push,
    Ready,
    Skip,
    State,
)
from smolcluster.wire.session import Session
from smolcluster.wire.streams import bucket_pieces, stream_frames

FRAMES_AHEAD = 2
"""A joiner is sent another bucket of the state while fewer frames wait in its session. That bounds memory,
and how long means wait behind the state: with those of two steps waiting it is parked, and begins anew."""
FIRST_PAUSE_S, MOST_PAUSE_S = 5.0, 320.0
"""How long a parked member waits for the state at least: twice as long each time, up to the second."""
SETTLED = 10.0
"""A member that has followed for so many times its last pause begins anew with the first one."""


@dataclass
class StepMember:
    """What SyncPS remembers of a worker that takes part, or is about to."""

    worker: Worker
    pace: Pace
    num_buckets: int
    num_sent: int | None = 0
    """Buckets of the state that it was sent, the first ones; None: it is parked, and hears of no step."""
    has_buffers: bool = False
    """Whether it was sent the buffers that the model changes, which come before the first bucket."""
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
        return self.num_sent is None

    @property
    def joined(self) -> bool:
        """Whether the whole state has been sent to it, and every step since."""
        return self.num_sent == self.num_buckets

    @property
    def idle(self) -> bool:
        """Whether it could work at once: all that it was given has arrived, if not been answered for."""
        waits = all(assignment.won for assignment in self.unanswered.values())
        return self.joined and waits and not self.session.is_cut

    @property
    def is_stuck(self) -> bool:
        """Whether it has not answered for a part that was overdue."""
        return any(assignment.is_told for assignment in self.unanswered.values())

    def covers(self, bucket: int) -> bool:
        return self.num_sent is not None and bucket < self.num_sent

    def lags(self, num_buffers: int) -> bool:
        """Whether it is `num_buffers` steps behind, or has no room for another one."""
        session, marks = self.session, self.commit_marks
        is_behind = len(marks) == num_buffers and session.num_sent + session.num_dropped < marks[0]
        return not self.is_parked and (is_behind or session.is_crowded)

    def give(
        self,
        assignment: PartAssignment,
        version: int,
        rate: float,
        indices: Tensor,
        *,
        loss_scale: float = 1.0,
    ) -> Callable[[ServedBatch | None], None]:
        """Assign it a part on weights of `version`; returns what sends it, once its batch is there."""
        self.unanswered[assignment.key] = assignment

        def send(batch: ServedBatch | None) -> None:
            if assignment.key in self.unanswered and not self.is_parked:
                sent = assignment_of(
                    assignment.key,
                    indices,
                    batch,
                    version=version,
                    learning_rate=rate,
                    loss_scale=loss_scale,
                    batch_samples=assignment.step.batch.num_samples,
                    first_bucket=assignment.first_bucket,
                    backup=assignment.backup,
                )
                send_assignment(self.session, *sent, batch)

        return send

    def send_mean(self, frame: Frame) -> None:
        self.session.send_frame(frame)
        self.last_mean = self.session.num_queued


class Members:
    """All members, by session id."""

    def __init__(
        self,
        stores: Stores,
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
        self._stores = stores
        self._batch_share = batch_share
        self._incarnation = incarnation
        self._members: dict[int, StepMember] = {}
        self._last_pushes: dict[str, PartAssignment] = {}
        """By instance, what its worker last pushed."""
        self._weights: tuple[int, dict[int, Frame]] = (-1, {})

    @property
    def joining(self) -> list[StepMember]:
        members = self._members.values()
        return [each for each in members if not each.is_parked and not each.joined]

    @property
    def free(self) -> list[StepMember]:
        return [member for member in self._members.values() if member.idle]

    def get(self, session_id: int) -> StepMember | None:
        return self._members.get(session_id)

    def send_mean(self, bucket: int, frame: Frame) -> None:
        for member in self._members.values():
            if member.covers(bucket):
                member.send_mean(frame)

    def welcome(self, worker: Worker, ready: Ready) -> None:
        """Let a worker catch up; tell it first what counted of a push that it is unsure of."""
        member = StepMember(worker, Pace(ready.samples_per_s), len(self._stores.buckets))
        self._members[worker.member.session_id] = member
        if ready.unacknowledged is not None:
            last = self._last_pushes.get(worker.member.instance)
            counted = last.num_settled if last and last.key == ready.unacknowledged else 0
            member.session.send(Cancel(lease=ready.unacknowledged, num_buckets=counted))

    def catch_up(
        self, member: StepMember, version: int, reduced: set[int], reduction: Reduction
    ) -> None:
        """Send a joiner more of the state, bucket by bucket, of whatever version it then is.

        Between two buckets a step may be committed: the joiner takes it for what it has, like everybody else.
        So a bucket is sent as of the last commit, followed by what the open step has `reduced` of it.
        """
        session = member.session
        at_once = not self._stores.can_be_cut  # then nothing may be committed in between
        while (number := member.num_sent) is not None and not member.joined:
            if session.backlog >= FRAMES_AHEAD and not at_once:
                return
            member.num_sent = number + 1
            for content in self._stores.contents(number):
                session.send_frame(self._copied(version, number, content))
            if number in reduced:
                member.send_mean(reduction.frame(version + 1, number))

    def unanswered(self, session_id: int, lease: LeaseKey) -> PartAssignment | None:
        """What a member was given and has not answered for."""
        member = self._members.get(session_id)
        return None if member is None else member.unanswered.get(lease)

    def session_of(self, instance: str) -> int | None:
        """The session of the member that is this process."""
        own = (
            session_id
            for session_id, member in self._members.items()
            if member.worker.member.instance == instance
        )
        return next(own, None)

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
        per_sample_s = statistics.median(cost.per_sample_s for cost in known)
        return Cost(
            statistics.median(cost.fixed_s for cost in known), max(own.per_sample_s, per_sample_s)
        )

    def expected_s(self, member: StepMember) -> float:
        """How long a member will take for all that it was given and has not brought."""
        cost = self.cost_of(member)
        waiting = [each.part for each in member.unanswered.values() if not each.won]
        return sum(cost.seconds(part.num_samples) for part in waiting)

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

    def take_back(self, session_id: int, answer: Push | Skip, now: float) -> PartAssignment | None:
        """Note that a member has answered for a part, and how long that took it."""
        member = self._members.get(session_id)
        assignment = member.unanswered.pop(answer.lease, None) if member else None
        if member is None or assignment is None:
            return None
        self.remember(assignment)
        if answer.compute_s > 0:
            elapsed_s = now - assignment.granted_at
            member.pace.measured(
                assignment.part.num_samples,
                answer.compute_s,
                elapsed_s,
                answer.held_s,
                whole=isinstance(answer, Push),
            )
        return assignment

    def remember(self, assignment: PartAssignment) -> None:
        """Keep a push, should its worker lose its connection and ask how much of it counted.

        One of which nothing counted is left out: its worker may yet ask about the one before.
        """
        if assignment.num_counted and not assignment.backup:
            self._last_pushes[assignment.holder.member.instance] = assignment

    def settle(self, step: Step) -> None:
        """Tell those whose parts others have finished that nothing more of them is wanted."""
        for assignment in step.assignments:
            self.remember(assignment)
            if not assignment.won:
                self.cancel(assignment)

    def cancel(self, assignment: PartAssignment) -> None:
        """Tell a holder, once, that no more of its push will count than has."""
        member = self._members.get(assignment.session_id)
        if member is not None and not assignment.is_cancelled:
            assignment.is_cancelled = True
            num_buckets = assignment.num_settled
            member.session.send_urgent(Cancel(lease=assignment.key, num_buckets=num_buckets))

    def cancel_others(self, winner: PartAssignment) -> None:
        for assignment in list(winner.part.assignments):
            if assignment is not winner:
                self.cancel(assignment)

    def broadcast(self, *frames: Frame) -> None:
        """Send a commit, and the buffers before it, to all, also to joiners."""
        for member in self._members.values():
            if member.is_parked:
                continue
            for frame in frames:
                member.session.send_frame(frame)
            member.commit_marks.append(member.last_mean)
            if len(member.commit_marks) > self._num_buffers:
                member.commit_marks.popleft()
        self._weights = (-1, {})

    @property
    def laggards(self) -> list[StepMember]:
        """Those that have not been sent the oldest mean that is kept: its memory is needed now."""
        return [member for member in self._members.values() if member.lags(self._num_buffers)]

    def park(self, member: StepMember, now: float) -> None:
        """Send it no more steps: take back what is queued, and say what counted of its last push.

        What it holds is called off.
        """
        last = self._last_pushes.get(member.worker.member.instance)
        lease, num_buckets = (last.key, last.num_settled) if last else (None, 0)
        member.session.drop_queued()
        member.session.send(Park(lease=lease, num_buckets=num_buckets))
        for assignment in member.unanswered.values():
            assignment.is_cancelled = True
        member.num_sent, member.has_buffers, member.has_asked = None, False, False
        member.commit_marks.clear()
        has_settled = now - member.resumed_at > SETTLED * member.pause_s
        member.pause_s = FIRST_PAUSE_S if has_settled else min(2 * member.pause_s, MOST_PAUSE_S)
        member.resumed_at = now + member.pause_s

    def resume(self, now: float, *, at_once: bool) -> None:
        """Begin to send the newest state to parked members whose links have drained and whose time has come.

        `at_once`: somebody is needed, so that nobody's time has to come.
        """
        for member in self._members.values():
            is_ready = member.is_parked and member.has_asked and member.session.backlog == 0
            if is_ready and (at_once or now >= member.resumed_at):
                member.num_sent, member.resumed_at = 0, now

    def send_weights(
        self, session_id: int, version: int, buckets: Sequence[int]
    ) -> StepMember | None:
        """Send a member these buckets of the weights; None if it is none, or they do not exist."""
        member = self._members.get(session_id)
        if member is None or not member.joined or not buckets:
            return None
        if max(buckets) >= len(self._stores.buckets):
            member.session.cut("it asked for a bucket that does not exist")
            return None
        for number in buckets:
            member.session.send_frame(self._weights_frame(version, number))
        member.num_drifts += 1
        return member

    def _weights_frame(self, version: int, number: int) -> Frame:
        """A bucket of the weights, shared by all who ask for it at this version."""
        if self._weights[0] != version:
            self._weights = (version, {})
        frames = self._weights[1]
        if number not in frames:
            frames[number] = self._copied(version, number, WEIGHTS)
        return frames[number]

    def _copied(self, version: int, number: int, content: str) -> Frame:
        """A copy of one of a bucket's `Store.contents`."""
        values = self._stores.contents(number)[content].to("cpu", copy=True)
        codec, total = get_codec(lossless_for(values.dtype)), len(self._stores.buckets)
        pieces = bucket_pieces(codec, [slice(0, len(values))], range(number, number + 1), total)
        make = partial(
            State,
            incarnation=self._incarnation,
            version=version,
            content=content,
            num_skipped=self._stores.num_skipped,
        )
        return stream_frames(make, pieces, [values])[0]
