"""A store of DiLoCo: a slice of the weights θ with the outer optimizer, on a machine other than the server.

It takes the steps that the server says, along what workers have changed: see `server/store_host.py`;
`outer_links.py` is the other side. Of each fragment it has what lies in its buckets, which may be nothing.
Which machines have one: `servers` in the cluster file.
By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("diloco", "store"))

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import ChangeReceiver, Layout
from smolcluster.algorithms.DiLoCo.fragments import Fragment, cut
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer, OuterStore
from smolcluster.algorithms.DiLoCo.outer_links import RESIDUAL
from smolcluster.codec.registry import get_codec
from smolcluster.errors import ConfigError, ProtocolError
from smolcluster.server.store import Counted, store_of
from smolcluster.server.store_host import HeldSlice, Part, PartArrived
from smolcluster.training.optimizer import bucket_norms
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    WEIGHTS,
    Delta,
    Message,
    OuterRule,
    PartKey,
    SendWeights,
    Slice,
    TakeStep,
)


class Held(HeldSlice):
    """A slice of θ that takes outer steps; before the first one steps of the inner optimizer."""

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
        self._store.versions = list(rule.versions)
        self._take_residual()

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

    def _first_bucket(self, fragment: int) -> int:
        return self._layout.numbers[fragment].start

    def _norms(self, fragment: int, bucket: int, values: Tensor) -> Sequence[Sequence[float]]:
        places = self._layout.buckets(fragment)[bucket - self._first_bucket(fragment) :]
        start = places[0].start
        within = [slice(each.start - start, each.stop - start) for each in places]
        norms = bucket_norms(values, [each for each in within if each.stop <= values.numel()])
        weights = self._store.norms(fragment)[bucket - self._first_bucket(fragment) :]
        return norms, weights[: len(norms)]

    def _step(
        self, step: TakeStep, fragment: int, keys: Sequence[PartKey], parts: Sequence[Counted]
    ) -> None:
        self._inner = None
        if not step.one_by_one:
            self._store.step(fragment, parts, step.version)
            return
        if len(parts) != 1 or not isinstance(self._outer, DelayedNesterov):
            raise ProtocolError("it applied changes one by one that are taken together")
        [(share, values)] = parts
        self._store.apply(keys[0].worker, values, share, step.moves_by, step.version)

    def _step_along(self, step: TakeStep, means: Mapping[int, Tensor]) -> None:
        if self._inner is None:
            raise ProtocolError("it took a step of an inner optimizer that is not here")
        self._store.step_along(self._inner, means, step)

    def _send_whole(self, instance: str, version: int) -> None:
        super()._send_whole(instance, version)
        self._store.follow(instance)

    def _send_fragment(self, wanted: SendWeights, fragment: int) -> None:
        numbers = self._layout.numbers
        if fragment >= len(numbers) or not numbers[fragment]:
            raise ProtocolError(f"it spoke of fragment {fragment}, of which nothing is here")
        worker, base_version = wanted.instance, wanted.base_version
        self._send(worker, self._store.frames_for(worker, fragment, base_version))

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
        return cut(layers, len(rule.versions))
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


class DeltaSliceReceiver(ChangeReceiver):
    """A store's, of one worker; each bucket is told of as it comes."""

    most_held = 2
    """One that is void, as the coordinator has still to say, and the next."""

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if not isinstance(message, Delta):
            return MessageReceived(self._session_id, message)
        self._check_is_answered(message.fragment)
        bucket, values = self._deltas.take(message, payload)
        part = None
        if values is not None:
            self._hold(message.fragment)
            part = Part(message.fragment, values, partial(self.free, message.fragment))
        return PartArrived(
            session_id=self._session_id,
            of=message.request,
            fragment=message.fragment,
            bucket=message.bucket,
            values=bucket,
            part=part,
        )
