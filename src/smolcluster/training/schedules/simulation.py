"""How long a schedule takes: what each rank and each link does when, from the costs of stages and transfers.

A rank executes its list in order. What it sends occupies the link to the other rank, one transfer after the
other, while the rank computes on; the two directions of a link do not disturb each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from smolcluster.training.schedules.instructions import Instruction, Op, Schedule, stage_ranks
from smolcluster.training.schedules.validation import (
    Key,
    dependencies,
    execution_order,
    key_of,
)


@dataclass(frozen=True)
class Costs:
    """Seconds that a microbatch takes at a stage; BACKWARD takes `input_s + weight_s`."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    def of(self, op: Op) -> float:
        return {
            Op.FORWARD: self.forward_s,
            Op.BACKWARD: self.input_s + self.weight_s,
            Op.BACKWARD_INPUT: self.input_s,
            Op.BACKWARD_WEIGHT: self.weight_s,
        }[op]


@dataclass(frozen=True)
class Boundary:
    """The way between a stage and the next one.

    Attributes:
        forward_s: seconds for which a microbatch's activations occupy the link.
        backward_s: the same for their gradients.
        latency_s: from the last byte sent to its arrival, during which the link is free for the next.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True)
class Span:
    """What a rank computes or a link carries, in seconds from the step's beginning.

    `instruction`: of a link the one whose result is carried.
    """

    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        ranks: spans of each rank, in order.
        links: spans by (sending rank, receiving rank).
    """

    ranks: tuple[tuple[Span, ...], ...]
    links: dict[tuple[int, int], tuple[Span, ...]] = field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        """From the first instruction's start to the last one's end."""
        spans = [span for one in self.ranks for span in one]
        return max(each.end_s for each in spans) - min(each.start_s for each in spans)

    def busy_s(self, rank: int) -> float:
        return sum(span.end_s - span.start_s for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait, in 0..1."""
        busy = sum(self.busy_s(rank) for rank in range(len(self.ranks)))
        return 1 - busy / (len(self.ranks) * self.makespan_s)


def median_costs(timeline: Timeline) -> list[Costs]:
    """What is usual for each stage's instructions; a backward as a whole counts as two halves."""
    taken: dict[tuple[int, Op], list[float]] = {}
    for span in (span for spans in timeline.ranks for span in spans):
        each = span.instruction
        taken.setdefault((each.stage, each.op), []).append(span.end_s - span.start_s)
    middle = {key: median(each) for key, each in taken.items()}
    costs = []
    for stage in range(1 + max(stage for stage, _ in middle)):
        whole = middle.get((stage, Op.BACKWARD), 0.0) / 2
        halves = (middle.get((stage, op), whole) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
        costs.append(Costs(middle[stage, Op.FORWARD], *halves))
    return costs


def simulate(
    schedule: Schedule, costs: Sequence[Costs], boundaries: Sequence[Boundary] = ()
) -> Timeline:
    """Execute a schedule in fast motion.

    Args:
        schedule: of as many stages as there are costs.
        costs: of each stage on its rank.
        boundaries: between each stage and the next; empty: transfers take no time.

    Raises:
        ConfigError: the schedule has a deadlock.
    """
    ranks_of, last_stage = stage_ranks(schedule), len(costs) - 1
    ways = boundaries or [Boundary()] * last_stage
    free = [0.0] * len(schedule)
    spans: list[list[Span]] = [[] for _ in schedule]
    links: dict[tuple[int, int], list[Span]] = {}
    arrived: dict[tuple[Key, int], float] = {}
    for rank, each in execution_order(schedule):
        needed = (arrived[key, rank] for key in dependencies(each, last_stage))
        start = max(free[rank], *needed, 0.0)
        end = free[rank] = start + costs[each.stage].of(each.op)
        spans[rank].append(Span(each, start, end))
        key = key_of(each)
        arrived[key, rank] = end
        if not 0 <= each.target <= last_stage or ranks_of[each.target] == rank:
            continue
        receiver = ranks_of[each.target]
        way = ways[min(each.stage, each.target)]
        seconds = way.forward_s if each.op is Op.FORWARD else way.backward_s
        link = links.setdefault((rank, receiver), [])
        begin = max(end, link[-1].end_s) if link else end
        link.append(Span(each, begin, begin + seconds))
        arrived[key, receiver] = begin + seconds + way.latency_s
    return Timeline(
        tuple(map(tuple, spans)), {pair: tuple(each) for pair, each in sorted(links.items())}
    )
