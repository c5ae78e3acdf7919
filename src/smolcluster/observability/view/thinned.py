"""Measurements of a run however long, as so many points at most, evenly over its length."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Point = TypeVar("Point")


class Thinned(Generic[Point]):
    """Points in the order in which they came; the newest is always among them.

    Args:
        at_most: about so many are kept, never more than twice as many.
        place: where a point lies, such as its step; grows within one start of the server.
        start: which start of the server a point belongs to.
    """

    def __init__(
        self,
        at_most: int,
        place: Callable[[Point], float],
        start: Callable[[Point], str],
    ) -> None:
        self._at_most = at_most
        self._place = place
        self._start = start
        self._kept: list[Point] = []
        self._newest: Point | None = None
        self._gap = 0.0

    def __iter__(self) -> Iterator[Point]:
        yield from self._kept
        if self._newest is not None:
            yield self._newest

    def __len__(self) -> int:
        return len(self._kept) + (self._newest is not None)

    def add(self, point: Point) -> None:
        """Take the next point."""
        if self._is_near(point):
            self._newest = point
            return
        self._newest = None
        self._kept.append(point)
        if len(self._kept) >= 2 * self._at_most:
            self._thin()

    def replace(self, points: Iterable[Point]) -> None:
        """Keep these of its points only."""
        self._kept, self._newest = list(points), None

    def _is_near(self, point: Point) -> bool:
        if not self._kept or self._start(self._kept[-1]) != self._start(point):
            return False
        return self._place(point) - self._place(self._kept[-1]) < self._gap

    def _thin(self) -> None:
        points = list(self)
        places = [self._place(point) for point in points]
        self._gap = max(2 * self._gap, (max(places) - min(places)) / self._at_most)
        self._kept, self._newest = [], None
        for point in points:
            if not self._is_near(point):
                self._kept.append(point)
        if len(self._kept) > 1.5 * self._at_most:  # many starts, each of few points
            self._kept = self._kept[::2]
        if self._kept[-1] is not points[-1]:
            self._newest = points[-1]
