"""A slice of the weights on a host that is not the server's, which steps as the coordinator says.

    worker      -> its part          decoded; Arrived with the norms of its buckets goes on
    coordinator -> TakeStep          a step along the parts that it names
    coordinator -> TakeMean          the mean of parts is wanted for a step: Arrived goes back
    coordinator -> Drop              a part is not wanted any more
    coordinator -> SendWeights       weights to a worker

What a step does is the matter of a subclass, which is its rule: `algorithms/EDP/store.py` takes a step of an
optimizer, `algorithms/DiLoCo/store.py` an outer one. The other side is `hosted_stores.py`.
Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server".
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smolcluster.errors import ProtocolError
from smolcluster.server.slices import arrived
from smolcluster.server.store import Counted, Store, mean_of
from smolcluster.server.store_host import HeldSlice
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    WEIGHTS,
    CountedPart,
    Drop,
    LeaseKey,
    Message,
    OuterRule,
    PartKey,
    SendWeights,
    SliceRule,
    TakeMean,
    TakeStep,
)
from smolcluster.wire.session import Session


@dataclass(frozen=True)
class Part:
    """What a worker has sent of a fragment, `values` (n,), as far as it belongs here."""

    fragment: int
    values: Tensor
    free: Callable[[], None]
    """The coordinator has decided on it: its worker may send more."""


@dataclass(frozen=True)
class PartArrived(Event):
    """Buckets of a fragment's part have come, from `bucket` on: `values` (m,); with the last one `part`."""

    session_id: int
    of: LeaseKey | int
    fragment: int
    bucket: int
    values: Tensor
    part: Part | None


class SteppingSlice(HeldSlice):
    """A slice that takes the steps that the coordinator says, along what workers have sent."""

    def __init__(self, *session: Any) -> None:
        """See `HeldSlice`."""
        super().__init__(*session)
        self._parts: dict[PartKey, Part] = {}
        """Those that wait for the coordinator's word."""
        self._means: dict[int, tuple[Tensor, Sequence[PartKey]]] = {}
        """By fragment: the mean that the next step takes, and whose it is."""
        self._snapshot: tuple[int, list[Frame]] | None = None
        """A version, and frames of the weights then."""

    def _first_bucket(self, _fragment: int) -> int:
        """The number of the first of a fragment's buckets that is held here."""
        return self._span.start

    @abstractmethod
    def _norms(self, fragment: int, bucket: int, values: Tensor) -> Sequence[Sequence[float]]:
        """L2 norms by bucket of a fragment's values from `bucket` on; a second row may be of the weights."""

    @abstractmethod
    def _step(
        self, step: TakeStep, fragment: int, keys: Sequence[PartKey], parts: Sequence[Counted]
    ) -> None:
        """Take a step along parts of a fragment."""

    def _step_along(self, _step: TakeStep, _means: Mapping[int, Tensor]) -> None:
        """Take a step along means, by fragment, (n,) each."""
        raise ProtocolError("it wanted a step along means of a slice that takes none")

    def _send_fragment(self, _wanted: SendWeights, _fragment: int) -> None:
        """Send a worker what leads to a fragment's weights."""
        raise ProtocolError("it wanted a fragment of a slice that has none")

    def _on_event(self, event: Event, coordinator: Session) -> None:
        """Tell the norms of what has come; keep what is whole until the coordinator decides on it."""
        if not isinstance(event, PartArrived):
            return
        part, instance = event.part, self._instance_of(event.session_id)
        key = None if instance is None else PartKey(instance=instance, of=event.of)
        if part is not None and (key is None or key in self._parts):
            # void, for its process has connected again; or sent twice: the first may count already
            part.free()
            return
        if key is None:
            return
        if part is not None:
            self._parts[key] = part
        self._tell_norms(key, event.fragment, event.bucket, event.values, coordinator)

    def _tell_norms(
        self,
        key: PartKey | None,
        fragment: int,
        bucket: int,
        values: Tensor,
        coordinator: Session,
    ) -> None:
        norms = self._norms(fragment, bucket, values)
        coordinator.send(*arrived(key, fragment, bucket, norms))

    def _obey(self, message: Message, coordinator: Session) -> None:
        match message:
            case TakeStep(parts=()):
                means, self._means = self._means, {}
                self._step_along(message, {number: mean for number, (mean, _) in means.items()})
                self._free(key for _, keys in means.values() for key in keys)
            case TakeStep(parts=named):
                fragment, keys, counted = self._named(named)
                self._step(message, fragment, keys, counted)
                self._free(keys)
            case TakeMean(parts=named):
                fragment, keys, counted = self._named(named)
                mean = mean_of(counted)
                self._means[fragment] = mean, keys
                self._tell_norms(None, fragment, self._first_bucket(fragment), mean, coordinator)
            case Drop(key=key):
                self._means.pop(self._held(key).fragment, None)
                self._free([key])
            case SendWeights(instance=instance, fragment=None, version=version):
                self._send_whole(instance, version)
            case SendWeights(fragment=int(fragment)):
                self._send_fragment(message, fragment)

    def _send_whole(self, instance: str, version: int) -> None:
        if self._snapshot is None or self._snapshot[0] != version:  # all share one copy
            weights = {WEIGHTS: self._contents[WEIGHTS]}
            self._snapshot = version, self._frames(weights, version)
        self._send(instance, self._snapshot[1])

    def _named(
        self, named: Sequence[CountedPart]
    ) -> tuple[int, Sequence[PartKey], Sequence[Counted]]:
        """The parts of a fragment that the coordinator has named, which stay here."""
        keys = [each.key for each in named]
        held = [self._held(key) for key in keys]
        if any(each.fragment != held[0].fragment for each in held):
            raise ProtocolError("it named parts of several fragments for one step")
        weights = [each.weight for each in named]
        counted = list(zip(weights, (each.values for each in held), strict=True))
        return held[0].fragment, keys, counted

    def _held(self, key: PartKey) -> Part:
        if (part := self._parts.get(key)) is None:
            raise ProtocolError("it decided on a part that has not arrived")
        return part

    def _free(self, keys: Iterable[PartKey]) -> None:
        for key in keys:
            self._parts.pop(key).free()


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
