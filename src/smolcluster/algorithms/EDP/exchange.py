"""What EDP's server and workers exchange, both ends of each transfer side by side.

* a gradient: `GradientSender` (worker) -> `GradientReceiver` (server), encoded, a frame a bucket;
* the weights: `state_frames` (server) -> `StateReceiver` (worker), plain fp32, a frame a bucket.

Receivers run in a session's reader thread. They check every frame against what may come next, write into
buffers of their own, and hand these over with the last bucket.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.cluster.inbox import Event, Said
from smolcluster.codec.base import Codec, NonFiniteValue
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    Assignment,
    LeaseKey,
    Message,
    Push,
    State,
    TensorSpec,
    frame_of,
)


@dataclass(frozen=True)
class Pushed(Event):
    """A whole `gradient` (num_params,) has arrived; it is the server's until `receiver.free()`."""

    seat: int
    push: Push
    gradient: Tensor
    receiver: "GradientReceiver"


@dataclass(frozen=True)
class Assigned(Event):
    """Samples to compute: `indices` (num_samples,) int32 into the training split."""

    lease: LeaseKey
    learning_rate: float
    indices: Tensor


@dataclass(frozen=True)
class WeightsArrived(Event):
    """The server's weights of `version`, flat (num_params,), whole."""

    version: int
    weights: Tensor


class GradientSender:
    """Encodes one gradient at a time; its bytes and residual stay until `settle`."""

    def __init__(self, codec_name: str, replica: Replica) -> None:
        self._replica = replica
        self._codec = get_codec(codec_name)
        self._feedback = (
            None if self._codec.lossless else ErrorFeedback(self._codec, replica.num_params)
        )
        sizes = [self._codec.encoded_nbytes(_length(bucket)) for bucket in replica.buckets]
        self._encoded = [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def frames(self, lease: LeaseKey, base_version: int, loss: float) -> Iterator[Frame]:
        """Encode the replica's gradient, bucket by bucket, into frames that share this sender's memory."""
        gradient = self._replica.host_gradient()
        num_samples = lease.stop - lease.start
        for number, bucket in enumerate(self._replica.buckets):
            encoded = self._encoded[number]
            self._encode(bucket, gradient[bucket], num_samples, encoded)
            push = Push(
                lease=lease,
                base_version=base_version,
                bucket=number,
                num_buckets=len(self._encoded),
                num_samples=num_samples,
                loss=loss,
                tensor=_spec(self._codec, bucket),
            )
            yield frame_of(push, _bytes_of(encoded))

    def settle(self, applied: bool) -> None:
        """Keep the residual of the last push if it was applied; otherwise it gives its mass back."""
        if self._feedback is not None:
            (self._feedback.commit if applied else self._feedback.rollback)()

    def _encode(self, bucket: slice, gradient: Tensor, num_samples: int, out: Tensor) -> None:
        try:
            if self._feedback is None:
                self._codec.encode(gradient, out)
            else:
                self._feedback.encode(bucket, gradient, num_samples, out)
        except NonFiniteValue as error:
            name = self._replica.parameter_at(bucket.start + error.index)
            raise NonFiniteLoss(f"gradient at layer {name} cannot be sent: {error}") from error


class GradientReceiver:
    """Decodes one worker's pushes into a buffer of its own; hands it over with the last bucket."""

    def __init__(self, seat: int, codec_name: str, buckets: Sequence[slice]) -> None:
        self.seat = seat
        self._codec = get_codec(codec_name)
        self._buckets = buckets
        self._gradient: Tensor | None = None
        self._taken = False
        self._next = 0
        self._lease: LeaseKey | None = None

    @property
    def in_progress(self) -> bool:
        """Whether a push has begun and not ended."""
        return self._next > 0

    def free(self) -> None:
        """The server has done with the gradient."""
        self._taken = False

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message in the reader's thread; a push is passed on when it is whole."""
        if not isinstance(message, Push):
            return Said(self.seat, message)
        self._check(message)
        if self._gradient is None:
            self._gradient = torch.empty(self._buckets[-1].stop)
        encoded = torch.frombuffer(payload, dtype=torch.uint8)
        self._codec.decode(encoded, self._gradient[self._buckets[message.bucket]])
        self._next += 1
        if self._next < len(self._buckets):
            return None
        self._next, self._lease, self._taken = 0, None, True
        return Pushed(self.seat, message, self._gradient, self)

    def _check(self, push: Push) -> None:
        if self._taken:
            raise ProtocolError("it pushed again before its last push was acknowledged")
        if push.bucket != self._next or push.num_buckets != len(self._buckets):
            raise ProtocolError(
                f"it sent bucket {push.bucket} of {push.num_buckets}, "
                f"expected {self._next} of {len(self._buckets)}"
            )
        if self._next and push.lease != self._lease:
            raise ProtocolError("it began another push in the middle of one")
        if push.num_samples != push.lease.stop - push.lease.start:
            raise ProtocolError(f"its push of {push.num_samples} samples does not fit its lease")
        if push.tensor != _spec(self._codec, self._buckets[push.bucket]):
            raise ProtocolError(
                f"bucket {push.bucket} is not the {self._codec.name} tensor agreed on"
            )
        self._lease = push.lease


def state_frames(
    incarnation: str, version: int, weights: Tensor, buckets: Sequence[slice]
) -> list[Frame]:
    """Frames of the weights (num_params,) fp32 at `version`, to be shared by all who ask for them."""
    codec = get_codec("fp32")
    return [
        frame_of(
            State(
                incarnation=incarnation,
                version=version,
                bucket=number,
                num_buckets=len(buckets),
                tensor=_spec(codec, bucket),
            ),
            _bytes_of(weights[bucket]),
        )
        for number, bucket in enumerate(buckets)
    ]


class StateReceiver:
    """A worker's receiver: puts weights together, unpacks assignments, passes everything else on."""

    def __init__(self, buckets: Sequence[slice]) -> None:
        self._codec = get_codec("fp32")
        self._buckets = buckets
        self._weights: Tensor | None = None
        self._next = 0
        self._version = 0

    @property
    def in_progress(self) -> bool:
        """Whether weights have begun to arrive and are not whole."""
        return self._next > 0

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message in the reader's thread."""
        if isinstance(message, Assignment):
            if message.tensor != _indices_spec(message.lease.stop - message.lease.start):
                raise ProtocolError("the server's assignment does not hold its lease's indices")
            indices = torch.frombuffer(bytearray(payload), dtype=torch.int32)
            return Assigned(message.lease, message.learning_rate, indices)
        if isinstance(message, State):
            return self._take(message, payload)
        return Said(0, message)

    def _take(self, state: State, payload: memoryview) -> Event | None:
        in_order = (state.bucket, state.num_buckets) == (self._next, len(self._buckets))
        if not in_order or (self._next and state.version != self._version):
            raise ProtocolError(
                f"the server sent bucket {state.bucket} of {state.num_buckets} of its weights, "
                f"expected {self._next} of {len(self._buckets)}"
            )
        if state.tensor != _spec(self._codec, self._buckets[state.bucket]):
            raise ProtocolError(
                f"bucket {state.bucket} of the server's weights is not of the agreed shape"
            )
        if self._weights is None:
            self._weights = torch.empty(self._buckets[-1].stop)
        encoded = torch.frombuffer(payload, dtype=torch.uint8)
        self._codec.decode(encoded, self._weights[self._buckets[state.bucket]])
        self._version = state.version
        self._next = (self._next + 1) % len(self._buckets)
        return WeightsArrived(state.version, self._weights) if self._next == 0 else None


def indices_payload(indices: Tensor) -> tuple[TensorSpec, memoryview]:
    """Describe and lay out the indices (num_samples,) int32 of an assignment."""
    return _indices_spec(indices.numel()), _bytes_of(indices)


def _indices_spec(num_samples: int) -> TensorSpec:
    return TensorSpec(codec="raw", dtype="int32", shape=(num_samples,), nbytes=4 * num_samples)


def _spec(codec: Codec, bucket: slice) -> TensorSpec:
    length = _length(bucket)
    return TensorSpec(
        codec=codec.name, dtype="float32", shape=(length,), nbytes=codec.encoded_nbytes(length)
    )


def _length(bucket: slice) -> int:
    return int(bucket.stop - bucket.start)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")
