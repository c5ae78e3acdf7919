"""Who gets how much of a global batch: pure functions of what each member costs.

A part of n samples takes a member a + b n seconds: `a` for the way there and back, whatever the part, and `b`
for each sample. The sizes that make a step shortest are those for which max(a_i + b_i n_i) is least; a member
whose `a` alone is longer than that gets nothing.
"""

from collections.abc import Sequence

from smolcluster.algorithms.shares import Cost, shared_out

MEMORY = 0.8
"""What an estimate keeps of its past with each new measurement."""
MOST_GROWTH = 4.0
"""How far above the estimate a measurement is believed: the member may have been stopped meanwhile."""
LEAST_BELIEVED_S = 1e-4
LEAST_PER_SAMPLE_S = 1e-7
UNKNOWN_PER_SAMPLE_S = 1e-3
MOST_PER_SAMPLE_S = 3600.0
OVERDUE = 4.0
"""A part is overdue when it has taken so many times as long as expected, beyond what is waited anyhow."""
LEAST_PATIENCE_S = 1.0
MOST_ALLOWANCE_S = 600.0
"""However slow a member is, or says it is."""
MOST_REST = 64
"""Steps without a part, at most, for a member that was waited for often."""
FIRST_PROBE = 16
"""Steps without a part after which a member is measured again; doubles each time."""
EARLY_PROBE = 2
"""The same for who was measured but once, while other joiners' states took the link."""


class Pace:
    """What is known of how fast a member is.

    A first measurement counts in full, and so does one after a long time without; of the others, what is far
    above the estimate may come from a pause, and counts as `MOST_GROWTH` times the estimate.
    """

    def __init__(self, samples_per_s: float) -> None:
        """`samples_per_s`: its own first measurement; 0: unknown."""
        per_sample_s = UNKNOWN_PER_SAMPLE_S
        if samples_per_s > 0:
            per_sample_s = min(max(1 / samples_per_s, LEAST_PER_SAMPLE_S), MOST_PER_SAMPLE_S)
        self.cost = Cost(0.0, per_sample_s)
        self._num_measured = 0
        self._is_fresh = True
        self._idle_steps = 0
        self._probe_after = FIRST_PROBE

    @property
    def is_measured(self) -> bool:
        return self._num_measured > 0

    def measured(
        self,
        num_samples: int,
        compute_s: float,
        elapsed_s: float,
        held_s: float = 0.0,
        *,
        whole: bool = True,
    ) -> None:
        """A part took `elapsed_s` from its assignment to its last byte, `compute_s` of it for computing.

        For `held_s` of it the push waited for others', which is no cost of its own. One that was not pushed
        `whole` tells only what it costs at least besides computing.
        """
        compute_s = min(compute_s, elapsed_s)  # only this side's clock is believed
        fixed_s = max(0.0, elapsed_s - compute_s - held_s)
        if not whole:
            fixed_s = max(fixed_s, self.cost.fixed_s)
        per_sample_s = max(compute_s / num_samples, LEAST_PER_SAMPLE_S)
        if self._is_fresh:
            self.cost = Cost(fixed_s, per_sample_s)
        else:
            self.cost = Cost(
                _moved(self.cost.fixed_s, fixed_s), _moved(self.cost.each_s, per_sample_s)
            )
        self._num_measured += 1
        self._is_fresh = self._is_fresh and not whole

    def wants_probe(self, num_samples: int) -> bool:
        """Note the size of its part; whether a member without one shall be measured again all the same."""
        if num_samples:
            self._idle_steps, self._probe_after = 0, FIRST_PROBE
            return False
        self._idle_steps += 1
        is_early = self._num_measured == 1
        if self._idle_steps < (EARLY_PROBE if is_early else self._probe_after):
            return False
        self._idle_steps = 0
        if not is_early:
            self._probe_after *= 2
        self._is_fresh = True
        return True


def sizes_by_cost(costs: Sequence[Cost], total: int) -> list[int]:
    """Whole sizes that add up to `total`, for which the longest part is shortest."""
    return list(shared_out(total, dict(enumerate(costs))).values())


def all_to_one(costs: Sequence[Cost], total: int) -> list[int]:
    """The sizes where one member gets the whole batch: the one that has it done first."""
    fastest = min(range(len(costs)), key=lambda place: costs[place].seconds(total))
    return [total if place == fastest else 0 for place in range(len(costs))]


def sizes_by_share(shares: Sequence[float], total: int) -> list[int]:
    """Whole sizes in proportion to `shares`, by largest remainder; equal ones if all shares are 0."""
    whole = sum(shares)
    exact = [total * (share / whole if whole else 1 / len(shares)) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: sizes[place] - exact[place])
    for place in by_remainder[: total - sum(sizes)]:
        sizes[place] += 1
    return sizes


def with_probes(paces: Sequence[Pace], sizes: list[int]) -> list[int]:
    """The same sizes, but for a sample that members which have had none for long take from the largest."""
    sizes = list(sizes)
    for place, pace in enumerate(paces):
        largest = sizes.index(max(sizes))
        if pace.wants_probe(sizes[place]) and sizes[largest] > 1:
            sizes[largest] -= 1
            sizes[place] += 1
    return sizes


def patience_s(expected_s: float, least_s: float) -> float:
    """How long a part that should take `expected_s` may take before others are asked to do it as well."""
    return max(least_s, LEAST_PATIENCE_S) + min(OVERDUE * expected_s, MOST_ALLOWANCE_S)


def rest_after(num_overdue: int) -> int:
    """Steps for which a member gets no part after its n-th overdue one: 0, 1, 3, 7 ... up to `MOST_REST`."""
    return min((1 << min(num_overdue - 1, 30)) - 1, MOST_REST)


def _moved(estimate: float, measured: float) -> float:
    return MEMORY * estimate + (1 - MEMORY) * min(
        measured, MOST_GROWTH * max(estimate, LEAST_BELIEVED_S)
    )
