"""Whether what a worker brings can be meant: its norm is finite, and in proportion to those before it.

And when the same samples lead to NaN or infinity again and again, whoever computes them.
"""

import math
import statistics
from collections import Counter, deque

from smolcluster.data.permutation import Range
from smolcluster.errors import NonFiniteLoss

NUM_NORMS = 64
OUT_OF_PROPORTION = 1e6
"""So many times the largest of the newest norms, and 1, a push is refused."""
SUSPICIOUS = 100.0
"""So many times the median of the newest norms a push is named when the weights are ruined."""
LARGEST_NORM = 1e18
"""Squares of larger values overflow in float32, and Adam's moments with them."""
MAX_FAILURES = 3
"""So often the same samples may lead to NaN or infinity before the run ends."""


class PushRefused(NonFiniteLoss):
    """A push would ruin the server's weights: nothing of it has been applied."""


class RefusedAgain(NonFiniteLoss):
    """The server has refused what a worker has computed on the server's own weights: it must leave."""


class Norms:
    """Norms of the newest pushes that were applied, and what is out of all proportion to them."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float, str]] = deque(maxlen=NUM_NORMS)

    def add(self, norm: float, whose: str) -> None:
        """A push of this norm was applied; `whose` names it."""
        self._newest.append((norm, whose))

    @property
    def limit(self) -> float:
        """The largest norm that is plausible now; never above `LARGEST_NORM`."""
        largest = max((norm for norm, _ in self._newest), default=LARGEST_NORM)
        return min(LARGEST_NORM, OUT_OF_PROPORTION * max(1.0, largest))

    @property
    def suspect(self) -> str:
        """Whose push stands out so much that it may have ruined the weights; empty if none does."""
        if not self._newest:
            return ""
        norm, whose = max(self._newest)
        if norm < SUSPICIOUS * statistics.median(norm for norm, _ in self._newest):
            return ""
        num_pushes = len(self._newest)
        return f"; of the newest {num_pushes} pushes one stands out, of {whose}: its norm was {norm:.3g}"


def check_norm(norm: float, limit: float = LARGEST_NORM) -> float:
    """Return the norm of a push, or of what was to be one.

    Raises:
        PushRefused: it is not finite, or above `limit`.
    """
    if not math.isfinite(norm):
        raise PushRefused(f"its norm is {norm}")
    if norm > limit:
        raise PushRefused(f"its norm of {norm:.3g} is out of all proportion (above {limit:.3g})")
    return norm


class Failures:
    """How often each of the samples that are not applied led to NaN or infinity."""

    def __init__(self) -> None:
        self._counts: Counter[Range] = Counter()

    def add(self, samples: Range) -> None:
        self._counts[samples] += 1

    def check(self, samples: Range, who: str, reason: str) -> None:
        """Look whether these have failed too often, at last on the worker `who`.

        Raises:
            NonFiniteLoss: they have failed `MAX_FAILURES` times.
        """
        if self._counts[samples] >= MAX_FAILURES:
            raise NonFiniteLoss(
                f"samples {samples.start} to {samples.stop} of epoch {samples.epoch + 1} have failed "
                f"{MAX_FAILURES} times, at last on {who}: {reason}"
            )

    def applied(self, samples: Range) -> None:
        self._counts.pop(samples, None)
