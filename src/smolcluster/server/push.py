"""Buckets on the wire, a frame each: gradients (or whole weights) from a worker, the server's state to it.

`GradientSender` (worker) -> `GradientReceiver` (server), where a push is needed whole.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from smolcluster.codec.base import NonFiniteValue, bytes_of
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.store import Part, PartArrived
from smolcluster.training.buffers import BufferValues
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.training.scaler import LEAST_SCALE
from smolcluster.utils.units import format_count
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Buffers,
    LeaseKey,
    Message,
    Push,
    TensorSpec,
    frame_of,
)
from smolcluster.wire.session import Receiver
from smolcluster.wire.streams import Assembler, Piece, bucket_length, span_pieces

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
        pushes = self.pushes(lease, base_version, loss, compute_s, weights, backup_from=backup_from)
        for push, payload in pushes:
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
        pieces = span_pieces(codec, self._replica.buckets)
        push = Push(
            lease=lease,
            base_version=base_version,
            num_samples=lease.stop - lease.start,
            num_terms=loss.num_terms,
            loss=None if math.isnan(loss.mean) else loss.mean,
            learning_rate=loss.learning_rate,
            overflow=loss.overflow,
            compute_s=compute_s,
            **pieces[0].fields,
        )
        values = self._replica.host_gradient() if weights is None else weights
        what = "gradient" if weights is None else "weights"
        for piece in pieces[backup_from or 0 :]:
            bucket = piece.place
            if is_in_place:
                payload = bytes_of(values[bucket])
            else:
                with self._meter("encode"):
                    payload = self._encode(bucket, values, share if push.num_terms else 0, what)
            if not is_backup:
                self._meter.raw_bytes += values[bucket].nbytes
                self._meter.encoded_bytes += payload.nbytes
            yield push.model_copy(update=piece.fields), payload

    def settle(self, num_buckets: int | None = None, share: float | None = None) -> None:
        """The first `num_buckets` buckets (None: all) of the last push have counted, `share` if given.

        The others give their mass back.
        """
        if self._feedback is not None:
            buckets = self._replica.buckets
            count = len(buckets) if num_buckets is None else num_buckets
            self._feedback.commit(buckets[count - 1].stop if count else 0, share)

    def forget(self) -> None:
        """Which buckets of the last push have counted is not known: nothing is owed any more."""
        if self._feedback is not None:
            self._feedback.forget()

    def _encode(self, bucket: slice, values: Tensor, share: float, what: str) -> memoryview:
        size = self._codec.encoded_nbytes(bucket_length(bucket))
        encoded = torch.empty(size, dtype=torch.uint8)
        try:
            if self._feedback is None or share == 0:  # what weighs nothing pays no debts
                self._codec.encode(values[bucket], encoded)
            else:
                self._feedback.encode(bucket, values[bucket], encoded, share)
        except NonFiniteValue as error:
            name = self._replica.parameter_at(bucket.start + error.index)
            raise NonFiniteLoss(f"{what} at layer {name} cannot be sent: {error}") from error
        return bytes_of(encoded)


def push_assembler(
    buckets: Sequence[slice],
    codec_name: str,
    memory_for: Callable[..., Tensor] = torch.empty,
    *,
    partial: bool = False,
    has_loss_scale: bool = False,
    span: range | None = None,
) -> Assembler[Push]:
    """Puts the pushes of one worker together: whole, one after the other, buckets in order.

    Args:
        buckets: places in the flat gradient.
        codec_name: the one agreed on.
        memory_for: see `Assembler`.
        partial: a push may begin with any bucket, and may be lossless whatever the codec.
        has_loss_scale: a gradient may overflow with it.
        span: the numbers of the buckets that come here, the others go elsewhere; None: all.
    """
    agreed = get_codec(codec_name)
    codecs = (agreed, get_codec(lossless_for(agreed.dtype))) if partial else (agreed,)
    expected = {codec.name: span_pieces(codec, buckets, span) for codec in reversed(codecs)}

    def pieces_of(push: Push) -> Sequence[Piece]:
        if push.num_samples != push.lease.stop - push.lease.start:
            raise ProtocolError(
                f"its push of {format_count(push.num_samples, 'sample')} does not fit its lease"
            )
        scale = push.overflow
        if scale is not None and not (has_loss_scale and scale > LEAST_SCALE):
            reason = f"is not above {LEAST_SCALE:g}" if has_loss_scale else "this run has none"
            raise ProtocolError(f"its gradient overflowed with a loss scale of {scale:g}: {reason}")
        pieces = expected.get(push.tensor.codec, expected[codec_name])
        first = push.bucket - (span.start if span else 0)
        return pieces[first:] if partial and 0 <= first < len(pieces) else pieces

    return Assembler("push", pieces_of, memory_for, varies=("held_s",))


@dataclass(frozen=True, kw_only=True)
class Pushed(PartArrived):
    """A whole push has arrived: a gradient (num_params,), or with the update rule `mixing` weights.

    Where its receiver takes only some buckets it is of these. `buffers`: what computing it has added to them.
    """

    push: Push
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
        self._collector = collector
        self._buffers: tuple[LeaseKey | None, BufferValues] = (None, {})
        self._memory = memory or GradientBuffers()
        self._pushes = push_assembler(
            buckets, codec_name, self._memory.take, has_loss_scale=has_loss_scale, span=span
        )
        self._first_bucket = 0 if span is None else span.start
        self._is_needed = False
        """Whether a push was handed over that is not free."""

    @property
    def in_progress(self) -> bool:
        return self._pushes.first is not None

    def _free(self, gradient: Tensor) -> None:
        """A push that was handed over is needed no more. Any thread."""
        self._memory.give_back(gradient)
        self._is_needed = False

    def close(self) -> None:
        if (gradient := self._pushes.take_back()) is not None:
            self._memory.give_back(gradient)

    def begin(self) -> None:
        """Its next push begins.

        Raises:
            ProtocolError: none may come yet.
        """
        if self._is_needed:
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
        _, gradient = self._pushes.take(message, payload)
        if gradient is None:
            return None
        self._is_needed = True
        (lease, buffers), self._buffers = self._buffers, (None, {})
        if lease != message.lease:
            buffers = {}
        return Pushed(
            session_id=self.session_id,
            of=message.lease,
            fragment=0,
            bucket=self._first_bucket,
            values=gradient,
            part=Part(0, gradient, partial(self._free, gradient)),
            push=message,
            buffers=buffers,
        )
