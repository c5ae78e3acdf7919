"""The lossless codecs."""

import math
import struct

import pytest
import torch

from smolcluster.codec.lossless import Fp32Codec, Fp64Codec, LosslessCodec
from smolcluster.errors import ProtocolError

FLT_MAX = torch.finfo(torch.float32).max
DBL_MAX = torch.finfo(torch.float64).max

KINDS = pytest.mark.parametrize(
    ("kind", "values", "letter"),
    [
        (Fp32Codec, [1.5, -0.0, 1e-45, FLT_MAX, -FLT_MAX], "f"),
        (Fp64Codec, [0.1, -0.0, 5e-324, DBL_MAX, -DBL_MAX], "d"),
    ],
    ids=["fp32", "fp64"],
)


@KINDS
def test_the_bytes_are_the_little_endian_floats(
    kind: type[LosslessCodec], values: list[float], letter: str
) -> None:
    codec = kind()
    out = torch.empty(codec.encoded_nbytes(5), dtype=torch.uint8)
    codec.encode(torch.tensor(values, dtype=codec.dtype), out)
    assert bytes(out.tolist()) == struct.pack(f"<5{letter}", *values)


@KINDS
def test_values_come_back_bit_for_bit(
    kind: type[LosslessCodec], values: list[float], letter: str
) -> None:
    codec = kind()
    source = torch.tensor([*values, 1 / 3], dtype=codec.dtype)
    out = torch.empty(codec.encoded_nbytes(6), dtype=torch.uint8)
    decoded = torch.empty(6, dtype=codec.dtype)
    codec.encode(source, out)
    codec.decode(out, decoded)
    assert torch.equal(source.view(torch.uint8), decoded.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("kind", "dtype"), [(Fp32Codec, torch.float32), (Fp64Codec, torch.float64)]
)
def test_a_non_finite_value_from_the_network_is_a_protocol_error(
    kind: type[LosslessCodec], dtype: torch.dtype, bad: float
) -> None:
    received = torch.tensor([1.0, bad, 2.0], dtype=dtype).view(torch.uint8)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ProtocolError, match=f"a {name} tensor with NaN or infinity arrived"):
        kind().decode(received, torch.empty(3, dtype=dtype))
