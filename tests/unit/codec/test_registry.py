"""Codecs by name."""

import pytest
import torch

from smolcluster.codec.registry import CODECS, get_codec, lossless_for
from smolcluster.errors import ConfigError, ProtocolError


def test_every_codec_is_found_by_the_name_it_carries() -> None:
    assert set(CODECS) == {"fp32", "fp64", "bf16", "fp16", "int8"}
    for name in CODECS:
        assert get_codec(name).name == name


def test_two_users_of_a_codec_share_no_scratch() -> None:
    assert get_codec("int8") is not get_codec("int8")


def test_an_unknown_name_is_a_protocol_error_that_lists_the_known_ones() -> None:
    known = "known: fp32, fp64, bf16, fp16, int8"
    with pytest.raises(ProtocolError, match=rf"'int3' is not known here \({known}\)"):
        get_codec("int3")


@pytest.mark.parametrize(
    ("name", "decoded"), [("fp32", "float32"), ("fp64", "float64"), ("int8", "float32")]
)
def test_a_codec_says_the_type_of_what_it_decodes(name: str, decoded: str) -> None:
    assert get_codec(name).dtype_name == decoded


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.float64, "fp64")])
def test_weights_of_a_type_travel_in_its_lossless_codec(dtype: torch.dtype, name: str) -> None:
    assert lossless_for(dtype) == name
    assert get_codec(name).lossless


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_a_type_without_a_lossless_codec_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"{dtype}.*allowed: torch.float32, torch.float64$"):
        lossless_for(dtype)
