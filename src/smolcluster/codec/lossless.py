"""The lossless codecs: raw little-endian floats, 4 bytes a float32 and 8 a float64.

A replica's weights travel as they are, so there is one for each type that a replica may have.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.codec.base import Codec, absmax, finite_absmax
from smolcluster.errors import ProtocolError


class LosslessCodec(Codec):
    """Copies the values as they are. Bound: decode(encode(x)) is x, bit for bit."""

    lossless: ClassVar[bool] = True

    def encoded_nbytes(self, numel: int) -> int:
        """The decoded type's bytes a value."""
        return self.dtype.itemsize * numel

    def _encode(self, source: Tensor, out: Tensor) -> None:
        finite_absmax(source)
        out.view(self.dtype).copy_(source)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        self._encode(source, out)
        source.zero_()

    def _decode(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.view(self.dtype))
        if not math.isfinite(absmax(out)):
            raise ProtocolError(
                f"a {self.dtype_name} tensor with NaN or infinity arrived: "
                "the peer must stop, it has diverged"
            )


class Fp32Codec(LosslessCodec):
    """float32 as it is, 4 bytes a value."""

    name: ClassVar[str] = "fp32"


class Fp64Codec(LosslessCodec):
    """float64 as it is, 8 bytes a value."""

    name: ClassVar[str] = "fp64"
    dtype: ClassVar[torch.dtype] = torch.float64
