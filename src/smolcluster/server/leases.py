"""Hands out every sample of every epoch and sees to it that each is applied exactly once.

A *range* is a batch: a contiguous piece of an epoch's permutation. A *lease* is a range granted to a holder;
its key `(incarnation, epoch, start, stop, grant)` names that grant for ever. A range is either

    waiting ──grant──> open ──commit──> applied
       ^                 │
       └──released/expired┘

A lease expires because a heartbeat proves life, not progress; whoever let one expire gets twice the time for
the next. How long a holder needs is measured; what it claims is believed only up to `MAX_SLOWER` times what
others were measured to need. When nothing waits any more, idle holders get copies of open ranges that take
twice as long as is usual here, and the first commit wins. Pure bookkeeping: the caller passes the time, in
seconds of a monotonic clock.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from smolcluster.data.permutation import Range, global_batches
from smolcluster.errors import CheckpointError
from smolcluster.wire.messages import LeaseKey

Verdict = Literal["open", "duplicate", "late"]

MAX_SLOWER = 10.0
"""So many times the median of what was measured a holder may claim to need."""
NUM_MEASURED = 64
"""Applied leases, the newest ones, of which the median is taken."""


class DispatcherState(BaseModel):
    """What a dispatcher needs to go on: ranges as `(epoch, start, stop)`."""

    model_config = ConfigDict(extra="forbid")

    cursor: tuple[int, int, int]
    """The last range that was cut."""
    waiting: list[tuple[int, int, int]]
    """Ranges up to there that have not been applied."""


@dataclass(frozen=True)
class Lease:
    """A range granted to a holder until `deadline`; `indices` (num_samples,) int32 are the dataset's.

    `sent_at`, `deadline`: infinite while it has not been sent.
    `copied_from`: the holder that takes too long for the same range. `away_s`: how long nobody could be heard
    since it was sent.
    """

    key: LeaseKey
    holder: int
    indices: Tensor
    sent_at: float
    deadline: float
    copied_from: int | None = None
    away_s: float = 0.0

    @property
    def range(self) -> Range:
        return Range.of(self.key)


class Dispatcher:
    """Leases for `total_samples` in epochs of `num_samples`, `batch_size` at a time.

    `permutation(epoch)` gives the epoch's order, (num_samples,) int32. A lease lasts `floor_s` seconds, or
    `patience` times what its holder usually needs, whichever is longer.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        num_samples: int,
        total_samples: int,
        batch_size: int,
        permutation: Callable[[int], Tensor],
        floor_s: float = 30.0,
        patience: float = 4.0,
    ) -> None:
        self.incarnation = incarnation
        self.num_samples = num_samples
        self.total_samples = total_samples
        self.batch_size = batch_size
        self.samples_applied = 0
        self._permutation = permutation
        self._orders: dict[int, Tensor] = {}
        self._floor_s = floor_s
        self._patience = patience
        self._cursor = Range(0, 0, 0)
        self._waiting: deque[Range] = deque()
        self._open: dict[Range, dict[int, Lease]] = {}
        self._num_unapplied: Counter[int] = Counter()
        """By epoch, oldest first: ranges that have been cut and have not been applied."""
        self._claimed_s: dict[int, float] = {}
        self._measured_s: dict[int, float] = {}
        self._newest_s: deque[float] = deque(maxlen=NUM_MEASURED)
        self._median_s: float | None = None
        """What the newest applied leases took."""
        self._num_grants = 0

    @property
    def done(self) -> bool:
        return self.samples_applied == self.total_samples

    @property
    def epoch(self) -> int:
        """The oldest epoch with a sample that is not applied yet."""
        return next(iter(self._num_unapplied), self._cursor.epoch)

    def expect(self, holder: int, lease_s: float) -> None:
        """Note how long `holder` says that it will need for a lease, in seconds."""
        self._claimed_s[holder] = lease_s

    def grant(
        self, holder: int, now: float, *, is_sent: bool = True, may_copy: bool = True
    ) -> Lease | None:
        """Lease the next range to `holder`; None when there is nothing that it could help with.

        With `is_sent` False its time begins with `sent`: its data have to be loaded first. With `may_copy`
        False it gets nothing that others hold.
        """
        range_ = self._next_range(holder, now, may_copy=may_copy)
        if range_ is None:
            return None
        self._num_grants += 1
        leases = self._open.setdefault(range_, {})
        late = next((other.holder for other in leases.values()), None)
        key = LeaseKey(
            incarnation=self.incarnation,
            epoch=range_.epoch,
            start=range_.start,
            stop=range_.stop,
            grant=self._num_grants,
        )
        lease = Lease(key, holder, self._indices(range_), math.inf, math.inf, late)
        leases[self._num_grants] = lease
        if is_sent:
            self.sent(key, holder, now)
        return leases[self._num_grants]

    def sent(self, key: LeaseKey, holder: int, now: float) -> bool:
        """Begin the time of a lease that is sent now; False: it is no longer the holder's."""
        if self.judge(key, holder) != "open":
            return False
        leases = self._open[Range.of(key)]
        deadline = now + self._allowed_s(holder)
        leases[key.grant] = replace(leases[key.grant], sent_at=now, deadline=deadline)
        return True

    def judge(self, key: LeaseKey, holder: int) -> Verdict:
        """Whether a push for `key` by `holder` may be applied now.

        `duplicate`: its samples have been applied. `late`: the lease is not, or no longer, the holder's.
        """
        range_ = Range.of(key)
        if key.incarnation != self.incarnation or self._end_of(range_) > self._num_cut:
            return "late"
        if (leases := self._open.get(range_)) is None:
            return "late" if range_ in self._waiting else "duplicate"
        lease = leases.get(key.grant)
        return "open" if lease and lease.holder == holder else "late"

    def commit(self, key: LeaseKey, holder: int, now: float) -> None:
        """Note that the samples of an open lease have been applied. Copies of it become duplicates."""
        if self.judge(key, holder) != "open":
            raise ValueError(f"lease {key} is not open for holder {holder}")
        range_ = Range.of(key)
        # one that is pushed before it was sent has taken no time
        took_s = max(0.0, now - self._open.pop(range_)[key.grant].sent_at)
        self._measured_s[holder] = 0.8 * self._measured_s.get(holder, took_s) + 0.2 * took_s
        self._newest_s.append(took_s)
        self._median_s = statistics.median(self._newest_s)
        self.samples_applied += range_.num_samples
        self._num_unapplied[range_.epoch] -= 1
        if not self._num_unapplied[range_.epoch]:
            del self._num_unapplied[range_.epoch]
            self._forget_finished_epochs()

    def release(self, key: LeaseKey, holder: int) -> list[Lease]:
        """Take one lease back, so that somebody else gets its samples."""
        return self._drop_where(
            lambda lease: (lease.key.grant, lease.holder) == (key.grant, holder)
        )

    @property
    def has_more(self) -> bool:
        """Whether there are samples that nobody holds."""
        return bool(self._waiting) or self._num_cut < self.total_samples

    def release_all(self, holder: int) -> list[Lease]:
        self._claimed_s.pop(holder, None)
        self._measured_s.pop(holder, None)
        return self._drop_where(lambda lease: lease.holder == holder)

    def was_away(self, away_s: float, now: float) -> None:
        """Do not count the last `away_s` seconds: what holders have sent in them may not have been read."""
        for leases in self._open.values():
            for grant, lease in leases.items():
                unheard_s = max(0.0, min(away_s, now - lease.sent_at))
                leases[grant] = replace(lease, away_s=lease.away_s + unheard_s)

    def expire(self, now: float) -> list[Lease]:
        allowed_s = {
            lease.holder: self._allowed_s(lease.holder)
            for leases in self._open.values()
            for lease in leases.values()
        }

        def is_over(lease: Lease) -> bool:
            # what was granted on a claim may be over sooner, now that something was measured
            ends_at = min(lease.deadline, lease.sent_at + allowed_s[lease.holder])
            return now - lease.away_s >= ends_at

        returned = self._drop_where(is_over)
        for holder in {each.holder for each in returned}:
            self._measured_s[holder] = 2 * allowed_s[holder] / self._patience
        return returned

    @property
    def state(self) -> DispatcherState:
        """What has not been applied yet, for a checkpoint; leases that are open now will be void then."""
        ahead = sorted(map(_triple, (*self._waiting, *self._open)))
        return DispatcherState(cursor=_triple(self._cursor), waiting=ahead)

    def resume(self, state: DispatcherState, samples_applied: int) -> None:
        """Go on from a checkpoint's state; to be called before the first lease.

        Raises:
            CheckpointError: it is none of these epochs and samples.
        """
        cursor = Range(*state.cursor)
        waiting = [Range(*each) for each in state.waiting]
        edges = [(each.epoch, index) for each in waiting for index in (each.start, each.stop)]
        edges.append((cursor.epoch, cursor.stop))
        if (
            not all(self._exists(each) for each in (cursor, *waiting))
            or not all(each.num_samples for each in waiting)
            or edges != sorted(edges)
            or samples_applied != self._end_of(cursor) - sum(each.num_samples for each in waiting)
        ):
            raise CheckpointError(
                f"the checkpoint stands in epoch {cursor.epoch + 1} of samples that do not fit "
                f"{self.total_samples} samples in epochs of {self.num_samples}: resume with the run's "
                "own dataset, and with as many epochs or steps or more"
            )
        self._cursor, self._waiting = cursor, deque(waiting)
        self._num_unapplied = Counter(each.epoch for each in waiting)
        self.samples_applied = samples_applied

    def _exists(self, range_: Range) -> bool:
        in_epoch = 0 <= range_.start <= range_.stop <= self.num_samples
        return in_epoch and range_.epoch >= 0 and self._end_of(range_) <= self.total_samples

    def _end_of(self, range_: Range) -> int:
        """The samples of the run up to the range's end."""
        return range_.epoch * self.num_samples + range_.stop

    @property
    def _num_cut(self) -> int:
        """Samples that are, or were, in a range."""
        return self._end_of(self._cursor)

    def _next_range(self, holder: int, now: float, *, may_copy: bool) -> Range | None:
        if self._waiting:
            return self._waiting.popleft()
        return self._cut_next() or (self._copy_for(holder, now) if may_copy else None)

    def _cut_next(self) -> Range | None:
        batches = global_batches(
            self.num_samples, self.total_samples, self.batch_size, first=self._num_cut
        )
        range_ = next(batches, None)
        if range_ is not None:
            self._cursor = range_
            self._num_unapplied[range_.epoch] += 1
        return range_

    def _copy_for(self, holder: int, now: float) -> Range | None:
        """The range that has been overdue longest, of those that only others hold, all for too long."""
        candidates = [
            (min(lease.sent_at for lease in leases.values()), range_)
            for range_, leases in self._open.items()
            if all(
                lease.holder != holder and self._is_overdue(lease, holder, now)
                for lease in leases.values()
            )
        ]
        return min(candidates)[1] if candidates else None

    def _is_overdue(self, lease: Lease, idle: int, now: float) -> bool:
        """Whether it takes twice as long as it takes its holder, the idle one, or most."""
        times = self._claimed_s if self._median_s is None else self._measured_s
        known = [self._median_s, times.get(lease.holder), times.get(idle)]
        usual_s = min((each for each in known if each is not None), default=0.0)
        return now - lease.away_s - lease.sent_at >= 2 * usual_s

    def _expected_s(self, holder: int) -> float | None:
        if holder in self._measured_s:
            return self._measured_s[holder]
        claimed_s = self._claimed_s.get(holder)
        if claimed_s is None or self._median_s is None:
            return claimed_s
        return min(claimed_s, MAX_SLOWER * self._median_s)

    def _allowed_s(self, holder: int) -> float:
        return max(self._floor_s, self._patience * (self._expected_s(holder) or 0.0))

    def _drop_where(self, is_doomed: Callable[[Lease], bool]) -> list[Lease]:
        returned = []
        for range_, leases in list(self._open.items()):
            doomed = [number for number, lease in leases.items() if is_doomed(lease)]
            returned += [leases.pop(number) for number in doomed]
            if not leases:
                del self._open[range_]
                self._waiting.append(range_)
        return returned

    def _indices(self, range_: Range) -> Tensor:
        if range_.epoch not in self._orders:
            self._forget_finished_epochs()
            self._orders[range_.epoch] = self._permutation(range_.epoch)
        return self._orders[range_.epoch][range_.start : range_.stop]

    def _forget_finished_epochs(self) -> None:
        """Keep orders of epochs in progress only."""
        for finished in [each for each in self._orders if each < self.epoch]:
            del self._orders[finished]


def _triple(range_: Range) -> tuple[int, int, int]:
    return range_.epoch, range_.start, range_.stop
