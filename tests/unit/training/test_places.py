"""Ranges of flat weights, and what of one lies in another."""

from smolcluster.training.places import pieces


def test_a_part_of_a_fragment_is_found_in_the_flat_weights() -> None:
    places = slice(10, 14), slice(20, 23)
    assert pieces(places, slice(0, 7)) == [
        (slice(10, 14), slice(0, 4)),
        (slice(20, 23), slice(4, 7)),
    ]
    assert pieces(places, slice(3, 5)) == [
        (slice(13, 14), slice(0, 1)),
        (slice(20, 21), slice(1, 2)),
    ]
    assert pieces(places, slice(5, 6)) == [(slice(21, 22), slice(0, 1))]
