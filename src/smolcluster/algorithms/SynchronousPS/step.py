"""The books of one open step: its parts, who holds them, and which of their buckets have counted.

A part's gradient arrives bucket by bucket and in order, perhaps from two members at once. The next missing
bucket counts, from whoever brings it first, and never again; so what has counted of a part is always its
first so many buckets. Of a first holder's push, too: once beaten to a bucket, nothing of it counts any more,
so that its error feedback can be told with one number.

The session's readers claim buckets while the server's loop grants parts: every method is atomic.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from smolcluster.cluster.dispatcher import Range
from smolcluster.cluster.worker import Worker
from smolcluster.errors import ProtocolError
from smolcluster.transport.messages import LeaseKey, Push

MAX_HOLDERS = 2
"""Members that work on one part at a time."""


@dataclass(eq=False)
class Holding:
    """A part in a member's hands. A `backup` copies somebody else's, from `first_bucket` on."""

    part: "Part"
    key: LeaseKey
    holder: Worker
    first_bucket: int
    backup: bool
    granted_at: float
    expected_s: float = 0.0
    due_at: float = math.inf
    """From when on it does not count among those who work on the part."""
    say_at: float = math.inf
    """When it is said next that it is overdue."""
    is_told: bool = False
    num_counted: int = 0
    beaten: bool = False
    is_cancelled: bool = False

    @property
    def seat(self) -> int:
        """Its holder's session."""
        return self.holder.member.seat

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
    loss: float = 0.0
    was_granted: bool = False
    finished_by: Holding | None = None
    holdings: list[Holding] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """n_i."""
        return self.stop - self.start

    @property
    def num_hopeful(self) -> int:
        """Holders that may still finish it."""
        return sum(not holding.beaten for holding in self.holdings)

    def is_overdue(self, now: float) -> bool:
        """Whether all who may still finish it should have done so long ago."""
        return all(holding.beaten or now >= holding.due_at for holding in self.holdings)


class Step:
    """The step that makes `version`."""

    def __init__(
        self, version: int, batch: Range, sizes: Sequence[int], num_buckets: int, incarnation: str
    ) -> None:
        """Cut `batch` into parts of these sizes, which are above 0 and add up to it."""
        self.version = version
        self.batch = batch
        self.num_buckets = num_buckets
        self.parts: list[Part] = []
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._grants: dict[int, Holding] = {}
        start = batch.start
        for size in sizes:
            self.parts.append(Part(start, start + size))
            start += size

    @property
    def loss(self) -> float:
        """Mean loss of the batch, once every part has counted."""
        return sum(part.loss * part.num_samples for part in self.parts) / self.batch.num_samples

    @property
    def holdings(self) -> list[Holding]:
        """All that was granted and not dropped."""
        with self._lock:
            return list(self._grants.values())

    def grant(self, part: Part, holder: Worker, number: int, now: float) -> Holding:
        """Put a part into a member's hands; `number` is never used again in a run."""
        with self._lock:
            key = LeaseKey(
                incarnation=self._incarnation,
                epoch=self.batch.epoch,
                start=part.start,
                stop=part.stop,
                grant=number,
            )
            holding = Holding(part, key, holder, part.num_counted, part.was_granted, now)
            part.was_granted = True
            part.holdings.append(holding)
            self._grants[number] = holding
            return holding

    def claim(self, seat: int, push: Push) -> Part | None:
        """Whether this bucket counts: the part if so, and then it must be added to the sum.

        Raises:
            ProtocolError: the push leaves out buckets that are still missing.
        """
        with self._lock:
            holding = self._grants.get(push.lease.grant)
            if holding is None or (holding.seat, holding.key) != (seat, push.lease):
                return None
            part = holding.part
            if push.bucket > part.num_counted and not holding.beaten:
                raise ProtocolError(
                    f"its push leaves out bucket {part.num_counted} and goes on with {push.bucket}"
                )
            if holding.beaten or push.bucket != part.num_counted:
                holding.beaten |= not holding.backup
                return None
            part.num_counted += 1
            holding.num_counted += 1
            part.loss = push.loss
            if part.num_counted == self.num_buckets:
                part.finished_by = holding
            return part

    def drop(self, seat: int) -> list[Holding]:
        """Take everything out of the hands of a member that has gone; returns what it was."""
        with self._lock:
            dropped = [holding for holding in self._grants.values() if holding.seat == seat]
            for holding in dropped:
                self._remove(holding)
            return dropped

    def give_up(self, holding: Holding) -> None:
        """Its holder will bring no more of it, if it is of this step at all."""
        with self._lock:
            if self._grants.get(holding.key.grant) is holding:
                self._remove(holding)

    def orphans(self) -> list[Part]:
        """Unfinished parts that nobody works on."""
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

    def overdue(self, now: float) -> list[Holding]:
        """Holdings of unfinished parts of which it is time to say that they are overdue."""
        return [
            holding
            for part in self._unfinished()
            for holding in part.holdings
            if now >= holding.say_at and not holding.beaten
        ]

    def _unfinished(self) -> list[Part]:
        with self._lock:
            return [part for part in self.parts if part.finished_by is None]

    def _remove(self, holding: Holding) -> None:
        del self._grants[holding.key.grant]
        holding.part.holdings.remove(holding)
