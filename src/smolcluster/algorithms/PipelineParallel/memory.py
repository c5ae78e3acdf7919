"""Whether the layers of a cut that was not made by memory fit in their machines'. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from smolcluster.algorithms.PipelineParallel.automatic import Reported, problem_for, speeds_of
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.plan import StageMap, schedule_of
from smolcluster.algorithms.planning.layers import (
    Problem,
    gigabytes,
    held_by_stage,
    memory_of,
    plan_layers,
)
from smolcluster.configs.schema import TrainConfig
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.simulation import Costs


def check_memory(
    stages: StageMap,
    machines: Mapping[str, Reported],
    config: PipelineConfig,
    train: TrainConfig,
    num_copies: int = 0,
) -> None:
    """Refuse a cut in which a machine has more layers than fit; where one has not measured, nothing is known.

    `num_copies`: see `problem_of`.

    Raises:
        ConfigError: names the machine, what it needs and has, and a cut that would fit if there is one.
    """
    machines = {node: machines[node] for node in stages.nodes}
    known = speeds_of(stages.cuts[-1], machines)
    if len(known) < len(machines):
        return
    problem = problem_for(known, {}, config, train, num_copies)
    needed = _needed(problem, stages, config)
    for place in dict.fromkeys(each.place for each in machines.values()):
        nodes = [node for node, each in machines.items() if each.place == place]
        has = max(_memory_bytes(machines[node]) for node in nodes)
        needs = sum(needed[node] for node in nodes)
        if needs > has:
            told = " and ".join(
                f"layers {stages.layers_of(stages.nodes.index(node))} of {node}" for node in nodes
            )
            raise ConfigError(
                f"shard_plan: {told} need {gigabytes(needs)}, the device has {gigabytes(has)} free: "
                f"{_remedy(problem)}"
            )


def _memory_bytes(machine: Reported) -> int:
    return 0 if machine.measured is None else machine.measured.memory_bytes


def _needed(problem: Problem, stages: StageMap, config: PipelineConfig) -> dict[str, float]:
    """The bytes that each node's stages take together."""
    schedule = schedule_of(config, len(stages.nodes), problem.num_microbatches)
    found = dict.fromkeys(stages.nodes, 0.0)
    for stage, held in enumerate(held_by_stage(schedule)):
        layers = stages.layers(stage)
        found[stages.nodes[stages.ranks[stage]]] += memory_of(
            problem, layers.start, layers.stop, held
        )
    return found


def _remedy(problem: Problem) -> str:
    """A cut that fits, on machines that are taken for equally fast."""
    alike = (Costs(1.0, 1.0, 1.0),) * len(problem.layers)
    machines = tuple(replace(each, costs=alike) for each in problem.machines)
    try:
        plan = plan_layers(replace(problem, machines=machines))
    except ConfigError as error:
        return str(error)
    told = ", ".join(f"{each.machine}: [{each.start}, {each.end}]" for each in plan.stages)
    return f"{{{told}}} would fit"
