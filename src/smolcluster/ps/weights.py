"""The server's weights on their way to a worker that takes them all at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import ProtocolError
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.net.session import Receiver
from smolcluster.ps.assignment import Assigned
from smolcluster.ps.push import bucket_length, bucket_spec, state_frame
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import WEIGHTS, Assignment, Message, State


def state_frames(
    incarnation: str, version: int, weights: Tensor, buckets: Sequence[slice]
) -> list[Frame]:
    """Frames of the weights (num_params,) at `version`, to be shared by all who ask for them."""
    return [
        state_frame(weights[bucket], number, len(buckets), incarnation=incarnation, version=version)
        for number, bucket in enumerate(buckets)
    ]


@dataclass(frozen=True)
class WeightsArrived(Event):
    """The server's weights of `version`: its buckets, flat and in order, whole."""

    version: int
    weights: list[Tensor]


class StateReceiver(Receiver):
    """A worker's receiver: collects weights, unpacks assignments, passes everything else on.

    Each bucket has memory of its own, which is free again as soon as the worker has taken the weights over.
    """

    def __init__(self, buckets: Sequence[slice], dtype: torch.dtype) -> None:
        self._codec = get_codec(lossless_for(dtype))
        self._buckets = buckets
        self._weights: list[Tensor] = []
        self._version = 0

    @property
    def in_progress(self) -> bool:
        """Whether weights have begun to arrive and are not whole."""
        return bool(self._weights)

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message in the reader's thread."""
        if isinstance(message, Assignment):
            return Assigned(message, payload)
        if isinstance(message, State):
            return self._take(message, payload)
        return MessageReceived(0, message)

    def _take(self, state: State, payload: memoryview) -> Event | None:
        number, expected = state.bucket, len(self._weights)
        in_order = (number, state.num_buckets) == (expected, len(self._buckets))
        if not in_order or (expected and state.version != self._version):
            raise ProtocolError(
                f"the server sent bucket {number} of {state.num_buckets} of its weights, "
                f"expected {expected} of {len(self._buckets)}"
            )
        agreed = bucket_spec(self._codec, self._buckets[number])
        if (state.content, state.tensor) != (WEIGHTS, agreed):
            raise ProtocolError(
                f"bucket {number} of the server's weights is not of the agreed shape"
            )
        values = torch.empty(bucket_length(self._buckets[number]), dtype=self._codec.dtype)
        self._codec.decode(torch.frombuffer(payload, dtype=torch.uint8), values)
        self._weights.append(values)
        self._version = state.version
        if len(self._weights) < len(self._buckets):
            return None
        weights, self._weights = self._weights, []
        return WeightsArrived(state.version, weights)
