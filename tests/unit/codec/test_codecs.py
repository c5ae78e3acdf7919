"""Every codec: its stated bound, its layout, what is refused here, and what may arrive from a network."""

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from smolcluster.codec import int4, topk
from smolcluster.codec.base import Codec, NonFiniteValue, absmax
from smolcluster.codec.int8 import BLOCK
from smolcluster.codec.registry import CODECS, get_codec, lossless_for
from smolcluster.errors import ConfigError, NonFiniteLoss, ProtocolError

FLT_MAX = torch.finfo(torch.float32).max
DBL_MAX = torch.finfo(torch.float64).max
BF16_MAX = torch.finfo(torch.bfloat16).max
FP16_MAX = torch.finfo(torch.float16).max
DENORMAL = 1e-45
CHUNK = 262_144
LARGER_THAN_A_CHUNK = 2 * CHUNK + 300
FINITE_ARRAYS = hnp.arrays(
    np.float32,
    st.integers(0, 700),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
)
NAMES = st.sampled_from(sorted(CODECS))
HALVES = pytest.mark.parametrize("codec", ["bf16", "fp16"], indirect=True)


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def noise(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def encoded_buffer(codec: Codec, numel: int) -> Tensor:
    return torch.full((codec.encoded_nbytes(numel),), 0xA5, dtype=torch.uint8)


def encode(codec: Codec, values: Tensor) -> Tensor:
    out = encoded_buffer(codec, values.numel())
    codec.encode(values, out)
    return out


def decode(codec: Codec, encoded: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), math.nan, dtype=codec.dtype)
    bound = codec.decode(encoded, out)
    assert absmax(out) <= bound
    return out


def roundtrip(codec: Codec, values: Tensor) -> Tensor:
    return decode(codec, encode(codec, values), values.numel())


def bound(name: str, values: Tensor) -> Tensor:
    """The largest error that the codec's module allows for each value, float64 (n,)."""
    magnitudes = values.to(torch.float64).abs()
    if name == "bf16":
        return (magnitudes * 2**-8).clamp(min=2.0**-126)
    if name == "fp16":
        return torch.maximum(magnitudes * 2**-11, magnitudes.max() * 2**-39)
    if name == "int8":
        return largest_of(magnitudes, BLOCK) / 254 * (1 + 2**-14) + 2.0**-127
    if name == "int4":
        return int4_bound(largest_of(magnitudes, int4.BLOCK))
    if name == "topk":
        kept = int4_bound(largest_of(magnitudes, topk.CHUNK))
        kth = least_kept(magnitudes)
        return torch.where(magnitudes > kth, kept, kth)
    return torch.zeros_like(magnitudes)


def largest_of(magnitudes: Tensor, block: int) -> Tensor:
    """For each value, the largest of its block, (n,)."""
    return torch.cat([part.max().expand(len(part)) for part in torch.split(magnitudes, block)])


def int4_bound(block_maxima: Tensor) -> Tensor:
    least = max(float(block_maxima.max()) * 2.0**-31, 2.0**-127)
    return (block_maxima / 14 * (1 + 2**-10)).clamp(min=least)


def least_kept(magnitudes: Tensor) -> Tensor:
    """For each value, the smallest magnitude that `topk` keeps of its chunk, (n,)."""
    chunks = torch.split(magnitudes, topk.CHUNK)
    kth = [chunk.sort(descending=True).values[-(-len(chunk) // 64) - 1] for chunk in chunks]
    return torch.cat([one.expand(len(chunk)) for one, chunk in zip(kth, chunks, strict=True)])


def assert_within_bound(codec: Codec, values: Tensor) -> None:
    """What is received is near enough, and the kept error is exactly what it lacks."""
    values = values.to(codec.dtype)
    before, error = values.clone(), values.clone()
    encoded = encode(codec, values)
    assert torch.equal(values, before), "the source is left alone"
    decoded = decode(codec, encoded, values.numel())
    assert bool(torch.isfinite(decoded).all())
    if values.numel():
        difference = (values.to(torch.float64) - decoded.to(torch.float64)).abs()
        assert bool((difference <= bound(codec.name, values)).all())
    again = encoded_buffer(codec, values.numel())
    codec.encode_keeping_error(error, again)
    assert torch.equal(again, encoded)
    assert torch.equal(error, values - decoded)


@settings(derandomize=True, database=None, max_examples=70)
@given(name=NAMES, array=FINITE_ARRAYS)
def test_any_finite_tensor_is_within_the_bound(name: str, array: np.ndarray) -> None:
    assert_within_bound(get_codec(name), torch.from_numpy(array))


@settings(derandomize=True, database=None, max_examples=70)
@given(
    name=NAMES,
    numel=st.integers(1, 3 * BLOCK) | st.integers(topk.CHUNK - 130, topk.CHUNK + 130),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-149, 125),
)
def test_noise_of_any_size_is_within_the_bound(
    name: str, numel: int, seed: int, exponent: int
) -> None:
    values = noise(numel, seed).to(torch.float64).clamp_(-4, 4) * 2.0**exponent
    assert_within_bound(get_codec(name), values.to(torch.float32))


def test_every_size_is_within_the_bound_and_nothing_of_earlier_tensors_is_kept(
    codec: Codec,
) -> None:
    for numel in (1000, 1, 2, CHUNK, 256, LARGER_THAN_A_CHUNK, 0, CHUNK + 1, 255, 257, 600_000):
        values = noise(numel, numel, codec.dtype)
        assert_within_bound(codec, values)
        assert torch.equal(encode(codec, values), encode(get_codec(codec.name), values))


@pytest.mark.parametrize(
    "constant",
    [
        *(DENORMAL, 1e-40, 2.0**-126, 2.0**-111, 1e-30, 0.1, 1.0),
        *(FP16_MAX, 65519.0, 65520.0, 1e5, 1e30),
        *(BF16_MAX, 3.39e38, 3.3961775e38, 3.4e38, FLT_MAX),
    ],
)
def test_a_constant_and_an_outlier_are_within_the_bound(codec: Codec, constant: float) -> None:
    for sign in (1.0, -1.0):
        assert_within_bound(codec, torch.full((BLOCK + 7,), sign * constant))
        values = torch.linspace(-1, 1, 3 * BLOCK)
        values[BLOCK + 5] = sign * constant
        assert_within_bound(codec, values)


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "topk"], indirect=True)
def test_a_tensor_far_from_zero_keeps_its_values(codec: Codec) -> None:
    values = torch.linspace(0.9, 1.1, 1000, dtype=codec.dtype)
    most = 1.1 / 14 if codec.name == "int4" else 0.005
    assert float((roundtrip(codec, values) - values).abs().max()) < most


def test_zeros_stay_exactly_zero_and_signs_are_symmetric(codec: Codec) -> None:
    zeros = torch.zeros(300, dtype=codec.dtype)
    assert torch.equal(roundtrip(codec, zeros), zeros)
    some = torch.tensor([0.0, 5.0, 0.0, -3.0], dtype=codec.dtype)
    assert roundtrip(codec, some)[[0, 2]].tolist() == [0.0, 0.0]
    values = noise(1000, 3, codec.dtype)
    assert torch.equal(roundtrip(codec, -values), -roundtrip(codec, values))


# Layouts.


@pytest.mark.parametrize(
    ("name", "values", "letter"),
    [
        ("fp32", [1.5, -0.0, 1e-45, FLT_MAX, -FLT_MAX], "f"),
        ("fp64", [0.1, -0.0, 5e-324, DBL_MAX, -DBL_MAX], "d"),
    ],
)
def test_lossless_bytes_are_the_little_endian_floats(
    name: str, values: list[float], letter: str
) -> None:
    codec = get_codec(name)
    source = torch.tensor(values, dtype=codec.dtype)
    assert bytes(encode(codec, source).tolist()) == struct.pack(f"<5{letter}", *values)
    assert torch.equal(roundtrip(codec, source).view(torch.uint8), source.view(torch.uint8))


@HALVES
def test_rounding_is_to_nearest_with_ties_to_even(codec: Codec) -> None:
    for exponent in range(-126, 128):
        values = torch.tensor([2.0**exponent, -(2.0**exponent)])
        assert torch.equal(roundtrip(codec, values), values)
    step = 2.0**-7 if codec.name == "bf16" else 2.0**-10
    quarters = torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 10.0])
    rounded = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    assert torch.equal(roundtrip(codec, 1 + quarters / 4 * step), 1 + rounded * step)


def test_bf16_is_the_upper_half_of_a_float32() -> None:
    codes = encode(get_codec("bf16"), torch.tensor([1.0, -2.5, 3.0e38])).view(torch.int16)
    assert codes.tolist() == [0x3F80, 0xC020 - 0x10000, 0x7F62]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("name", "largest"), [("bf16", BF16_MAX), ("fp16", 32752 * 2.0**113)])
def test_what_would_become_infinite_is_clamped(name: str, largest: float, sign: float) -> None:
    decoded = roundtrip(get_codec(name), torch.tensor([FLT_MAX, 3.4027e38, 1.0]) * sign)
    assert decoded[:2].tolist() == [sign * largest, sign * largest]


@pytest.mark.parametrize("largest", [1.0, 1.999, FP16_MAX, 1e-9, 1e30, FLT_MAX])
def test_fp16_starts_with_a_power_of_two_that_fits_the_largest_value(largest: float) -> None:
    encoded = encode(get_codec("fp16"), torch.tensor([0.0, -largest, largest / 3]))
    assert encoded.numel() == 4 + 3 * 2
    scale = float(encoded[:4].view(torch.float32))
    assert math.frexp(scale)[0] == 0.5
    assert 2**14 <= largest / scale < 2**15
    codes = encoded[4:].view(torch.float16).to(torch.float64) * scale
    assert codes.tolist() == pytest.approx([0.0, -largest, largest / 3], rel=2**-11)


def test_fp16_keeps_denormals_exactly_among_themselves() -> None:
    values = (torch.tensor([1, -1, 3, 1000, 2047], dtype=torch.float64) * 2.0**-149).float()
    assert torch.equal(roundtrip(get_codec("fp16"), values), values)


def test_int8_scales_come_first_and_codes_use_the_whole_range() -> None:
    codec, values = get_codec("int8"), torch.linspace(-2, 2, BLOCK + 10)
    encoded = encode(codec, values)
    assert encoded.numel() == 2 * 4 + BLOCK + 10
    scales, codes = encoded[:8].view(torch.float32), encoded[8:].view(torch.int8)
    assert scales.tolist() == pytest.approx([2 / 127, 2 / 127])
    assert (int(codes[0]), int(codes[-1])) == (-127, 127)
    assert torch.equal(codes[:BLOCK].float() * scales[0], roundtrip(codec, values)[:BLOCK])


def test_an_int8_payload_is_at_least_3_9_times_smaller_than_float32() -> None:
    for numel in (9_610, 101_770, 262_144, 17_500_000):
        assert 4 * numel / get_codec("int8").encoded_nbytes(numel) >= 3.9


def test_int4_has_a_base_then_ratios_then_two_codes_a_byte() -> None:
    codec, numel = get_codec("int4"), 2 * 128 + 64 + 10
    values = torch.linspace(-0.7, 0.7, numel)
    encoded = encode(codec, values)
    assert encoded.numel() == 4 + 2 * 6 + 2 * 64 + 64
    base, ratios = encoded[:4].view(torch.float32), encoded[4:16].view(torch.float16)
    assert 2**14 <= 0.1 / float(base) < 2**15
    scales = ratios.float() * base
    assert scales.tolist() == pytest.approx(
        [float(part.abs().max()) / 7 for part in torch.split(values, 64)], rel=2**-11
    )
    codes = torch.zeros(numel, dtype=torch.int64)
    low, high = two_codes(encoded[16:144])
    codes[:128], codes[128:256] = low, high
    low, high = two_codes(encoded[144:])
    codes[256:320], codes[320:] = low, high[:10]
    assert not high[10:].any()
    assert torch.equal(codes * scales.repeat_interleave(64)[:numel], roundtrip(codec, values))
    assert (int(codes.min()), int(codes.max())) == (-7, 7)


def two_codes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of bytes that are low + 16 · high, each from -8 to 7."""
    signed = packed.view(torch.int8).to(torch.int64)
    low = (signed + 8) % 16 - 8
    return low, (signed - low) // 16


@pytest.mark.parametrize(
    ("numel", "nbytes"),
    [(0, 4), (1, 7), (64, 70), (65, 72), (128, 72), (129, 75), (262_144, 139_268)],
)
def test_an_int4_payload_has_four_and_a_quarter_bits_a_value(numel: int, nbytes: int) -> None:
    assert get_codec("int4").encoded_nbytes(numel) == nbytes


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-30, 1e-9, 65504.0, 1e30, FLT_MAX])
def test_int4_scales_neither_overflow_nor_underflow_in_float16(largest: float) -> None:
    values = noise(640, 1).clamp_(-4, 4) / 4 * largest
    assert_within_bound(get_codec("int4"), values)
    ratios = encode(get_codec("int4"), values)[4:24].view(torch.float16)
    assert float(ratios.min()) >= 2**-14
    assert float(ratios.max()) <= 2**15


def test_a_block_far_below_the_largest_is_zero_in_int4_and_kept_as_error() -> None:
    codec, values = get_codec("int4"), torch.cat([torch.ones(64), torch.full((64,), 2.0**-33)])
    decoded = roundtrip(codec, values)
    assert decoded[:64].tolist() == pytest.approx([1.0] * 64, rel=2**-11)
    assert not decoded[64:].any()
    error = values.clone()
    codec.encode_keeping_error(error, encoded_buffer(codec, 128))
    assert torch.equal(error[64:], values[64:])
    values[64:] = 2.0**-28
    assert torch.allclose(roundtrip(codec, values)[64:], values[64:], rtol=0.1, atol=0)


def test_topk_keeps_the_largest_of_each_chunk_and_nothing_else() -> None:
    codec, values = get_codec("topk"), noise(2 * topk.CHUNK + 100, 4)
    decoded = roundtrip(codec, values)
    for chunk, kept in zip(
        torch.split(values, topk.CHUNK), torch.split(decoded, topk.CHUNK), strict=True
    ):
        largest = chunk.abs().topk(-(-len(chunk) // 64)).indices.sort().values
        assert torch.equal(kept.nonzero().view(-1), largest)
        assert torch.allclose(kept[largest], chunk[largest], atol=float(chunk.abs().max()) / 13)


def test_topk_indices_have_12_bits_after_the_values() -> None:
    codec, values = get_codec("topk"), torch.zeros(topk.CHUNK + 70)
    places = [*range(5, 4096, 65), topk.CHUNK + 3, topk.CHUNK + 69]
    values[places] = torch.linspace(1, 2, 66)[: len(places)]
    encoded = encode(codec, values)
    num_kept = 64 + 2
    at = get_codec("int4").encoded_nbytes(num_kept)
    assert encoded.numel() == at + num_kept + num_kept // 2
    low, high = encoded[at : at + num_kept].tolist(), encoded[at + num_kept :].tolist()
    highs = [byte & 15 for byte in high] + [byte >> 4 for byte in high]
    indices = [256 * upper + lower for upper, lower in zip(highs, low, strict=True)]
    assert indices[64:] == [3, 69]
    assert set(places[:-2]) <= set(indices[:64])


def test_a_topk_payload_is_a_quarter_of_a_bit_a_value() -> None:
    assert get_codec("topk").encoded_nbytes(262_144) == 4 + 64 * (2 + 32 + 96)


# What is refused here.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 255, 256, 700, 300_000, LARGER_THAN_A_CHUNK - 1])
def test_a_non_finite_value_is_refused_and_its_place_is_named(
    codec: Codec, index: int, bad: float
) -> None:
    values = torch.ones(LARGER_THAN_A_CHUNK, dtype=codec.dtype)
    values[index] = values[-1] = bad
    out = encoded_buffer(codec, values.numel())
    for refusing in (codec.encode, codec.encode_keeping_error):
        with pytest.raises(NonFiniteValue, match=rf"value {index} of the tensor is {bad}") as error:
            refusing(values, out)
        assert error.value.index == index
        assert isinstance(error.value, NonFiniteLoss)


def of_another_type(codec: Codec) -> Tensor:
    return torch.ones(8, dtype=torch.float64 if codec.dtype == torch.float32 else torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        of_another_type,
        lambda codec: torch.ones(2, 4, dtype=codec.dtype),
        lambda codec: torch.ones(16, dtype=codec.dtype)[::2],
    ],
    ids=["another type", "two dimensions", "strided"],
)
def test_tensors_of_another_kind_are_refused(codec: Codec, make: Callable[[Codec], Tensor]) -> None:
    out = encoded_buffer(codec, 8)
    message = f"{codec.name} works on a contiguous {codec.dtype_name} tensor of one dimension"
    with pytest.raises(ValueError, match=message):
        codec.encode(make(codec), out)
    with pytest.raises(ValueError, match=message):
        codec.decode(out, make(codec))


def test_an_out_buffer_of_the_wrong_size_is_refused(codec: Codec) -> None:
    out = torch.empty(codec.encoded_nbytes(8) + 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="need a uint8 tensor"):
        codec.encode(torch.ones(8, dtype=codec.dtype), out)


# What may arrive.


@pytest.mark.parametrize("excess", [-1, 1, 4])
def test_received_bytes_of_the_wrong_length_are_a_protocol_error(codec: Codec, excess: int) -> None:
    received = torch.zeros(codec.encoded_nbytes(300) + excess, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match=rf"{received.numel()} bytes arrived for 300 values"):
        codec.decode(received, torch.empty(300, dtype=codec.dtype))


@settings(derandomize=True, database=None)
@given(name=NAMES, numel=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_random_bytes_decode_to_finite_values_or_are_a_protocol_error(
    name: str, numel: int, seed: int
) -> None:
    codec, generator = get_codec(name), torch.Generator().manual_seed(seed)
    size = (codec.encoded_nbytes(numel),)
    received = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    try:
        decoded = decode(codec, received, numel)
    except ProtocolError:
        return
    assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fp32", torch.float32),
        ("fp64", torch.float64),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_a_float_that_no_encoder_writes_is_a_protocol_error(
    name: str, kind: torch.dtype, bad: float
) -> None:
    codec = get_codec(name)
    received = encode(codec, torch.ones(3, dtype=codec.dtype))
    received[-2 * kind.itemsize : -kind.itemsize].view(kind).fill_(bad)
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        decode(codec, received, 3)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45])
@pytest.mark.parametrize(("name", "block"), [("fp16", 0), ("int8", 0), ("int8", 2)])
def test_a_scale_that_no_encoder_writes_is_a_protocol_error(
    name: str, block: int, scale: float
) -> None:
    codec, numel = get_codec(name), 2 * BLOCK + 1
    received = encode(codec, torch.ones(numel))
    received[4 * block : 4 * block + 4].view(torch.float32).fill_(scale)
    with pytest.raises(ProtocolError, match=rf"{name} scales? .* arrived"):
        decode(codec, received, numel)


@pytest.mark.parametrize("base", [math.nan, math.inf, -1.0, 0.0, 3.0, 2.0**-113, 2.0**112])
@pytest.mark.parametrize("name", ["int4", "topk"])
def test_a_base_that_no_encoder_writes_is_a_protocol_error(name: str, base: float) -> None:
    codec = get_codec(name)
    received = encode(codec, torch.ones(300))
    received[:4].view(torch.float32).fill_(base)
    with pytest.raises(ProtocolError, match=r"int4 scale with base .* arrived"):
        decode(codec, received, 300)


@pytest.mark.parametrize("ratio", [math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0**-15])
@pytest.mark.parametrize("block", [0, 4])
def test_a_ratio_that_no_encoder_writes_is_a_protocol_error(block: int, ratio: float) -> None:
    codec = get_codec("int4")
    received = encode(codec, torch.ones(300))
    received[4 + 2 * block : 6 + 2 * block].view(torch.float16).fill_(ratio)
    with pytest.raises(ProtocolError, match=r"int4 scales from .* arrived"):
        decode(codec, received, 300)


def test_received_int4_values_that_would_overflow_are_a_protocol_error() -> None:
    codec = get_codec("int4")
    received = encode(codec, torch.full((64,), FLT_MAX))
    received[4:6].view(torch.float16).fill_(FP16_MAX)
    with pytest.raises(ProtocolError, match="decode to infinity"):
        decode(codec, received, 64)
    received[6:] = 0
    assert not decode(codec, received, 64).any(), "where all codes are 0 it is allowed"


@pytest.mark.parametrize("indices", [(5, 5), (6, 5), (127, 128), (0, 4095)])
def test_topk_indices_out_of_order_or_range_are_a_protocol_error(indices: tuple[int, int]) -> None:
    codec, numel = get_codec("topk"), topk.CHUNK + 128
    received = encode(codec, torch.cat([torch.zeros(topk.CHUNK), torch.ones(128)]))
    at = get_codec("int4").encoded_nbytes(66)
    for number, index in enumerate(indices, start=64):
        received[at + number] = index & 255
        upper = at + 66 + number - 33
        received[upper] = (int(received[upper]) & 15) | (index >> 8) << 4
    with pytest.raises(ProtocolError, match="topk indices arrived"):
        decode(codec, received, numel)


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_received_values_that_would_overflow_are_a_protocol_error(name: str) -> None:
    codec = get_codec(name)
    received = encode(codec, torch.ones(BLOCK))
    received[:4].view(torch.float32).fill_(FLT_MAX)
    with pytest.raises(ProtocolError, match=r"decode to (NaN or )?infinity"):
        decode(codec, received, BLOCK)


def test_the_largest_scale_and_a_scale_of_zero() -> None:
    received = torch.zeros(4 + BLOCK, dtype=torch.uint8)
    received[:4].view(torch.float32).fill_(FLT_MAX)
    assert not decode(get_codec("int8"), received, BLOCK).any(), (
        "where all codes are 0 it is allowed"
    )
    with pytest.raises(ProtocolError, match=r"an fp16 scale of 0\.0 arrived"):
        decode(get_codec("fp16"), torch.zeros(4 + 2 * 3, dtype=torch.uint8), 3)


# By name.


def test_a_codec_is_found_by_its_name_and_shares_no_scratch() -> None:
    assert list(CODECS) == ["fp32", "fp64", "bf16", "fp16", "int8", "int4", "topk"]
    for name in CODECS:
        assert get_codec(name).name == name
        assert get_codec(name) is not get_codec(name)
        assert get_codec(name).dtype_name == ("float64" if name == "fp64" else "float32")
    known = "known: fp32, fp64, bf16, fp16, int8, int4, topk"
    with pytest.raises(ProtocolError, match=rf"'int3' is not known here \({known}\)"):
        get_codec("int3")


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.float64, "fp64")])
def test_weights_of_a_type_travel_in_its_lossless_codec(dtype: torch.dtype, name: str) -> None:
    assert lossless_for(dtype) == name
    assert get_codec(name).lossless


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_a_type_without_a_lossless_codec_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"{dtype}.*allowed: torch.float32, torch.float64$"):
        lossless_for(dtype)
