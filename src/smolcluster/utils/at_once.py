"""A task for several things at once, each in a thread of its own."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(task: Callable[[T], R], items: Collection[T], most: int | None = None) -> list[R]:
    """What came of the task for each item, in their order; at most `most` at a time, None: all."""
    with ThreadPoolExecutor(min(max(1, len(items)), most or len(items) + 1)) as pool:
        return list(pool.map(task, items))
