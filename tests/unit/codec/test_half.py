"""bf16 and fp16: the stated bounds, the layouts, and what may arrive from a network."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from smolcluster.codec.half import CHUNK, Bf16Codec, Fp16Codec
from smolcluster.errors import ProtocolError

HalfCodec = Bf16Codec | Fp16Codec

FLT_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
FP16_MAX = torch.finfo(torch.float16).max
DENORMAL = 1e-45

BOTH = pytest.mark.parametrize("codec", [Bf16Codec(), Fp16Codec()], ids=["bf16", "fp16"])
KINDS = st.sampled_from([Bf16Codec, Fp16Codec])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def encode(codec: HalfCodec, values: Tensor) -> Tensor:
    encoded = torch.full((codec.encoded_nbytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values, encoded)
    return encoded


def roundtrip(codec: HalfCodec, values: Tensor) -> Tensor:
    decoded = torch.full_like(values, math.nan)
    codec.decode(encode(codec, values), decoded)
    return decoded


def bound(codec: HalfCodec, values: Tensor) -> Tensor:
    """The largest error that the module's docstring allows for each value, float64 (n,)."""
    magnitudes = values.to(torch.float64).abs()
    if isinstance(codec, Bf16Codec):
        return (magnitudes * 2**-8).clamp(min=2.0**-126)
    return torch.maximum(magnitudes * 2**-11, magnitudes.max() * 2**-39)


def assert_within_bound(codec: HalfCodec, values: Tensor) -> None:
    decoded = roundtrip(codec, values)
    assert bool(torch.isfinite(decoded).all())
    error = (values.to(torch.float64) - decoded.to(torch.float64)).abs()
    assert bool((error <= bound(codec, values)).all())


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(kind=KINDS, array=hnp.arrays(np.float32, st.integers(1, 300), elements=FINITE))
def test_any_finite_tensor_is_within_the_bound(kind: type[HalfCodec], array: np.ndarray) -> None:
    assert_within_bound(kind(), torch.from_numpy(array))


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(
    kind=KINDS,
    numel=st.integers(1, 600),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-149, 125),
)
def test_noise_of_any_size_is_within_the_bound(
    kind: type[HalfCodec], numel: int, seed: int, exponent: int
) -> None:
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values = (noise.to(torch.float64).clamp_(-4, 4) * 2.0**exponent).to(torch.float32)
    assert_within_bound(kind(), values)


@BOTH
@pytest.mark.parametrize("numel", [1, 2, 1000, CHUNK, CHUNK + 1, 2 * CHUNK + 300])
def test_every_size_is_within_the_bound(codec: HalfCodec, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert_within_bound(codec, values)


@BOTH
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "constant",
    [
        *(DENORMAL, 1e-40, 2.0**-126, 2.0**-111, 1e-30, 0.1, 1.0),
        *(FP16_MAX, 65519.0, 65520.0, 1e5, 1e30),
        *(BF16_MAX, 3.39e38, 3.3961775e38, 3.4e38, FLT_MAX),
    ],
)
def test_a_constant_is_within_the_bound(codec: HalfCodec, constant: float, sign: float) -> None:
    assert_within_bound(codec, torch.full((263,), sign * constant))


@BOTH
def test_powers_of_two_of_every_size_come_back_as_they_were(codec: HalfCodec) -> None:
    for exponent in range(-126, 128):
        values = torch.tensor([2.0**exponent, -(2.0**exponent)])
        assert torch.equal(roundtrip(codec, values), values)


@BOTH
def test_zeros_stay_exactly_zero(codec: HalfCodec) -> None:
    assert torch.equal(roundtrip(codec, torch.zeros(300)), torch.zeros(300))
    assert roundtrip(codec, torch.tensor([0.0, 5.0, 0.0, -3.0]))[[0, 2]].tolist() == [0.0, 0.0]


@BOTH
def test_a_tensor_far_from_zero_keeps_its_values(codec: HalfCodec) -> None:
    values = torch.linspace(0.9, 1.1, 1000)
    assert float((roundtrip(codec, values) - values).abs().max()) < 0.004


@BOTH
@pytest.mark.parametrize("outlier", [1e5, 1e9, FLT_MAX, -FLT_MAX])
def test_one_huge_outlier_survives(codec: HalfCodec, outlier: float) -> None:
    values = torch.linspace(-1, 1, 768)
    values[261] = outlier
    assert float(roundtrip(codec, values)[261]) == pytest.approx(outlier, rel=2**-8)
    assert_within_bound(codec, values)


@BOTH
def test_signs_are_symmetric(codec: HalfCodec) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(roundtrip(codec, -values), -roundtrip(codec, values))


@BOTH
def test_rounding_is_to_nearest_with_ties_to_even(codec: HalfCodec) -> None:
    step = 2.0**-7 if isinstance(codec, Bf16Codec) else 2.0**-10
    quarters = torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 10.0])
    rounded = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    assert torch.equal(roundtrip(codec, 1 + quarters / 4 * step), 1 + rounded * step)


def test_bf16_is_the_upper_half_of_a_float32() -> None:
    values = torch.tensor([1.0, -2.5, 3.0e38])
    codes = encode(Bf16Codec(), values).view(torch.int16)
    assert codes.tolist() == [0x3F80, 0xC020 - 0x10000, 0x7F62]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bf16_clamps_what_would_round_to_infinity(sign: float) -> None:
    values = torch.tensor([FLT_MAX, 3.397e38, 3.39e38, 1.0]) * sign
    decoded = roundtrip(Bf16Codec(), values)
    assert decoded.tolist() == [sign * BF16_MAX, sign * BF16_MAX, sign * BF16_MAX, sign]


@pytest.mark.parametrize("largest", [1.0, 1.999, FP16_MAX, 1e-9, 1e30, FLT_MAX])
def test_fp16_starts_with_a_power_of_two_that_fits_the_largest_value(largest: float) -> None:
    encoded = encode(Fp16Codec(), torch.tensor([0.0, -largest, largest / 3]))
    assert encoded.numel() == 4 + 3 * 2
    scale = float(encoded[:4].view(torch.float32))
    assert math.frexp(scale)[0] == 0.5
    assert 2**14 <= largest / scale < 2**15
    codes = encoded[4:].view(torch.float16).to(torch.float64) * scale
    assert codes.tolist() == pytest.approx([0.0, -largest, largest / 3], rel=2**-11)


def test_fp16_clamps_what_would_decode_to_infinity() -> None:
    largest = 32752 * 2.0**113
    values = torch.tensor([FLT_MAX, -FLT_MAX, 3.4027e38, 1e38])
    decoded = roundtrip(Fp16Codec(), values)
    assert decoded[:3].tolist() == [largest, -largest, largest]
    assert_within_bound(Fp16Codec(), values)


def test_fp16_keeps_a_tiny_gradient_that_a_plain_float16_loses() -> None:
    values = torch.linspace(1e-9, 2e-9, 100)
    assert not bool(values.to(torch.float16).any())
    assert bool(((roundtrip(Fp16Codec(), values) - values).abs() <= values * 2**-11).all())


def test_fp16_keeps_denormals_exactly_among_themselves() -> None:
    values = torch.tensor([1, -1, 3, 1000, 2047], dtype=torch.float64) * 2.0**-149
    assert torch.equal(roundtrip(Fp16Codec(), values.float()), values.float())


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_code_that_no_encoder_writes_is_a_protocol_error(codec: HalfCodec, bad: float) -> None:
    encoded = encode(codec, torch.ones(3))
    kind = torch.bfloat16 if isinstance(codec, Bf16Codec) else torch.float16
    encoded[-4:-2].view(kind).fill_(bad)
    with pytest.raises(ProtocolError, match=f"{codec.name} values arrived that decode to NaN"):
        codec.decode(encoded, torch.empty(3))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45, 0.0])
def test_a_scale_that_no_encoder_writes_is_a_protocol_error(scale: float) -> None:
    encoded = encode(Fp16Codec(), torch.ones(3))
    encoded[:4].view(torch.float32).fill_(scale)
    with pytest.raises(ProtocolError, match=r"an fp16 scale of .* arrived"):
        Fp16Codec().decode(encoded, torch.empty(3))


def test_received_values_that_would_overflow_are_a_protocol_error() -> None:
    encoded = encode(Fp16Codec(), torch.ones(3))
    encoded[:4].view(torch.float32).fill_(FLT_MAX)
    with pytest.raises(ProtocolError, match="decode to NaN or infinity"):
        Fp16Codec().decode(encoded, torch.empty(3))
