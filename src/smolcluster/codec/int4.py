"""Symmetric 4-bit quantization in blocks of 64, each scaled by its largest magnitude.

Layout for n values, with B = ceil(n / 64) blocks and p = floor(n / 128) pairs of whole blocks:

    base (float32), B ratios (float16), ceil of half as many codes, two a byte

A block's scale is base · ratio. A byte, read as a signed number, is `low + 16 · high`, with codes from
-7 to 7. The first 64 p bytes hold the values [0, 64 p) as `low` and [64 p, 128 p) as `high`; what is left,
fewer than 128 values, follows in the same way: its first block is `low`, its second one `high` (0 where
there is none). So codes are packed by operations on whole stretches of memory. With `blockmax` the largest
magnitude of a block and `absmax` that of the tensor:

    base = the power of two that puts absmax / 7 / base in [2^14, 2^15), but at least 2^-112
    ratio = max(blockmax / 7 / base, 2^-14)   code = round(x / scale)   decoded = code · scale

That is 4.25 bits a value. The base gives float16's scales the range of float32: they neither overflow nor
lose precision as denormals. A block more than 2^28 times smaller than the largest one becomes zero; error
feedback sends it later. Bound, for every finite x:

    |x - decoded| <= max(blockmax / 14 * (1 + 2^-10), absmax * 2^-31, 2^-127)

2^-10 covers the roundings, most of all float16's of the ratio. Products of code and scale are exact, so
that every machine decodes to the same bits. Nothing overflows: the ratio of float32's largest number is
rounded down.

Block-wise as in 8-bit Optimizers (Dettmers et al., arXiv:2110.02861); 4 bits for the outer gradients of
local training as in Streaming DiLoCo (Douillard et al., arXiv:2501.18512), with evenly spaced codes and a
scale a block instead of a 4-bit float.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, absmax, reject_non_finite
from smolcluster.errors import ProtocolError

BLOCK = 64
"""Values that share a scale."""

CHUNK_PAIRS = 2048
"""Pairs of blocks worked on at once: 1 MiB of float32, a default bucket."""

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_CODE = 7
_BASE_NBYTES = 4
_LEAST_BASE = 2.0**-112
_GREATEST_BASE = 2.0**111
_LEAST_RATIO = torch.finfo(torch.float16).tiny


class Int4BlockCodec(Codec):
    """Blockwise absmax quantization to 4 bits: 4 bytes become 0.53; layout and bound are above.

    Encoding keeps 1.5 MiB of scratch, decoding 0.13 MiB, whatever the size of the buckets.
    """

    name: ClassVar[str] = "int4"

    @cached_property
    def _floats(self) -> Tensor:
        """For low and high values and their codes; a codec that only decodes needs none."""
        return torch.empty(3, CHUNK_PAIRS * BLOCK)

    @cached_property
    def _codes(self) -> Tensor:
        """For codes that are taken apart; a codec that only encodes needs none."""
        return torch.empty(CHUNK_PAIRS * BLOCK, dtype=torch.int8)

    def encoded_nbytes(self, numel: int) -> int:
        pairs, rest = divmod(numel, 2 * BLOCK)
        return _codes_at(numel) + BLOCK * pairs + min(rest, BLOCK)

    def _encode(self, source: Tensor, out: Tensor) -> None:
        for section in _sections(source, out, _write_scales(source, out)):
            self._quantize(section)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        for section in _sections(source, out, _write_scales(source, out)):
            low, high = self._quantize(section)
            section.low.sub_(low.mul_(section.low_scales))
            section.high.sub_(high.mul_(section.high_scales))

    def _decode(self, encoded: Tensor, out: Tensor) -> float:
        scales, largest = _read_scales(encoded, out.numel())
        for section in _sections(out, encoded, scales):
            code = self._codes[: section.codes.numel()].view(section.codes.shape)
            torch.bitwise_left_shift(section.codes, 4, out=code).bitwise_right_shift_(4)
            section.low.copy_(code).mul_(section.low_scales)
            torch.sub(section.codes, code, out=code).bitwise_right_shift_(4)
            section.high.copy_(code[:, : section.high.shape[1]]).mul_(section.high_scales)
        bound = 8 * largest  # no encoder writes the code -8, but a peer may
        if bound > _LARGEST and not math.isfinite(absmax(out)):
            raise ProtocolError("int4 values arrived that decode to infinity: the peer is faulty")
        return bound

    def _quantize(self, section: "_Section") -> tuple[Tensor, Tensor]:
        """Fill a section's bytes; return its codes as float32, low and high, in scratch."""
        low = _rounded(section.low, section.low_scales, self._floats[0])
        high = _rounded(section.high, section.high_scales, self._floats[1])
        packed = self._floats[2, : low.numel()].view(low.shape).copy_(low)
        packed[:, : high.shape[1]].add_(high, alpha=16)
        section.codes.copy_(packed)
        return low, high


@dataclass(frozen=True)
class _Section:
    """Views of blocks that share bytes; b is 1 and a width below 64 only where values are left over.

    Shapes: low (b, width), high (b, up to width), scales (b, 1), codes int8 (b, width).
    """

    low: Tensor
    high: Tensor
    low_scales: Tensor
    high_scales: Tensor
    codes: Tensor


def _sections(values: Tensor, encoded: Tensor, scales: Tensor) -> Iterator[_Section]:
    """Walk over values (n,) and bytes (m,), with the scales float32 (B, 1)."""
    pairs, rest = divmod(values.numel(), 2 * BLOCK)
    codes = encoded[_codes_at(values.numel()) :].view(torch.int8)
    blocks = values[: 2 * pairs * BLOCK].view(-1, BLOCK)
    for first in range(0, pairs, CHUNK_PAIRS):
        low = slice(first, min(first + CHUNK_PAIRS, pairs))
        high = slice(pairs + low.start, pairs + low.stop)
        section_codes = codes[low.start * BLOCK : low.stop * BLOCK].view(-1, BLOCK)
        yield _Section(blocks[low], blocks[high], scales[low], scales[high], section_codes)
    if rest:
        left = values[-rest:].view(1, -1)
        low_scales, high_scales = scales[2 * pairs : 2 * pairs + 1], scales[-1:]
        section_codes = codes[pairs * BLOCK :].view(1, -1)
        yield _Section(left[:, :BLOCK], left[:, BLOCK:], low_scales, high_scales, section_codes)


def _rounded(values: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
    out = scratch[: values.numel()].view(values.shape)
    return torch.mul(values, scales.reciprocal(), out=out).round_()


def _codes_at(numel: int) -> int:
    return _BASE_NBYTES + 2 * -(-numel // BLOCK)


def _base(encoded: Tensor) -> Tensor:
    return encoded[:_BASE_NBYTES].view(torch.float32)


def _ratios(encoded: Tensor, numel: int) -> Tensor:
    return encoded[_BASE_NBYTES : _codes_at(numel)].view(torch.float16).view(-1, 1)


def _write_scales(source: Tensor, out: Tensor) -> Tensor:
    """Fill base and ratios; return the scales that they stand for, float32 (B, 1).

    Raises:
        NonFiniteValue: `source` holds NaN or infinity.
    """
    scales = _block_maxima(source)
    largest = float(scales.max()) if scales.numel() else 0.0
    if not largest <= _LARGEST:
        reject_non_finite(source)
    base = max(math.ldexp(1.0, math.frexp(largest / _LARGEST_CODE)[1] - 15), _LEAST_BASE)
    _base(out).fill_(base)
    ratios = _ratios(out, source.numel())
    ratios.copy_(scales.mul_(1 / (_LARGEST_CODE * base)).clamp_(min=_LEAST_RATIO))
    return scales.copy_(ratios).mul_(base)


def _block_maxima(values: Tensor) -> Tensor:
    """Return each block's largest magnitude, (B, 1); NaN or infinity where a block holds one."""
    num_full, rest = divmod(values.numel(), BLOCK)
    maxima = torch.empty(num_full + (rest > 0), 1)
    blocks = values[: num_full * BLOCK].view(-1, BLOCK)
    if num_full:
        torch.amax(blocks, 1, keepdim=True, out=maxima[:num_full])
        torch.maximum(maxima[:num_full], blocks.amin(1, keepdim=True).neg_(), out=maxima[:num_full])
    if rest:
        maxima[num_full] = absmax(values[-rest:])
    return maxima


def _read_scales(encoded: Tensor, numel: int) -> tuple[Tensor, float]:
    """Return the scales that a peer sent, float32 (B, 1), and the largest one, or raise `ProtocolError`."""
    base = float(_base(encoded))
    if not (_LEAST_BASE <= base <= _GREATEST_BASE and math.frexp(base)[0] == 0.5):
        raise ProtocolError(
            f"an int4 scale with base {base} arrived, only powers of two from 2^-112 to 2^111 are "
            "allowed: the peer is faulty"
        )
    ratios = _ratios(encoded, numel).to(torch.float32)
    if not numel:
        return ratios, 0.0
    low, high = (float(value) for value in ratios.aminmax())
    if not (low >= _LEAST_RATIO and high <= _LARGEST):
        raise ProtocolError(
            f"int4 scales from {low} to {high} of the base arrived, only finite ones from 2^-14 up are "
            "allowed: the peer is faulty"
        )
    return ratios.mul_(base), high * base
