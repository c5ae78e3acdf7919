"""Fragments hold every value once, in order, and are of about equal size."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.DiLoCo.fragments import Fragment, cut
from smolcluster.errors import ConfigError


def layers_of(sizes: list[int]) -> list[tuple[str, slice]]:
    stops = list(itertools.accumulate(sizes))
    return [
        (f"layer{number}", slice(stop - size, stop))
        for number, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    ]


def indices(fragment: Fragment) -> list[int]:
    return [index for place in fragment.places for index in range(place.start, place.stop)]


REPEATABLE = settings(derandomize=True, database=None, max_examples=40)
SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@REPEATABLE
@given(SIZES, st.data())
def test_each_value_is_in_one_fragment_and_order_is_kept(
    sizes: list[int], data: st.DataObject
) -> None:
    fragments = cut(layers_of(sizes), data.draw(st.integers(1, len(sizes))))
    everything = [index for fragment in fragments for index in indices(fragment)]
    assert sorted(everything) == list(range(sum(sizes)))
    assert all(indices(fragment) == sorted(indices(fragment)) for fragment in fragments)
    starts = [fragment.places[0].start for fragment in fragments]
    assert starts == sorted(starts)


@REPEATABLE
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_is_near_that_of_the_best_packing(sizes: list[int], num_fragments: int) -> None:
    num_fragments = min(num_fragments, len(sizes))
    best = min(
        max(
            sum(size for size, place in zip(sizes, places, strict=True) if place == number)
            for number in range(num_fragments)
        )
        for places in itertools.product(range(num_fragments), repeat=len(sizes))
    )
    largest = max(fragment.numel for fragment in cut(layers_of(sizes), num_fragments))
    assert largest <= 4 / 3 * best


@REPEATABLE
@given(SIZES, st.data())
def test_gathered_and_scattered_again_is_the_same(sizes: list[int], data: st.DataObject) -> None:
    flat = torch.arange(float(sum(sizes)))
    copy = torch.full_like(flat, -1)
    for fragment in cut(layers_of(sizes), data.draw(st.integers(1, len(sizes)))):
        values = fragment.gather(flat, torch.empty(fragment.numel))
        assert values.tolist() == indices(fragment)
        fragment.scatter(values, copy)
    assert torch.equal(copy, flat)


def test_tensors_stay_whole_and_neighbours_are_one_place() -> None:
    assert cut(layers_of([4, 3, 1]), 1) == [Fragment((slice(0, 8),))]
    assert cut(layers_of([1, 4, 3]), 2) == [
        Fragment((slice(0, 1), slice(5, 8))),
        Fragment((slice(1, 5),)),
    ]


@REPEATABLE
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.data())
def test_tensors_without_values_change_nothing(sizes: list[int], data: st.DataObject) -> None:
    layers, full = layers_of(sizes), layers_of([size for size in sizes if size])
    num_fragments = data.draw(st.integers(1, len(full)))
    fragments = cut(layers, num_fragments)
    assert fragments == cut(full, num_fragments)
    for fragment in fragments:
        places = [place for _, place in fragment.buckets(4)]
        assert all(place.start < place.stop for place in places)
        assert sum(place.stop - place.start for place in places) == fragment.numel
    with pytest.raises(ConfigError, match=f"the model has {len(full)} "):
        cut(layers, len(full) + 1)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fragments is 3.*2 trainable tensors"):
        cut(layers_of([5, 5]), 3)
