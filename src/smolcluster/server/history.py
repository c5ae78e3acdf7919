"""The newest updates of some weights, encoded: whoever is a few versions behind applies them in order.

The store applies what it encodes, as its receivers do, so that all who begin at one version come to the same
bits at another, and no copy of a receiver's weights is needed to know what it lacks. Updates are kept as
long as they are fewer bytes than the weights themselves: of `int8` 3, of `int4` 7. Whoever is further behind
gets the whole weights.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Update(Generic[T]):
    """What leads from the weights of `base_version` to those of `version`: `nbytes`, in whatever form."""

    base_version: int
    version: int
    nbytes: int
    encoded: T


class UpdateHistory(Generic[T]):
    """Consecutive updates up to the newest version, of fewer than `whole_nbytes` bytes together."""

    def __init__(self, whole_nbytes: int) -> None:
        self._whole_nbytes = whole_nbytes
        self._updates: deque[Update[T]] = deque()

    def add(self, update: Update[T]) -> None:
        """Keep the newest update.

        Raises:
            ValueError: it does not follow on the last one.
        """
        if self._updates and self._updates[-1].version != update.base_version:
            raise ValueError(
                f"an update from version {update.base_version} does not follow on version "
                f"{self._updates[-1].version}"
            )
        self._updates.append(update)
        while self._updates and self._nbytes() >= self._whole_nbytes:
            self._updates.popleft()

    def since(self, version: int) -> Sequence[Update[T]] | None:
        """The updates that lead from `version` to the newest, in order; None: send the whole weights."""
        updates = list(self._updates)
        for index, update in enumerate(updates):
            if update.base_version == version:
                return updates[index:]
        return None

    def _nbytes(self) -> int:
        return sum(update.nbytes for update in self._updates)
