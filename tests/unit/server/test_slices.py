"""Weights cut into slices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.server.slices import spans


@given(st.integers(1, 60), st.integers(1, 9))
def test_every_bucket_is_in_one_span_and_no_span_is_empty(buckets: int, hosts: int) -> None:
    cut = spans(buckets, [1] * hosts)
    assert [number for span in cut for number in span] == list(range(buckets))
    assert len(cut) == min(buckets, hosts)
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize(
    ("buckets", "shares", "sizes"),
    [
        (12, (2, 1, 1), [6, 3, 3]),
        (4, (0.97, 0.01, 0.01, 0.01), [1, 1, 1, 1]),
        (10, (0.01, 0.98, 0.01), [1, 8, 1]),
        (2, (1, 1, 8), [1, 1]),
    ],
)
def test_a_host_has_about_its_share_and_at_least_a_bucket(
    buckets: int, shares: tuple[float, ...], sizes: list[int]
) -> None:
    assert list(map(len, spans(buckets, shares))) == sizes
