"""Codecs of activations: the stated bounds, what is not finite, and what is left as it is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from smolcluster.codec.rows import ROW_CODECS, decode_rows, encode_rows, encoded_form, is_coded

MATRICES = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=3, max_side=9),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
)
LOSSY = pytest.mark.parametrize("codec", ["bf16", "int8"])
FLT_MAX = torch.finfo(torch.float32).max


def roundtrip(values: Tensor, codec: str) -> Tensor:
    sent = encode_rows(values, codec)
    assert (sent.dtype, tuple(sent.shape)) == encoded_form(tuple(values.shape), codec)
    return decode_rows(sent, values.dtype, tuple(values.shape), codec)


def bound(values: Tensor, codec: str) -> Tensor:
    magnitudes = values.to(torch.float64).abs()
    if codec == "bf16":
        return (magnitudes * 2**-8).clamp(min=2.0**-126)
    return magnitudes.amax(-1, keepdim=True) / 254 * (1 + 2**-13) + 2.0**-127


@LOSSY
@given(values=MATRICES)
def test_no_value_is_further_off_than_is_stated(codec: str, values: NDArray[np.float32]) -> None:
    exact = torch.from_numpy(values)
    if codec == "bf16":
        exact = exact.clamp(-3e38, 3e38)
    loss = (roundtrip(exact, codec).to(torch.float64) - exact.to(torch.float64)).abs()
    assert bool((loss <= bound(exact, codec)).all())


def test_the_largest_number_stays_finite_and_an_outlier_costs_its_own_row_only() -> None:
    values = torch.tensor([[FLT_MAX, 1.0], [0.9, 1.1]])
    decoded = roundtrip(values, "int8")
    assert bool(torch.isfinite(decoded).all())
    torch.testing.assert_close(decoded[1], values[1], rtol=0.005, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not(bad: float) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = bad
    decoded = roundtrip(values, "int8")
    assert bool(torch.isnan(decoded[1]).all())
    torch.testing.assert_close(decoded[[0, 2]], values[[0, 2]])
    assert not bool(torch.isfinite(roundtrip(values, "bf16")[1, 2]))


@LOSSY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_come_back_as_they_went(codec: str, dtype: torch.dtype) -> None:
    values = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    if not is_coded(values, codec):
        assert codec == "bf16"
        return
    decoded = roundtrip(values.transpose(0, 1), codec)
    assert decoded.dtype == dtype
    torch.testing.assert_close(decoded, values.transpose(0, 1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "values",
    [torch.ones(4), torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int64), torch.ones(0, 3)],
    ids=["vector", "scalar", "integers", "empty"],
)
def test_what_is_no_activation_is_left_as_it_is(values: Tensor) -> None:
    assert not any(is_coded(values, codec) for codec in ROW_CODECS)


@pytest.mark.parametrize(
    ("dtype", "numel", "shape", "codec"),
    [
        (torch.uint8, 15, (2, 4), "int8"),
        (torch.int8, 16, (2, 4), "int8"),
        (torch.bfloat16, 8, (2, 4), "bf16"),
        (torch.uint8, 16, (2, 4), "fp32"),
        (torch.uint8, 0, (0, 4), "int8"),
        (torch.uint8, 8, (8,), "int8"),
    ],
)
def test_what_no_encoder_makes_is_refused(
    dtype: torch.dtype, numel: int, shape: tuple[int, ...], codec: str
) -> None:
    with pytest.raises(ValueError, match=r"\(\d, ?\d?\)"):
        decode_rows(torch.zeros(numel, dtype=dtype), torch.float32, shape, codec)
