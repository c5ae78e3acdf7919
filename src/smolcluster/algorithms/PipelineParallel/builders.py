"""Which workers have built the layers that they were given, and which cannot. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

MOST_LOST = 3
"""A worker that is lost so often in a row while it builds, without a word, cannot: its memory runs out."""
MOST_FAILED = 2
"""After so many of its processes that could not build layers a worker is given none any more."""


@dataclass
class Builders:
    """What has come of the layers that each worker was given, by its number.

    One that cannot build them is given none again, except once, to another process of it.

    Attributes:
        num_lost: how often in a row a worker was lost while it built; 0: it built its layers last.
        reasons: why a worker cannot build them.
        unable: the processes, by their instances, of a worker that could not.
    """

    num_lost: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    unable: dict[int, set[str]] = field(default_factory=dict)

    def built(self, worker_id: int) -> None:
        self.num_lost[worker_id] = 0
        self.reasons.pop(worker_id, None)
        self.unable.pop(worker_id, None)

    def failed(self, worker_id: int, instance: str, reason: str) -> None:
        """It says itself that it cannot."""
        self.num_lost.pop(worker_id, None)
        self.reasons[worker_id] = reason
        self.unable.setdefault(worker_id, set()).add(instance)

    def lost(self, worker_id: int, instance: str, name: str) -> None:
        """It was there no more before it had built its layers."""
        if worker_id in self.reasons:
            self.unable[worker_id].add(instance)
            return
        times = self.num_lost.get(worker_id, 0) + 1
        self.num_lost[worker_id] = times
        if times >= MOST_LOST:
            reason = f"{name} was lost {times} times while it built its layers (out of memory?)"
            self.failed(worker_id, instance, reason)

    def may_build(self, worker_id: int, instance: str) -> bool:
        """Whether that process of a worker may be given layers."""
        unable = self.unable.get(worker_id, set())
        return instance not in unable and len(unable) < MOST_FAILED

    def why_not(self, able: Collection[int]) -> str:
        """The reasons of all but the workers `able`, which may be given layers; "": none is known."""
        others = sorted(self.reasons.keys() - set(able))
        return "; ".join(self.reasons[each] for each in others)

    def why_none_is_left(self, able: Collection[int]) -> str | None:
        """The reasons of all, where nobody could build layers; None: somebody may.

        `able`: the workers that are there and may be given layers.
        """
        if not self.reasons or self.num_lost or able:
            return None
        return self.why_not(())
