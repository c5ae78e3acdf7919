"""Buffers that change as the model computes, on the wire: see `training/buffers.py`."""

from functools import partial

import torch
from torch import Tensor

from smolcluster.errors import ProtocolError
from smolcluster.training.buffers import BufferValues, ModelBuffers
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Buffers, LeaseKey
from smolcluster.wire.streams import Assembler, raw_pieces, stream_frames

DTYPE = torch.float64


def buffer_frames(
    values: BufferValues, bucket_bytes: int, *, version: int, lease: LeaseKey | None = None
) -> list[Frame]:
    """Frames of buffers' values at `version`, or of what computing `lease` has added; none of nothing."""
    flat = torch.cat(list(values.values())) if values else torch.empty(0)
    make = partial(Buffers, lease=lease, version=version, numbers=tuple(values))
    pieces = raw_pieces(flat.numel(), DTYPE, bucket_bytes)
    return stream_frames(make, pieces, (flat[piece.place] for piece in pieces))


def most_buffer_frames(buffers: ModelBuffers, bucket_bytes: int) -> int:
    """How many frames the buffers take if all of them change."""
    numel = sum(buffers.numel(number) for number in range(len(buffers.names)))
    return len(raw_pieces(numel, DTYPE, bucket_bytes))


class BufferCollector:
    """Puts the pieces of a peer's buffers together."""

    def __init__(self, buffers: ModelBuffers, bucket_bytes: int) -> None:
        self._buffers = buffers
        self._assembler = Assembler[Buffers](
            "set of buffers",
            lambda first: raw_pieces(sum(self._sizes(first)), DTYPE, bucket_bytes),
            lambda numel, **_: torch.empty(numel, dtype=DTYPE),
        )

    def forget(self) -> None:
        """What has arrived counts no more."""
        self._assembler.first = None

    def take(self, message: Buffers, payload: memoryview) -> dict[int, Tensor] | None:
        """Take the next piece; returns the values when they are whole.

        Raises:
            ProtocolError: it is not what may come next, or holds NaN or infinity.
        """
        piece, flat = self._assembler.take(message, payload)
        if not bool(torch.isfinite(piece).all()):
            raise ProtocolError("its buffers hold NaN or infinity")
        if flat is None:
            return None
        return dict(zip(message.numbers, torch.split(flat, self._sizes(message)), strict=True))

    def _sizes(self, message: Buffers) -> list[int]:
        known = range(len(self._buffers.names))
        if (
            sorted(set(message.numbers)) != list(message.numbers)
            or message.numbers[-1] not in known
        ):
            raise ProtocolError(f"its buffers are none of the {len(known)} of the model")
        return [self._buffers.numel(number) for number in message.numbers]
