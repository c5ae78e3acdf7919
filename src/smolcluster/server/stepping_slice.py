"""A store's slice of the weights with its optimizer.

    worker      -> Push, a frame for each bucket   decoded; Arrived with the norm of each bucket goes on
    coordinator -> Apply | Discard                 one optimizer step, or none
    coordinator -> SendWeights                     the weights to a worker

Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server".
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smolcluster.codec.base import bytes_of
from smolcluster.errors import PeerLost, ProtocolError
from smolcluster.server.push import GradientBuffers, GradientReceiver, Pushed
from smolcluster.server.slices import PushKey, norms_spec
from smolcluster.server.store import Store
from smolcluster.server.store_host import TICK_S, HeldSlice
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    WEIGHTS,
    Apply,
    Arrived,
    Discard,
    Message,
    OuterRule,
    SendWeights,
    SliceRule,
)
from smolcluster.wire.session import Session

PUSHES_HELD = 2
"""Of a worker: one that is to be applied, and one that arrives meanwhile."""


class SteppingSlice(HeldSlice):
    """A slice that takes an optimizer step with each push that the coordinator says so of."""

    def __init__(self, *session: Any) -> None:
        """See `HeldSlice`.

        Raises:
            ProtocolError: its contents do not fit its rule.
        """
        super().__init__(*session)
        own = self._buckets[self._given.first : self._given.stop]
        self._store = store_of(self._given.rule, own, self._contents)
        self._contents = {WEIGHTS: self._store.weights, **self._store.optimizer.moments}
        self._pushes: dict[PushKey, Pushed] = {}
        self._snapshot: list[Frame] | None = None
        """Frames of the weights as long as they have not changed."""
        self._memory = GradientBuffers()

    def _receiver_for(self, session_id: int) -> GradientReceiver:
        return PushReceiver(
            *(session_id, self._given.codec, self._buckets),
            has_loss_scale=self._given.has_loss_scale,
            span=self._span,
            memory=self._memory,
            closed=self._closed,
        )

    def _on_event(self, event: Event, coordinator: Session) -> None:
        """Keep a push that is whole until the coordinator says what becomes of it."""
        if not isinstance(event, Pushed):
            return
        pushed, lease = event, event.push.lease
        instance = self._instance_of(pushed.session_id)
        if instance is None:  # the same process has connected again: this is void
            _give_back(pushed)
            return
        key = PushKey(instance, lease)
        if key in self._pushes:  # copies of one lease have different keys
            _give_back(pushed)
            return
        self._pushes[key] = pushed
        self._store.take(pushed.gradient)
        norms = torch.tensor(self._store.norms(), dtype=torch.float64)
        arrived = Arrived(instance=instance, lease=lease, tensor=norms_spec(len(self._span)))
        coordinator.send(arrived, bytes_of(norms))

    def _obey(self, message: Message, _coordinator: Session) -> None:
        match message:
            case Apply(clip=clip, learning_rate=rate, bound=bound):
                pushed = self._taken(PushKey(message.instance, message.lease))
                self._store.take(pushed.gradient)
                self._store.step(clip, rate, bound)
                self._snapshot = None
                _give_back(pushed)
            case Discard(instance=instance, lease=lease):
                _give_back(self._taken(PushKey(instance, lease)))
            case SendWeights(instance=instance, version=version):
                if self._snapshot is None:  # whoever gets the same version shares one copy
                    self._snapshot = self._frames({WEIGHTS: self._store.weights}, version)
                self._send(instance, self._snapshot)

    def _taken(self, key: PushKey) -> Pushed:
        if (pushed := self._pushes.pop(key, None)) is None:
            raise ProtocolError("it decided on a push that has not arrived")
        return pushed


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


class PushReceiver(GradientReceiver):
    """Takes a worker's pushes; one may arrive while another waits for the coordinator's word."""

    def __init__(
        self,
        session_id: int,
        codec_name: str,
        buckets: Sequence[slice],
        *,
        has_loss_scale: bool,
        span: range,
        memory: GradientBuffers,
        closed: threading.Event,
    ) -> None:
        """`closed` is set when the store is one no more: nobody may wait for it then."""
        what = session_id, codec_name, buckets, None, memory
        super().__init__(*what, has_loss_scale=has_loss_scale, span=span)
        self._places = threading.Semaphore(PUSHES_HELD)
        self._closed = closed

    def begin(self) -> None:
        """Its next push begins: the reader waits until the coordinator has decided on older ones."""
        while not self._places.acquire(timeout=TICK_S):
            if self._closed.is_set():
                raise PeerLost("the store has lost its slice")

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        event = super().__call__(message, payload)
        if isinstance(event, Pushed):  # the next one has memory of its own
            self._gradient = None
        return event

    def give_back(self, gradient: Tensor) -> None:
        self._memory.give_back(gradient)
        self._places.release()


def _give_back(pushed: Pushed) -> None:
    if isinstance(pushed.receiver, PushReceiver):
        pushed.receiver.give_back(pushed.gradient)
