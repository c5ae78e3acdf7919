"""Streams: tensors that travel in several frames, a piece each. One sender, and one assembler.

A stream is named by its first message: those of its other pieces say the same but for a piece's own `fields`.
Sender and receiver work out the pieces from what both know, so nothing that a peer says decides on memory.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, bytes_of
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import ProtocolError
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Message, TensorSpec, frame_of, payload_nbytes

M = TypeVar("M", bound=Message)


class Piece(NamedTuple):
    """What one frame of a stream carries, or several: bytes, which the sender cuts as it likes.

    Attributes:
        fields: of its message, those that differ from piece to piece: its number, of how many, `tensor`, and
            what else.
        place: of its values among the stream's.
        codec: how its values are written; None: the payload is their bytes.
        fields_at: of a piece that is cut, those of the part from this byte on, but `tensor`; None: it is not.
    """

    fields: Mapping[str, Any]
    place: slice
    codec: Codec | None = None
    fields_at: Callable[[int], Mapping[str, Any]] | None = None

    def part(self, start: int, nbytes: int) -> "Piece":
        """What comes next: from byte `start` on some `nbytes`, if these are not more than are left."""
        if self.fields_at is None:
            return self
        nbytes = max(1, min(nbytes, self.place.stop - start))
        spec = spec_of("raw", "uint8", nbytes, nbytes)
        return Piece({**self.fields_at(start), "tensor": spec}, slice(start, start + nbytes))


def bytes_piece(nbytes: int, fields_at: Callable[[int], Mapping[str, Any]]) -> list[Piece]:
    """A stream of so many bytes, which its sender cuts as it likes; `fields_at`: see `Piece`."""
    return [Piece({}, slice(0, nbytes), None, fields_at)]


def bucket_length(bucket: slice) -> int:
    return int(bucket.stop - bucket.start)


def bucket_spec(codec: Codec, bucket: slice) -> TensorSpec:
    length = bucket_length(bucket)
    return spec_of(codec.name, codec.dtype_name, length, codec.encoded_nbytes(length))


@functools.lru_cache(maxsize=64)
def spec_of(codec: str, dtype: str, length: int, nbytes: int) -> TensorSpec:
    """Made once for pieces of one length, because every frame needs one."""
    return TensorSpec(codec=codec, dtype=dtype, shape=(length,), nbytes=nbytes)


def bucket_pieces(
    codec: Codec, buckets: Sequence[slice], numbers: range | None = None, total: int | None = None
) -> list[Piece]:
    """A stream of buckets, which lie one after the other; its values begin with the first of them.

    `numbers`: those of the buckets, of `total` in all; None: they are all.
    """
    numbers = range(len(buckets)) if numbers is None else numbers
    start = buckets[0].start if buckets else 0
    return [
        Piece(
            {
                "bucket": number,
                "num_buckets": len(buckets) if total is None else total,
                "tensor": bucket_spec(codec, bucket),
            },
            slice(bucket.start - start, bucket.stop - start),
            codec,
        )
        for number, bucket in zip(numbers, buckets, strict=True)
    ]


def span_pieces(codec: Codec, buckets: Sequence[slice], span: range | None = None) -> list[Piece]:
    """A stream of those of all `buckets` whose numbers are in `span`; None: of all."""
    span = range(len(buckets)) if span is None else span
    return bucket_pieces(codec, buckets[span.start : span.stop], span, len(buckets))


def raw_pieces(numel: int, dtype: torch.dtype, bucket_bytes: int) -> list[Piece]:
    """A stream of so many values as they are, also NaN and infinity, in buckets of at most those bytes."""
    most = max(1, bucket_bytes // dtype.itemsize)
    buckets = [slice(start, min(start + most, numel)) for start in range(0, numel, most)]
    pieces = bucket_pieces(get_codec(lossless_for(dtype)), buckets)
    return [each._replace(codec=None) for each in pieces]


def stream_frames(
    make: Callable[..., Message], pieces: Iterable[Piece], payloads: Iterable[Tensor]
) -> list[Frame]:
    """The frames of a stream; `make` gives the message of each piece, whose fields it is called with.

    They refer to the payloads, on the CPU, which must not change until they have been sent.
    """
    return [
        frame_of(make(**piece.fields), bytes_of(payload))
        for piece, payload in zip(pieces, payloads, strict=True)
    ]


def byte_frames(make: Callable[..., Message], parts: Iterable[memoryview]) -> Iterator[Frame]:
    """The frames of a stream of bytes; `make` is called with each part's `offset` and `tensor`."""
    offset = 0
    for part in parts:
        spec = spec_of("raw", "uint8", part.nbytes, part.nbytes)
        yield frame_of(make(offset=offset, tensor=spec), part)
        offset += part.nbytes


def byte_parts(values: Tensor, most_nbytes: int) -> Iterator[memoryview]:
    """The bytes of `values`, cut; they must not change before they have been sent."""
    data = bytes_of(values.to("cpu").contiguous().reshape(-1).view(torch.uint8))
    return (data[at : at + most_nbytes] for at in range(0, data.nbytes, most_nbytes))


class Assembler(Generic[M]):
    """Puts the streams of one kind together that a peer sends one after another, each piece in its order.

    Before the first piece has been checked no memory is asked for; the owner gives it, and may have to wait.
    """

    def __init__(
        self,
        what: str,
        pieces_of: Callable[[M], Sequence[Piece]],
        memory_for: Callable[..., Tensor | None] = torch.empty,
        *,
        varies: Collection[str] = (),
    ) -> None:
        """Nothing has come yet.

        Args:
            what: one stream is, in words.
            pieces_of: what has to come of a stream that a message begins; refuses one by raising.
            memory_for: gives memory for as many values, of `dtype`, as a stream has; None: it is not kept.
            varies: fields that may differ from piece to piece, and that nobody can know.
        """
        self._what, self._pieces_of = what, pieces_of
        self._memory_for, self._varies = memory_for, varies
        self.first: M | None = None
        """The message that has begun the stream that is not whole yet. Set it to None to give that up."""
        self._pieces: Sequence[Piece] = ()
        self._num_taken = self._stop = 0
        """Whole pieces of it, and where the last part ends."""
        self._values: Tensor | None = None

    def take_back(self) -> Tensor | None:
        """The memory of the newest stream, if it has got some: it is its giver's again."""
        values, self._values = self._values, None
        return values

    def check(self, message: M) -> Piece:
        """Note the next piece, without memory for it.

        Raises:
            ProtocolError: it is not what may come next, or what `pieces_of` says.
        """
        first = self.first or message
        if self.first is None:
            self._pieces, self._num_taken, self._stop = self._pieces_of(message), 0, 0
        if not self._pieces:
            raise ProtocolError(f"it sent a piece of a {self._what} of which nothing comes here")
        whole = self._pieces[self._num_taken]
        piece = whole.part(self._stop, payload_nbytes(message))
        self._compare(first, message, piece)
        self._stop = piece.place.stop
        self._num_taken += self._stop == whole.place.stop
        self.first = first if self._num_taken < len(self._pieces) else None
        return piece

    def take(self, message: M, payload: memoryview) -> tuple[Tensor, Tensor | None]:
        """Decode the next piece; returns its values, and with the last one those of the whole stream.

        Raises:
            ProtocolError: as `check`, or it does not decode.
        """
        newest, codec = self._place(message)
        assert newest is not None  # noqa: S101 - whoever does not keep a stream has only `place_for`
        encoded = torch.frombuffer(payload, dtype=torch.uint8)
        if codec is None:
            newest.view(torch.uint8).copy_(encoded)
        else:
            codec.decode(encoded, newest)
        return newest, self.whole()

    def place_for(self, message: M) -> memoryview | None:
        """Where the bytes of the next piece shall be written; None: nowhere. `whole` is asked afterwards.

        Raises:
            ProtocolError: as `check`.
        """
        newest, _ = self._place(message)
        return None if newest is None else bytes_of(newest)

    def whole(self) -> Tensor | None:
        """The values of the stream, once, when all that is kept of it lies in its place."""
        return self.take_back() if self.first is None else None

    def _place(self, message: M) -> tuple[Tensor | None, Codec | None]:
        is_first = self.first is None
        piece = self.check(message)
        if is_first:
            dtype = torch.uint8 if piece.codec is None else piece.codec.dtype
            self._values = self._memory_for(self._pieces[-1].place.stop, dtype=dtype)
        return None if self._values is None else self._values[piece.place], piece.codec

    def _compare(self, first: M, message: M, piece: Piece) -> None:
        varying = {name: getattr(message, name) for name in self._varies}
        said, agreed = vars(message), {**vars(first), **varying, **piece.fields}
        if said == agreed:
            return
        wrong = {name for name in said if said[name] != agreed[name]}
        own = _in_words({name: said[name] for name in piece.fields})
        if wrong - piece.fields.keys():
            raise ProtocolError(f"it sent {own} of another {self._what} in the middle of one")
        if wrong != {"tensor"}:
            expected = _in_words(piece.fields).partition(" ")[2]
            raise ProtocolError(f"it sent {own}, expected {expected} of its {self._what}")
        spec: TensorSpec = agreed["tensor"]
        raise ProtocolError(
            f"{own} of its {self._what} is not the {spec.codec} tensor agreed on, "
            f"{spec.dtype} of shape {spec.shape}"
        )


def _in_words(fields: Mapping[str, Any]) -> str:
    """Which piece these fields are of."""
    (name, number), *others = (each for each in fields.items() if each[0] != "tensor")
    more = "".join(f" ({other!a})" for _, other in others[1:])
    return f"{name} {number}" + "".join(f" of {total}" for _, total in others[:1]) + more
