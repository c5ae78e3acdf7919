"""Deadlines and delays for everything that waits or tries again."""

import random
import time
from collections.abc import Callable, Iterator


class Deadline:
    """A point in time by which something must have happened."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Strike `seconds` from now on `clock`; `math.inf` never strikes."""
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - self._clock())

    @property
    def expired(self) -> bool:
        return self.remaining() <= 0.0


def backoff_delays(
    first_s: float = 0.1,
    cap_s: float = 5.0,
    jitter: random.Random | None = None,
) -> Iterator[float]:
    """Seconds to wait before each further attempt: growing twofold, at most `cap_s`, without end.

    With `jitter` each delay is drawn between half of its value and the whole, so that workers which lost
    their server together do not come back together.
    """
    delay_s = min(first_s, cap_s)
    while True:
        yield delay_s if jitter is None else delay_s * jitter.uniform(0.5, 1.0)
        delay_s = min(2 * delay_s, cap_s)
