"""Symmetric 8-bit quantization in blocks, each scaled by its largest magnitude.

Layout for n values: ceil(n / 256) scales (float32), then n codes (int8). A scale covers 256
consecutive values, the last one what is left. With `absmax` the largest magnitude of a block:

    scale = absmax / 127 + 2^-126        code = round(x / scale)        decoded = code * scale

After the block-wise quantization of 8-bit Optimizers (Dettmers et al., arXiv:2110.02861), with
evenly spaced codes instead of a dynamic tree. There is a scale a block, so that an outlier costs
precision to its neighbours only, and no zero point: zero is exact, and a block far from zero keeps
its values.

Bound, for every finite x:

    |x - decoded| <= absmax / 254 * (1 + 2^-14) + 2^-127

2^-14 covers the roundings of float32; 2^-126, its smallest normal number, keeps the scale of a
block of zeros or denormals invertible. Nothing overflows: in float32, 1/127 is rounded down, so its
largest number comes back finite.

On gradients of a small classifier of digits, blocks of 256 lose 15% less than blocks of 512 (0.63%
against 0.74% of the norm) for 0.8% more bytes; smaller blocks cost more than 1/3.9 of float32.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, reject_non_finite
from smolcluster.errors import ProtocolError

BLOCK = 256
"""Values that share a scale."""

CHUNK_BLOCKS = 1024
"""Blocks worked on at once: 1 MiB of float32, a default bucket. Smaller chunks would fit a closer
cache, but starting more operations costs more than that gains: a quarter of it takes 1.8x as long.
"""

_LARGEST = torch.finfo(torch.float32).max

Section = tuple[Tensor, Tensor, Tensor]


class Int8BlockCodec(Codec):
    """Blockwise absmax quantization to int8: 4 bytes become 1.016; layout and bound are above.

    Encoding keeps 1.01 MiB of scratch, whatever the size of the buckets.
    """

    name: ClassVar[str] = "int8"

    def __init__(self) -> None:
        self._tiny = torch.tensor(torch.finfo(torch.float32).tiny)

    @cached_property
    def _scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """For scales, their inverses, and values; a codec that only decodes needs none."""
        lowest, inverse = torch.empty(CHUNK_BLOCKS, 1), torch.empty(CHUNK_BLOCKS, 1)
        return lowest, inverse, torch.empty(CHUNK_BLOCKS * BLOCK)

    def encoded_nbytes(self, numel: int) -> int:
        return 4 * _num_blocks(numel) + numel

    def _encode(self, source: Tensor, out: Tensor) -> None:
        for values, scales, codes in _sections(source, out):
            self._quantize(source, values, scales, codes)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        for values, scales, codes in _sections(source, out):
            rounded = self._quantize(source, values, scales, codes)
            values.sub_(rounded.mul_(scales))

    def _decode(self, encoded: Tensor, out: Tensor) -> float:
        bound = 0.0
        for values, scales, codes in _sections(out, encoded):
            largest = _check_received(scales)
            values.copy_(codes).mul_(scales)
            bound = max(bound, 128 * largest)  # no encoder writes the code -128, but a peer may
            if bound > _LARGEST and not bool(torch.isfinite(values).all()):
                raise ProtocolError(
                    "int8 values arrived that decode to infinity: the peer is faulty"
                )
        return bound

    def _quantize(self, source: Tensor, values: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        """Fill a section's scales and codes; return the codes as float32 (b, width), in scratch.

        `source` is the whole tensor, for the place of a NaN or infinity in it.
        """
        num_blocks = values.shape[0]
        lowest, inverse, scaled = self._scratch
        lowest, inverse = lowest[:num_blocks], inverse[:num_blocks]
        scaled = scaled[: values.numel()].view(values.shape)
        torch.amin(values, 1, keepdim=True, out=lowest)
        torch.amax(values, 1, keepdim=True, out=scales)
        torch.maximum(scales, lowest.neg_(), out=scales)
        torch.add(self._tiny, scales, alpha=1 / 127, out=scales)
        if not float(scales.max()) <= _LARGEST:
            reject_non_finite(source)
        torch.reciprocal(scales, out=inverse)
        codes.copy_(torch.mul(values, inverse, out=scaled).round_())
        return scaled


def _sections(values: Tensor, encoded: Tensor) -> Iterator[Section]:
    """Walk over (n,) and (m,) as views: values (b, width), scales (b, 1) and codes (b, width).

    The last section is the block that is not full, if there is one: b is 1, `width` what is left.
    """
    num_full, rest = divmod(values.numel(), BLOCK)
    num_blocks = num_full + (rest > 0)
    scales = encoded[: 4 * num_blocks].view(torch.float32).view(-1, 1)
    codes = encoded[4 * num_blocks :].view(torch.int8)
    if rest == 0 and 0 < num_full <= CHUNK_BLOCKS:
        yield values.view(-1, BLOCK), scales, codes.view(-1, BLOCK)
        return
    for first in range(0, num_full, CHUNK_BLOCKS):
        last = min(first + CHUNK_BLOCKS, num_full)
        part = slice(first * BLOCK, last * BLOCK)
        yield values[part].view(-1, BLOCK), scales[first:last], codes[part].view(-1, BLOCK)
    if rest:
        yield values[-rest:].view(1, -1), scales[num_full:], codes[-rest:].view(1, -1)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _check_received(scales: Tensor) -> float:
    """Return the largest of the scales that a peer sent, or raise `ProtocolError`."""
    low, high = (float(value) for value in scales.aminmax())
    if not (low >= 0 and high <= _LARGEST):
        raise ProtocolError(
            f"int8 scales from {low} to {high} arrived, only finite ones from 0 up are allowed: "
            "the peer is faulty"
        )
    return high
