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
        unable: of a worker that cannot, why its processes, by their instances, could not.
    """

    num_lost: dict[int, int] = field(default_factory=dict)
    unable: dict[int, dict[str, str]] = field(default_factory=dict)

    def built(self, worker_id: int) -> None:
        self.num_lost[worker_id] = 0
        self.unable.pop(worker_id, None)

    def failed(self, worker_id: int, instance: str, reason: str) -> None:
        """It says itself that it cannot."""
        self.num_lost.pop(worker_id, None)
        self.unable.setdefault(worker_id, {})[instance] = reason

    def lost(self, worker_id: int, instance: str, name: str) -> None:
        """It was there no more before it had built its layers."""
        if worker_id in self.unable:
            self.unable[worker_id].setdefault(instance, self.reason(worker_id))
            return
        times = self.num_lost.get(worker_id, 0) + 1
        self.num_lost[worker_id] = times
        if times >= MOST_LOST:
            reason = f"{name} was lost {times} times while it built its layers (out of memory?)"
            self.failed(worker_id, instance, reason)

    def may_build(self, worker_id: int, instance: str) -> bool:
        """Whether that process of a worker may be given layers."""
        unable = self.unable.get(worker_id, {})
        return instance not in unable and len(unable) < MOST_FAILED

    def reason(self, worker_id: int) -> str:
        """Why a worker cannot build layers, as its newest process has shown."""
        return list(self.unable[worker_id].values())[-1]

    def why_not(self, able: Collection[int]) -> str:
        """The reasons of all but the workers `able`, which may be given layers; "": none is known."""
        return "; ".join(map(self.reason, sorted(self.unable.keys() - set(able))))

    def why_none_is_left(self, able: Collection[int]) -> str | None:
        """The reasons of all, where nobody could build layers; None: somebody may.

        `able`: the workers that are there and may be given layers.
        """
        if not self.unable or self.num_lost or able:
            return None
        return self.why_not(())
