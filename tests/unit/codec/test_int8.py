"""Blockwise int8: the stated bound, the layout, and what may arrive from a network."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from smolcluster.codec.int8 import BLOCK, Int8BlockCodec
from smolcluster.errors import ProtocolError

FLT_MAX = torch.finfo(torch.float32).max
DENORMAL = 1e-45


def roundtrip(values: Tensor) -> Tensor:
    codec = Int8BlockCodec()
    encoded = torch.empty(codec.encoded_nbytes(values.numel()), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    codec.encode(values, encoded)
    codec.decode(encoded, decoded)
    return decoded


def bound(values: Tensor) -> Tensor:
    """The largest error that the module's docstring allows for each value, float64 (n,)."""
    magnitudes = values.to(torch.float64).abs()
    absmax = torch.empty_like(magnitudes)
    for start in range(0, values.numel(), BLOCK):
        absmax[start : start + BLOCK] = magnitudes[start : start + BLOCK].max()
    return absmax / 254 * (1 + 2**-14) + 2.0**-127


def assert_within_bound(values: Tensor) -> None:
    decoded = roundtrip(values)
    assert bool(torch.isfinite(decoded).all())
    error = (values.to(torch.float64) - decoded.to(torch.float64)).abs()
    assert bool((error <= bound(values)).all())


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(
    hnp.arrays(
        np.float32,
        st.integers(1, 3 * BLOCK),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
    )
)
def test_any_finite_tensor_is_within_the_bound(array: np.ndarray) -> None:
    assert_within_bound(torch.from_numpy(array))


@settings(derandomize=True, deadline=None, database=None)
@given(
    numel=st.integers(1, 3 * BLOCK),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-149, 125),
)
def test_noise_of_any_size_is_within_the_bound(numel: int, seed: int, exponent: int) -> None:
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    assert_within_bound((noise.to(torch.float64).clamp_(-4, 4) * 2.0**exponent).to(torch.float32))


@pytest.mark.parametrize("numel", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 262_144, 600_000])
def test_every_size_is_within_the_bound(numel: int) -> None:
    assert_within_bound(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))


@pytest.mark.parametrize(
    "constant", [1.0, -1.0, 0.1, 1e-30, DENORMAL, -1e-40, 2.0**-126, 1e30, FLT_MAX, -FLT_MAX]
)
def test_a_constant_is_within_the_bound(constant: float) -> None:
    assert_within_bound(torch.full((BLOCK + 7,), constant))


def test_zeros_stay_exactly_zero() -> None:
    assert torch.equal(roundtrip(torch.zeros(300)), torch.zeros(300))
    values = torch.tensor([0.0, 5.0, 0.0, -3.0])
    assert roundtrip(values)[[0, 2]].tolist() == [0.0, 0.0]


def test_a_tensor_far_from_zero_keeps_its_values() -> None:
    values = torch.linspace(0.9, 1.1, 1000)
    assert float((roundtrip(values) - values).abs().max()) < 0.005


@pytest.mark.parametrize("outlier", [FLT_MAX, -FLT_MAX])
def test_one_huge_outlier_survives_and_spoils_its_own_block_only(outlier: float) -> None:
    values = torch.linspace(-1, 1, 3 * BLOCK)
    values[BLOCK + 5] = outlier
    decoded = roundtrip(values)
    assert math.isfinite(float(decoded[BLOCK + 5]))
    assert float(decoded[BLOCK + 5]) == pytest.approx(outlier, rel=1e-6)
    others = torch.cat([decoded[:BLOCK] - values[:BLOCK], decoded[-BLOCK:] - values[-BLOCK:]])
    assert float(others.abs().max()) < 0.004
    assert_within_bound(values)


def test_signs_are_symmetric() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(roundtrip(-values), -roundtrip(values))


def test_scales_come_first_and_codes_use_the_whole_range() -> None:
    codec = Int8BlockCodec()
    values = torch.linspace(-2, 2, BLOCK + 10)
    encoded = torch.empty(codec.encoded_nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, encoded)
    assert encoded.numel() == 2 * 4 + BLOCK + 10
    scales, codes = encoded[:8].view(torch.float32), encoded[8:].view(torch.int8)
    assert scales.tolist() == pytest.approx([2 / 127, 2 / 127])
    assert (int(codes[0]), int(codes[-1])) == (-127, 127)
    assert torch.equal(codes[:BLOCK].float() * scales[0], roundtrip(values)[:BLOCK])


def test_a_payload_is_at_least_3_9_times_smaller_than_float32() -> None:
    codec = Int8BlockCodec()
    for numel in (9_610, 101_770, 262_144, 17_500_000):
        assert 4 * numel / codec.encoded_nbytes(numel) >= 3.9


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45])
@pytest.mark.parametrize("block", [0, 2])
def test_a_scale_that_no_encoder_writes_is_a_protocol_error(block: int, scale: float) -> None:
    codec = Int8BlockCodec()
    received = torch.ones(codec.encoded_nbytes(2 * BLOCK + 1), dtype=torch.uint8)
    scales = received[:12].view(torch.float32)
    scales.fill_(0.5)
    scales[block] = scale
    with pytest.raises(ProtocolError, match="int8 scales from"):
        codec.decode(received, torch.empty(2 * BLOCK + 1))


def test_received_values_that_would_overflow_are_a_protocol_error() -> None:
    codec = Int8BlockCodec()
    received = torch.zeros(codec.encoded_nbytes(BLOCK), dtype=torch.uint8)
    received[:4].view(torch.float32).fill_(FLT_MAX)
    codec.decode(received, torch.empty(BLOCK))
    received[-1] = 2
    with pytest.raises(ProtocolError, match="decode to infinity"):
        codec.decode(received, torch.empty(BLOCK))
