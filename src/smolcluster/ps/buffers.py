"""Buffers that change as the model computes, on the wire: see `training/buffers.py`."""

import torch
from torch import Tensor

from smolcluster.codec.base import bytes_of
from smolcluster.errors import ProtocolError
from smolcluster.training.buffers import BufferValues, ModelBuffers
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import Buffers, LeaseKey, TensorSpec, frame_of

VALUE_NBYTES = 8


def buffer_frames(
    values: BufferValues, bucket_bytes: int, *, version: int, lease: LeaseKey | None = None
) -> list[Frame]:
    """Frames of buffers' values at `version`, or of what computing `lease` has added; none of nothing."""
    if not values:
        return []
    pieces = torch.split(torch.cat(list(values.values())), _piece_length(bucket_bytes))
    return [
        frame_of(
            Buffers(
                lease=lease,
                version=version,
                numbers=tuple(values),
                piece=number,
                num_pieces=len(pieces),
                tensor=_spec(piece.numel()),
            ),
            bytes_of(piece),
        )
        for number, piece in enumerate(pieces)
    ]


def most_buffer_frames(buffers: ModelBuffers, bucket_bytes: int) -> int:
    """How many frames the buffers take if all of them change."""
    numel = sum(buffers.numel(number) for number in range(len(buffers.names)))
    return -(-numel // _piece_length(bucket_bytes))


def _piece_length(bucket_bytes: int) -> int:
    return max(1, bucket_bytes // VALUE_NBYTES)


def _spec(length: int) -> TensorSpec:
    return TensorSpec(codec="raw", dtype="float64", shape=(length,), nbytes=VALUE_NBYTES * length)


class BufferCollector:
    """Puts the pieces of a peer's buffers together."""

    def __init__(self, buffers: ModelBuffers, bucket_bytes: int) -> None:
        self._buffers = buffers
        self._length = _piece_length(bucket_bytes)
        self._pieces: list[Tensor] = []
        self._first: Buffers | None = None

    def forget(self) -> None:
        """What has arrived counts no more."""
        self._pieces, self._first = [], None

    def take(self, message: Buffers, payload: memoryview) -> dict[int, Tensor] | None:
        """Take the next piece; returns the values when they are whole.

        Raises:
            ProtocolError: it is not what may come next, or holds NaN or infinity.
        """
        if message.piece == 0:
            self._first, self._pieces = message, []
        sizes = self._sizes(message)
        self._check(message, sum(sizes))
        piece = torch.frombuffer(bytearray(payload), dtype=torch.float64)
        if not bool(torch.isfinite(piece).all()):
            raise ProtocolError("its buffers hold NaN or infinity")
        self._pieces.append(piece)
        if len(self._pieces) < message.num_pieces:
            return None
        flat = torch.cat(self._pieces)
        self.forget()
        return dict(zip(message.numbers, torch.split(flat, sizes), strict=True))

    def _sizes(self, message: Buffers) -> list[int]:
        known = range(len(self._buffers.names))
        if (
            sorted(set(message.numbers)) != list(message.numbers)
            or message.numbers[-1] not in known
        ):
            raise ProtocolError(f"its buffers are none of the {len(known)} of the model")
        return [self._buffers.numel(number) for number in message.numbers]

    def _check(self, message: Buffers, total: int) -> None:
        expected = None
        if self._first is not None:
            piece = len(self._pieces)
            length = min(self._length, total - piece * self._length)
            pieces = {"piece": piece, "num_pieces": -(-total // self._length)}
            expected = self._first.model_copy(update={**pieces, "tensor": _spec(length)})
        if message != expected:
            raise ProtocolError(f"piece {message.piece} of its buffers is not of the agreed shape")
