"""What EDP's server and workers exchange, both ends of each transfer side by side.

* a gradient: `GradientSender` (worker) -> `GradientReceiver` (server), encoded, a frame a bucket;
  with the update rule `mixing` the worker's weights instead, in the same frames;
* the weights: `state_frames` (server) -> `StateReceiver` (worker), plain fp32, a frame a bucket.

Receivers run in a session's reader thread. They check every frame against what may come next, write into
buffers of their own, and hand these over with the last bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from smolcluster.cluster.inbox import Event, MessageReceived
from smolcluster.cluster.session import Receiver
from smolcluster.cluster.tensors import (
    Assigned,
    bucket_length,
    bucket_spec,
    state_frame,
    work_payload,
)
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import ProtocolError
from smolcluster.ps.leases import Lease
from smolcluster.ps.push import PushOrder
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import WEIGHTS, Assignment, Message, Push, State


@dataclass(frozen=True)
class Pushed(Event):
    """A whole push has arrived: a `gradient` (num_params,), or with the update rule `mixing` weights.

    The tensor is the server's until `receiver.free()`.
    """

    session_id: int
    push: Push
    gradient: Tensor
    receiver: "GradientReceiver"


@dataclass(frozen=True)
class WeightsArrived(Event):
    """The server's weights of `version`: its buckets, flat and in order, whole."""

    version: int
    weights: list[Tensor]


class GradientReceiver(Receiver):
    """Decodes one worker's pushes into a buffer of its own; hands it over with the last bucket."""

    def __init__(self, session_id: int, codec_name: str, buckets: Sequence[slice]) -> None:
        self.session_id = session_id
        self._codec = get_codec(codec_name)
        self._buckets = buckets
        self._order = PushOrder(buckets, codec_name)
        self._gradient: Tensor | None = None
        self._taken = False

    @property
    def in_progress(self) -> bool:
        """Whether a push has begun and not ended."""
        return self._order.in_progress

    def free(self) -> None:
        """The server has done with the gradient."""
        self._taken = False

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message in the reader's thread; a push is passed on when it is whole."""
        if not isinstance(message, Push):
            return MessageReceived(self.session_id, message)
        if self._taken:
            raise ProtocolError("it pushed again before its last push was acknowledged")
        whole = self._order.take(message)
        if self._gradient is None:
            self._gradient = torch.empty(self._buckets[-1].stop, dtype=self._codec.dtype)
        encoded = torch.frombuffer(payload, dtype=torch.uint8)
        self._codec.decode(encoded, self._gradient[self._buckets[message.bucket]])
        if not whole:
            return None
        self._taken = True
        return Pushed(self.session_id, message, self._gradient, self)


def assignment_of(
    lease: Lease, version: int, learning_rate: float, rows: NDArray[Any] | None = None
) -> tuple[Assignment, memoryview]:
    """The message that hands out a lease when the weights are at `version`, and its payload.

    `rows`: the samples themselves, where workers do not have them.
    """
    spec, rows_spec, payload = work_payload(lease.indices, rows)
    return Assignment(
        lease=lease.key,
        version=version,
        learning_rate=learning_rate,
        tensor=spec,
        rows=rows_spec,
    ), payload


def state_frames(
    incarnation: str, version: int, weights: Tensor, buckets: Sequence[slice]
) -> list[Frame]:
    """Frames of the weights (num_params,) at `version`, to be shared by all who ask for them."""
    return [
        state_frame(weights[bucket], number, len(buckets), incarnation=incarnation, version=version)
        for number, bucket in enumerate(buckets)
    ]


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
