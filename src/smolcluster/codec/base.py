"""What every codec does: write a flat tensor as bytes, and read it back.

A codec works on one bucket at a time, on the CPU, into buffers that the caller owns. It may keep
scratch buffers, so an instance serves one thread at a time. Numbers are in the machine's byte
order, which is little-endian wherever PyTorch is used today.

Shape letters: n values in a bucket; m = `encoded_nbytes(n)` bytes.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.errors import NonFiniteLoss, ProtocolError


class NonFiniteValue(NonFiniteLoss):
    """A tensor to encode holds NaN or infinity; `index` is the place of the first such value."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(
            f"value {index} of the tensor is {value}, nothing of it is sent: "
            "lower the learning rate or turn gradient clipping on"
        )
        self.index = index


class Codec(ABC):
    """A way to write n values of type `dtype` as bytes, with a stated bound on what is lost."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype] = torch.float32
    """Type of what is encoded, and of what comes back."""
    lossless: ClassVar[bool] = False
    """Whether every value comes back as it was, so that error feedback has nothing to feed back."""

    @property
    def dtype_name(self) -> str:
        """`dtype` as it is said in frames and messages, such as float32."""
        return str(self.dtype).removeprefix("torch.")

    @abstractmethod
    def encoded_nbytes(self, numel: int) -> int:
        """Bytes that `numel` values take once encoded."""

    def encode(self, source: Tensor, out: Tensor) -> None:
        """Write `source`, `dtype` (n,), to `out`, uint8 (m,).

        `out` starts at a multiple of `dtype.itemsize` bytes of its storage.

        Raises:
            NonFiniteValue: `source` holds NaN or infinity. `out` then holds rubbish and must not be
                sent.
        """
        self._check_buffers(source, out)
        self._encode(source, out)

    def encode_keeping_error(self, source: Tensor, out: Tensor) -> None:
        """Encode like `encode`, and leave in `source` what was lost: `source - decode(out)`.

        Raises:
            NonFiniteValue: as for `encode`. `source` then holds rubbish as well.
        """
        self._check_buffers(source, out)
        self._encode_keeping_error(source, out)

    def decode(self, encoded: Tensor, out: Tensor) -> float:
        """Read `encoded`, uint8 (m,), into `out`, `dtype` (n,); return what no magnitude in it exceeds.

        `encoded` starts at a multiple of `dtype.itemsize` bytes of its storage.

        Raises:
            ProtocolError: `encoded` has the wrong length, or would decode to NaN or infinity. `out`
                then holds rubbish.
        """
        expected = self.encoded_nbytes(out.numel())
        if encoded.numel() != expected:
            raise ProtocolError(
                f"{encoded.numel()} bytes arrived for {out.numel()} values, which take {expected} "
                f"in {self.name}: both sides need the same codec, model and bucket size"
            )
        self._check_buffers(out, encoded)
        return self._decode(encoded, out)

    @abstractmethod
    def _encode(self, source: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _encode_keeping_error(self, source: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _decode(self, encoded: Tensor, out: Tensor) -> float: ...

    def _check_buffers(self, values: Tensor, encoded: Tensor) -> None:
        if values.dtype != self.dtype or values.ndim != 1 or not values.is_contiguous():
            raise ValueError(
                f"{self.name} works on a contiguous {self.dtype_name} tensor of one dimension, "
                f"not on {values.dtype} of shape {tuple(values.shape)}"
            )
        if encoded.dtype != torch.uint8 or encoded.shape != (self.encoded_nbytes(values.numel()),):
            raise ValueError(
                f"{values.numel()} values in {self.name} need a uint8 tensor of "
                f"{self.encoded_nbytes(values.numel())} bytes, "
                f"not {encoded.dtype} of shape {tuple(encoded.shape)}"
            )


def absmax(values: Tensor) -> float:
    """Return the largest magnitude in (n,): NaN or infinity if there is one, 0 of no values.

    Reads the tensor once and takes no memory.
    """
    if not values.numel():
        return 0.0
    low, high = (float(value) for value in values.aminmax())
    return max(-low, high)


def finite_absmax(source: Tensor) -> float:
    """Return the largest magnitude in (n,).

    Raises:
        NonFiniteValue: `source` holds NaN or infinity.
    """
    largest = absmax(source)
    if not math.isfinite(largest):
        reject_non_finite(source)
    return largest


def reject_non_finite(source: Tensor) -> None:
    """Raise `NonFiniteValue` for the first NaN or infinity in `source`, (n,), if there is one."""
    places = torch.isfinite(source).logical_not_().nonzero()
    if places.numel():
        index = int(places[0])
        raise NonFiniteValue(index, float(source[index]))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.numpy().data).cast("B")
