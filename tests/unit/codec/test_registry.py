"""Codecs by name."""

import pytest

from smolcluster.codec.registry import CODECS, get_codec
from smolcluster.errors import ProtocolError


def test_every_codec_is_found_by_the_name_it_carries() -> None:
    assert set(CODECS) == {"fp32", "int8"}
    for name in CODECS:
        assert get_codec(name).name == name


def test_two_users_of_a_codec_share_no_scratch() -> None:
    assert get_codec("int8") is not get_codec("int8")


def test_an_unknown_name_is_a_protocol_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ProtocolError, match=r"'int3' is not known here \(known: fp32, int8\)"):
        get_codec("int3")
