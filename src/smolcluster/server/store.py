"""Where the weights lie and what changes them: slices, one a host.

A slice is a contiguous range of the buckets that the flat parameters are cut into (Li et al. 2014, "Scaling
distributed machine learning with the parameter server"). The server's process has one, and each store another
(`store_host.py`). A `HeldSlice` keeps what workers send of it, and obeys the coordinator (`store_links.py`);
a `Store` is one that has weights and their optimizer. They know no sessions, leases or files.

Slices need one thing of each other: a gradient is clipped by the norm of the whole. Each tells one norm a
bucket, and these are combined in the order of the buckets and in float64, so that the clip factor is the
same, bit for bit, for any number of hosts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

from smolcluster.codec.base import bytes_of
from smolcluster.errors import ProtocolError
from smolcluster.server.slices import place_of, slice_frames
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer, bucket_norms
from smolcluster.training.replica import Replica
from smolcluster.training.torch_optimizer import Optimizer
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    WEIGHTS,
    CountedPart,
    LeaseKey,
    OuterRule,
    PartKey,
    SendWeights,
    SliceRule,
    TakeMean,
    TakeStep,
)

Counted = tuple[float, Tensor]
"""What a worker has sent, (n,), and how many times it counts."""


def mean_of(parts: Sequence[Counted]) -> Tensor:
    """Σ n_i x_i / Σ n_i, (n,), in the memory of the first; 0 where nothing counts."""
    total = sum(weight for weight, _ in parts) or 1.0
    (weight, first), *others = parts
    mean = first.mul_(weight / total)
    for weight, values in others:
        mean.add_(values, alpha=weight / total)
    return mean


def state_of(replica: Replica) -> dict[str, Tensor]:
    """What a copy of a replica needs, by name: its weights, and the moments of its optimizer. Views."""
    return {WEIGHTS: replica.params, **replica.optimizer.moments}


@dataclass(frozen=True)
class Part:
    """What a worker has sent of a fragment, `values` (n,), as far as it belongs to a host."""

    fragment: int
    values: Tensor
    free: Callable[[], None]
    """The coordinator has decided on it: its worker may send more."""


@dataclass(frozen=True, kw_only=True)
class PartArrived(Event):
    """Buckets of a fragment's part have come, from `bucket` on: `values` (m,); with the last one `part`."""

    session_id: int
    of: LeaseKey | int
    fragment: int
    bucket: int
    values: Tensor
    part: Part | None

    def free(self) -> None:
        """Nobody waits for it."""
        if self.part is not None:
            self.part.free()


class HeldSlice(ABC):
    """What a host holds, with the parts that workers have sent of it until the coordinator decides on them.

    What is exchanged at once is a fragment, of which a slice holds some buckets or none; the only one are all
    weights, unless a subclass says otherwise. A subclass is a rule: it says what is held, and what a step
    makes of it. One that adds up what comes keeps no parts, and has a `prepare_mean` and a `drop` of its own.
    """

    def __init__(self, buckets: Sequence[slice], span: range, incarnation: str) -> None:
        """Hold the numbers `span` of all `buckets`, of weights that began with this `incarnation`."""
        self.span = span
        self._buckets, self._incarnation = buckets, incarnation
        self._parts: dict[PartKey, Part] = {}
        """Those that wait for the coordinator's word."""
        self._means: dict[int, tuple[Tensor, Sequence[PartKey]]] = {}
        """By fragment: the mean that the next step takes, and whose it is."""
        self._snapshot: tuple[int, list[Frame]] | None = None
        """A version, and frames of the weights then."""

    # its rule

    @abstractmethod
    def contents(self) -> Mapping[str, Tensor]:
        """What the coordinator may gather, each (n,)."""

    @property
    def num_frames(self) -> int:
        """In which all that workers are sent of the slice is sent once."""
        return len(self.span)

    def held(self, _fragment: int) -> range:
        """The numbers of a fragment's buckets that are held here."""
        return self.span

    def norms(self, _fragment: int, _bucket: int, _values: Tensor) -> Sequence[Sequence[float]]:
        """L2 norms by bucket of a fragment's values from a bucket on; a second row may be of the weights."""
        raise ProtocolError("it was sent parts of a slice that keeps none")

    def _step_parts(
        self,
        _step: TakeStep,
        _fragment: int,
        _keys: Sequence[PartKey],
        _parts: Sequence[Counted],
    ) -> None:
        """Take a step along parts of a fragment."""
        raise ProtocolError("it wanted a step along parts of a slice that keeps none")

    def _step_means(self, _step: TakeStep, _means: Mapping[int, Tensor]) -> None:
        """Take a step along means, by fragment, (n,) each."""
        raise ProtocolError("it wanted a step along means of a slice that takes none")

    def _fragment_frames(self, _wanted: SendWeights, _fragment: int) -> Sequence[Frame]:
        """What leads a worker to a fragment's weights."""
        raise ProtocolError("it wanted a fragment of a slice that has none")

    def leave(self, worker: str) -> None:  # noqa: B027 - most keep nothing else of it
        """A worker has gone; its parts are the coordinator's matter."""

    # what the coordinator says

    def take(self, key: PartKey, came: PartArrived) -> Sequence[Sequence[float]] | None:
        """Buckets of a part are here; returns their `norms`, and keeps the part when it is whole.

        Of one that is whole already nothing more is taken (None): the first one may count already.
        """
        if key in self._parts:
            came.free()
            return None
        if came.part is not None:
            self._parts[key] = came.part
        return self.norms(came.fragment, came.bucket, came.values)

    def prepare_mean(self, wanted: TakeMean) -> Sequence[Sequence[float]]:
        """The next step takes the mean of these parts of a fragment; returns its `norms`, [] of none."""
        fragment, keys, counted = self._named(wanted.parts)
        mean = mean_of(counted)
        self._means[fragment] = mean, keys
        return self.norms(fragment, self.held(fragment).start, mean)

    def fragment_of(self, key: PartKey) -> int:
        """Which fragment a part that is kept is of."""
        return self._kept(key).fragment

    def take_step(self, step: TakeStep) -> None:
        if step.parts:
            fragment, keys, counted = self._named(step.parts)
            self._step_parts(step, fragment, keys, counted)
            self._free(keys)
            return
        means, self._means = self._means, {}
        self._step_means(step, {number: mean for number, (mean, _) in means.items()})
        self._free(key for _, keys in means.values() for key in keys)

    def drop(self, key: PartKey) -> None:
        """A part is not wanted any more, nor a mean with it."""
        self._means.pop(self._kept(key).fragment, None)
        self._free([key])

    def frames_for(self, wanted: SendWeights) -> Sequence[Frame]:
        """What a worker is sent; all who want the weights of one version share one copy."""
        if wanted.fragment is not None:
            return self._fragment_frames(wanted, wanted.fragment)
        version = wanted.version
        if self._snapshot is None or self._snapshot[0] != version:
            self._snapshot = version, self.frames([WEIGHTS], version)
        return self._snapshot[1]

    def frames(self, contents: Sequence[str], version: int) -> list[Frame]:
        """Frames of these contents as they are now, at `version`.

        Raises:
            ProtocolError: the slice has not all of them.
        """
        now = self.contents()
        if not set(contents) <= now.keys():
            raise ProtocolError("it wants contents that its slice has not")
        return slice_frames(
            {name: now[name] for name in contents},
            self._buckets,
            self.span,
            incarnation=self._incarnation,
            version=version,
        )

    def _named(
        self, named: Sequence[CountedPart]
    ) -> tuple[int, Sequence[PartKey], Sequence[Counted]]:
        """The parts of a fragment that the coordinator has named, which stay here."""
        keys = [each.key for each in named]
        kept = [self._kept(key) for key in keys]
        if any(each.fragment != kept[0].fragment for each in kept):
            raise ProtocolError("it named parts of several fragments for one step")
        weights = [each.weight for each in named]
        counted = list(zip(weights, (each.values for each in kept), strict=True))
        return kept[0].fragment, keys, counted

    def _kept(self, key: PartKey) -> Part:
        if (part := self._parts.get(key)) is None:
            raise ProtocolError("it decided on a part that has not arrived")
        return part

    def _free(self, keys: Iterable[PartKey]) -> None:
        for key in keys:
            self._parts.pop(key).free()


class Store:
    """Weights of a slice, with their optimizer's state.

    `buckets` are places in the flat parameters, in order and without gaps; `weights` (n,) change in place.
    """

    def __init__(
        self, buckets: Sequence[slice], weights: Tensor, buffer: Tensor, optimizer: Optimizer
    ) -> None:
        """`buffer` (n,), on the weights' device, takes gradients from elsewhere, and what is clipped."""
        self.buckets = buckets
        self.weights = weights
        self.optimizer = optimizer
        self.buffer = buffer
        self._taken = self._scaled = buffer
        self._start = buckets[0].start

    @classmethod
    def of(cls, replica: Replica, span: range | None = None) -> "Store":
        """A slice of a replica's weights, in the replica's own memory; `span`: the numbers of its buckets.

        One that has not the first bucket is made after a checkpoint has been restored, because it counts its
        own steps from there.
        """
        span = range(len(replica.buckets)) if span is None else span
        place = place_of(replica.buckets, span)
        return Store(
            replica.buckets[span.start : span.stop],
            replica.params[place],
            replica.grads[place],
            replica.optimizer.part(place),
        )

    @property
    def place(self) -> slice:
        return slice(self._start, self.buckets[-1].stop)

    def take(self, gradient: Tensor, *, owned: bool = False) -> None:
        """Take the gradient of the next step, (n,).

        On the weights' device it is not copied, and must not change before the step. `owned`: the step may
        change it, and leaves the buffer alone.
        """
        self._taken = gradient
        self._scaled = gradient if owned else self.buffer
        if gradient.device != self.weights.device:
            self._taken = self._scaled = self.buffer.copy_(gradient)

    def take_difference(self, weights: Tensor) -> None:
        """Take the way from these weights to a worker's, (n,), instead of a gradient."""
        self._taken = self.buffer.copy_(weights).sub_(self.weights)

    def norms(self) -> list[float]:
        """The L2 norm of each bucket of what was taken."""
        return bucket_norms(self._taken, [self._within(bucket) for bucket in self.buckets])

    def norm(self) -> float:
        """L2 norm of all that was taken."""
        return math.hypot(*self.norms())

    def step(self, clip: float, learning_rate: float, bound: float | None = None) -> None:
        """Take one optimizer step with `clip` times the gradient; no element is above `bound`."""
        gradient = self._taken
        if clip != 1.0:
            gradient = torch.mul(gradient, clip, out=self._scaled)
        if bound is not None:
            gradient = torch.clamp(gradient, -bound, bound, out=self._scaled)
        self.optimizer.step_with(gradient, learning_rate, owned=gradient is self._scaled)

    def mix(self, share: float) -> None:
        self.weights.add_(self._taken, alpha=share)

    def digests(self) -> list[bytes]:
        """xxh3-64 of the bytes of each bucket of the weights, 8 bytes each."""
        weights = self.weights.to("cpu")
        return [xxh3_64_digest(bytes_of(weights[self._within(each)])) for each in self.buckets]

    def _within(self, bucket: slice) -> slice:
        return slice(bucket.start - self._start, bucket.stop - self._start)


def store_of(
    rule: SliceRule | OuterRule | None, buckets: Sequence[slice], values: Mapping[str, Tensor]
) -> Store:
    """The store of a slice of these buckets; `values` (n,) by name become its memory.

    Raises:
        ProtocolError: these are not what its rule needs.
    """
    weights = values.get(WEIGHTS)
    if not isinstance(rule, SliceRule) or weights is None:
        raise ProtocolError("it gave a slice without weights or rule to a store that takes steps")
    buffer = torch.empty_like(weights)
    optimizer = FlatOptimizer(
        rule.optimizer,
        weights,
        buffer,
        rule.weight_decay,
        rule.num_decayed,
        arguments=rule.optimizer_args,
    )
    if set(optimizer.moments) != set(values) - {WEIGHTS}:
        raise ProtocolError(f"{rule.optimizer} has other moments than were sent")
    for name in optimizer.moments:
        optimizer.state[name] = values[name]
    if STEP_COUNT in optimizer.state:
        optimizer.state[STEP_COUNT].fill_(rule.num_steps)
    return Store(buckets, weights, buffer, optimizer)
