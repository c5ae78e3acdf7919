"""A store's slice of the weights θ, with the outer optimizer's state: `outer_links.py` is the other side.

    worker      -> Delta            decoded; BucketNorm with the norm of each bucket goes on
    coordinator -> TakeOuterStep    a step along the changes that it names
    coordinator -> TakeGradients    their mean is wanted: GradientNorms goes back
    coordinator -> TakeInnerStep    a step of the inner optimizer along such means
    coordinator -> DropChange       a change is not wanted any more
    coordinator -> SendWeights      all weights, or those of a fragment, to a worker

Of each fragment it has what lies in its buckets, which may be nothing.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import Layout, change_assembler
from smolcluster.algorithms.DiLoCo.fragments import Fragment, cut
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.algorithms.DiLoCo.outer_links import RESIDUAL, ChangeKey
from smolcluster.algorithms.DiLoCo.outer_store import Counted, OuterStore
from smolcluster.codec.base import bytes_of
from smolcluster.codec.registry import get_codec
from smolcluster.errors import ConfigError, ProtocolError
from smolcluster.server.slices import norms_spec
from smolcluster.server.stepping_slice import store_of
from smolcluster.server.store_host import HeldSlice
from smolcluster.training.optimizer import bucket_norms
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    WEIGHTS,
    BucketNorm,
    CountedChange,
    Delta,
    DropChange,
    GradientNorms,
    Message,
    OuterRule,
    SendWeights,
    Slice,
    TakeGradients,
    TakeInnerStep,
    TakeOuterStep,
)
from smolcluster.wire.session import Receiver, Session

CHANGES_HELD = 2
"""Of a worker and a fragment: one that is void, as the coordinator has still to say, and the next."""


@dataclass(frozen=True)
class BucketArrived(Event):
    """A bucket of a change has come; with the last one all `values` (numel,) that are held."""

    session_id: int
    delta: Delta
    bucket: Tensor
    values: Tensor | None
    receiver: "DeltaSliceReceiver"


@dataclass(frozen=True)
class HeldChange:
    """A change that waits for the coordinator's word."""

    fragment: int
    values: Tensor
    receiver: "DeltaSliceReceiver"

    def free(self) -> None:
        self.receiver.free(self.fragment)


class OuterSlice(HeldSlice):
    """A slice of θ that takes the outer steps that the coordinator says."""

    def __init__(self, *session: Any) -> None:
        """See `HeldSlice`.

        Raises:
            ProtocolError: its contents do not fit its rule, or the rule not the weights.
        """
        super().__init__(*session)
        given = self._given
        rule, codec = given.rule, get_codec(given.codec)
        if not isinstance(rule, OuterRule):
            raise ProtocolError("it gave a slice without an outer optimizer's rule")
        bucket_bytes = given.bucket_length * codec.dtype.itemsize
        whole = Layout(_fragments(given, rule), bucket_bytes, codec.dtype)
        self._layout = whole.part(self._span)
        weights, self._outer = self._contents.get(WEIGHTS), _outer_of(rule, self._contents)
        outer_names = {*self._outer.vectors, RESIDUAL}
        others = {
            name: values for name, values in self._contents.items() if name not in outer_names
        }
        if (
            weights is None
            or not self._outer.vectors.keys() <= self._contents.keys()
            or (rule.inner is None and len(others) > 1)
        ):
            raise ProtocolError("it gave a slice of other contents than an outer optimizer has")
        self._weights = weights
        own = self._buckets[given.first : given.stop]
        self._inner = None if rule.inner is None else store_of(rule.inner, own, others)
        """Steps the weights along gradients, before the first outer step."""
        self._store = OuterStore(
            weights, self._layout, self._outer, rule.codec_down, is_async=rule.is_async
        )
        self._take_residual()
        self._changes: dict[ChangeKey, HeldChange] = {}
        self._stepping: dict[int, Sequence[ChangeKey]] = {}
        """By fragment: the changes whose mean is ready for the next step of all."""
        self._snapshot: tuple[int, list[Frame]] | None = None
        """A version, and frames of the weights then."""

    def _take_residual(self) -> None:
        residual = self._contents.get(RESIDUAL)
        if bool(self._store.residuals) != (residual is not None):
            raise ProtocolError("what its codec owes is not of the codec that its rule names")
        for number, feedback in enumerate(self._store.residuals):
            assert residual is not None  # noqa: S101 - there are none else
            feedback.committed.copy_(self._layout.gather(number, residual))
        self._store.resume(self._store.versions)

    def _now(self) -> dict[str, Tensor]:
        """What the coordinator may gather."""
        moments = {} if self._inner is None else self._inner.optimizer.moments
        contents = {WEIGHTS: self._weights, **self._outer.vectors, **moments}
        if (residual := self._contents.get(RESIDUAL)) is not None:
            for fragment, feedback in zip(
                self._layout.fragments, self._store.residuals, strict=True
            ):
                fragment.scatter(feedback.committed, residual)
            contents[RESIDUAL] = residual
        return contents

    @property
    def _num_frames(self) -> int:
        """Fragments are sent one by one, in a frame for each of their buckets."""
        return max(len(self._span), sum(map(len, self._layout.numbers)))

    def _receiver_for(self, session_id: int) -> "DeltaSliceReceiver":
        return DeltaSliceReceiver(session_id, self._given.codec, self._layout)

    def _on_event(self, event: Event, coordinator: Session) -> None:
        """Tell the norm of a bucket; keep a change that is whole until the coordinator decides on it."""
        if not isinstance(event, BucketArrived):
            return
        delta, instance = event.delta, self._instance_of(event.session_id)
        if instance is None:  # the same process has connected again: this is void
            return
        if event.values is not None:
            change = HeldChange(delta.fragment, event.values, event.receiver)
            if (key := ChangeKey(instance, delta.request)) in self._changes:
                change.free()  # it was sent twice, and the coordinator may count on the first
                return
            self._changes[key] = change
        [norm] = bucket_norms(event.bucket, [slice(None)])
        first = self._layout.numbers[delta.fragment].start
        weights_norm = self._store.norms(delta.fragment)[delta.bucket - first]
        coordinator.send(
            BucketNorm(
                instance=instance,
                request=delta.request,
                fragment=delta.fragment,
                bucket=delta.bucket,
                norm=_finite(norm),
                weights_norm=_finite(weights_norm),
            )
        )

    def _obey(self, message: Message, coordinator: Session) -> None:
        match message:
            case TakeOuterStep():
                self._step(message)
            case TakeGradients():
                self._take_gradients(message, coordinator)
            case TakeInnerStep():
                self._step_together(message)
            case DropChange(instance=instance, request=request):
                key = ChangeKey(instance, request)
                fragment = self._held(key).fragment
                self._free([key])
                self._stepping.pop(fragment, None)  # with a change of it that step is void
                self._store.gradients.pop(fragment, None)
            case SendWeights(instance=instance, fragment=None, version=version):
                if self._snapshot is None or self._snapshot[0] != version:  # all share one copy
                    self._snapshot = version, self._frames({WEIGHTS: self._weights}, version)
                self._send(instance, self._snapshot[1])
                self._store.follow(instance)
            case SendWeights(instance=instance, fragment=int(number), base_version=base_version):
                self._check(number)
                self._send(instance, self._store.frames_for(instance, number, base_version))

    def _step(self, step: TakeOuterStep) -> None:
        self._inner = None
        keys, counted = self._named(step.fragment, step.changes)
        if step.share is not None:
            if len(counted) != 1 or not isinstance(self._outer, DelayedNesterov):
                raise ProtocolError("it applied changes one by one that are taken together")
            [(_, values)] = counted
            self._store.apply(keys[0].instance, values, step.share, step.moves_by, step.version)
        else:
            self._store.step(
                step.fragment, counted, base_version=step.base_version, version=step.version
            )
        self._free(keys)

    def _take_gradients(self, taken: TakeGradients, coordinator: Session) -> None:
        keys, counted = self._named(taken.fragment, taken.changes)
        norms = self._store.take_gradients(taken.fragment, counted)
        self._stepping[taken.fragment] = keys
        values = torch.tensor(norms, dtype=torch.float64)
        told = GradientNorms(fragment=taken.fragment, tensor=norms_spec(len(norms)))
        coordinator.send(told, bytes_of(values))

    def _step_together(self, step: TakeInnerStep) -> None:
        if self._inner is None or len(step.base_versions) != len(self._layout.fragments):
            raise ProtocolError("it took a step of an inner optimizer that is not here")
        self._store.step_together(self._inner, step)
        for keys in self._stepping.values():
            self._free(keys)
        self._stepping.clear()

    def _named(
        self, fragment: int, changes: Sequence[CountedChange]
    ) -> tuple[Sequence[ChangeKey], Sequence[Counted]]:
        """The changes of a fragment that the coordinator has named, which stay here."""
        self._check(fragment)
        keys = [ChangeKey(each.instance, each.request) for each in changes]
        held = [self._held(key) for key in keys]
        if any(each.fragment != fragment for each in held):
            raise ProtocolError("it took a step with changes of another fragment")
        weights = [each.weight for each in changes]
        return keys, list(zip(weights, (each.values for each in held), strict=True))

    def _check(self, fragment: int) -> None:
        numbers = self._layout.numbers
        if fragment >= len(numbers) or not numbers[fragment]:
            raise ProtocolError(f"it spoke of fragment {fragment}, of which nothing is here")

    def _held(self, key: ChangeKey) -> HeldChange:
        if (change := self._changes.get(key)) is None:
            raise ProtocolError("it decided on a change that has not arrived")
        return change

    def _free(self, keys: Sequence[ChangeKey]) -> None:
        for key in keys:
            self._changes.pop(key).free()

    def _on_gone(self, instance: str) -> None:
        super()._on_gone(instance)
        self._store.leave(instance)


def _fragments(given: Slice, rule: OuterRule) -> list[Fragment]:
    """Those of the whole model.

    Raises:
        ProtocolError: its tensors are not those of the slice.
    """
    stops = list(accumulate(rule.layers, initial=0))
    if stops[-1] != given.num_params:
        raise ProtocolError(f"its tensors have {stops[-1]} weights, the model {given.num_params}")
    layers = [("", slice(*ends)) for ends in pairwise(stops)]
    try:
        return cut(layers, rule.num_fragments)
    except ConfigError as error:
        raise ProtocolError(str(error)) from error


def _outer_of(rule: OuterRule, contents: Mapping[str, Tensor]) -> OuterOptimizer:
    """The outer optimizer; the contents become its state. When momentum moves, the coordinator says."""
    optimizer: OuterOptimizer
    if rule.is_async:
        optimizer = DelayedNesterov(0, rule.learning_rate, rule.momentum, momentum_delay=1)
    else:
        optimizer = OuterOptimizer(0, rule.learning_rate, rule.momentum)
    for name in optimizer.vectors:
        if name in contents:
            optimizer.state[name] = contents[name]
    return optimizer


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None


class DeltaSliceReceiver(Receiver):
    """Puts one worker's changes together; each bucket is told of as it comes."""

    def __init__(self, session_id: int, codec_name: str, layout: Layout) -> None:
        self._session_id = session_id
        self._deltas = change_assembler(codec_name, layout)
        self._held = Counter[int]()
        """By fragment: changes that the coordinator has not decided on."""

    @property
    def in_progress(self) -> bool:
        return self._deltas.first is not None

    def free(self, fragment: int) -> None:
        """The coordinator has decided on a change. Any thread."""
        self._held[fragment] -= 1

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if not isinstance(message, Delta):
            return MessageReceived(self._session_id, message)
        if self._held[message.fragment] >= CHANGES_HELD:
            raise ProtocolError(f"it sent fragment {message.fragment} again before it was answered")
        bucket, values = self._deltas.take(message, payload)
        if values is not None:
            self._held[message.fragment] += 1
        return BucketArrived(self._session_id, message, bucket, values, self)
