"""Fragments on the wire: what a worker has changed, and what the server made of it, a frame for each bucket.

A worker exchanges them with all hosts that hold weights: see `Hosts`.

Both ways may be lossy. What a codec loses of a worker's change is added to its next one; what is lost of an
outer step, to the next outer step. The server takes the same decoded step as it sends, so that who had the
same weights before has the same weights after it, bit for bit.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from smolcluster.algorithms.DiLoCo.config import gradient_codec
from smolcluster.algorithms.DiLoCo.fragments import Fragment
from smolcluster.codec.base import Codec, NonFiniteValue
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import NonFiniteLoss, PeerLost, ProtocolError
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.link import Link
from smolcluster.server.store import Part, PartArrived
from smolcluster.server.store_client import StoreClient
from smolcluster.server.weights import StateReceiver, WeightsArrived
from smolcluster.training.buffers import BufferValues
from smolcluster.training.build import TrainingContext
from smolcluster.training.local_copy import Values
from smolcluster.training.optimizer import bucket_norms
from smolcluster.training.places import pieces
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Buffers,
    Collect,
    Delta,
    DeltaSent,
    Message,
    OuterStep,
    StoreList,
)
from smolcluster.wire.session import Receiver
from smolcluster.wire.streams import Assembler, Piece, bucket_pieces, stream_frames


@dataclass(frozen=True)
class Layout:
    """How a model's weights are cut: into fragments, and each of these into buckets.

    A fragment is cut where the flat weights are: so each of its buckets lies in one of theirs, and is the
    same on any number of hosts. A `part` is what one host holds: of each fragment some buckets, or none.
    """

    fragments: Sequence[Fragment]
    bucket_bytes: int
    dtype: torch.dtype
    whole: "Layout | None" = None
    """What it is a part of."""
    start: int = 0
    """The number of the first flat bucket that it holds."""

    @classmethod
    def of(cls, replica: Replica, fragments: Sequence[Fragment]) -> "Layout":
        return cls(fragments, replica.bucket_bytes, replica.params.dtype)

    def part(self, held: range) -> "Layout":
        """What lies in these buckets of the flat weights; places count from the first of them."""
        slice_ = slice(held.start * self._length, held.stop * self._length)
        fragments = [fragment.within(slice_) for fragment in self.fragments]
        return Layout(fragments, self.bucket_bytes, self.dtype, self, held.start)

    @property
    def _length(self) -> int:
        return max(1, self.bucket_bytes // self.dtype.itemsize)

    @cached_property
    def _buckets(self) -> list[list[tuple[int, slice]]]:
        return [fragment.buckets(self._length) for fragment in self.fragments]

    @cached_property
    def numbers(self) -> list[range]:
        """By fragment: the numbers of its buckets that are held here."""
        numbers = []
        for number, buckets in enumerate(self._buckets):
            before = self.whole.homes(number) if self.whole else []
            first = sum(home < self.start for home in before)
            numbers.append(range(first, first + len(buckets)))
        return numbers

    def homes(self, number: int) -> list[int]:
        """By bucket of a fragment: the number of the flat bucket that it lies in, counted as places are."""
        return [home for home, _ in self._buckets[number]]

    def buckets(self, number: int) -> list[slice]:
        """Places in the fragment's values, laid one after the other."""
        return [place for _, place in self._buckets[number]]

    def norms(self, number: int, values: Tensor) -> list[float]:
        """L2 norms of a fragment's values (numel,), by bucket."""
        buckets = self.buckets(number)
        return bucket_norms(values, buckets) if buckets else []

    def pieces(self, number: int, codec: Codec) -> list[Piece]:
        """A fragment on the wire, as far as it is held here.

        Raises:
            ProtocolError: there is no such fragment.
        """
        if number >= len(self.fragments):
            raise ProtocolError(f"there is no fragment {number}")
        num_in_all = len((self.whole or self)._buckets[number])
        return bucket_pieces(codec, self.buckets(number), self.numbers[number], num_in_all)

    def gather(self, number: int, flat: Tensor) -> Tensor:
        """A fragment's values of `flat` (num_params,), in memory of their own, on its device."""
        fragment = self.fragments[number]
        return fragment.gather(flat, flat.new_empty(fragment.numel))

    def nbytes(self, number: int) -> int:
        """Bytes of a fragment's values as they are."""
        return self.fragments[number].numel * self.dtype.itemsize


class Encoder:
    """Encodes a fragment's values, bucket by bucket; what is lost of them is added to the next ones."""

    def __init__(
        self, codec_name: str, layout: Layout, kept: Sequence[Fragment] | None = None
    ) -> None:
        """`kept`: fragments with as many values as what is lost has room for; None: the layout's."""
        self.codec = get_codec(codec_name)
        self._layout = layout
        lossy = [] if self.codec.lossless else kept or layout.fragments
        self.feedbacks = [ErrorFeedback(self.codec, fragment.numel) for fragment in lossy]
        """By fragment, with a lossy codec."""

    def encode(self, number: int, values: Values, *, counts: bool = True) -> list[Tensor]:
        """The buckets of fragment `number`, encoded; without `counts` they pay no debts.

        Raises:
            NonFiniteValue: they hold NaN or infinity; its index is that in the fragment.
        """
        encoded = []
        for bucket in self._layout.buckets(number):
            out = torch.empty(
                self.codec.encoded_nbytes(bucket.stop - bucket.start), dtype=torch.uint8
            )
            try:
                if self.feedbacks and counts:
                    self.feedbacks[number].encode(bucket, values[bucket], out)
                else:
                    self.codec.encode(values[bucket], out)
            except NonFiniteValue as error:
                error.index += bucket.start
                raise
            encoded.append(out)
        return encoded

    def encode_and_decode(
        self, number: int, values: Tensor, *, counts: bool = True
    ) -> tuple[list[Tensor], Tensor]:
        """As `encode`; also `values` (numel,), in the same memory, as everybody decodes them."""
        encoded = self.encode(number, values, counts=counts)
        for place, bucket in zip(self._layout.buckets(number), encoded, strict=True):
            self.codec.decode(bucket, values[place])
        return encoded, values

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is owed to the next changes."""
        return {f"owed.{number}": each.committed for number, each in enumerate(self.feedbacks)}

    def resume(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with such `tensors`."""
        for number, feedback in enumerate(self.feedbacks):
            feedback.committed.copy_(tensors[f"owed.{number}"])
            feedback.resume(self._layout.buckets(number))

    def forget(self, number: int) -> None:
        """Whether the last values of a fragment have been applied is not known: nothing is owed twice."""
        if self.feedbacks:
            self.feedbacks[number].forget()

    def settle(self, number: int, *, is_applied: bool) -> None:
        """The last values of a fragment have been applied, or came to nothing."""
        if self.feedbacks:
            feedback = self.feedbacks[number]
            feedback.commit() if is_applied else feedback.rollback()


def delta_frames(
    layout: Layout, collect: Collect, encoded: Sequence[Tensor], codec: Codec
) -> list[Frame]:
    """The answer to `collect`."""
    make = partial(Delta, request=collect.request, fragment=collect.fragment)
    return stream_frames(make, layout.pieces(collect.fragment, codec), encoded)


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
    make = partial(OuterStep, fragment=number, base_version=base_version, version=version)
    return stream_frames(make, layout.pieces(number, codec), encoded)


@dataclass(frozen=True, kw_only=True)
class DeltaArrived(PartArrived):
    """Buckets of a fragment's change have come; with the last one what the model's buffers have gained.

    Where all of it belongs to other hosts it has no values, and has been sent to these.
    """

    buffers: BufferValues


@dataclass(frozen=True)
class FragmentArrived(Event):
    """A fragment's weights, `values` (numel,), or what is to be taken from those of `base_version`.

    From one of several hosts come those that it holds; its flat buckets are `first` on.
    """

    fragment: int
    base_version: int | None
    version: int
    values: Tensor
    buffers: BufferValues
    first: int = 0


def step_assembler(codec_name: str, layout: Layout) -> Assembler[OuterStep]:
    """Puts outer steps, or fragments' weights, together, as far as `layout` says that one host sends them."""
    steps, lossless = get_codec(codec_name), get_codec(lossless_for(layout.dtype))
    return Assembler(
        "fragment",
        lambda step: layout.pieces(step.fragment, lossless if step.base_version is None else steps),
    )


MOST_HELD = 2
"""Changes of a fragment: one that is void, as is still to be decided, and the next."""


class ChangeReceiver(Receiver):
    """A host's, of one worker: puts its changes together, as far as they belong here."""

    def __init__(
        self,
        session_id: int,
        codec_name: str,
        layout: Layout,
        collector: BufferCollector | None = None,
    ) -> None:
        """`collector`: takes the buffers that the model changes; None: they go to another host."""
        self._session_id = session_id
        self._layout, self._collector = layout, collector
        changes, gradients = get_codec(codec_name), get_codec(gradient_codec(codec_name))

        def pieces_of(first: Delta) -> list[Piece]:
            is_gradient = first.tensor.codec == gradients.name
            return layout.pieces(first.fragment, gradients if is_gradient else changes)

        self._deltas = Assembler("change", pieces_of)
        self._buffers: BufferValues = {}
        self._held = Counter[int]()
        """By fragment: changes that have not been decided on."""
        self._counting = threading.Lock()

    @property
    def in_progress(self) -> bool:
        return self._deltas.first is not None

    def _count(self, fragment: int, changes: int) -> None:
        """So many more of its changes are held. Any thread."""
        with self._counting:
            self._held[fragment] += changes

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message; each bucket of a change is told of as it comes."""
        if isinstance(message, Buffers) and self._collector is not None:
            if (buffers := self._collector.take(message, payload)) is not None:
                self._buffers = buffers
            return None
        if not isinstance(message, Delta | DeltaSent):
            return MessageReceived(self._session_id, message)
        fragment = message.fragment
        if self._held[fragment] >= MOST_HELD:
            raise ProtocolError(f"it sent fragment {fragment} again before it was answered")
        values: Tensor | None
        if isinstance(message, Delta):
            number = message.bucket
            bucket, values = self._deltas.take(message, payload)
        else:
            number, bucket = 0, self._none_of(fragment)
            values = bucket
        part: Part | None = None
        added: BufferValues = {}
        if values is not None:
            self._count(fragment, 1)
            part = Part(fragment, values, partial(self._count, fragment, -1))
            added, self._buffers = self._buffers, {}
        return DeltaArrived(
            session_id=self._session_id,
            of=message.request,
            fragment=fragment,
            bucket=number,
            values=bucket,
            part=part,
            buffers=added,
        )

    def _none_of(self, fragment: int) -> Tensor:
        numbers = self._layout.numbers
        if fragment >= len(numbers) or numbers[fragment]:
            raise ProtocolError(f"it sent nothing of fragment {fragment}, which is held here")
        return torch.empty(0, dtype=self._layout.dtype)


class FragmentReceiver(StateReceiver):
    """A worker's: takes fragments besides whole weights and assignments."""

    def __init__(
        self, codec_name: str, layout: Layout, training: TrainingContext, span: range | None = None
    ) -> None:
        """Of the server, or of a store that holds the flat buckets `span`; `codec_name`: of outer steps."""
        replica = training.replica
        buckets, dtype = replica.buckets, replica.params.dtype
        if span is None:
            collector = BufferCollector(replica.buffers, replica.bucket_bytes)
            super().__init__(buckets, dtype, collector, training)
        else:
            super().__init__(buckets, dtype, span=span)
        self._codec_down, self._layout = codec_name, layout
        self._fragments = step_assembler(codec_name, layout if span is None else layout.part(span))

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if not isinstance(message, OuterStep):
            event = super().__call__(message, payload)
            if isinstance(message, StoreList):
                self._fragments = step_assembler(self._codec_down, self._layout.part(self._span))
            return event
        _, values = self._fragments.take(message, payload)
        if values is None:
            return None
        place = message.fragment, message.base_version, message.version
        return FragmentArrived(*place, values, self.take_buffers(), self._span.start)


def cannot_be_sent(error: NonFiniteValue, fragment: Fragment, replica: Replica) -> NonFiniteLoss:
    [(place, _)] = pieces(fragment.places, slice(error.index, error.index + 1))
    name = replica.parameter_at(place.start)
    return NonFiniteLoss(f"what training has changed at layer {name} cannot be sent: {error}")


SERVER = 0
"""The first bucket that is on the server's host, by which hosts are named here."""


class Hosts(StoreClient):
    """The server, and the stores on other hosts if it names any.

    On each link all comes in the order in which the server has said it, but not so on two of them. A worker
    must not see that: whole weights count when all hosts' parts are here, and what a host has sent behind its
    part waits for these; a fragment is taken when all have sent theirs.
    """

    def __init__(
        self, layout: Layout, num_buckets: int, receiver_for: Callable[[range], FragmentReceiver]
    ) -> None:
        """`layout`: of the whole; `receiver_for`: takes what a store sends that holds these flat buckets."""
        super().__init__(num_buckets, receiver_for)
        self._layout = layout
        self._holders: list[list[int]] = []
        """By fragment: the hosts that hold something of it."""
        self._fragments: list[dict[int, deque[FragmentArrived]]] = []
        """By fragment and host: what has come, and not from all yet."""
        self._behind: dict[int, list[Event]] = {}
        """By host whose part of whole weights is here, and not yet all others': what has come behind it."""

    @property
    def is_several(self) -> bool:
        return self._is_spread

    def begin(self, link: Link) -> None:
        super().begin(link)
        self._behind = {}
        self._hold({SERVER: range(self._num_buckets)})

    def reach(self, stores: StoreList) -> None:
        super().reach(stores)
        own = range(min(store.first for store in stores.stores))
        others = {store.first: range(store.first, store.stop) for store in stores.stores}
        self._hold({SERVER: own} | others)

    def _hold(self, spans: dict[int, range]) -> None:
        parts = {first: self._layout.part(span) for first, span in spans.items()}
        self._holders = [
            [first for first, part in sorted(parts.items()) if part.numbers[number]]
            for number in range(len(self._layout.fragments))
        ]
        self._forget()

    def _forget(self) -> None:
        self._fragments = [{first: deque() for first in each} for each in self._holders]

    def send(self, collect: Collect, buffers: Sequence[Frame], frames: Sequence[Frame]) -> None:
        """Send a fragment's change, a frame for each of its buckets, to where these belong."""
        for frame in buffers:
            self._server.send_frame(frame)
        for home, frame in zip(self._layout.homes(collect.fragment), frames, strict=True):
            self.session_of(home).send_frame(frame)
        if SERVER not in self._holders[collect.fragment]:
            self._server.send(DeltaSent(request=collect.request, fragment=collect.fragment))

    def take(self, event: Event) -> Iterator[Event]:
        """What may be known of now that this has come, in order.

        Raises:
            PeerLost: what hosts have sent does not belong together.
        """
        host = event.first if isinstance(event, WeightsArrived | FragmentArrived) else SERVER
        if host in self._behind:
            self._behind[host].append(event)
        elif isinstance(event, WeightsArrived):
            yield from self._take_weights(event)
        elif isinstance(event, FragmentArrived):
            yield from self._take_fragment(event, host)
        else:
            yield event

    def _take_weights(self, part: WeightsArrived) -> Iterator[Event]:
        self._behind[part.first] = []
        parts = self.weights(part)
        if not parts:
            return
        self._forget()  # what has come of fragments was before
        behind, self._behind = self._behind, {}
        weights = [bucket for each in parts for bucket in each.weights]
        yield WeightsArrived(part.version, weights, parts[0].buffers)
        for events in behind.values():
            for event in events:
                yield from self.take(event)

    def _take_fragment(self, part: FragmentArrived, host: int) -> Iterator[Event]:
        arrived = self._fragments[part.fragment]
        arrived[host].append(part)
        if not all(arrived.values()):
            return
        parts = [each.popleft() for each in arrived.values()]
        place = part.fragment, part.base_version, part.version
        if any((each.fragment, each.base_version, each.version) != place for each in parts):
            raise PeerLost("the hosts have sent a fragment of two versions")
        buffers = {number: values for each in parts for number, values in each.buffers.items()}
        values = parts[0].values if len(parts) == 1 else torch.cat([each.values for each in parts])
        yield FragmentArrived(*place, values, buffers)
