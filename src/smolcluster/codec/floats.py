"""Values written as floats: as they are, or in two bytes each.

`fp32` and `fp64`, for n values: n little-endian floats. Every value comes back bit for bit. A replica's
weights travel so; there is one for each type that a replica may have.

`bf16`, for n values: n bfloat16. It has the range of float32 and 8 bits of precision. Bound, for
every finite x:

    |x - decoded| <= max(|x| * 2^-8, 2^-126)

What would round to infinity becomes the largest bfloat16, 3.3895e38, which is within that bound.
2^-126, float32's smallest normal number, is for denormals: the processors that convert in one
instruction (AVX512-BF16) flush them to zero.

`fp16`, for n values: a scale (float32), then n float16 of x / scale. It has 11 bits of precision
but a range of 2^40 only, hence the scale. With `absmax` the largest magnitude of the tensor:

    scale = the power of two that puts absmax / scale in [2^14, 2^15), but at least 2^-126

Bound, for every finite x:

    |x - decoded| <= max(|x| * 2^-11, absmax * 2^-39)

No code overflows, as 2^15 is half of float16's largest number; where 2^15 times the scale would
overflow float32, the code below it is sent, within that bound. A gradient of 1e-9 everywhere keeps
its precision, which a plain float16 flushes to zero. The second term is what float16's denormals
lose: beside an outlier, values 2^39 times smaller may become zero. Scaling itself is exact. At the
least scale, every float32 denormal is a multiple of float16's smallest number.

All rounding is to nearest, ties to even.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, absmax, finite_absmax
from smolcluster.errors import ProtocolError

CHUNK = 1 << 18
"""Values worked on at once in scratch: 1 MiB of float32, a default bucket."""

_FP16_MAX_CODE = 2.0**15 - 2.0**4
"""The largest float16 below 2^15."""

_FP16_MAX_SCALE = 2.0**113
_SCALE_NBYTES = 4


class FloatCodec(Codec):
    """Writes each value as a float of type `code`; layout and bound are above."""

    code: ClassVar[torch.dtype]

    def encoded_nbytes(self, numel: int) -> int:
        return self.code.itemsize * numel

    def _encode(self, source: Tensor, out: Tensor) -> None:
        largest = finite_absmax(source)
        codes = out.view(self.code).copy_(source)
        if largest > (limit := torch.finfo(self.code).max):
            codes.clamp_(-limit, limit)

    def _decode(self, encoded: Tensor, out: Tensor) -> float:
        out.copy_(encoded.view(self.code))
        return self._finite_absmax(out)

    def _finite_absmax(self, values: Tensor) -> float:
        """Return the largest magnitude; `ProtocolError` if a peer's bytes decoded to NaN or infinity."""
        largest = absmax(values)
        if math.isfinite(largest):
            return largest
        if self.lossless:
            raise ProtocolError(
                f"a {self.dtype_name} tensor with NaN or infinity arrived: "
                "the peer must stop, it has diverged"
            )
        raise ProtocolError(
            f"{self.name} values arrived that decode to NaN or infinity: the peer is faulty"
        )


class Fp32Codec(FloatCodec):
    """float32 as it is, 4 bytes a value."""

    name: ClassVar[str] = "fp32"
    code: ClassVar[torch.dtype] = torch.float32
    lossless: ClassVar[bool] = True

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        self._encode(source, out)
        source.zero_()


class Fp64Codec(Fp32Codec):
    """float64 as it is, 8 bytes a value."""

    name: ClassVar[str] = "fp64"
    code: ClassVar[torch.dtype] = torch.float64
    dtype: ClassVar[torch.dtype] = torch.float64


class Bf16Codec(FloatCodec):
    """Rounds to bfloat16: 4 bytes become 2. Encoding keeps 1 MiB of scratch."""

    name: ClassVar[str] = "bf16"
    code: ClassVar[torch.dtype] = torch.bfloat16

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(CHUNK)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        self._encode(source, out)
        for values, codes in _chunks(source, out.view(self.code)):
            values.sub_(self._scratch[: values.numel()].copy_(codes))


class Fp16Codec(FloatCodec):
    """Scales and rounds to float16: 4 bytes become 2. Encoding keeps 1 MiB of scratch."""

    name: ClassVar[str] = "fp16"
    code: ClassVar[torch.dtype] = torch.float16

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(CHUNK)

    def encoded_nbytes(self, numel: int) -> int:
        return _SCALE_NBYTES + super().encoded_nbytes(numel)

    def _encode(self, source: Tensor, out: Tensor) -> None:
        self._quantize(source, out)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        scale = self._quantize(source, out)
        for values, codes in _chunks(source, _fp16_codes(out)):
            values.sub_(self._scratch[: values.numel()].copy_(codes).mul_(scale))

    def _decode(self, encoded: Tensor, out: Tensor) -> float:
        scale = float(_fp16_scale(encoded))
        if not 0 < scale < math.inf:
            raise ProtocolError(
                f"an fp16 scale of {scale} arrived, only finite ones above 0 are allowed: "
                "the peer is faulty"
            )
        out.copy_(_fp16_codes(encoded)).mul_(scale)
        return self._finite_absmax(out)

    def _quantize(self, source: Tensor, out: Tensor) -> float:
        """Fill `out`, uint8 (m,), and return the scale; it and its inverse are exact in float32."""
        exponent = math.frexp(finite_absmax(source))[1]
        scale = math.ldexp(1.0, max(exponent - 15, -126))
        _fp16_scale(out).fill_(scale)
        for values, codes in _chunks(source, _fp16_codes(out)):
            codes.copy_(torch.mul(values, 1 / scale, out=self._scratch[: values.numel()]))
            if scale == _FP16_MAX_SCALE:
                codes.clamp_(-_FP16_MAX_CODE, _FP16_MAX_CODE)
        return scale


def _fp16_scale(encoded: Tensor) -> Tensor:
    return encoded[:_SCALE_NBYTES].view(torch.float32)


def _fp16_codes(encoded: Tensor) -> Tensor:
    return encoded[_SCALE_NBYTES:].view(torch.float16)


def _chunks(values: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over values and codes, both (n,), as views of at most `CHUNK`.

    A float32 operation on 2-byte numbers would convert all of them into a new tensor first.
    """
    return zip(torch.split(values, CHUNK), torch.split(codes, CHUNK), strict=True)
