"""What holds for every codec."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from smolcluster.codec.base import Codec, NonFiniteValue
from smolcluster.codec.registry import CODECS, get_codec
from smolcluster.errors import NonFiniteLoss, ProtocolError

FINITE_ARRAYS = hnp.arrays(
    np.float32,
    st.integers(0, 700),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
)
CODEC_NAMES = st.sampled_from(sorted(CODECS))
LARGER_THAN_A_CHUNK = 2 * 262_144 + 300


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def encoded_buffer(codec: Codec, numel: int) -> Tensor:
    return torch.full((codec.encoded_nbytes(numel),), 0xA5, dtype=torch.uint8)


def encode(codec: Codec, values: Tensor) -> Tensor:
    out = encoded_buffer(codec, values.numel())
    codec.encode(values, out)
    return out


def decode(codec: Codec, encoded: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), math.nan, dtype=codec.dtype)
    codec.decode(encoded, out)
    return out


@settings(derandomize=True, deadline=None, database=None)
@given(name=CODEC_NAMES, array=FINITE_ARRAYS)
def test_finite_values_come_back_finite_and_the_source_is_left_alone(
    name: str, array: np.ndarray
) -> None:
    codec = get_codec(name)
    values = torch.from_numpy(array.copy()).to(codec.dtype)
    decoded = decode(codec, encode(codec, values), values.numel())
    assert bool(torch.isfinite(decoded).all())
    assert np.array_equal(values.numpy(), array)


@settings(derandomize=True, deadline=None, database=None)
@given(name=CODEC_NAMES, array=FINITE_ARRAYS)
def test_the_kept_error_is_exactly_what_the_receiver_lacks(name: str, array: np.ndarray) -> None:
    codec = get_codec(name)
    values = torch.from_numpy(array.copy()).to(codec.dtype)
    error = values.clone()
    out = encoded_buffer(codec, values.numel())
    codec.encode_keeping_error(error, out)
    assert torch.equal(out, encode(codec, values))
    assert torch.equal(error, values - decode(codec, out, values.numel()))


def test_the_kept_error_of_a_large_tensor_is_what_the_receiver_lacks(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(LARGER_THAN_A_CHUNK, generator=generator, dtype=codec.dtype)
    error = values.clone()
    out = encoded_buffer(codec, values.numel())
    codec.encode_keeping_error(error, out)
    assert torch.equal(error, values - decode(codec, out, values.numel()))
    assert bool(error.any()) is not codec.lossless


def test_an_instance_keeps_nothing_of_earlier_tensors(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (1000, 1, LARGER_THAN_A_CHUNK, 256, 0, 257):
        values = torch.randn(numel, generator=generator, dtype=codec.dtype)
        assert torch.equal(encode(codec, values), encode(get_codec(codec.name), values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 255, 256, 700, 300_000, LARGER_THAN_A_CHUNK - 1])
def test_a_non_finite_value_is_refused_and_its_place_is_named(
    codec: Codec, index: int, bad: float
) -> None:
    values = torch.ones(LARGER_THAN_A_CHUNK, dtype=codec.dtype)
    values[index] = bad
    values[-1] = bad
    out = encoded_buffer(codec, values.numel())
    with pytest.raises(NonFiniteValue, match=rf"value {index} of the tensor is {bad}") as caught:
        codec.encode(values, out)
    assert caught.value.index == index
    assert isinstance(caught.value, NonFiniteLoss)
    with pytest.raises(NonFiniteValue) as caught:
        codec.encode_keeping_error(values, out)
    assert caught.value.index == index


@pytest.mark.parametrize("excess", [-1, 1, 4])
def test_received_bytes_of_the_wrong_length_are_a_protocol_error(codec: Codec, excess: int) -> None:
    received = torch.zeros(codec.encoded_nbytes(300) + excess, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match=rf"{received.numel()} bytes arrived for 300 values"):
        codec.decode(received, torch.empty(300, dtype=codec.dtype))


@settings(derandomize=True, deadline=None, database=None)
@given(name=CODEC_NAMES, numel=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_random_bytes_decode_to_finite_values_or_are_a_protocol_error(
    name: str, numel: int, seed: int
) -> None:
    codec = get_codec(name)
    generator = torch.Generator().manual_seed(seed)
    received = torch.randint(
        0, 256, (codec.encoded_nbytes(numel),), dtype=torch.uint8, generator=generator
    )
    try:
        decoded = decode(codec, received, numel)
    except ProtocolError:
        return
    assert bool(torch.isfinite(decoded).all())


def of_another_type(codec: Codec) -> Tensor:
    other = torch.float64 if codec.dtype == torch.float32 else torch.float32
    return torch.ones(8, dtype=other)


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
