"""The lossless codec."""

import math
import struct

import pytest
import torch

from smolcluster.codec.fp32 import Fp32Codec
from smolcluster.errors import ProtocolError


def test_the_bytes_are_the_little_endian_floats() -> None:
    values = [1.5, -0.0, 1e-45, 3.4028234663852886e38]
    out = torch.empty(16, dtype=torch.uint8)
    Fp32Codec().encode(torch.tensor(values), out)
    assert bytes(out.tolist()) == struct.pack("<4f", *values)


def test_values_come_back_bit_for_bit() -> None:
    values = torch.tensor([1.5, -0.0, 1e-45, 3.4028234663852886e38, 0.1])
    codec = Fp32Codec()
    out = torch.empty(codec.encoded_nbytes(5), dtype=torch.uint8)
    decoded = torch.empty(5)
    codec.encode(values, out)
    codec.decode(out, decoded)
    assert torch.equal(values.view(torch.int32), decoded.view(torch.int32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_from_the_network_is_a_protocol_error(bad: float) -> None:
    received = torch.tensor([1.0, bad, 2.0]).view(torch.uint8)
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        Fp32Codec().decode(received, torch.empty(3))
