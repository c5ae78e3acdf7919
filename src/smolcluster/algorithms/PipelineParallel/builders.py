"""Which workers have built the layers that they were given, and which cannot. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

MOST_LOST = 3
"""A worker that is lost so often in a row while it builds, without a word, cannot: its memory runs out."""


@dataclass
class Builders:
    """What has come of the layers that each worker was given, by its number.

    Attributes:
        num_lost: how often in a row a worker was lost while it built; 0: it built its layers last.
        reasons: why a worker cannot build them.
    """

    num_lost: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def built(self, worker_id: int) -> None:
        self.num_lost[worker_id] = 0
        self.reasons.pop(worker_id, None)

    def failed(self, worker_id: int, reason: str) -> None:
        """It says itself that it cannot."""
        self.num_lost.pop(worker_id, None)
        self.reasons[worker_id] = reason

    def lost(self, worker_id: int, name: str) -> None:
        """It was there no more before it had built its layers."""
        if worker_id in self.reasons:
            return
        times = self.num_lost.get(worker_id, 0) + 1
        self.num_lost[worker_id] = times
        if times >= MOST_LOST:
            reason = f"{name} was lost {times} times while it built its layers (out of memory?)"
            self.failed(worker_id, reason)

    def why_none_is_left(self, present: Collection[int]) -> str | None:
        """The reasons of all, where nobody could build layers; None: somebody may.

        `present`: the workers that are there.
        """
        if not self.reasons or self.num_lost or set(present) - self.reasons.keys():
            return None
        return "; ".join(self.reasons[each] for each in sorted(self.reasons))
