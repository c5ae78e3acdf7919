"""What the changes that workers send are made of: which samples, and of which fragments.

A worker reads one ordered stream: samples to compute, and now and then a request for what a fragment of its
weights has changed by. So a request covers, of its fragment, the samples that the worker was given before it
and that no earlier request covers. Samples count when the changes that hold them have been applied in every
fragment. When a worker is lost, its samples go to others, for those fragments alone that have not arrived.
Pure bookkeeping: nothing here waits, sends or knows the time.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from smolcluster.data.permutation import Range
from smolcluster.errors import CheckpointError
from smolcluster.wire.messages import LeaseKey, Stepped

RESUMED = "resumed"
"""In place of an incarnation: nobody holds these samples yet."""


@dataclass(frozen=True)
class Request:
    """A worker was asked for the change of a fragment: what `leases` have done to it."""

    number: int
    holder: int
    fragment: int
    leases: tuple[LeaseKey, ...]


@dataclass(frozen=True)
class Applied:
    """Samples that count now: who computed them, at which learning rate, and what was said of that."""

    key: LeaseKey
    holder: int
    learning_rate: float
    stepped: Stepped


@dataclass
class Entry:
    """Samples that have been handed out, and not yet applied in every fragment."""

    key: LeaseKey
    holder: int | None
    """None: they wait for somebody, for the fragments that have not arrived."""
    learning_rate: float
    arrived: set[int] = field(default_factory=set)
    """Fragments whose change is here, or has been applied."""
    applied: set[int] = field(default_factory=set)
    stepped: Stepped | None = None
    """What the worker that computed them last has said of that."""


class Ledger:
    """The books of all workers' leases and requests, for `num_fragments` fragments."""

    def __init__(self, num_fragments: int) -> None:
        self._all = frozenset(range(num_fragments))
        self._entries: dict[Range, Entry] = {}
        self._uncovered: dict[int, dict[int, list[LeaseKey]]] = {}
        """By holder and fragment: leases that no request covers yet."""
        self._requests: dict[int, Request] = {}
        """Those that have not been answered."""
        self._num_requests = 0
        self.num_open_samples = 0
        """Of the leases that somebody holds, or whose changes are all here."""

    def assign(self, key: LeaseKey, holder: int, learning_rate: float) -> frozenset[int]:
        """`holder` is given samples; returns the fragments that it shall compute them for."""
        samples = Range.of(key)
        entry = self._entries.setdefault(samples, Entry(key, holder, learning_rate))
        entry.key, entry.holder, entry.learning_rate = key, holder, learning_rate
        missing = self._all - entry.arrived
        uncovered = self._uncovered.setdefault(holder, defaultdict(list))
        for fragment in missing:
            uncovered[fragment].append(key)
        self.num_open_samples += samples.num_samples
        return missing

    def stepped(self, holder: int, stepped: Stepped) -> bool:
        """`holder` has taken a step with samples; returns whether they are its, and it says so first."""
        if not self.holds(holder, stepped.lease):
            return False
        entry = self._entries[Range.of(stepped.lease)]
        if entry.stepped is not None:
            return False
        entry.stepped = stepped
        return True

    def holds(self, holder: int, key: LeaseKey) -> bool:
        """Whether samples are `holder`'s, and have not arrived whole."""
        entry = self._entries.get(Range.of(key))
        if entry is None or (entry.key, entry.holder) != (key, holder):
            return False
        return entry.arrived != self._all

    def is_waiting(self, fragment: int) -> bool:
        """Whether a change of this fragment was asked for, and has still to arrive."""
        return any(each.fragment == fragment for each in self._requests.values())

    def owes_change(self, holder: int) -> bool:
        """Whether a worker has still to bring what it was asked for."""
        return any(each.holder == holder for each in self._requests.values())

    def request(self, holder: int, fragment: int) -> Request | None:
        """Ask `holder` for the change of a fragment, by all leases that no earlier request covers.

        None: there are no such leases.
        """
        leases = self._uncovered.get(holder, {}).pop(fragment, [])
        if not leases:
            return None
        self._num_requests += 1
        request = Request(self._num_requests, holder, fragment, tuple(leases))
        self._requests[request.number] = request
        return request

    def asked(self, number: int, holder: int, fragment: int) -> Request | None:
        """The request that a worker answers; None: there is none, or no longer."""
        request = self._requests.get(number)
        is_its = request is not None and (request.holder, request.fragment) == (holder, fragment)
        return request if is_its else None

    def steps_of(self, request: Request) -> list[Stepped]:
        """What was said of the leases of a request."""
        said = [self._entries[Range.of(key)].stepped for key in request.leases]
        return [each for each in said if each is not None]

    def arrived(self, request: Request) -> None:
        """The change is here and will be applied, also if its worker is lost now."""
        del self._requests[request.number]
        for key in request.leases:
            self._entries[Range.of(key)].arrived.add(request.fragment)

    def lose(self, requests: Iterable[Request]) -> set[int]:
        """Changes that were here are lost, and not applied: `take_back` gives their samples to others.

        Returns who holds these samples: somebody else than has sent a change, if that one was lost since.
        """
        holders = set()
        for each in requests:
            for key in each.leases:
                entry = self._entries[Range.of(key)]
                entry.arrived.discard(each.fragment)
                if entry.holder is not None:
                    holders.add(entry.holder)
        return holders

    def take_back(self, holder: int) -> list[LeaseKey]:
        """Forget what `holder` was asked for, and its leases that have not arrived whole; returns these."""
        self._uncovered.pop(holder, None)
        for number in [each.number for each in self._requests.values() if each.holder == holder]:
            del self._requests[number]
        returned = []
        for entry in self._entries.values():
            if entry.holder == holder and entry.arrived != self._all:
                returned.append(entry.key)
                entry.holder = entry.stepped = None
                self.num_open_samples -= Range.of(entry.key).num_samples
        return returned

    def apply(self, requests: Iterable[Request]) -> list[Applied]:
        """Changes have been applied; returns the samples that count now, in the order of their grants."""
        touched = [
            (self._entries[Range.of(key)], each.fragment)
            for each in requests
            for key in each.leases
        ]
        for entry, fragment in touched:
            entry.applied.add(fragment)
        complete = {
            Range.of(entry.key): entry for entry, _ in touched if entry.applied == self._all
        }
        applied = []
        for samples, entry in complete.items():
            del self._entries[samples]
            self.num_open_samples -= samples.num_samples
            if entry.holder is None or entry.stepped is None:
                raise ValueError(f"samples {samples} were applied before anybody computed them")
            applied.append(Applied(entry.key, entry.holder, entry.learning_rate, entry.stepped))
        return sorted(applied, key=lambda each: each.key.grant)

    @property
    def partly_applied(self) -> list[tuple[int, int, int, list[int]]]:
        """Samples that have been applied in some fragments: epoch, start, stop, and these fragments."""
        return [
            (samples.epoch, samples.start, samples.stop, sorted(entry.applied))
            for samples, entry in self._entries.items()
            if entry.applied
        ]

    def resume(self, partly_applied: Iterable[tuple[int, int, int, list[int]]]) -> None:
        """Go on from a checkpoint: these samples wait for the fragments that are missing.

        Raises:
            CheckpointError: there are no such fragments.
        """
        for epoch, start, stop, applied in partly_applied:
            if not set(applied) < self._all:
                raise CheckpointError(
                    f"the checkpoint has applied samples in fragments {applied} of {len(self._all)}: resume "
                    "with the run's own mode and fragments"
                )
            key = LeaseKey(incarnation=RESUMED, epoch=epoch, start=start, stop=stop, grant=0)
            entry = Entry(key, None, 0.0, set(applied), set(applied))
            self._entries[Range.of(key)] = entry


class RoundsState(BaseModel):
    """Where a run stands between two rounds, for a checkpoint."""

    model_config = ConfigDict(extra="forbid")

    version: NonNegativeInt
    """Outer steps."""
    num_fragments: PositiveInt
    outer_lr: PositiveFloat
    outer_momentum: NonNegativeFloat
    partly_applied: list[tuple[int, int, int, list[int]]]
    """Samples that have been applied in some fragments: epoch, start, stop, and these fragments."""
    momentum_order: Literal["fragments", "weights"] = "fragments"
    """How momentum is laid; earlier versions, which do not say it, have laid it fragment by fragment."""
    local_steps: PositiveInt | None = None
    """H; earlier versions do not say it."""
    sync_steps: NonNegativeInt | None = None
    """Steps of the synchronous beginning, in which the run still is; null: it is over."""
    sync_waited_s: NonNegativeFloat = 0.0

    def check(self, num_fragments: int) -> None:
        """Refuse to go on with another number of fragments, or with momentum that is laid otherwise.

        Raises:
            CheckpointError: one line with what differs and what to do.
        """
        if self.num_fragments != num_fragments:
            raise CheckpointError(
                f"the run has {self.num_fragments} fragments, {num_fragments} are asked for now: "
                "resume with its own mode and fragments"
            )
        if num_fragments > 1 and self.momentum_order != "weights":
            raise CheckpointError(
                "an earlier version of smolcluster has saved this streaming run, with its momentum in "
                "another order: resume with that version, or begin a new run"
            )
