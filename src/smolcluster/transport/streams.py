"""Streams: tensors that travel in several frames, a piece each. One sender, and one assembler.

A stream is named by its first message: those of its other pieces say the same but for a piece's own `fields`.
Sender and receiver work out the pieces from what both know, so nothing that a peer says decides on memory.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, bytes_of
from smolcluster.errors import ProtocolError
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import Message, TensorSpec, frame_of

M = TypeVar("M", bound=Message)


class Piece(NamedTuple):
    """What one frame of a stream carries.

    Attributes:
        fields: of its message, those that differ from piece to piece: its number, of how many, `tensor`, and
            what else.
        place: of its values among the stream's.
        codec: how its values are written; None: the payload is their bytes.
    """

    fields: Mapping[str, Any]
    place: slice
    codec: Codec | None


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


class Assembler(Generic[M]):
    """Puts the streams of one kind together that a peer sends one after another, each piece in its order.

    Before the first piece has been checked no memory is asked for; the owner gives it, and may have to wait.
    """

    def __init__(
        self,
        what: str,
        pieces_of: Callable[[M], Sequence[Piece]],
        memory_for: Callable[..., Tensor] = torch.empty,
        *,
        varies: Collection[str] = (),
    ) -> None:
        """Nothing has come yet.

        Args:
            what: one stream is, in words.
            pieces_of: what has to come of a stream that a message begins; refuses one by raising.
            memory_for: gives memory for as many values, of `dtype`, as a stream has.
            varies: fields that may differ from piece to piece, and that nobody can know.
        """
        self._what, self._pieces_of = what, pieces_of
        self._memory_for, self._varies = memory_for, varies
        self.first: M | None = None
        """The message that has begun the stream that is not whole yet; None: there is none."""
        self._pieces: Sequence[Piece] = ()
        self._num_taken = 0
        self._values: Tensor | None = None

    def forget(self) -> Tensor | None:
        """No more comes of the stream that has begun; returns its memory, if it has got some."""
        values, self.first, self._values = self._values, None, None
        return values

    def check(self, message: M) -> Piece:
        """Note the next piece, without memory for it.

        Raises:
            ProtocolError: it is not what may come next, or what `pieces_of` says.
        """
        first, number = self.first or message, self._num_taken
        if self.first is None:
            self._pieces, number = self._pieces_of(message), 0
            if not self._pieces:
                raise ProtocolError(f"it sent a {self._what} of nothing")
        piece = self._pieces[number]
        self._compare(first, message, piece)
        self._num_taken = number + 1
        self.first = None if self._num_taken == len(self._pieces) else first
        return piece

    def take(self, message: M, payload: memoryview) -> tuple[Tensor, Tensor | None]:
        """Decode the next piece; returns its values, and with the last one those of the whole stream.

        Raises:
            ProtocolError: as `check`, or it does not decode.
        """
        piece = self.check(message)
        if self._values is None:
            dtype = torch.uint8 if piece.codec is None else piece.codec.dtype
            self._values = self._memory_for(self._pieces[-1].place.stop, dtype=dtype)
        values, encoded = self._values, torch.frombuffer(payload, dtype=torch.uint8)
        newest = values[piece.place]
        if piece.codec is None:
            newest.view(torch.uint8).copy_(encoded)
        else:
            piece.codec.decode(encoded, newest)
        if self.first is not None:
            return newest, None
        self._values = None
        return newest, values

    def _compare(self, first: M, message: M, piece: Piece) -> None:
        own = {name: getattr(message, name) for name in piece.fields}
        names = {*piece.fields, *self._varies}
        said = _in_words(own)
        if any(
            one != other for one, other in zip(first, message, strict=True) if one[0] not in names
        ):
            raise ProtocolError(f"it sent {said} of another {self._what} in the middle of one")
        spec, agreed = own.pop("tensor", None), piece.fields["tensor"]
        if any(own[name] != piece.fields[name] for name in own):
            expected = _in_words(piece.fields).partition(" ")[2]
            raise ProtocolError(f"it sent {said}, expected {expected} of its {self._what}")
        if spec != agreed:
            raise ProtocolError(
                f"{said} of its {self._what} is not the {agreed.codec} tensor agreed on, "
                f"{agreed.dtype} of shape {agreed.shape}"
            )


def _in_words(fields: Mapping[str, Any]) -> str:
    """Which piece these fields are of."""
    (name, number), (_, total), *others = (each for each in fields.items() if each[0] != "tensor")
    return f"{name} {number} of {total}" + "".join(f" ({other!a})" for _, other in others)
