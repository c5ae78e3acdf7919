"""Whether layers are dealt out again because stages take longer, or less, than was planned. Pure.

Each stage says what it computed for in every step, waiting excluded. A window of seconds and steps is
judged by the medians of its steps, so that a few slow ones do not count. Where a stage differs from the
plan, the model is planned again with the layers of each machine as much slower as its stage was. A machine
without layers on the host of such a stage counts as slower as well, because both share that host's cores.
Layers move only where

* the simulated step becomes shorter by a tenth of what a step really takes, and
* steps gain more than the move costs, in the steps that are left and in ten times as many as were observed.

After each move the plan is left alone for twice as long as after the one before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from smolcluster.algorithms.planning.layers import LayerPlan, Problem, plan_again, predict
from smolcluster.training.schedules.instructions import Op
from smolcluster.utils.units import format_duration

WINDOW_S = 5.0
"""How long steps are observed at least before they are judged."""
NUM_STEPS = 9
"""How many of them at least; odd, so that a median is one of them."""
WORTH_A_LOOK = 0.1
"""A stage must differ by this share from what was considered last for the model to be planned again."""
WORTH_MOVING = 0.1
"""The share of a real step that another cut must save."""
AS_LONG_AGAIN = 10
"""A move must have paid for itself after this many times the steps that were observed."""
LONGEST_REST_S = 600.0


def rest_after(num_moves: int) -> float:
    """Seconds for which a plan is left alone when layers have moved so often."""
    return 0.0 if num_moves == 0 else min(LONGEST_REST_S, WINDOW_S * 2.0**num_moves)


@dataclass(frozen=True)
class Decision:
    """To deal the layers out again, and why.

    Attributes:
        slowness: by machine, the seconds it takes for each second that was planned.
    """

    reason: str
    slowness: Mapping[str, float]


class StageTimes:
    """What the stages of one plan take, and what follows from it."""

    def __init__(
        self,
        problem: Problem,
        plan: LayerPlan,
        *,
        hosts: Mapping[str, str] | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """`hosts` by machine, of processes that share one; `rest_s`: steps of these seconds do not count."""
        self._problem, self._plan, self._rest_s = problem, plan, rest_s
        self._planned = {each.machine: each.costs.total_s for each in plan.stages}
        hosts = hosts or {}
        self._beside = {
            machine.name: [each for each in self._planned if hosts.get(each) == hosts[machine.name]]
            for machine in problem.machines
            if machine.name in hosts and machine.name not in self._planned
        }
        """The stages on the host of each machine without layers."""
        self._considered = dict.fromkeys(self._planned, 1.0)
        """By machine: the slowness for which this plan was found to be good enough."""
        self._steps: list[Mapping[str, float]] = []
        self._took: list[float] = []
        self._is_first = True

    def add(self, seconds: Mapping[str, float], took_s: float) -> None:
        """Count a whole step that took so long; `seconds` of a microbatch by machine."""
        if self._is_first:
            self._is_first = False
        elif self._rest_s > 0:
            self._rest_s -= took_s
        else:
            self._steps.append(seconds)
            self._took.append(took_s)

    def decide(self, steps_left: int, move_s: float) -> Decision | None:
        """None: the layers stay. `move_s`: what dealing them out again costs, in seconds."""
        num_steps = len(self._steps)
        if num_steps < NUM_STEPS or sum(self._took) < WINDOW_S:
            return None
        steps, took_s = self._steps, median(self._took)
        self._steps, self._took = [], []
        measured = {
            name: max(median(each[name] for each in steps), 1e-9)
            for name, planned in self._planned.items()
            if planned > 0
        }
        slowness = {name: seconds / self._planned[name] for name, seconds in measured.items()}
        change = {name: abs(each / self._considered[name] - 1) for name, each in slowness.items()}
        if max(change.values(), default=0.0) <= WORTH_A_LOOK:
            return None
        worst = max(change, key=lambda name: change[name])
        self._considered = slowness
        slowness = slowness | self._slowness_beside(slowness)
        turned_out, better = plan_again(self._problem, self._plan, slowness)
        if better is None:
            return None
        stages = [(each.machine, each.start, each.end) for each in self._plan.stages]
        now_s = predict(turned_out, stages).step_s
        gain_s = now_s - better.step_s
        gain_of_all_s = gain_s * min(steps_left, AS_LONG_AGAIN * num_steps)
        if gain_s < WORTH_MOVING * took_s or gain_of_all_s < move_s:
            return None
        took, planned = (format_duration(each[worst]) for each in (measured, self._planned))
        return Decision(
            f"{worst} takes {took} a microbatch instead of {planned}; with another cut a step of "
            f"{format_duration(now_s)} takes {format_duration(better.step_s)}",
            slowness,
        )

    def _slowness_beside(self, slowness: Mapping[str, float]) -> dict[str, float]:
        """That of machines without layers, which share their host's cores with stages."""
        there = {
            name: [slowness[stage] for stage in stages if stage in slowness]
            for name, stages in self._beside.items()
        }
        return {name: max(1.0, *factors) for name, factors in there.items() if factors}


def seconds_computed(seconds: Mapping[str, float]) -> float:
    """Of a stage in a step, by operation: all that it computed."""
    return sum(seconds.get(op, 0.0) for op in Op)
