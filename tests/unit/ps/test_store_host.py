"""What a store checks of a slice before it takes memory for it."""

import pytest

from connection_pairs import one_of_each
from smolcluster.errors import ProtocolError
from smolcluster.ps.store_host import buckets_of, check_fits
from smolcluster.transport.messages import Slice

BUCKET_BYTES = 512 * 4
ADAM = next(each for each in one_of_each() if isinstance(each, Slice))
"""Bucket 1 of 2, of 1000 weights in all, with two moments."""


def test_buckets_are_as_agreed_on() -> None:
    assert buckets_of(ADAM, BUCKET_BYTES) == [slice(0, 512), slice(512, 1000)]
    small = ADAM.model_copy(update={"num_params": 9, "bucket_length": 9, "first": 0, "stop": 1})
    assert buckets_of(small, BUCKET_BYTES) == [slice(0, 9)]


@pytest.mark.parametrize(
    "change",
    [
        {"bucket_length": 1},
        {"bucket_length": 2**53, "num_params": 2**53},
        {"num_params": 2**53},
        {"first": 2, "stop": 3},
        {"first": 1, "stop": 1},
    ],
)
def test_impossible_buckets_are_refused_before_memory_is_taken(change: dict[str, int]) -> None:
    with pytest.raises(ProtocolError):
        buckets_of(ADAM.model_copy(update=change), BUCKET_BYTES)


def test_a_slice_that_does_not_fit_is_refused() -> None:
    needed = BUCKET_BYTES * (3 + 2)
    check_fits(ADAM, needed)
    with pytest.raises(ProtocolError, match="more hosts"):
        check_fits(ADAM, needed - 1)
