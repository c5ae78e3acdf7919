"""Points of a run however long."""

import random
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

import pytest

from smolcluster.observability.view.thinned import Thinned


class Point(NamedTuple):
    step: float
    start: str = "a"
    loss: float = 0.0


def thinned(at_most: int) -> Thinned[Point]:
    return Thinned(at_most, lambda point: point.step, lambda point: point.start)


def test_few_points_are_all_kept() -> None:
    points = thinned(10)
    for step in range(15):
        points.add(Point(step))
    assert [point.step for point in points] == list(range(15))


def test_many_points_are_kept_at_even_distances_with_the_first_and_the_newest() -> None:
    points = thinned(10)
    for step in range(100_001):
        points.add(Point(step))
        assert len(points) <= 21
    steps = [point.step for point in points]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 100_000)
    distances = {after - before for before, after in pairwise(steps[:-1])}
    assert max(distances) <= 2 * min(distances)


def test_a_new_start_begins_with_its_own_first_point() -> None:
    points = thinned(10)
    for step in range(1000):
        points.add(Point(step))
    points.add(Point(500, "b"))
    assert list(points)[-1] == Point(500, "b")


def test_many_starts_of_few_points_do_not_grow_without_end() -> None:
    points = thinned(10)
    for start in range(1000):
        points.add(Point(1, str(start)))
    assert len(points) <= 21


def test_noise_is_as_high_as_it_was_and_what_stands_out_of_it_is_seen() -> None:
    points = Thinned[Point](
        1500, lambda point: point.step, lambda point: point.start, lambda point: point.loss
    )
    noise = random.Random(7)  # noqa: S311 - no secret
    for step in range(60_000):
        points.add(Point(step, loss=200.0 if step == 30_011 else noise.gauss(2.0, 0.3)))
    losses = [point.loss for point in points]
    assert losses.count(200.0) == 1
    assert mean(loss for loss in losses if loss < 200.0) == pytest.approx(2.0, rel=0.02)


def test_a_place_before_the_last_one_is_not_near_it() -> None:
    points = thinned(10)
    for step in range(10_000, 10_100):
        points.add(Point(step))
    for step in range(100):
        points.add(Point(step))
    assert sum(point.step < 10_000 for point in points) > 1


def test_what_stands_out_for_a_moment_is_seen_in_a_long_run() -> None:
    points = Thinned[Point](
        10, lambda point: point.step, lambda point: point.start, lambda point: point.loss
    )
    for step in range(100_000):
        points.add(Point(step, loss=50.0 if step in (61_803, 99_990) else 1.0))
        assert len(points) <= 42
    assert [point.step for point in points if point.loss == 50.0] == [61_803, 99_990]
    steps = [point.step for point in points]
    assert steps == sorted(steps)
