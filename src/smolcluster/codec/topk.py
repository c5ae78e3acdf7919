"""The largest magnitudes of each chunk, 4 bits each, with 12-bit indices; the others become zero.

Layout for n values, cut in chunks of 4096, of which the last one holds what is left. A chunk of w values
keeps k = ceil(w / 64) of them, K in all:

    the K values in `int4`, then the indices' low 8 bits (K bytes), then their high 4 bits, two a byte

Indices count from the chunk's first value and rise strictly within a chunk; chunk follows chunk. The
first ceil(K / 2) indices' high bits are the lower halves of those bytes, the others' the upper halves.
A whole chunk keeps 64, which are one block of `int4` with a scale of its own: 0.254 bits a value
of the tensor, 126 times less than float32.

Bound, for every finite x, with `kth` the smallest magnitude that its chunk keeps:

    |x - decoded| <= kth                     where x is left out
    |x - decoded| <= int4's bound            where x is kept, of the K values

It is a contraction, and no codec to use without error feedback: what is left out arrives later. Chunks,
density and 12 bits an index are SparseLoCo's (Sarfi et al., arXiv:2508.15706), whose outer step has no
momentum. The kept values of a chunk lie within a factor of two or so, so that few bits say enough: on
Gaussian values 4 bits lose 0.3% of the energy that is kept. float16 would take 1.7 times the bytes, which
are better spent on more values; 2 bits, as there, would save an eighth.
"""

from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, NonFiniteValue, reject_non_finite
from smolcluster.codec.int4 import BLOCK, Int4BlockCodec
from smolcluster.errors import ProtocolError

CHUNK = 4096
"""Values that 12 bits can tell apart."""

KEPT = BLOCK
"""Values that a whole chunk keeps."""


class TopKCodec(Codec):
    """Chunkwise top-k with 4-bit values: 4 bytes become 0.032; layout and bound are above.

    Keeps int4's scratch, and takes some for as long as it works on a bucket: its size once for magnitudes.
    """

    name: ClassVar[str] = "topk"

    def __init__(self) -> None:
        self._values = Int4BlockCodec()

    def encoded_nbytes(self, numel: int) -> int:
        num_kept = _num_kept(numel)
        return self._values.encoded_nbytes(num_kept) + num_kept + -(-num_kept // 2)

    def _encode(self, source: Tensor, out: Tensor) -> None:
        places = _largest(source)
        self._encode_kept(source, places, source[places], out)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        places = _largest(source)
        source[places] = self._encode_kept(source, places, source[places], out)

    def _encode_kept(self, source: Tensor, places: Tensor, kept: Tensor, out: Tensor) -> Tensor:
        """Fill `out` with places int64 (K,) and values (K,); leave in the values what was lost."""
        values_nbytes = self._values.encoded_nbytes(len(kept))
        try:
            self._values.encode_keeping_error(kept, out[:values_nbytes])
        except NonFiniteValue:
            reject_non_finite(source)
            raise
        _pack(places % CHUNK, out[values_nbytes:])
        return kept

    def _decode(self, encoded: Tensor, out: Tensor) -> float:
        num_kept = _num_kept(out.numel())
        values_nbytes = self._values.encoded_nbytes(num_kept)
        kept = torch.empty(num_kept)
        bound = self._values.decode(encoded[:values_nbytes], kept)
        places = _places(_unpack(encoded[values_nbytes:], num_kept), out.numel())
        out.zero_()
        out[places] = kept
        return bound


def _num_kept(numel: int) -> int:
    return -(-numel * KEPT // CHUNK)


def _largest(source: Tensor) -> Tensor:
    """Return the rising places of the largest magnitudes in each chunk of (n,), int64 (K,).

    A chunk's NaN and infinities are among them.
    """
    num_full, rest = divmod(source.numel(), CHUNK)
    whole = source[: num_full * CHUNK].view(-1, CHUNK).abs()
    parts = [_top(whole, KEPT) + torch.arange(num_full).unsqueeze(1) * CHUNK]
    if rest:
        parts.append(_top(source[-rest:].view(1, -1).abs(), _num_kept(rest)) + num_full * CHUNK)
    return torch.cat([part.view(-1) for part in parts])


def _top(magnitudes: Tensor, num_kept: int) -> Tensor:
    """Return the rising indices of each row's largest, int64 (rows, num_kept)."""
    indices = torch.topk(magnitudes, num_kept, dim=1, sorted=False).indices
    return indices.sort(dim=1).values


def _pack(indices: Tensor, out: Tensor) -> None:
    """Write indices below 4096, int64 (K,), to uint8 (K + ceil(K / 2),)."""
    num_low = -(-len(indices) // 2)
    out[: len(indices)] = indices & 0xFF
    high = out[len(indices) :]
    high.copy_(indices[:num_low] >> 8)
    high[: len(indices) - num_low] += ((indices[num_low:] >> 8) << 4).to(torch.uint8)


def _unpack(packed: Tensor, num_kept: int) -> Tensor:
    """Return the indices that `_pack` wrote, int64 (K,)."""
    num_low = -(-num_kept // 2)
    indices = packed[:num_kept].to(torch.int64)
    high = packed[num_kept:].to(torch.int64)
    indices[:num_low] += (high & 0xF) << 8
    indices[num_low:] += (high[: num_kept - num_low] >> 4) << 8
    return indices


def _places(indices: Tensor, numel: int) -> Tensor:
    """Return the places in (n,) of indices that a peer sent, int64 (K,), or raise `ProtocolError`."""
    chunks = torch.arange(len(indices)) // KEPT
    places = indices + chunks * CHUNK
    if len(places) and not (bool((places.diff() > 0).all()) and int(places[-1]) < numel):
        raise ProtocolError(
            f"topk indices arrived that do not rise within a chunk, or lie outside of the {numel} values: "
            "the peer is faulty"
        )
    return places
