"""The members of a SyncPS run: who is free, how much each gets, and what became of their pushes.

Only the server's loop calls this. A worker is a member once it has the whole state; from then on it follows
every step, also those in which it has no part. It gets a new part only when it has answered for all it was
given, so a stopped one is waited for once at most.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.algorithms.SynchronousPS.sharing import (
    Pace,
    sizes_by_cost,
    sizes_by_share,
    with_probes,
)
from smolcluster.algorithms.SynchronousPS.state import StateStream, weights_frame
from smolcluster.algorithms.SynchronousPS.step import Holding, Part, Step
from smolcluster.cluster.session import Session
from smolcluster.cluster.tensors import work_payload
from smolcluster.cluster.worker import Worker
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    Assignment,
    Cancel,
    LeaseKey,
    Push,
    Ready,
    Skip,
)

FRAMES_AHEAD = 8
"""Frames of the state that may wait in a joiner's session: what bounds the memory that it takes."""


@dataclass
class Member:
    """What SyncPS remembers of a worker that takes part, or is about to."""

    worker: Worker
    pace: Pace
    stream: StateStream
    unanswered: dict[LeaseKey, Holding] = field(default_factory=dict)
    num_drifts: int = 0
    """How often its weights differed from the server's."""
    last_mean: int = 0
    """Frames that had been queued for it with the last one of a mean, whose memory is the reduction's."""
    commit_marks: deque[int] = field(default_factory=deque)
    """The same at each of the last commits, for as long as that memory is not used again."""

    @property
    def name(self) -> str:
        """How log lines call it."""
        return self.worker.name

    @property
    def session(self) -> Session:
        """Its connection."""
        return self.worker.live_session

    @property
    def joined(self) -> bool:
        """Whether the whole state has been sent to it."""
        return self.stream.done

    @property
    def idle(self) -> bool:
        """Whether it could work at once: all that it was given has arrived, if not been answered for."""
        waits = all(holding.won for holding in self.unanswered.values())
        return self.joined and waits and not self.session.is_cut

    def give(
        self,
        holding: Holding,
        version: int,
        rate: float,
        indices: Tensor,
        rows: NDArray[Any] | None = None,
    ) -> None:
        """Assign it a part: samples `indices` (n,) int32, on weights of `version`.

        `rows`: the samples themselves, where workers do not have them.
        """
        self.unanswered[holding.key] = holding
        spec, rows_spec, payload = work_payload(indices, rows)
        assignment = Assignment(
            lease=holding.key,
            version=version,
            learning_rate=rate,
            first_bucket=holding.first_bucket,
            backup=holding.backup,
            tensor=spec,
            rows=rows_spec,
        )
        self.session.send(assignment, payload)

    def catch_up(self, version: int, reduced: set[int], reduction: Reduction) -> None:
        """Send it more of the state, and of the open step what went out before."""
        session = self.session
        while not self.joined and session.num_queued - session.num_sent < FRAMES_AHEAD:
            number, frames = self.stream.next_frames(version)
            for frame in frames:
                session.send_frame(frame)
            if number in reduced:
                self.send_mean(reduction.frame(version + 1, number))

    def send_mean(self, frame: Frame) -> None:
        """Send it a bucket of the open step's mean."""
        self.session.send_frame(frame)
        self.last_mean = self.session.num_queued


class Members:
    """All members, by seat."""

    def __init__(
        self,
        replica: Replica,
        batch_share: Mapping[str, float] | None,
        incarnation: str,
        num_turns: int,
    ) -> None:
        """`num_turns`: steps after which the memory of a mean gradient is used again."""
        self._num_turns = num_turns
        self._replica = replica
        self._batch_share = batch_share
        self._incarnation = incarnation
        self._members: dict[int, Member] = {}
        self._fates: dict[str, tuple[LeaseKey, int]] = {}
        self._weights: tuple[int, dict[int, Frame]] = (-1, {})

    @property
    def joining(self) -> list[Member]:
        """Those that have not been sent the whole state yet."""
        return [member for member in self._members.values() if not member.joined]

    @property
    def free(self) -> list[Member]:
        """Those that may get a part of the next step."""
        return [member for member in self._members.values() if member.idle]

    def get(self, seat: int) -> Member | None:
        """The member with this seat, if it is still there."""
        return self._members.get(seat)

    def send_mean(self, bucket: int, frame: Frame) -> None:
        """Send the mean of a bucket to all who have that bucket of the weights."""
        for member in self._members.values():
            if member.stream.covers(bucket):
                member.send_mean(frame)

    def welcome(self, worker: Worker, ready: Ready) -> None:
        """Let a worker catch up; tell it first what counted of a push that it is unsure of."""
        stream = StateStream(self._replica, self._incarnation)
        member = Member(worker, Pace(ready.samples_per_s), stream)
        self._members[worker.member.seat] = member
        if ready.unacknowledged is not None:
            lease, num_buckets = self._fates.get(worker.member.instance, (None, 0))
            counted = num_buckets if lease == ready.unacknowledged else 0
            member.session.send(Cancel(lease=ready.unacknowledged, num_buckets=counted))

    def see_off(self, worker: Worker) -> Member | None:
        """Forget a worker that has gone."""
        return self._members.pop(worker.member.seat, None)

    def sizes(self, members: Sequence[Member], num_samples: int) -> list[int]:
        """How many samples of a batch each of these members gets."""
        if self._batch_share is not None:
            shares = [self._batch_share.get(each.worker.member.node, 0.0) for each in members]
            return sizes_by_share(shares, num_samples)
        paces = [member.pace for member in members]
        return with_probes(paces, sizes_by_cost([pace.cost for pace in paces], num_samples))

    def best_for(self, part: Part) -> Member | None:
        """Who takes over a part that nobody works on: the least busy, of these the fastest."""
        holders = {holding.seat for holding in part.holdings}
        able = [
            member
            for seat, member in self._members.items()
            if member.joined and seat not in holders
        ]
        return min(
            able,
            key=lambda each: (len(each.unanswered), each.pace.cost.seconds(part.num_samples)),
            default=None,
        )

    def idle_for(self, part: Part) -> Member | None:
        """Who works on a late part as well: the fastest that has nothing else to do."""
        return min(
            self.free,
            key=lambda each: each.pace.cost.seconds(part.num_samples),
            default=None,
        )

    def take_back(self, seat: int, answer: Push | Skip, now: float) -> Holding | None:
        """Note that a member has answered for a part, and how long that took it."""
        member = self._members.get(seat)
        holding = member.unanswered.pop(answer.lease, None) if member else None
        if member is None or holding is None:
            return None
        self.remember(holding)
        if answer.compute_s > 0:
            elapsed_s = now - holding.granted_at
            member.pace.measured(holding.part.num_samples, answer.compute_s, elapsed_s)
        return holding

    def remember(self, holding: Holding) -> None:
        """Note how much of a push counted, should its worker lose its connection and ask.

        One of which nothing counted is left out: its worker may yet ask about the one before.
        """
        if holding.num_counted and not holding.backup:
            self._fates[holding.holder.member.instance] = (holding.key, holding.num_counted)

    def settle(self, step: Step) -> None:
        """Tell those whose parts others have finished that nothing more of them is wanted."""
        for holding in step.holdings:
            self.remember(holding)
            if not holding.won:
                self.cancel(holding)

    def cancel(self, holding: Holding) -> None:
        """Tell a holder, once, that no more of its push will count than has."""
        member = self._members.get(holding.seat)
        if member is not None and not holding.is_cancelled:
            holding.is_cancelled = True
            counted = 0 if holding.backup else holding.num_counted
            member.session.send(Cancel(lease=holding.key, num_buckets=counted))

    def cancel_others(self, winner: Holding) -> None:
        """A part is finished: tell who else holds it."""
        for holding in list(winner.part.holdings):
            if holding is not winner:
                self.cancel(holding)

    def broadcast(self, frame: Frame) -> None:
        """Send a commit to all, also to joiners."""
        for member in self._members.values():
            member.session.send_frame(frame)
            member.commit_marks.append(member.last_mean)
            if len(member.commit_marks) > self._num_turns:
                member.commit_marks.popleft()
        self._weights = (-1, {})

    def cut_laggards(self) -> None:
        """Cut those that have not been sent the oldest mean that is kept: its memory is needed now."""
        for member in self._members.values():
            marks = member.commit_marks
            if len(marks) == self._num_turns and member.session.num_sent < marks[0]:
                member.session.cut(f"it does not keep up: it is {self._num_turns} steps behind")

    def send_weights(self, seat: int, version: int, buckets: Sequence[int]) -> Member | None:
        """Send a member these buckets of the weights; None if it is none, or they do not exist."""
        member = self._members.get(seat)
        if member is None or not member.joined or not buckets:
            return None
        if max(buckets) >= len(self._replica.buckets):
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
            frames[number] = weights_frame(self._replica, self._incarnation, version, number)
        return frames[number]
