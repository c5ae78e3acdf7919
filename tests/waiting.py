"""Time in tests: a clock that the test moves, and waiting for what is bound to come."""

import time
from collections.abc import Callable

DEADLINE_S = 240.0


class Clock:
    """A clock that stands still until `now` is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def eventually(
    condition: Callable[[], object],
    said: Callable[[], object] | str = "it did not come",
    timeout_s: float = DEADLINE_S,
) -> None:
    """Wait until it is so; `said` is what the test fails with where it does not come."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, said if isinstance(said, str) else said()
        time.sleep(0.05)
