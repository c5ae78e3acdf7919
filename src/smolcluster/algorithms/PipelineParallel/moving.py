"""Whether layers are dealt out again because stages take longer, or less, than was planned. Pure.

Each stage says what it computed for in every step, waiting excluded. When that has differed from the plan in
several steps the model is planned again, with the layers of each machine as much slower as its stage was;
layers move only where the simulated step is shorter by a tenth, and where the steps that are left gain more
than dealing the layers out took the last time.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from smolcluster.algorithms.planning.layers import LayerPlan, Problem, plan_again, predict
from smolcluster.training.schedules.instructions import Op
from smolcluster.utils.units import format_duration

NUM_STEPS = 9
"""By whose median stages are judged; odd, so that it is one of them. A plan's first one is not counted."""
WORTH_A_LOOK = 0.1
"""A stage must differ by this share from what was considered last for the model to be planned again."""


@dataclass(frozen=True)
class Decision:
    """Whether to deal the layers out again, and why.

    Attributes:
        slowness: seconds that a machine took for each that was planned; empty: the layers stay.
    """

    reason: str
    slowness: Mapping[str, float]

    @property
    def moves(self) -> bool:
        return bool(self.slowness)


class StageTimes:
    """What the stages of one plan take, and what follows from it."""

    def __init__(self, problem: Problem, plan: LayerPlan) -> None:
        self._problem, self._plan = problem, plan
        self._planned = {each.machine: each.costs.total_s for each in plan.stages}
        self._considered = dict.fromkeys(self._planned, 1.0)
        """By machine: the slowness for which this plan was found to be good enough."""
        self._steps: deque[Mapping[str, float]] = deque(maxlen=NUM_STEPS)
        self._is_first = True

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count a whole step; `seconds` of a microbatch by machine."""
        if self._is_first:
            self._is_first = False
        else:
            self._steps.append(seconds)

    def decide(self, steps_left: int, dealing_s: float) -> Decision:
        """`dealing_s`: what dealing the layers out costs, in seconds."""
        if len(self._steps) < NUM_STEPS:
            return _stay(f"{len(self._steps)} of {NUM_STEPS} steps were measured")
        measured = {
            name: max(median(each[name] for each in self._steps), 1e-9)
            for name, planned in self._planned.items()
            if planned > 0
        }
        slowness = {name: seconds / self._planned[name] for name, seconds in measured.items()}
        if all(self._is_known(name, factor) for name, factor in slowness.items()):
            return _stay("stages take what was considered")
        worst = max(slowness, key=lambda name: abs(slowness[name] / self._considered[name] - 1))
        self._considered = slowness
        turned_out, better = plan_again(self._problem, self._plan, measured)
        if better is None:
            return _stay("no cut is better by a tenth")
        stages = [(each.machine, each.start, each.end) for each in self._plan.stages]
        now_s = predict(turned_out, stages).step_s
        if (now_s - better.step_s) * steps_left < dealing_s:
            return _stay("the steps that are left gain less than dealing the layers out costs")
        took, planned = (format_duration(each[worst]) for each in (measured, self._planned))
        return Decision(
            f"{worst} takes {took} a microbatch instead of {planned}; with another cut a step of "
            f"{format_duration(now_s)} takes {format_duration(better.step_s)}",
            slowness,
        )

    def _is_known(self, name: str, factor: float) -> bool:
        return abs(factor / self._considered[name] - 1) <= WORTH_A_LOOK


def _stay(reason: str) -> Decision:
    return Decision(reason, {})


def seconds_computed(seconds: Mapping[str, float]) -> float:
    """Of a stage in a step, by operation: all that it computed."""
    return sum(seconds.get(op, 0.0) for op in Op)
