"""The books of one open step: its parts, who holds them, and which of their buckets have counted.

A part's gradient arrives bucket by bucket and in order, perhaps from two members at once. The next missing
bucket counts, from whoever brings it first, and never again; so what has counted of a part is always its
first so many buckets: `SliceStep`, wherever gradients are added up. On the server (`Step`), of a first
holder's push, too: once beaten to a bucket, nothing of it counts any more, so that its error feedback can be
told with one number.

The session's readers claim buckets while the server's loop grants parts: every method is atomic.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from types import MappingProxyType

from smolcluster.algorithms.SynchronousPS.sharing import patience_s
from smolcluster.data.permutation import Range
from smolcluster.errors import ProtocolError
from smolcluster.server.worker import Worker
from smolcluster.training.buffers import BufferValues, mean_buffers
from smolcluster.training.compute import BatchLoss
from smolcluster.utils.units import format_duration
from smolcluster.wire.messages import LeaseKey, Push, Skip

NO_LOSS = BatchLoss(0.0, 0)
MAX_HOLDERS = 2
"""Members that work on one part at a time."""


@dataclass
class Term:
    """How long a part may stay in a holder's hands, on the server's clock in seconds."""

    since: float
    """When it was granted, or its batch was sent if the server had to load that."""
    expected_s: float = 0.0
    due_at: float = math.inf
    """From when on it is overdue, so that its holder counts no more; infinite: it has not been sent."""
    say_at: float = math.inf
    """When it is said next that it is overdue."""
    is_told: bool = False

    @property
    def has_begun(self) -> bool:
        return math.isfinite(self.due_at)

    def expect(self, expected_s: float, least_s: float) -> None:
        """It begins, or something else is expected of its holder; `least_s` are waited in any case."""
        self.expected_s = expected_s
        self.due_at = self.say_at = self.since + patience_s(expected_s, least_s)

    def tell(self, now: float) -> bool:
        """Note that it is said to be overdue, and again at twice the time; returns whether that is news."""
        is_news, self.is_told = not self.is_told, True
        self.say_at = now + (now - self.since)
        return is_news


@dataclass
class PushState:
    """What has become of a holder's push."""

    awaited: set[str]
    """The stores at which it has not ended; the server's own is ""."""
    answer: Push | Skip | None = None
    """How it has ended here."""
    is_beaten: bool = False
    """Whether another one was first with a bucket, so that no more of it counts."""
    is_cancelled: bool = False
    """Whether its holder knows that it is not wanted any more."""


@dataclass(eq=False)
class PartAssignment:
    """A part in a member's hands. A `backup` copies somebody else's, from `first_bucket` on."""

    step: "Step"
    part: "Part"
    key: LeaseKey
    holder: Worker
    first_bucket: int
    backup: bool
    term: Term
    push: PushState

    @property
    def session_id(self) -> int:
        return self.holder.member.session_id

    @property
    def num_counted(self) -> int:
        """Buckets of its push, wherever these belong."""
        return self.step.num_counted[self.key]

    @property
    def num_settled(self) -> int | None:
        """Buckets whose residual its worker keeps: none of a backup, nor in a step that is skipped.

        None: with stores on other hosts some may have counted, and not the first ones. What they carried of
        earlier pushes' residual is paid.
        """
        if self.backup or self.step.is_abandoned or self.step.overflow is not None:
            return 0
        is_unknown = self.is_partial and (self.num_counted > 0 or self.push.awaited)
        return None if is_unknown else self.num_counted

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
    """A contiguous range of the batch, and how many of its buckets here have counted."""

    epoch: int
    start: int
    stop: int
    num_counted: int = 0
    loss: BatchLoss = NO_LOSS
    buffers: BufferValues = field(default_factory=dict)
    """What computing it has added to the model's buffers, whoever has said it first."""
    meant_for: int | None = None
    """The session of the member for which it was cut, until it has been granted."""
    was_granted: bool = False
    waits_for: set[str] = field(default_factory=set)
    """Stores on other hosts at which buckets of it are missing."""
    completed_by: PartAssignment | None = None
    """Who brought the last bucket that lies here."""
    assignments: list[PartAssignment] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"samples {self.start} to {self.stop - 1} of epoch {self.epoch}"

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def finished_by(self) -> PartAssignment | None:
        """Who brought the last bucket that lies here, once none is missing anywhere."""
        return None if self.waits_for else self.completed_by

    @property
    def hopeful(self) -> list[PartAssignment]:
        """Of those who hold it, who may still finish it."""
        return [assignment for assignment in self.assignments if not assignment.push.is_beaten]


class Need(StrEnum):
    """Why a part needs one more holder."""

    ORPHAN = "nobody works on it"
    OVERDUE = "all who work on it should have finished it long ago"
    LATE = "others have finished theirs, and few work on it"


def needs_holder(part: Part, now: float, *, is_late: bool) -> Need | None:
    """Why a part shall be given to one more member; None: it shall not.

    `is_late`: whether one that is in one member's hands is given to a second one.
    """
    if part.finished_by is not None:
        return None
    if not part.hopeful:
        return Need.ORPHAN
    if all(now >= each.term.due_at for each in part.hopeful):
        return Need.OVERDUE
    return Need.LATE if is_late and len(part.hopeful) < MAX_HOLDERS else None


def is_overdue(assignment: PartAssignment, now: float) -> str | None:
    """Why it is to be said that a holder holds up the step; None: it does not, or that was said."""
    term = assignment.term
    if assignment.part.finished_by is not None or assignment.push.is_beaten or now < term.say_at:
        return None
    return (
        f"it has had {assignment.num_samples} samples for {format_duration(now - term.since)}, "
        f"expected were {format_duration(term.expected_s)}"
    )


class SliceStep:
    """An open step where a slice of the gradient is added up: which of its buckets have counted."""

    def __init__(self, version: int, batch: Range, sizes: Sequence[int], span: range) -> None:
        """Cut `batch` into parts of these sizes, which are above 0 and add up to it.

        `span`: the numbers of the slice's buckets.
        """
        self.version, self.batch, self.span = version, batch, span
        self.num_counted = Counter[LeaseKey]()
        """Buckets that have counted of each push."""
        cuts = pairwise(accumulate(sizes, initial=batch.start))
        self.parts = [Part(batch.epoch, start, stop) for start, stop in cuts]
        self._lock = threading.Lock()

    def claim(self, _session_id: int, push: Push) -> "Part | PartAssignment | None":
        """Whether this bucket counts: of whose push if so, and then it must be added to the sum."""
        with self._lock:
            part = self._part_of(push.lease)
            is_current = push.base_version + 1 == self.version
            if part is None or not is_current or not self._is_next(part, push.bucket):
                return None
            self._count(part, push)
            return part

    def counted_here(self, lease: LeaseKey) -> tuple[int, bool]:
        """How many buckets of a push have counted, and whether of its part all have."""
        with self._lock:
            part = self._part_of(lease)
            is_whole = part is not None and part.num_counted == len(self.span)
            return self.num_counted[lease], is_whole

    def _part_of(self, lease: LeaseKey) -> Part | None:
        which = lease.epoch, lease.start, lease.stop
        return next((p for p in self.parts if (p.epoch, p.start, p.stop) == which), None)

    def _is_next(self, part: Part, bucket: int) -> bool:
        return bucket == self.span.start + part.num_counted

    def _count(self, part: Part, push: Push) -> None:
        part.num_counted += 1
        self.num_counted[push.lease] += 1
        overflow = part.loss.overflow if push.overflow is None else push.overflow
        part.loss = BatchLoss(push.mean_loss, push.num_terms, push.learning_rate, overflow)


class Step(SliceStep):
    """The step that makes `version`, as the server's loop deals it out. Its own slice is the first one."""

    def __init__(
        self,
        version: int,
        batch: Range,
        sizes: Sequence[int],
        num_buckets: int,
        incarnation: str,
        *,
        others: Mapping[str, int] = MappingProxyType({}),
        expected_s: float = math.inf,
        opened_at: float = 0.0,
    ) -> None:
        """Cut `batch` into parts: see `SliceStep`.

        Args:
            num_buckets: that lie here; on each of the `others`, by node, so many more do.
            expected_s: how long the longest part should take, as far as is known.
        """
        super().__init__(version, batch, sizes, range(num_buckets))
        self.num_buckets = num_buckets
        self.others = frozenset(others)
        self.num_in_all = num_buckets + sum(others.values())
        self.is_abandoned = False
        """Whether nothing of it counts, because it is done again."""
        self.expected_s, self.opened_at = expected_s, opened_at
        self.first_part_at: float | None = None
        """When the first part was whole."""
        self.heard_at = opened_at
        """When a push last ended here, or a bucket of the mean last went out."""
        self._incarnation = incarnation
        self._grants: dict[int, PartAssignment] = {}
        for part in self.parts:
            part.waits_for = set(others)

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
            assignment = PartAssignment(
                step=self,
                part=part,
                key=key,
                holder=holder,
                first_bucket=first,
                backup=part.was_granted,
                term=Term(now),
                push=PushState({"", *self.others}),
            )
            part.was_granted, part.meant_for = True, None
            part.assignments.append(assignment)
            self._grants[number] = assignment
            return assignment

    def claim(self, session_id: int, push: Push) -> PartAssignment | None:
        """Whether this bucket counts: of which assignment if so, and then it must be added to the sum.

        Raises:
            ProtocolError: the push leaves out buckets that are still missing.
        """
        with self._lock:
            assignment = self._granted(session_id, push.lease)
            if assignment is None:
                return None
            part, own = assignment.part, assignment.push
            if push.bucket > part.num_counted and not own.is_beaten:
                raise ProtocolError(
                    f"its push leaves out bucket {part.num_counted} and goes on with {push.bucket}"
                )
            if own.is_beaten or not self._is_next(part, push.bucket):
                own.is_beaten = own.is_beaten or not assignment.backup
                return None
            self._count(part, push)
            if part.num_counted == self.num_buckets:
                part.completed_by = assignment
            return assignment

    def _granted(self, session_id: int, lease: LeaseKey) -> PartAssignment | None:
        """What a member holds by this lease."""
        own = self._grants.get(lease.grant)
        return own if own and (own.session_id, own.key) == (session_id, lease) else None

    def counted(
        self, assignment: PartAssignment, node: str, num_buckets: int, *, is_finished: bool
    ) -> None:
        """Of its push so many buckets have counted on another host; perhaps the part is whole there."""
        with self._lock:
            self.num_counted[assignment.key] += num_buckets
            if is_finished:
                assignment.part.waits_for.discard(node)

    def abandon(self) -> None:
        """Nothing of it counts, also of pushes that have been answered for: it will be done again."""
        self.is_abandoned = True

    @property
    def has_ended_here(self) -> bool:
        """Whether every push that its parts need has come to its end here."""
        is_orphaned = any(not part.hopeful for part in self.unfinished())
        return not is_orphaned and all(each.push.answer for each in self.assignments)

    def note_buffers(self, session_id: int, lease: LeaseKey, added: BufferValues) -> None:
        """What computing a part has added to the buffers of the step's beginning."""
        with self._lock:
            if (assignment := self._granted(session_id, lease)) is not None:
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

    def unfinished(self) -> list[Part]:
        """Parts of which buckets are missing, wherever these belong."""
        with self._lock:
            return [part for part in self.parts if part.finished_by is None]

    def _remove(self, assignment: PartAssignment) -> None:
        del self._grants[assignment.key.grant]
        assignment.part.assignments.remove(assignment)
