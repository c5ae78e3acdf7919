"""Ranges of flat weights, and what of one lies in another."""

from smolcluster.training.places import common, pieces, total, without


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


def test_what_two_lists_of_places_share_and_what_one_has_alone() -> None:
    places = slice(0, 4), slice(6, 10)
    others = slice(2, 3), slice(3, 7), slice(9, 20)
    assert common(places, others) == [slice(2, 3), slice(3, 4), slice(6, 7), slice(9, 10)]
    assert without(places, others) == [slice(0, 2), slice(7, 9)]
    assert without(places, ()) == list(places)
    assert total(places) == 8
