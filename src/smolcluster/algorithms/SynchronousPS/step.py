"""The books of one open step: its parts, who holds them, and which of their buckets have counted.

A part's gradient arrives bucket by bucket and in order, perhaps from two members at once. The next missing
bucket counts, from whoever brings it first, and never again; so what has counted of a part is always its
first so many buckets. Of a first holder's push, too: once beaten to a bucket, nothing of it counts any more,
so that its error feedback can be told with one number.

The session's readers claim buckets while the server's loop grants parts: every method is atomic.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from smolcluster.data.permutation import Range
from smolcluster.errors import ProtocolError
from smolcluster.server.worker import Worker
from smolcluster.training.buffers import BufferValues, mean_buffers
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.messages import LeaseKey, Push, Skip

NO_LOSS = BatchLoss(0.0, 0)
MAX_HOLDERS = 2
"""Members that work on one part at a time."""


@dataclass(eq=False)
class PartAssignment:
    """A part in a member's hands. A `backup` copies somebody else's, from `first_bucket` on."""

    step: "Step"
    part: "Part"
    key: LeaseKey
    holder: Worker
    first_bucket: int
    backup: bool
    granted_at: float
    """Or when its batch was sent, if the server had to load that."""
    awaited: set[str] = field(default_factory=set)
    """The stores at which its push has not ended; the server's own is ""."""
    answer: Push | Skip | None = None
    is_sent: bool = False
    expected_s: float = 0.0
    due_at: float = math.inf
    """From when on it does not count among those who work on the part."""
    say_at: float = math.inf
    """When it is said next that it is overdue."""
    is_told: bool = False
    num_counted: int = 0
    superseded: bool = False
    is_cancelled: bool = False

    @property
    def session_id(self) -> int:
        return self.holder.member.session_id

    @property
    def num_settled(self) -> int:
        """Buckets whose residual its worker keeps: none of a backup, nor in a step that is skipped.

        With stores on other hosts all or none, as those that have counted are not the first ones.
        """
        is_void = self.step.is_abandoned or self.step.overflow is not None
        return 0 if self.backup or is_void or self.is_partial else self.num_counted

    @property
    def is_partial(self) -> bool:
        """Whether, with stores on other hosts, not all of its part's buckets have counted of its push."""
        return bool(self.step.others) and self.num_counted < self.step.num_in_all

    @property
    def num_samples(self) -> int:
        return self.part.num_samples

    @property
    def name(self) -> str:
        return self.holder.name

    @property
    def won(self) -> bool:
        """Whether this push brought the part's last missing bucket."""
        return self.part.finished_by is self


@dataclass(eq=False)
class Part:
    """A contiguous range of the batch, and how many of its buckets have counted."""

    start: int
    stop: int
    num_counted: int = 0
    loss: BatchLoss = NO_LOSS
    buffers: BufferValues = field(default_factory=dict)
    """What computing it has added to the model's buffers, whoever has said it first."""
    was_granted: bool = False
    waits_for: set[str] = field(default_factory=set)
    """Stores on other hosts at which buckets of it are missing."""
    completed_by: PartAssignment | None = None
    """Who brought the last bucket that lies here."""
    finished_by: PartAssignment | None = None
    """The same, once no bucket is missing anywhere."""
    assignments: list[PartAssignment] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def num_hopeful(self) -> int:
        """Holders that may still finish it."""
        return sum(not assignment.superseded for assignment in self.assignments)

    def is_overdue(self, now: float) -> bool:
        """Whether all who may still finish it should have done so long ago."""
        return all(
            assignment.superseded or now >= assignment.due_at for assignment in self.assignments
        )


class Step:
    """The step that makes `version`."""

    def __init__(
        self,
        version: int,
        batch: Range,
        sizes: Sequence[int],
        num_buckets: int,
        incarnation: str,
        *,
        others: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Cut `batch` into parts of these sizes, which are above 0 and add up to it.

        `num_buckets` lie here, and on each of the `others`, by node, so many more.
        """
        self.version = version
        self.batch = batch
        self.num_buckets = num_buckets
        self.others = frozenset(others)
        self.num_in_all = num_buckets + sum(others.values())
        self.is_abandoned = False
        """Whether nothing of it counts, because it is done again."""
        self.expected_s = math.inf
        """How long its longest part should take, as far as is known."""
        self.parts: list[Part] = []
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._grants: dict[int, PartAssignment] = {}
        start = batch.start
        for size in sizes:
            self.parts.append(Part(start, start + size, waits_for=set(others)))
            start += size

    @property
    def loss(self) -> BatchLoss:
        """Mean loss over the batch's terms, once every part has counted."""
        num_terms = sum(part.loss.num_terms for part in self.parts)
        total = sum(part.loss.mean * part.loss.num_terms for part in self.parts)
        return BatchLoss(total / (num_terms or 1.0), num_terms)

    @property
    def buffers(self) -> BufferValues:
        """What the step adds to the model's buffers: the mean over its samples."""
        return mean_buffers([(part.num_samples, part.buffers) for part in self.parts])

    @property
    def overflow(self) -> float | None:
        """The loss scale with which the gradient of a part has overflowed; None: none has."""
        return next((each.loss.overflow for each in self.parts if each.loss.overflow), None)

    @property
    def learning_rate(self) -> float | None:
        """What the workers' own schedules have come to, as the first part says; None: they have none."""
        return self.parts[0].loss.learning_rate

    @property
    def assignments(self) -> list[PartAssignment]:
        with self._lock:
            return list(self._grants.values())

    def grant(self, part: Part, holder: Worker, number: int, now: float) -> PartAssignment:
        """Put a part into a member's hands; `number` is never used again in a run."""
        with self._lock:
            key = LeaseKey(
                incarnation=self._incarnation,
                epoch=self.batch.epoch,
                start=part.start,
                stop=part.stop,
                grant=number,
            )
            first = 0 if self.others else part.num_counted  # elsewhere it may be another one
            assignment = PartAssignment(self, part, key, holder, first, part.was_granted, now)
            assignment.awaited = {"", *self.others}
            part.was_granted = True
            part.assignments.append(assignment)
            self._grants[number] = assignment
            return assignment

    def claim(self, session_id: int, push: Push) -> PartAssignment | None:
        """Whether this bucket counts: of which assignment if so, and then it must be added to the sum.

        Raises:
            ProtocolError: the push leaves out buckets that are still missing.
        """
        with self._lock:
            assignment = self._grants.get(push.lease.grant)
            if assignment is None or (assignment.session_id, assignment.key) != (
                session_id,
                push.lease,
            ):
                return None
            part = assignment.part
            if push.bucket > part.num_counted and not assignment.superseded:
                raise ProtocolError(
                    f"its push leaves out bucket {part.num_counted} and goes on with {push.bucket}"
                )
            if assignment.superseded or push.bucket != part.num_counted:
                assignment.superseded |= not assignment.backup
                return None
            part.num_counted += 1
            assignment.num_counted += 1
            overflow = part.loss.overflow if push.overflow is None else push.overflow
            part.loss = BatchLoss(push.mean_loss, push.num_terms, push.learning_rate, overflow)
            if part.num_counted == self.num_buckets:
                part.completed_by = assignment
                if not part.waits_for:
                    part.finished_by = assignment
            return assignment

    def counted(
        self, assignment: PartAssignment, node: str, num_buckets: int, *, is_finished: bool
    ) -> None:
        """Of its push so many buckets have counted on another host; perhaps the part is whole there."""
        with self._lock:
            part = assignment.part
            assignment.num_counted += num_buckets
            if is_finished:
                part.waits_for.discard(node)
                if not part.waits_for:
                    part.finished_by = part.completed_by

    def abandon(self) -> None:
        """Nothing of it counts, also of pushes that have been answered for: it will be done again."""
        self.is_abandoned = True

    @property
    def has_ended_here(self) -> bool:
        """Whether every push that its parts need has come to its end here."""
        return not self.orphans() and all(each.answer is not None for each in self.assignments)

    @property
    def is_whole(self) -> bool:
        """Whether all parts' buckets have counted, everywhere."""
        return not self._unfinished()

    def note_buffers(self, session_id: int, lease: LeaseKey, added: BufferValues) -> None:
        """What computing a part has added to the buffers of the step's beginning."""
        with self._lock:
            assignment = self._grants.get(lease.grant)
            if assignment is None or (assignment.session_id, assignment.key) != (session_id, lease):
                return
            assignment.part.buffers = assignment.part.buffers or added

    def drop(self, session_id: int) -> list[PartAssignment]:
        """Take everything out of the hands of a member that has gone; returns what it was."""
        with self._lock:
            dropped = [
                assignment
                for assignment in self._grants.values()
                if assignment.session_id == session_id
            ]
            for assignment in dropped:
                self._remove(assignment)
            return dropped

    def give_up(self, assignment: PartAssignment) -> None:
        """Its holder will bring no more of it, if it is of this step at all."""
        with self._lock:
            if self._grants.get(assignment.key.grant) is assignment:
                self._remove(assignment)

    def orphans(self) -> list[Part]:
        return [part for part in self._unfinished() if part.num_hopeful == 0]

    def late(self, now: float, *, is_late: bool) -> list[Part]:
        """Unfinished parts that shall have one more holder: all who work on it are overdue, or too few do.

        `is_late`: whether a part that is in one member's hands is to be given to a second one.
        """
        least = MAX_HOLDERS if is_late else 1
        return [
            part
            for part in self._unfinished()
            if part.num_hopeful and (part.num_hopeful < least or part.is_overdue(now))
        ]

    def overdue(self, now: float) -> list[PartAssignment]:
        """Holdings of unfinished parts of which it is time to say that they are overdue."""
        return [
            assignment
            for part in self._unfinished()
            for assignment in part.assignments
            if now >= assignment.say_at and not assignment.superseded
        ]

    def _unfinished(self) -> list[Part]:
        with self._lock:
            return [part for part in self.parts if part.finished_by is None]

    def _remove(self, assignment: PartAssignment) -> None:
        del self._grants[assignment.key.grant]
        assignment.part.assignments.remove(assignment)
