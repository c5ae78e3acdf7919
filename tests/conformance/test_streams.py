"""What every stream of tensors must do: whole in its order, refused in any other, before memory is taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peers import opened, small_replica
from smolcluster.algorithms.DiLoCo.exchange import (
    ChangeReceiver,
    DeltaArrived,
    Encoder,
    Layout,
    delta_frames,
    outer_frames,
    step_assembler,
)
from smolcluster.algorithms.DiLoCo.fragments import Fragment
from smolcluster.algorithms.PipelineParallel.part_copy import CopyStream, copy_frames
from smolcluster.algorithms.SynchronousPS.members import Members
from smolcluster.algorithms.SynchronousPS.step_receiver import MeanReceiver, Means, StepReceiver
from smolcluster.codec.base import bytes_of
from smolcluster.codec.registry import get_codec
from smolcluster.errors import ProtocolError
from smolcluster.server.buffers import BufferCollector, buffer_frames
from smolcluster.server.offering import (
    OFFER,
    Offer,
    Offered,
    OfferUnusable,
    Plan,
    _OfferReceiver,
    offer_frames,
)
from smolcluster.server.push import GradientReceiver, GradientSender
from smolcluster.server.slices import slice_frames, slice_pieces
from smolcluster.server.store import PartArrived
from smolcluster.server.weights import StateReceiver
from smolcluster.training.buffers import ModelBuffers
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.frames import Frame, check_head
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    ALL_KINDS,
    WEIGHTS,
    Buffers,
    Collect,
    CopyPiece,
    Kinds,
    LeaseKey,
    Message,
    Park,
    State,
    TensorSpec,
    Transfer,
    TransferPiece,
    decode,
)
from smolcluster.wire.streams import (
    Assembler,
    Piece,
    bucket_pieces,
    byte_frames,
    bytes_piece,
    span_pieces,
    stream_frames,
)
from unit.algorithms.SynchronousPS.actors import (
    post_of,
    random_gradient,
    reduce_step,
    reduction_of,
    worker_at,
)

BUCKETS = [slice(0, 4), slice(4, 8), slice(8, 10)]
NAMES = ("weights", "exp_avg")
Taker = Callable[[Message, memoryview], object]
"""Takes a frame of a peer; returns something when a stream is whole."""


@dataclass(frozen=True)
class Kind:
    """A stream as its sender makes it, by a number that names it, and what takes it in."""

    frames: Callable[[int], list[Frame]]
    new_taker: Callable[[], Taker]
    kinds: Kinds = ALL_KINDS
    """What its sender may say: some numbers have two meanings."""
    is_named: bool = True
    """Whether a message says which stream it is of."""

    def said(self, number: int) -> list[tuple[Message, memoryview]]:
        """What the other side makes of the stream's frames."""
        return [
            (
                decode(frame.kind, check_head(frame.head), self.kinds),
                memoryview(bytearray(frame.payload)),
            )
            for frame in self.frames(number)
        ]


@dataclass
class Bare:
    """An assembler with nothing around it, which notes how much memory it has asked for."""

    pieces: list[Piece]
    asked: list[int] = field(default_factory=list)
    pieces_told: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.assembler = Assembler[State]("test", lambda _: self.pieces, self.memory_for)

    def memory_for(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        self.asked.append(numel)
        return torch.zeros(numel, dtype=dtype)

    def __call__(self, message: Message, payload: memoryview) -> Tensor | None:
        assert isinstance(message, State)
        newest, whole = self.assembler.take(message, payload)
        self.pieces_told.append(newest)
        return whole


def values_of(number: int) -> Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(number))


def frames_in(pieces: list[Piece], number: int) -> list[Frame]:
    make = partial(State, incarnation="here", version=number)
    payloads = (values_of(number)[4:][piece.place].contiguous() for piece in pieces)
    return stream_frames(make, pieces, payloads)


def span() -> list[Piece]:
    return span_pieces(get_codec("fp32"), BUCKETS, range(1, 3))


def fragments() -> Layout:
    """The second of two hosts holds buckets 1 and 2 of the only fragment, which are 6 values."""
    return Layout([Fragment((slice(0, 10),))], 16, torch.float32).part(range(1, 3))


def changes(number: int) -> list[Frame]:
    collect = Collect(request=number, fragment=0, wait=True)
    encoded = Encoder("int8", fragments()).encode(0, values_of(number)[4:])
    return delta_frames(fragments(), collect, encoded, get_codec("int8"))


def change_receiver() -> Taker:
    collector = BufferCollector(ModelBuffers(nn.Linear(1, 1)), 64)
    receiver = ChangeReceiver(1, "int8", fragments(), collector)

    def take(message: Message, payload: memoryview) -> Event | None:
        event = receiver(message, payload)
        if isinstance(event, PartArrived):
            event.free()
        return event if isinstance(event, DeltaArrived) and event.part else None

    return take


def outer_steps(number: int) -> list[Frame]:
    layout, base_version = fragments(), (None, 7)[number]
    encoder = Encoder("fp32", layout)
    encoded = encoder.encode(0, values_of(number)[4:])
    return outer_frames(layout, 0, encoded, encoder.codec, base_version=base_version, version=8)


def slices(number: int) -> list[Frame]:
    contents = {name: values_of(number)[4:] for name in NAMES}
    return slice_frames(contents, BUCKETS, range(1, 3), incarnation="here", version=number)


def slice_assembler() -> Assembler[State]:
    return Assembler("slice", lambda _: slice_pieces(BUCKETS, range(1, 3), NAMES, torch.float32))


def weights(number: int) -> list[Frame]:
    contents = {WEIGHTS: values_of(number)[4:]}
    return slice_frames(contents, BUCKETS, range(1, 3), incarnation="here", version=number)


def pushes(number: int) -> list[Frame]:
    lease = LeaseKey(incarnation="here", epoch=0, start=0, stop=4, grant=number)
    replica = small_replica()
    return list(GradientSender("int8", replica).frames(lease, 7, BatchLoss(0.5, 4), 0.25))


def push_receiver() -> Taker:
    receiver = GradientReceiver(1, "int8", small_replica().buckets)

    def take(message: Message, payload: memoryview) -> Event | None:
        event = receiver(message, payload)
        if isinstance(event, PartArrived):
            event.free()
        return event

    return take


def trained() -> ModelBuffers:
    """Those of batch norm after a batch: 6 + 6 + 1 values, and so in 2 pieces of 8 and 5."""
    model = nn.BatchNorm1d(6)
    found = ModelBuffers(model)
    model(torch.randn(5, 6))
    found.find()
    return found


def buffers(number: int) -> list[Frame]:
    return buffer_frames(trained().values(), 64, version=number)


def buffer_taker() -> Taker:
    collector = BufferCollector(trained(), 64)

    def take(message: Message, payload: memoryview) -> object:
        assert isinstance(message, Buffers)
        return collector.take(message, payload)

    return take


PLAN = Plan.of(nn.Linear(2**18, 2), 4, is_counted=True)


def offers(number: int) -> list[Frame]:
    values = torch.full((PLAN.num_values,), float("inf") if number else 0.0)
    return offer_frames(values.view(torch.uint8))


def offer_receiver() -> Taker:
    receiver = _OfferReceiver(1)
    receiver(Offer(plan=PLAN.text), memoryview(b""))

    def take(message: Message, payload: memoryview) -> Event | None:
        event = receiver(message, payload)
        if isinstance(event, OfferUnusable):
            raise ProtocolError(event.reason)
        return event if isinstance(event, Offered) else None

    return take


def transfers(number: int) -> list[Frame]:
    """Activations, in parts that the sender has cut where it liked."""
    encoded = bytes_of(values_of(number))
    first = TransferPiece(
        attempt=1, step=2, direction="forward", stage=1, microbatch=number, offset=0, nbytes=40
    )

    def make(offset: int, tensor: TensorSpec) -> Transfer:
        return Transfer(piece=first.model_copy(update={"offset": offset}), tensor=tensor)

    return list(byte_frames(make, (encoded[:7], encoded[7:30], encoded[30:])))


def copies(number: int) -> list[Frame]:
    """Values of a worker's copy, which lie in two places."""
    return list(copy_frames(1, number, (values_of(number)[:3], values_of(number)[3:]), 16))


def copy_taker() -> Taker:
    streams: list[CopyStream] = []

    def take(message: Message, payload: memoryview) -> Tensor | None:
        assert isinstance(message, CopyPiece)
        if not streams or streams[-1].is_whole:
            streams.append(CopyStream([slice(5, 9), slice(20, 26)], torch.float32))
        streams[-1].take(message, bytearray(payload))
        given = [values for _, values in streams[-1].given] if streams[-1].is_whole else None
        return None if given is None else torch.cat(given)

    return take


def transfer_taker() -> Taker:
    def bytes_of_all(first: Transfer) -> list[Piece]:
        at = first.piece
        return bytes_piece(
            at.nbytes, lambda start: {"piece": at.model_copy(update={"offset": start})}
        )

    assembler = Assembler[Transfer]("tree", bytes_of_all)

    def take(message: Message, payload: memoryview) -> Tensor | None:
        assert isinstance(message, Transfer)
        place = assembler.place_for(message)
        assert place is not None
        place[:] = payload
        return assembler.whole()

    return take


def means(number: int) -> list[Frame]:
    """SyncPS's, in int8; the last bucket is shorter."""
    replica = small_replica()
    reduction = reduction_of(replica, "int8")
    return reduce_step(reduction, replica, number + 1, [random_gradient(610, number)])


def mean_taker() -> Taker:
    replica = small_replica()
    means = Means(610, torch.float32, range(3), patience_s=1.0, longest_wait_s=1.0)
    return MeanReceiver(means, replica.buckets, "int8", range(3))


def state(number: int) -> list[Frame]:
    """The weights that a SyncPS joiner is sent, of other versions."""
    members = Members(small_replica(), None, "here", num_buffers=2)
    worker = worker_at(1)
    members.send_state(members.welcome(worker), number, [])
    return post_of(worker).frames


def state_taker() -> Taker:
    receiver = StepReceiver(small_replica(), "int8")

    def take(message: Message, payload: memoryview) -> Event | None:
        """Of a joiner that begins anew with each stream."""
        event = receiver(message, payload)
        if event is not None:
            receiver(Park(lease=None, num_buckets=0), memoryview(b""))
        return event

    return take


def whole_of(assembler: Assembler[Any]) -> Taker:
    return lambda message, payload: assembler.take(message, payload)[1]


KINDS = {
    "buckets of a span": Kind(lambda number: frames_in(span(), number), lambda: Bare(span())),
    "weights": Kind(weights, lambda: StateReceiver(BUCKETS, torch.float32, span=range(1, 3))),
    "a push": Kind(pushes, push_receiver),
    "buffers": Kind(buffers, buffer_taker),
    "an offer": Kind(offers, offer_receiver, OFFER.from_dialler, is_named=False),
    "bytes": Kind(transfers, transfer_taker),
    "a copy's values": Kind(copies, copy_taker),
    "a slice": Kind(slices, lambda: whole_of(slice_assembler())),
    "DiLoCo's change": Kind(changes, change_receiver),
    "SyncPS's mean": Kind(means, mean_taker),
    "SyncPS's state": Kind(state, state_taker),
    "DiLoCo's step": Kind(outer_steps, lambda: whole_of(step_assembler("fp32", fragments()))),
}


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def wrong(message: Message) -> Iterator[Message]:
    """The same piece as something else that nobody agreed on."""
    tensor: TensorSpec = getattr(message, "tensor")  # noqa: B009 - all that carry one have it
    for change in (
        {"nbytes": tensor.nbytes + 4},
        {"shape": (2**40,)},
        {"shape": (tensor.shape[0] + 1,), "nbytes": tensor.nbytes + 4},
        {"codec": "topk"},
        {"dtype": "int64"},
    ):
        yield message.model_copy(update={"tensor": tensor.model_copy(update=change)})
    for name in ("bucket", "num_buckets", "offset"):
        for other in (0, 1, 2**40):
            if isinstance(said := getattr(message, name, None), int) and said != other:
                yield message.model_copy(update={name: other})


def test_a_stream_is_whole_with_its_last_piece_and_the_next_one_may_follow(kind: Kind) -> None:
    take = kind.new_taker()
    for number in (0, 1):
        *others, last = kind.said(number)
        assert others, "it has several pieces"
        assert not any(take(*each) is not None for each in others)
        assert take(*last) is not None


def test_a_piece_that_is_left_out_comes_twice_or_is_of_another_stream_is_refused(
    kind: Kind,
) -> None:
    pieces, others = kind.said(0), kind.said(1)
    for number in range(1, len(pieces)):
        other = [others[number]] if kind.is_named else []
        for piece in (*pieces[:number], *pieces[number + 1 :], *other):
            take = kind.new_taker()
            for fine in pieces[:number]:
                take(*fine)
            with pytest.raises(ProtocolError):
                take(*piece)


def test_a_piece_that_is_not_as_agreed_is_refused_wherever_it_comes(kind: Kind) -> None:
    pieces = kind.said(0)
    for number, (message, payload) in enumerate(pieces):
        for other in wrong(message):
            take = kind.new_taker()
            for fine in pieces[:number]:
                take(*fine)
            with pytest.raises(ProtocolError):
                take(other, payload)


def test_values_arrive_each_piece_told_and_memory_is_asked_for_once_a_stream() -> None:
    pieces = span()
    take = Bare(pieces)
    for number in (0, 1):
        whole = [take(*opened(frame)) for frame in frames_in(pieces, number)][-1]
        assert whole is not None
        assert torch.equal(whole, values_of(number)[4:])
        assert torch.equal(torch.cat(take.pieces_told), whole)
        take.pieces_told.clear()
    assert take.asked == [6, 6]


def test_no_memory_is_asked_for_before_the_first_piece_is_known_to_be_right() -> None:
    message, payload = opened(frames_in(span(), 0)[0])
    for other in wrong(message):
        take = Bare(span())
        with pytest.raises(ProtocolError):
            take(other, payload)
        assert not take.asked


def test_bytes_lie_where_their_owner_wanted_them_or_nowhere() -> None:
    take, (*others, last) = transfer_taker(), KINDS["bytes"].said(0)
    assert [take(*each) for each in others] == [None, None]
    whole = take(*last)
    assert isinstance(whole, Tensor)
    assert torch.equal(whole.view(torch.float32), values_of(0))
    nowhere = Assembler[Transfer](
        "tree", lambda _: bytes_piece(40, lambda _: dict(others[0][0])), lambda *_, **__: None
    )
    first = others[0][0]
    assert isinstance(first, Transfer)
    assert nowhere.place_for(first) is None
    assert nowhere.whole() is None


def test_a_stream_of_no_pieces_is_refused() -> None:
    with pytest.raises(ProtocolError, match="of which nothing comes here"):
        whole_of(Assembler[State]("test", lambda _: []))(*opened(frames_in(span(), 0)[0]))


def test_after_a_stream_is_given_up_another_one_begins() -> None:
    pieces = bucket_pieces(get_codec("fp32"), BUCKETS)
    assembler = Assembler[State]("test", lambda _: pieces)
    first, second = (
        [
            opened(frame)
            for frame in stream_frames(
                partial(State, incarnation="here", version=number),
                pieces,
                [values_of(number)[piece.place] for piece in pieces],
            )
        ]
        for number in (0, 1)
    )
    assembler.take(*first[0])  # type: ignore[arg-type]
    left, assembler.first = assembler.take_back(), None
    assert left is not None
    assert torch.equal(left[:4], values_of(0)[:4]), "whoever gave it has it back"
    whole = [assembler.take(*each)[1] for each in second][-1]  # type: ignore[arg-type]
    assert whole is not None
    assert torch.equal(whole, values_of(1))
