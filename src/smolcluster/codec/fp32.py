"""The lossless codec: raw little-endian float32, 4 bytes a value."""

import math
from typing import ClassVar

from torch import Tensor

from smolcluster.codec.base import Codec, reject_non_finite
from smolcluster.errors import ProtocolError


class Fp32Codec(Codec):
    """Copies the values as they are. Bound: decode(encode(x)) is x, bit for bit."""

    name: ClassVar[str] = "fp32"
    lossless: ClassVar[bool] = True

    def encoded_nbytes(self, numel: int) -> int:
        """4 bytes a value."""
        return 4 * numel

    def _encode(self, source: Tensor, out: Tensor) -> None:
        if not _all_finite(source):
            reject_non_finite(source)
        out.view(source.dtype).copy_(source)

    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        self._encode(source, out)
        source.zero_()

    def _decode(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.view(out.dtype))
        if not _all_finite(out):
            raise ProtocolError(
                "a float32 tensor with NaN or infinity arrived: the peer must stop, it has diverged"
            )


def _all_finite(values: Tensor) -> bool:
    """Whether no value of (n,) is NaN or infinite; reads the tensor once and takes no memory."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return math.isfinite(float(low)) and math.isfinite(float(high))
