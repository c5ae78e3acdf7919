"""Buckets on the wire, a frame each: gradients (or whole weights) from a worker, the server's state to it.

`GradientSender` (worker) -> `PushOrder` checks -> `GradientReceiver` (server), where a push is needed whole.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.codec.base import NonFiniteValue, bytes_of
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.net.session import Receiver
from smolcluster.ps.buffers import BufferCollector
from smolcluster.training.buffers import BufferValues
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.training.scaler import LEAST_SCALE
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    Buffers,
    LeaseKey,
    Message,
    Push,
    TensorSpec,
    frame_of,
)
from smolcluster.transport.streams import bucket_length, bucket_spec

DIGEST_NBYTES = 8
SPARE_AFTER = 16
"""A buffer that was not needed for so many pushes is let go."""


def digests_spec(num_buckets: int) -> TensorSpec:
    nbytes = DIGEST_NBYTES * num_buckets
    return TensorSpec(codec="raw", dtype="xxh3-64", shape=(num_buckets,), nbytes=nbytes)


class GradientSender:
    """Encodes one gradient at a time; its bytes live until they are sent, its residual until `settle`.

    With `in_place` a lossless gradient is not copied: its frames refer to the replica's own memory, which
    must not change before they have been sent.
    """

    def __init__(self, codec_name: str, replica: Replica, *, in_place: bool = False) -> None:
        self._replica = replica
        self._meter = replica.meter
        self._codec = get_codec(codec_name)
        self._lossless = get_codec(lossless_for(replica.params.dtype))
        self._in_place = in_place
        self._feedback = (
            None if self._codec.lossless else ErrorFeedback(self._codec, replica.num_params)
        )

    def frames(
        self,
        lease: LeaseKey,
        base_version: int,
        loss: BatchLoss,
        compute_s: float,
        weights: Tensor | None = None,
        *,
        backup_from: int | None = None,
    ) -> Iterator[Frame]:
        """Encode the replica's gradient, bucket by bucket, into frames: see `pushes`."""
        what = lease, base_version, loss, compute_s, weights
        for push, payload in self.pushes(*what, backup_from=backup_from):
            yield frame_of(push, payload)

    def pushes(
        self,
        lease: LeaseKey,
        base_version: int,
        loss: BatchLoss,
        compute_s: float,
        weights: Tensor | None = None,
        *,
        backup_from: int | None = None,
        share: float = 1.0,
    ) -> Iterator[tuple[Push, memoryview]]:
        """The messages of those frames, and their payloads, which have memory of their own.

        With `weights` (num_params,) on the CPU these are sent instead; that takes a lossless codec. With
        `backup_from` only the buckets from that one on, lossless, as the replica's own memory.
        `share` is what the push counts in the sum that is applied, as far as is known: see `ErrorFeedback`.

        Raises:
            NonFiniteLoss: a bucket that is encoded holds NaN or infinity; its layer is named.
        """
        is_backup = backup_from is not None
        codec = self._lossless if is_backup else self._codec
        is_in_place = is_backup or (self._in_place and codec.lossless)
        push = self._header(lease, base_version, loss, compute_s)
        values = self._replica.host_gradient() if weights is None else weights
        what = "gradient" if weights is None else "weights"
        for number, bucket in list(enumerate(self._replica.buckets))[backup_from or 0 :]:
            if is_in_place:
                payload = bytes_of(values[bucket])
            else:
                with self._meter("encode"):
                    payload = self._encode(
                        number, values[bucket], share if push.num_terms else 0, what
                    )
            if not is_backup:
                self._meter.raw_bytes += values[bucket].nbytes
                self._meter.encoded_bytes += payload.nbytes
            spec = bucket_spec(codec, bucket)
            yield push.model_copy(update={"bucket": number, "tensor": spec}), payload

    def settle(self, num_buckets: int | None = None, share: float | None = None) -> None:
        """The first `num_buckets` buckets (None: all) of the last push have counted, `share` if given.

        The others give their mass back.
        """
        if self._feedback is not None:
            buckets = self._replica.buckets
            count = len(buckets) if num_buckets is None else num_buckets
            self._feedback.commit(buckets[count - 1].stop if count else 0, share)

    def _header(
        self, lease: LeaseKey, base_version: int, loss: BatchLoss, compute_s: float
    ) -> Push:
        return Push(
            lease=lease,
            base_version=base_version,
            bucket=0,
            num_buckets=len(self._replica.buckets),
            num_samples=lease.stop - lease.start,
            num_terms=loss.num_terms,
            loss=None if math.isnan(loss.mean) else loss.mean,
            learning_rate=loss.learning_rate,
            overflow=loss.overflow,
            compute_s=compute_s,
            tensor=bucket_spec(self._codec, self._replica.buckets[0]),
        )

    def _encode(self, number: int, values: Tensor, share: float, what: str) -> memoryview:
        bucket = self._replica.buckets[number]
        size = self._codec.encoded_nbytes(bucket_length(bucket))
        encoded = torch.empty(size, dtype=torch.uint8)
        try:
            if self._feedback is None or share == 0:  # what weighs nothing pays no debts
                self._codec.encode(values, encoded)
            else:
                self._feedback.encode(bucket, values, encoded, share)
        except NonFiniteValue as error:
            name = self._replica.parameter_at(bucket.start + error.index)
            raise NonFiniteLoss(f"{what} at layer {name} cannot be sent: {error}") from error
        return bytes_of(encoded)


class PushOrder:
    """Checks the pushes of one worker: whole, one after the other, buckets in order."""

    def __init__(
        self,
        buckets: Sequence[slice],
        codec_name: str,
        *,
        partial: bool = False,
        has_loss_scale: bool = False,
        span: range | None = None,
    ) -> None:
        """What may come.

        Args:
            buckets: places in the flat gradient.
            codec_name: the one agreed on.
            partial: a push may begin with any bucket, and may be lossless whatever the codec.
            has_loss_scale: a gradient may overflow with it.
            span: the numbers of the buckets that come here, the others go elsewhere; None: all.
        """
        self._span = range(len(buckets)) if span is None else span
        self._has_loss_scale = has_loss_scale
        self._buckets = buckets
        self._codec = get_codec(codec_name)
        self._partial = partial
        self._lossless = get_codec(lossless_for(self._codec.dtype))
        self._next = 0
        self._lease: LeaseKey | None = None

    @property
    def in_progress(self) -> bool:
        return self._lease is not None

    def give_up(self, lease: LeaseKey) -> None:
        """No more comes of this push."""
        if self._lease == lease:
            self._lease = None

    def take(self, push: Push) -> bool:
        """Note the next frame of a push; returns whether it is the last one.

        Raises:
            ProtocolError: it is not what may come next.
        """
        if self._lease is None:
            self._next = push.bucket if self._partial else self._span.start
        elif push.lease != self._lease:
            raise ProtocolError("it began another push in the middle of one")
        known = push.bucket in self._span and push.num_buckets == len(self._buckets)
        if not known or push.bucket != self._next:
            raise ProtocolError(
                f"it sent bucket {push.bucket} of {push.num_buckets}, "
                f"expected {self._next} of {len(self._buckets)}"
            )
        if push.num_samples != push.lease.stop - push.lease.start:
            raise ProtocolError(f"its push of {push.num_samples} samples does not fit its lease")
        self._check_overflow(push.overflow)
        if push.tensor != bucket_spec(self._codec, self._buckets[push.bucket]) and not (
            self._partial and push.tensor == bucket_spec(self._lossless, self._buckets[push.bucket])
        ):
            raise ProtocolError(
                f"bucket {push.bucket} is not the {self._codec.name} tensor agreed on"
            )
        self._next += 1
        last = self._next == self._span.stop
        self._lease = None if last else push.lease
        return last

    def _check_overflow(self, scale: float | None) -> None:
        if scale is None or (self._has_loss_scale and scale > LEAST_SCALE):
            return
        reason = f"is not above {LEAST_SCALE:g}" if self._has_loss_scale else "this run has none"
        raise ProtocolError(f"its gradient overflowed with a loss scale of {scale:g}: {reason}")


@dataclass(frozen=True)
class Pushed(Event):
    """A whole push has arrived: a `gradient` (num_params,), or with the update rule `mixing` weights.

    Where its receiver takes only some buckets it is of these. `buffers`: what computing it has added to them.
    The tensor is the server's until `receiver.free()`.
    """

    session_id: int
    push: Push
    gradient: Tensor
    receiver: "GradientReceiver"
    buffers: BufferValues


class GradientBuffers:
    """Memory for pushes, shared by all workers: as much as there were pushes at one time. Any thread."""

    def __init__(self) -> None:
        self._idle: list[Tensor] = []
        self._num_taken = 0
        self._num_spare = 0
        """Buffers that nobody has needed since `_num_taken` was 0."""
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer (numel,) with anything in it; it is the caller's until it is given back."""
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
            self._num_spare = min(self._num_spare, len(self._idle))
            self._num_taken += 1
            if self._num_taken == SPARE_AFTER:
                del self._idle[: self._num_spare]
                self._num_taken, self._num_spare = 0, len(self._idle)
        if buffer is None or buffer.numel() != numel or buffer.dtype != dtype:
            return torch.empty(numel, dtype=dtype)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        with self._lock:
            self._idle.append(buffer)


class GradientReceiver(Receiver):
    """Decodes one worker's pushes, each into a buffer that it hands over with the last bucket."""

    def __init__(
        self,
        session_id: int,
        codec_name: str,
        buckets: Sequence[slice],
        collector: BufferCollector | None = None,
        memory: GradientBuffers | None = None,
        *,
        has_loss_scale: bool = False,
        span: range | None = None,
    ) -> None:
        """Receive for one worker.

        Args:
            session_id: the worker's session.
            codec_name: the one agreed on.
            buckets: places in the flat gradient.
            collector: takes the buffers that the model changes; None: it has none.
            memory: where the buffers for its pushes come from; None: from memory of its own.
            has_loss_scale: a gradient may overflow with it.
            span: the numbers of the buckets that come here, the others go elsewhere; None: all.
        """
        self.session_id = session_id
        self._codec = get_codec(codec_name)
        self._buckets = buckets
        self._order = PushOrder(buckets, codec_name, has_loss_scale=has_loss_scale, span=span)
        held = buckets if span is None else buckets[span.start : span.stop]
        self._start, self._stop = held[0].start, held[-1].stop
        self._collector = collector
        self._buffers: tuple[LeaseKey | None, BufferValues] = (None, {})
        self._memory = memory or GradientBuffers()
        self._gradient: Tensor | None = None
        self._taken = False

    @property
    def in_progress(self) -> bool:
        return self._order.in_progress

    def free(self) -> None:
        """The push that was handed over is needed no more."""
        self._give_back()
        self._taken = False

    def close(self) -> None:
        if not self._taken:  # else whoever has the push frees it
            self._give_back()

    def _give_back(self) -> None:
        gradient, self._gradient = self._gradient, None
        if gradient is not None:
            self._memory.give_back(gradient)

    def begin(self) -> None:
        """Its next push begins.

        Raises:
            ProtocolError: none may come yet.
        """
        if self._taken:
            raise ProtocolError("it pushed again before its last push was acknowledged")

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message in the reader's thread; a push is passed on when it is whole."""
        if isinstance(message, Buffers) and self._collector is not None:
            if self.in_progress:
                raise ProtocolError("it sent buffers in the middle of a push")
            if (values := self._collector.take(message, payload)) is not None:
                self._buffers = message.lease, values
            return None
        if not isinstance(message, Push):
            return MessageReceived(self.session_id, message)
        if not self.in_progress:
            self.begin()
        whole = self._order.take(message)
        if self._gradient is None:
            self._gradient = self._memory.take(self._stop - self._start, self._codec.dtype)
        encoded = torch.frombuffer(payload, dtype=torch.uint8)
        place = self._buckets[message.bucket]
        gradient = self._gradient
        self._codec.decode(encoded, gradient[place.start - self._start : place.stop - self._start])
        if not whole:
            return None
        self._taken = True
        (lease, buffers), self._buffers = self._buffers, (None, {})
        if lease != message.lease:
            buffers = {}
        return Pushed(self.session_id, message, gradient, self, buffers)
