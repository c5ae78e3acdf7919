"""`shard_plan: auto`: each worker measures the model's layers, and the server cuts the model by that.

Where that cannot be done, all stages get as many layers: schedules with several stages a machine are not
planned, and samples that the server sends cannot be measured on.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch

from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Peer
from smolcluster.algorithms.PipelineParallel.plan import Cut, StageMap, even_cut, unmeasured
from smolcluster.algorithms.planning.layers import Link, Problem, in_words, plan_layers
from smolcluster.algorithms.planning.measured import problem_of
from smolcluster.algorithms.planning.plan_file import document_of
from smolcluster.configs.schema import TrainConfig
from smolcluster.data.dataset import Elsewhere
from smolcluster.errors import SmolclusterError
from smolcluster.training.build import TrainingContext
from smolcluster.training.schedules.instructions import SCHEDULES
from smolcluster.training.stages.measure import LayerSpeeds, measure_workload
from smolcluster.wire.messages import MAX_LAYER_KINDS, MAX_STAGES, LayersMeasured


def is_measured(config: PipelineConfig) -> bool:
    """Whether the cut depends on how fast the machines are."""
    return config.shard_plan == "auto" and SCHEDULES[config.schedule].num_stages == 1


def measure(
    training: TrainingContext,
    train: TrainConfig,
    config: PipelineConfig,
    device: torch.device,
    log: logging.Logger,
) -> LayersMeasured | None:
    """What each layer takes here, for a microbatch; None: the log says why not.

    Where the cut does not depend on how fast machines are only memory is measured, and all seconds are 0.
    """
    is_timed = is_measured(config)
    problem = "samples come from the server"
    if not isinstance(training.workload.train, Elsewhere):
        size = train.samples_per_step // config.microbatches
        try:
            speeds = measure_workload(
                training.workload, training.seed, size, device, is_timed=is_timed
            )
            return message_of(speeds)
        except (SmolclusterError, ValueError) as error:
            problem = str(error)
    if is_timed:
        log.warning("layers are not measured, but dealt out evenly: %s", problem)
    else:
        log.info("layers are not compared with memory: %s", problem)
    return None


def message_of(speeds: LayerSpeeds) -> LayersMeasured:
    """What is sent of it; layers that are alike are sent once.

    Raises:
        ValueError: there are too many that are not.
    """
    kinds = list(dict.fromkeys(speeds.layers))
    if len(kinds) > MAX_LAYER_KINDS or len(speeds.layers) > MAX_STAGES:
        raise ValueError(f"{len(kinds)} layers of different kinds are too many")
    return LayersMeasured(
        kinds=tuple(kinds),
        layers=tuple(kinds.index(each) for each in speeds.layers),
        memory_bytes=speeds.memory_bytes,
        device=speeds.device,
    )


def automatic_cut(
    num_layers: int,
    machines: Mapping[str, Peer],
    config: PipelineConfig,
    train: TrainConfig,
    links: Mapping[tuple[str, str], Link] = MappingProxyType({}),
    *,
    num_copies: int = 0,
) -> Cut:
    """The fastest cut over some or all of the machines, if all have measured; else an even one.

    `links` by sender and receiver; what is missing costs nothing, as between processes of one machine.
    `num_copies`: see `problem_of`.

    Raises:
        ConfigError: nothing fits in their memory, or there are more stages than layers.
    """
    known = speeds_of(num_layers, machines)
    if not is_measured(config) or len(known) < len(machines):
        return unmeasured(even_cut(num_layers, list(machines), config), config)
    problem = problem_for(known, links, config, train, num_copies)
    plan = plan_layers(problem)
    stages = StageMap(
        (0, *(each.end for each in plan.stages)),
        tuple(range(len(plan.stages))),
        tuple(each.machine for each in plan.stages),
    )
    devices = {name: each.device for name, each in known.items()}
    unused = [name for name in machines if name not in stages.nodes]
    spare = f"; not used, because a step would be longer: {', '.join(unused)}" if unused else ""
    return Cut(stages, document_of(problem, plan, devices), in_words(plan) + spare, problem, plan)


def problem_for(
    speeds: Mapping[str, LayerSpeeds],
    links: Mapping[tuple[str, str], Link],
    config: PipelineConfig,
    train: TrainConfig,
    num_copies: int = 0,
) -> Problem:
    """What is to be planned, as a run's configuration has it."""
    return problem_of(
        speeds,
        links,
        train,
        num_microbatches=config.microbatches,
        schedule=config.schedule,
        codec=config.activation_codec,
        recompute=config.recomputes,
        num_copies=num_copies,
    )


def slowed(measured: LayersMeasured, factor: float) -> LayersMeasured:
    """The same with every layer as much slower as a stage turned out to be."""
    kinds = (
        each.model_copy(
            update={
                "forward_s": factor * each.forward_s,
                "input_s": factor * each.input_s,
                "weight_s": factor * each.weight_s,
            }
        )
        for each in measured.kinds
    )
    return measured.model_copy(update={"kinds": tuple(kinds)})


def speeds_of(num_layers: int, machines: Mapping[str, Peer]) -> dict[str, LayerSpeeds]:
    """What each machine has measured of this model; processes on one device share its memory."""
    num_sharing = Counter(each.place for each in machines.values())
    return {
        name: LayerSpeeds(
            layers=tuple(each.measured.kinds[kind] for kind in each.measured.layers),
            memory_bytes=each.measured.memory_bytes // num_sharing[each.place],
            device=each.measured.device,
        )
        for name, each in machines.items()
        if each.measured is not None
        and len(each.measured.layers) == num_layers
        and max(each.measured.layers) < len(each.measured.kinds)
    }
