"""Fragments on the wire: what a worker has changed, and what the server made of it, a frame for each bucket.

Both ways may be lossy. What a codec loses of a worker's change is added to its next one; what is lost of an
outer step, to the next outer step. The server takes the same decoded step as it sends, so that who had the
same weights before has the same weights after it, bit for bit.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.algorithms.DiLoCo.fragments import Fragment
from smolcluster.codec.base import Codec, NonFiniteValue, bytes_of
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.net.session import Receiver
from smolcluster.ps.buffers import BufferCollector
from smolcluster.ps.push import bucket_spec
from smolcluster.ps.weights import StateReceiver
from smolcluster.training.buffers import BufferValues
from smolcluster.training.build import TrainingContext
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import Buffers, Collect, Delta, Message, OuterStep, frame_of


@dataclass(frozen=True)
class Layout:
    """How a model's weights are cut: into fragments, and each of these into buckets."""

    fragments: Sequence[Fragment]
    bucket_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, replica: Replica, fragments: Sequence[Fragment]) -> "Layout":
        return cls(fragments, replica.bucket_bytes, replica.params.dtype)

    def buckets(self, number: int) -> list[slice]:
        """Places in the fragment's values, laid one after the other."""
        length = max(1, self.bucket_bytes // self.dtype.itemsize)
        numel = self.fragments[number].numel
        return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]

    def gather(self, number: int, flat: Tensor) -> Tensor:
        """A fragment's values of `flat` (num_params,), in memory of their own, on its device."""
        fragment = self.fragments[number]
        return fragment.gather(flat, flat.new_empty(fragment.numel))

    @property
    def lossless(self) -> Codec:
        return get_codec(lossless_for(self.dtype))


class Encoder:
    """Encodes a fragment's values, bucket by bucket; what is lost of them is added to the next ones."""

    def __init__(self, codec_name: str, layout: Layout) -> None:
        self.codec = get_codec(codec_name)
        self._layout = layout
        lossy = [] if self.codec.lossless else layout.fragments
        self.feedbacks = [ErrorFeedback(self.codec, fragment.numel) for fragment in lossy]
        """By fragment, with a lossy codec."""

    def encode(self, number: int, values: Tensor, weight: int) -> list[Tensor]:
        """The buckets of fragment `number`, encoded; `values` (numel,), on the CPU, count `weight` times.

        Raises:
            NonFiniteValue: they hold NaN or infinity; its index is that in the fragment.
        """
        encoded = []
        for bucket in self._layout.buckets(number):
            out = torch.empty(
                self.codec.encoded_nbytes(bucket.stop - bucket.start), dtype=torch.uint8
            )
            try:
                if self.feedbacks and weight:
                    self.feedbacks[number].encode(bucket, values[bucket], weight, out)
                else:
                    self.codec.encode(values[bucket], out)
            except NonFiniteValue as error:
                error.index += bucket.start
                raise
            encoded.append(out)
        return encoded

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is owed to the next changes, with the loss terms of the last ones."""
        owed = [feedback.owed for feedback in self.feedbacks]
        return {f"owed.{number}": values for number, (values, _) in enumerate(owed)} | {
            f"owed_terms.{number}": torch.tensor(terms) for number, (_, terms) in enumerate(owed)
        }

    def resume(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with such `tensors`."""
        for number, feedback in enumerate(self.feedbacks):
            feedback.committed.copy_(tensors[f"owed.{number}"])
            if terms := int(tensors[f"owed_terms.{number}"]):
                feedback.resume(self._layout.buckets(number), terms)

    def forget(self, number: int) -> None:
        """Whether the last values of a fragment have been applied is not known: nothing is owed twice."""
        if self.feedbacks:
            self.feedbacks[number] = ErrorFeedback(self.codec, self._layout.fragments[number].numel)

    def settle(self, number: int, *, is_applied: bool) -> None:
        """The last values of a fragment have been applied, or came to nothing."""
        if self.feedbacks:
            feedback = self.feedbacks[number]
            feedback.commit() if is_applied else feedback.rollback()


def delta_frames(
    layout: Layout, collect: Collect, encoded: Sequence[Tensor], codec: Codec
) -> list[Frame]:
    """The answer to `collect`."""
    buckets = layout.buckets(collect.fragment)
    return [
        frame_of(
            Delta(
                request=collect.request,
                fragment=collect.fragment,
                bucket=number,
                num_buckets=len(buckets),
                tensor=bucket_spec(codec, bucket),
            ),
            bytes_of(encoded[number]),
        )
        for number, bucket in enumerate(buckets)
    ]


def outer_frames(
    layout: Layout,
    number: int,
    encoded: Sequence[Tensor],
    codec: Codec,
    *,
    base_version: int | None,
    version: int,
) -> list[Frame]:
    """A fragment's weights of `version`, or what is to be taken from those of `base_version`."""
    buckets = layout.buckets(number)
    return [
        frame_of(
            OuterStep(
                fragment=number,
                base_version=base_version,
                version=version,
                bucket=place,
                num_buckets=len(buckets),
                tensor=bucket_spec(codec, bucket),
            ),
            bytes_of(encoded[place]),
        )
        for place, bucket in enumerate(buckets)
    ]


@dataclass(frozen=True)
class DeltaArrived(Event):
    """A fragment's change has come whole: `values` (numel,), and what was added to the model's buffers."""

    session_id: int
    request: int
    fragment: int
    values: Tensor
    buffers: BufferValues


@dataclass(frozen=True)
class FragmentArrived(Event):
    """A fragment's weights, `values` (numel,), or what is to be taken from those of `base_version`."""

    fragment: int
    base_version: int | None
    version: int
    values: Tensor
    buffers: BufferValues


class Assembly:
    """Puts the buckets of a fragment together as they come."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._first: Delta | OuterStep | None = None
        self._next = 0
        self._values = torch.empty(0)

    @property
    def in_progress(self) -> bool:
        return self._first is not None

    def take(self, message: Delta | OuterStep, payload: memoryview, codec: Codec) -> Tensor | None:
        """Decode the next bucket; returns the fragment's values when they are whole.

        Raises:
            ProtocolError: it is not what may come next.
        """
        if message.fragment >= len(self._layout.fragments):
            raise ProtocolError(f"there is no fragment {message.fragment}")
        buckets = self._layout.buckets(message.fragment)
        if self._first is None:
            self._first, self._next = message, 0
        place = self._next
        tensor = bucket_spec(codec, buckets[place])
        expected = {"bucket": place, "num_buckets": len(buckets), "tensor": tensor}
        if message != self._first.model_copy(update=expected):
            raise ProtocolError(
                f"bucket {message.bucket} of fragment {message.fragment} is not what comes next"
            )
        if place == 0:
            self._values = torch.empty(buckets[-1].stop, dtype=codec.dtype)
        codec.decode(torch.frombuffer(payload, dtype=torch.uint8), self._values[buckets[place]])
        self._next += 1
        if self._next < len(buckets):
            return None
        self._first = None
        return self._values


class DeltaReceiver(Receiver):
    """The server's, of one worker: puts its changes together, of which one a fragment may be unapplied."""

    def __init__(
        self, session_id: int, codec_name: str, layout: Layout, collector: BufferCollector
    ) -> None:
        self._session_id = session_id
        self._codec = get_codec(codec_name)
        self._assembly = Assembly(layout)
        self._collector = collector
        self._buffers: BufferValues = {}
        self._taken: set[int] = set()
        self.heard_at = -math.inf
        """When the last bucket came, of the monotonic clock: a slow link is not a worker that is late."""

    @property
    def in_progress(self) -> bool:
        return self._assembly.in_progress

    def free(self, fragment: int) -> None:
        """Its last change is needed no more."""
        self._taken.discard(fragment)

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, Buffers):
            if (buffers := self._collector.take(message, payload)) is not None:
                self._buffers = buffers
            return None
        if not isinstance(message, Delta):
            return MessageReceived(self._session_id, message)
        if message.fragment in self._taken:
            raise ProtocolError(f"it sent fragment {message.fragment} again before it was answered")
        values = self._assembly.take(message, payload, self._codec)
        self.heard_at = time.monotonic()
        if values is None:
            return None
        self._taken.add(message.fragment)
        added, self._buffers = self._buffers, {}
        return DeltaArrived(self._session_id, message.request, message.fragment, values, added)


class FragmentReceiver(StateReceiver):
    """A worker's: takes fragments besides whole weights and assignments."""

    def __init__(self, codec_name: str, layout: Layout, training: TrainingContext) -> None:
        """`codec_name`: of outer steps."""
        replica = training.replica
        collector = BufferCollector(replica.buffers, replica.bucket_bytes)
        super().__init__(replica.buckets, replica.params.dtype, collector, training)
        self._steps = get_codec(codec_name)
        self._whole = layout.lossless
        self._assembly = Assembly(layout)

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if not isinstance(message, OuterStep):
            return super().__call__(message, payload)
        codec = self._whole if message.base_version is None else self._steps
        values = self._assembly.take(message, payload, codec)
        if values is None:
            return None
        place = message.fragment, message.base_version, message.version
        return FragmentArrived(*place, values, self.take_buffers())


def name_of(fragment: Fragment, index: int, replica: Replica) -> str:
    """The parameter that a fragment's element `index` belongs to."""
    for place in fragment.places:
        if index < place.stop - place.start:
            return replica.parameter_at(place.start + index)
        index -= place.stop - place.start
    raise IndexError(f"a fragment of {fragment.numel} values has none of number {index}")


def cannot_be_sent(error: NonFiniteValue, fragment: Fragment, replica: Replica) -> NonFiniteLoss:
    name = name_of(fragment, error.index, replica)
    return NonFiniteLoss(f"what training has changed at layer {name} cannot be sent: {error}")
