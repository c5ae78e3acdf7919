"""How fast a run goes, and how long it has taken: what is timed."""

import time
from collections.abc import Callable

from smolcluster.server.tally import Counts

PACE_WINDOW_S = 10.0
STEP_WINDOW_S = 1.0
"""The least window of rates that are told with each step."""


class SteadyRate:
    """How fast a counter grows, a second, as a person wants to read it.

    It is steady where the counter grows rarely: a window of at least `window_s` seconds ends only when it
    has grown, and when the next one lasts longer than that the pace fades.
    """

    def __init__(
        self,
        count: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        window_s: float = PACE_WINDOW_S,
    ) -> None:
        self._count = count
        self._clock = clock
        self._window_s = window_s
        self._since = clock()
        self._base = count()
        self._last: tuple[int, float] | None = None
        """By how much it grew in the last window, and how many seconds that took."""

    def __call__(self) -> float:
        """The pace of the last window, or of the first one so far."""
        now, count = self._clock(), self._count()
        grown, elapsed = count - self._base, now - self._since
        if grown and elapsed >= self._window_s:
            self._last = (grown, elapsed)
            self._since, self._base = now, count
            return grown / elapsed
        if self._last is None:
            return grown / elapsed if elapsed > 0 else 0.0
        last_grown, last_elapsed = self._last
        return last_grown / max(last_elapsed, elapsed)


class Rates:
    """Rates, times and traffic of a run, since training began or went on."""

    def __init__(self, counts: Counts, bytes_moved: Callable[[], tuple[int, int]]) -> None:
        """`bytes_moved`: how many have been sent and received since this process started."""
        self._counts = counts
        self._bytes_moved = bytes_moved
        self.begin()

    def begin(self) -> None:
        """Training begins now, or goes on: what came before is no sign of speed."""
        counts = self._counts
        self._since = time.monotonic()
        self.total_steps = counts.version + counts.steps_left
        self.samples = SteadyRate(lambda: counts.samples_applied)
        """Applied a second, as the status says."""
        self.samples_of_step = SteadyRate(lambda: counts.samples_applied, window_s=STEP_WINDOW_S)
        self.bytes_of_step = SteadyRate(lambda: sum(self._bytes_moved()), window_s=STEP_WINDOW_S)

    @property
    def wall_s(self) -> float:
        """Spent on the run by all its owners so far, without the time in which nobody trained."""
        return self._counts.tally.wall_s + time.monotonic() - self._since

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that all its owners have sent and received."""
        before, now = self._counts.tally.traffic, self._bytes_moved()
        return before[0] + now[0], before[1] + now[1]
