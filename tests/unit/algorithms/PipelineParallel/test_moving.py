"""Whether layers move because a stage takes longer than planned, on paper."""

from collections.abc import Mapping

import pytest

from smolcluster.algorithms.PipelineParallel.automatic import slowed
from smolcluster.algorithms.PipelineParallel.moving import (
    NUM_STEPS,
    Decision,
    StageTimes,
    seconds_computed,
)
from smolcluster.algorithms.planning.layers import Layer, Machine, Problem, plan_layers
from smolcluster.training.schedules.simulation import Costs
from smolcluster.transport.messages import LayersMeasured, MeasuredLayer

NUM_LAYERS = 12
LAYER_S = 3e-3


def times(num_machines: int = 2) -> tuple[StageTimes, dict[str, float]]:
    """Those of equal machines, and what is planned for a microbatch of each."""
    cost = Costs(LAYER_S / 3, LAYER_S / 3, LAYER_S / 3)
    machines = tuple(Machine(name, (cost,) * NUM_LAYERS) for name in "abcd"[:num_machines])
    problem = Problem((Layer(100, 10, 1000),) * NUM_LAYERS, machines, {}, 16)
    plan = plan_layers(problem)
    return StageTimes(problem, plan), {each.machine: each.costs.total_s for each in plan.stages}


def after(
    stages: StageTimes,
    seconds: Mapping[str, float],
    num_steps: int = NUM_STEPS + 1,
    *,
    steps_left: int = 1000,
    dealing_s: float = 1.0,
) -> Decision:
    for _ in range(num_steps):
        stages.add(seconds)
    return stages.decide(steps_left, dealing_s)


def test_a_stage_that_becomes_three_times_slower_has_the_layers_dealt_out_again() -> None:
    stages, planned = times()
    assert not after(stages, planned).moves
    slow = planned | {"a": 3 * planned["a"]}
    decisions = [after(stages, slow, 1) for _ in range(1 + NUM_STEPS // 2)]
    assert [each.moves for each in decisions] == [False] * 4 + [True], "a few slow steps may pass"
    assert decisions[-1].slowness == pytest.approx({"a": 3.0, "b": 1.0})
    assert decisions[-1].reason.startswith("a takes 54 ms a microbatch instead of 18 ms; ")


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        ({"a": 1.05, "b": 0.95}, "stages take what was considered"),
        ({"a": 3.0, "b": 3.0}, "no cut is better by a tenth"),
        ({"a": 1.12, "b": 1.0}, "no cut is better by a tenth"),
    ],
    ids=["a little", "all alike", "less than a layer"],
)
def test_layers_stay_where_nothing_is_to_be_gained(
    factors: Mapping[str, float], reason: str
) -> None:
    stages, planned = times()
    found = after(stages, {name: factors[name] * each for name, each in planned.items()})
    assert (found.moves, found.reason) == (False, reason)


def test_what_was_considered_is_not_searched_again_until_it_changes() -> None:
    stages, planned = times()
    both = {name: 3 * each for name, each in planned.items()}
    after(stages, both)
    assert after(stages, both).reason == "stages take what was considered"
    assert after(stages, both | {"b": 9 * planned["b"]}).moves


def test_the_last_steps_of_a_run_do_not_pay_for_moving() -> None:
    slow = {"a": 3.0}
    for steps_left, moves in ((2, False), (200, True)):
        stages, planned = times()
        seconds = planned | {name: factor * planned[name] for name, factor in slow.items()}
        assert after(stages, seconds, steps_left=steps_left, dealing_s=5.0).moves is moves


def test_too_few_steps_and_the_first_one_say_nothing() -> None:
    stages, planned = times()
    stages.add({name: 100 * each for name, each in planned.items()})
    assert after(stages, planned, NUM_STEPS - 1).reason == f"8 of {NUM_STEPS} steps were measured"
    assert after(stages, planned, 1).reason == "stages take what was considered"


def test_waiting_is_no_computing_and_a_machines_layers_become_slower_together() -> None:
    assert seconds_computed({"F": 1.0, "B": 2.0, "I": 4.0, "W": 8.0, "wait": 16.0}) == 15.0
    layer = MeasuredLayer(
        forward_s=1.0,
        input_s=2.0,
        weight_s=3.0,
        trained_bytes=4,
        frozen_bytes=0,
        activation_bytes=5,
        output_bytes=6,
    )
    measured = LayersMeasured(kinds=(layer,), layers=(0, 0), memory_bytes=1, device="cpu")
    [found] = slowed(measured, 3.0).kinds
    assert (found.forward_s, found.input_s, found.weight_s) == (3.0, 6.0, 9.0)
    assert found.trained_bytes == 4
