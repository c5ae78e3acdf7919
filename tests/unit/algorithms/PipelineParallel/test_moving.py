"""Whether layers move because a stage takes longer than planned, on paper."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from pipelines import measured_layer
from smolcluster.algorithms.PipelineParallel import moving
from smolcluster.algorithms.PipelineParallel.automatic import slowed
from smolcluster.algorithms.PipelineParallel.moving import (
    NUM_STEPS,
    WINDOW_S,
    Decision,
    StageTimes,
    rest_after,
    seconds_computed,
)
from smolcluster.algorithms.planning.layers import Layer, Machine, Problem, plan_again, plan_layers
from smolcluster.training.schedules.simulation import Costs
from smolcluster.wire.messages import LayersMeasured

NUM_LAYERS = 12
LAYER_S = 3e-3


STEP_S = 1.0
"""What a whole step takes: nine of them are more than a window."""


def times(
    num_machines: int = 2, *, hosts: Mapping[str, str] | None = None, rest_s: float = 0.0
) -> tuple[StageTimes, dict[str, float]]:
    """Those of equal machines, and what is planned for a microbatch of each."""
    cost = Costs(LAYER_S / 3, LAYER_S / 3, LAYER_S / 3)
    machines = tuple(Machine(name, (cost,) * NUM_LAYERS) for name in "abcd"[:num_machines])
    problem = Problem((Layer(100, 10, 1000),) * NUM_LAYERS, machines, {}, 16)
    plan = plan_layers(problem)
    stages = StageTimes(problem, plan, hosts=hosts, rest_s=rest_s)
    return stages, {each.machine: each.costs.total_s for each in plan.stages}


def after(
    stages: StageTimes,
    seconds: Mapping[str, float],
    num_steps: int = NUM_STEPS,
    *,
    steps_left: int = 1000,
    move_s: float = 1.0,
    took_s: float = STEP_S,
) -> Decision | None:
    for _ in range(num_steps):
        stages.add(seconds, took_s)
    return stages.decide(steps_left, move_s)


def begun(**kwargs: Any) -> tuple[StageTimes, dict[str, float]]:
    """Those whose first step, which does not count, has been taken."""
    stages, planned = times(**kwargs)
    stages.add(planned, STEP_S)
    return stages, planned


def test_a_stage_that_becomes_three_times_slower_has_the_layers_dealt_out_again() -> None:
    stages, planned = begun()
    assert after(stages, planned) is None
    slow = planned | {"a": 3 * planned["a"]}
    after(stages, planned, NUM_STEPS // 2)
    decision = after(stages, slow, NUM_STEPS - NUM_STEPS // 2)
    assert decision is not None
    assert decision.slowness == pytest.approx({"a": 3.0, "b": 1.0})
    assert decision.reason.startswith("a takes 54 ms a microbatch instead of 18 ms; ")


def test_a_few_slow_steps_move_nothing() -> None:
    stages, planned = begun()
    after(stages, planned | {"a": 3 * planned["a"]}, NUM_STEPS // 2)
    assert after(stages, planned, NUM_STEPS - NUM_STEPS // 2) is None


def test_many_short_steps_are_observed_for_a_window_before_they_are_judged() -> None:
    stages, planned = begun()
    slow = planned | {"a": 3 * planned["a"]}
    num_steps = 400
    took_s = WINDOW_S / num_steps / 1.25
    assert after(stages, slow, num_steps, took_s=took_s) is None
    assert after(stages, slow, num_steps, took_s=took_s)


def test_a_plan_is_left_alone_twice_as_long_after_each_move() -> None:
    assert [rest_after(num) for num in range(4)] == [0.0, 10.0, 20.0, 40.0]
    assert rest_after(100) == rest_after(1000) == 600.0
    stages, planned = begun(rest_s=3 * STEP_S)
    slow = planned | {"a": 3 * planned["a"]}
    assert after(stages, slow, NUM_STEPS + 2) is None
    assert after(stages, slow, 1)


def test_a_gain_in_the_simulation_alone_moves_nothing() -> None:
    """A step of many tiny messages takes far longer than its computing, which is all that a cut changes."""
    stages, planned = begun()
    assert after(stages, planned | {"a": 3 * planned["a"]}, took_s=100.0) is None


def test_a_machine_without_layers_is_as_slow_as_the_stages_on_its_host() -> None:
    """Of processes that share a machine's cores, the one that rests is not the faster one."""
    cost = Costs(LAYER_S / 3, LAYER_S / 3, LAYER_S / 3)
    machines = tuple(Machine(name, (cost,)) for name in "ab")
    problem = Problem((Layer(100, 10, 1000),), machines, {}, 4)
    plan = plan_layers(problem)
    [used] = [each.machine for each in plan.stages]
    for hosts, moves in ({"a": "one", "b": "one"}, False), ({"a": "one", "b": "other"}, True):
        alone = StageTimes(problem, plan, hosts=hosts)
        seconds = {used: 3 * plan.stages[0].costs.total_s}
        alone.add(seconds, 0.02)
        assert bool(after(alone, seconds, 1000, took_s=0.02)) is moves


@pytest.mark.parametrize(
    ("factors", "num_searches"),
    [
        ({"a": 1.05, "b": 0.95}, 0),
        ({"a": 3.0, "b": 3.0}, 1),
        ({"a": 1.12, "b": 1.0}, 1),
    ],
    ids=["a little", "all alike", "less than a layer"],
)
def test_layers_stay_where_nothing_is_to_be_gained_which_is_searched_for_once(
    factors: Mapping[str, float], num_searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Mock(side_effect=plan_again)
    monkeypatch.setattr(moving, "plan_again", search)
    stages, planned = begun()
    taken = {name: factors[name] * each for name, each in planned.items()}
    assert after(stages, taken) is after(stages, taken) is None
    assert search.call_count == num_searches
    assert after(stages, taken | {"b": 9 * planned["b"]})


@pytest.mark.parametrize(
    ("steps_left", "move_s", "moves"),
    [(2, 5.0, False), (200, 5.0, True), (10**6, 1000.0, False)],
    ids=["the run ends", "it pays", "it would take too long to pay"],
)
def test_a_move_has_to_pay_for_itself(steps_left: int, move_s: float, moves: bool) -> None:
    stages, planned = begun()
    slow = planned | {"a": 3 * planned["a"]}
    assert bool(after(stages, slow, steps_left=steps_left, move_s=move_s)) is moves


def test_too_few_steps_and_the_first_one_say_nothing() -> None:
    stages, planned = times()
    slow = planned | {"a": 3 * planned["a"]}
    assert after(stages, slow, NUM_STEPS) is None
    assert after(stages, slow, 1)


def test_waiting_is_no_computing_and_a_machines_layers_become_slower_together() -> None:
    assert seconds_computed({"F": 1.0, "B": 2.0, "I": 4.0, "W": 8.0, "wait": 16.0}) == 15.0
    layer = measured_layer(forward_s=1.0, input_s=2.0, weight_s=3.0)
    measured = LayersMeasured(kinds=(layer,), layers=(0, 0), memory_bytes=1, device="cpu")
    [found] = slowed(measured, 3.0).kinds
    assert (found.forward_s, found.input_s, found.weight_s) == (3.0, 6.0, 9.0)
    assert found.trained_bytes == layer.trained_bytes
