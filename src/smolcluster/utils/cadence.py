"""Often at first, rarely later: how often something is written down in a run that may last a week."""

import math
import time
from collections.abc import Callable


class Cadence:
    """Says yes to the first `num_first` times, then to one in `every_s` seconds."""

    def __init__(
        self, num_first: int, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._left = num_first
        self._every_s = every_s
        self._clock = clock
        self._due_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether `take` would say yes now."""
        return self._left > 0 or self._clock() >= self._due_at

    def take(self) -> bool:
        """Whether it is time; a yes counts."""
        if not self.is_due:
            return False
        self._left -= self._left > 0
        self._due_at = self._clock() + self._every_s
        return True


def is_power_of_two(count: int) -> bool:
    """What happens often is logged ever more rarely: the 1st, 2nd, 4th, 8th … time."""
    return count.bit_count() == 1
