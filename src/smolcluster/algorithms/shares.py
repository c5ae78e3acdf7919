"""Work that is shared out among unequal workers, so that the last one is done as early as can be. Pure."""

import heapq
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

WorkerId = TypeVar("WorkerId", bound=Hashable)


@dataclass(frozen=True)
class Cost:
    """What a share costs a worker: `fixed_s` seconds whatever its size, and `each_s` for each unit of it.

    Where work is shared out anew while workers are busy, `fixed_s` is when a worker could be done without
    more, in seconds of any one clock.
    """

    fixed_s: float
    each_s: float

    def seconds(self, num_units: float) -> float:
        return self.fixed_s + num_units * self.each_s

    def units_within(self, seconds: float) -> int:
        """How many whole units it can do in that time."""
        return max(0, math.floor((seconds - self.fixed_s) / self.each_s))


def shared_out(num_units: int, workers: Mapping[WorkerId, Cost]) -> dict[WorkerId, int]:
    """Share out so many units; who would be done later without any than all others gets none.

    Water-filling: all workers are filled up to a common time, what remains goes to who is done first with one
    unit more.

    Returns:
        Units for each worker, Σ = `num_units`; all 0 where that is not above 0. Of equals the first are
        given more.
    """
    if num_units <= 0 or not workers:
        return dict.fromkeys(workers, 0)
    level = _water_level(num_units, workers.values())
    plan = {worker: cost.units_within(level) for worker, cost in workers.items()}
    queue = [
        (cost.seconds(plan[worker] + 1), number, worker)
        for number, (worker, cost) in enumerate(workers.items())
    ]
    heapq.heapify(queue)
    for _ in range(num_units - sum(plan.values())):
        _, number, worker = queue[0]
        plan[worker] += 1
        heapq.heapreplace(queue, (workers[worker].seconds(plan[worker] + 1), number, worker))
    return plan


def _water_level(num_units: int, costs: Collection[Cost]) -> float:
    """The time by which the units, if they could be broken, are done; a hair less, for rounding.

    Those who begin before it do them: n(T) = Σ (T - fixed_i) / each_i = `num_units`.
    """
    speed = started = level = 0.0
    by_start = sorted(costs, key=lambda cost: cost.fixed_s)
    for number, cost in enumerate(by_start):
        speed += 1 / cost.each_s
        started += cost.fixed_s / cost.each_s
        level = (num_units + started) / speed
        if number + 1 < len(by_start) and level <= by_start[number + 1].fixed_s:
            break
    return level - 1e-9 * max(1.0, abs(level))
