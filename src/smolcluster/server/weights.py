"""The server's weights on their way to a worker that takes them all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smolcluster.server.assignment import AssignmentReceiver
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.slices import slice_pieces
from smolcluster.training.buffers import BufferValues
from smolcluster.training.build import TrainingContext
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    WEIGHTS,
    Assignment,
    Buffers,
    Message,
    Served,
    State,
    StoreList,
)
from smolcluster.wire.session import Receiver
from smolcluster.wire.streams import (
    Assembler,
    bucket_length,
)


@dataclass(frozen=True)
class WeightsArrived(Event):
    """Weights of `version`: buckets, flat and in order, whole; and the server's `buffers`.

    `first` is the number of the first bucket: what several stores hold comes in several of these.
    """

    version: int
    weights: list[Tensor]
    buffers: BufferValues = field(default_factory=dict)
    first: int = 0


class StateReceiver(Receiver):
    """A worker's receiver: collects weights, unpacks assignments, passes everything else on.

    Each copy of the weights has memory of its own, free again as soon as the worker has taken them over.
    """

    def __init__(
        self,
        buckets: Sequence[slice],
        dtype: torch.dtype,
        collector: BufferCollector | None = None,
        training: TrainingContext | None = None,
        span: range | None = None,
    ) -> None:
        """Receive for a model.

        Args:
            buckets: of its weights, which are of type `dtype`.
            span: the numbers of those that come from this sender; None: all, as long as it names no stores.
            collector: takes the buffers that the model changes; None: it has none.
            training: begins to load the samples of an assignment as soon as that comes; None: nobody does.
        """
        self._collector = collector
        self._buffers: BufferValues = {}
        self._buckets = buckets
        self._span = range(len(buckets)) if span is None else span
        self._states = Assembler[State](
            "copy of the weights",
            lambda _: slice_pieces(buckets, self._span, (WEIGHTS,), dtype),
        )
        self._assignments = AssignmentReceiver(training)

    def place_for(self, message: Message) -> memoryview | None:
        return self._assignments.place_for(message) if isinstance(message, Served) else None

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, Assignment):
            return self._assignments.assigned(message, payload)
        if isinstance(message, Served):
            return None
        if isinstance(message, State):
            return self._take(message, payload)
        if isinstance(message, StoreList):
            self._span = range(min(place.first for place in message.stores))
        if isinstance(message, Buffers) and self._collector is not None:
            if (values := self._collector.take(message, payload)) is not None:
                self._buffers = values
            return None
        return MessageReceived(0, message)

    def _take(self, state: State, payload: memoryview) -> Event | None:
        _, weights = self._states.take(state, payload)
        if weights is None:
            return None
        sizes = [bucket_length(self._buckets[number]) for number in self._span]
        buckets = list(torch.split(weights, sizes))
        return WeightsArrived(state.version, buckets, self.take_buffers(), self._span.start)

    def forget(self) -> None:
        """What is on its way counts no more."""
        self._states.first, self._buffers = None, {}
        if self._collector is not None:
            self._collector.forget()

    def take_buffers(self) -> BufferValues:
        """The buffers that have come since the last weights."""
        buffers, self._buffers = self._buffers, {}
        return buffers
