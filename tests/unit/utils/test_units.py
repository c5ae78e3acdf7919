import math

import pytest

from smolcluster.utils.units import (
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_rate,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.0 kB"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (70_000_000, "70.0 MB"),
        (3_200_000_000, "3.2 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_bytes_are_decimal_with_one_digit(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (0, "0 MB/s"),
        (4_100, "0.0041 MB/s"),
        (51_700, "0.052 MB/s"),
        (9.94e6, "9.9 MB/s"),
        (9.96e6, "10 MB/s"),
        (117.5e6, "118 MB/s"),
        (1.18e9, "1,180 MB/s"),
    ],
)
def test_what_links_carry_is_told_in_one_unit(bytes_per_s: float, text: str) -> None:
    assert format_rate(bytes_per_s) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.000_031, "0.031 ms"),
        (0.003_26, "3.3 ms"),
        (0.009_96, "10 ms"),
        (0.0994, "99 ms"),
        (0.0996, "0.1 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (65, "1 min 05 s"),
        (120, "2 min"),
        (3599.6, "1 h"),
        (3600 + 125, "1 h 02 min"),
        (3 * 86400 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "worker", "0 workers"),
        (1, "worker", "1 worker"),
        (3, "worker", "3 workers"),
        (2, "epoch", "2 epochs"),
        (1200, "batch", "1,200 batches"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int, noun: str, text: str) -> None:
    assert format_count(count, noun) == text


@pytest.mark.parametrize(
    ("loss", "decimals", "text"),
    [
        (2.30258, 4, "2.3026"),
        (0.0461, 3, "0.046"),
        (0.0, 4, "0.0000"),
        (5.137e-07, 4, "5.14e-07"),
        (0.00812, 3, "0.00812"),
        (123456.0, 4, "1.23e+05"),
        (math.nan, 4, "nan"),
    ],
)
def test_a_small_loss_is_not_shown_as_none(loss: float, decimals: int, text: str) -> None:
    assert format_loss(loss, decimals) == text
