"""Measurements of a run however long, as so many points at most, evenly over its length."""

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Generic, TypeGuard, TypeVar

NUM_NEIGHBOURS = 32
STANDS_OUT = 10.0
"""So many times its neighbours' median deviation above them; of noise the highest of thousands is not."""
Point = TypeVar("Point")


class Thinned(Generic[Point]):
    """Points in the order in which they came; the newest is always among them.

    Args:
        at_most: about so many are kept, never more than twice as many.
        place: where a point lies, such as its step; grows within one start of the server.
        start: which start of the server a point belongs to.
        height: of points that are left out the highest are kept, where they stand out far above the noise:
            were the highest of each gap kept, the points would be too high on average.
    """

    def __init__(
        self,
        at_most: int,
        place: Callable[[Point], float],
        start: Callable[[Point], str],
        height: Callable[[Point], float] = lambda _: 0.0,
    ) -> None:
        self._at_most = at_most
        self._place = place
        self._start = start
        self._height = height
        self._kept: list[Point] = []
        self._peak: Point | None = None
        """The highest of those since the last one that is kept."""
        self._newest: Point | None = None
        self._gap = 0.0

    def __iter__(self) -> Iterator[Point]:
        yield from self._kept
        if self._stands_out(self._peak) and self._peak is not self._newest:
            yield self._peak
        if self._newest is not None:
            yield self._newest

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, point: Point) -> None:
        """Take the next point."""
        self._take(point)
        if len(self._kept) >= 2 * self._at_most:
            self._thin()

    def _take(self, point: Point) -> None:
        if not self._is_near(point):
            self._keep_peak()
            self._kept.append(point)
            return
        self._newest = point
        if self._peak is None or self._height(point) > self._height(self._peak):
            self._peak = point

    def _keep_peak(self) -> None:
        """Keep the peak where it stands out: a moment's explosion must be seen in a long run."""
        if self._stands_out(self._peak):
            self._kept.append(self._peak)
        self._peak = self._newest = None

    def _stands_out(self, point: Point | None) -> TypeGuard[Point]:
        if point is None:
            return False
        heights = [self._height(each) for each in self._kept[-NUM_NEIGHBOURS:]]
        known = [height for height in heights if math.isfinite(height)]
        if not known:
            return False
        middle = median(known)
        spread = median(abs(height - middle) for height in known)
        return self._height(point) > middle + STANDS_OUT * spread

    def replace(self, points: Iterable[Point]) -> None:
        """Keep these of its points only."""
        self._kept, self._peak, self._newest = list(points), None, None

    def _is_near(self, point: Point) -> bool:
        if not self._kept or self._start(self._kept[-1]) != self._start(point):
            return False
        return 0.0 <= self._place(point) - self._place(self._kept[-1]) < self._gap

    def _thin(self) -> None:
        points = list(self)
        places = [self._place(point) for point in points]
        self._gap = max(2 * self._gap, (max(places) - min(places)) / self._at_most)
        self._kept, self._peak, self._newest = [], None, None
        for point in points:
            self._take(point)
        if len(self._kept) > 1.5 * self._at_most:  # many starts, each of few points
            self._kept = self._kept[::2]
