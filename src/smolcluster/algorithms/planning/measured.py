"""From what was measured of a model's layers on each machine to the problem that is planned."""

from collections.abc import Mapping

from smolcluster.algorithms.planning.costs import FLOAT_NBYTES, VALUE_NBYTES, num_moments
from smolcluster.algorithms.planning.layers import Layer, Link, Machine, Problem
from smolcluster.configs.schema import TrainConfig
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.simulation import Costs
from smolcluster.training.stages.measure import LayerSpeeds


def problem_of(
    speeds: Mapping[str, LayerSpeeds],
    links: Mapping[tuple[str, str], Link],
    train: TrainConfig,
    *,
    num_microbatches: int,
    schedule: str,
    codec: str,
    recompute: bool = False,
    num_copies: int = 0,
) -> Problem:
    """Bytes are those of the first machine, activations encoded by `codec`; seconds are each machine's own.

    `num_copies`: of the trained weights, which are kept besides weights, gradients and moments.

    Raises:
        ConfigError: machines have seen different models.
    """
    first = next(iter(speeds.values())).layers
    copies = 2 + num_moments(train) + num_copies
    encoded = VALUE_NBYTES[codec] / FLOAT_NBYTES
    for node, each in speeds.items():
        if len(each.layers) != len(first):
            raise ConfigError(
                f"{node} sees {len(each.layers)} layers and {next(iter(speeds))} {len(first)}: they have "
                "different versions of the model; bring the same files to all machines"
            )
    return Problem(
        layers=tuple(
            Layer(
                each.frozen_bytes + copies * each.trained_bytes,
                each.activation_bytes,
                round(encoded * each.output_bytes),
                each.input_bytes,
            )
            for each in first
        ),
        machines=tuple(
            Machine(
                node,
                tuple(Costs(x.forward_s, x.input_s, x.weight_s) for x in each.layers),
                each.memory_bytes,
            )
            for node, each in speeds.items()
        ),
        links=links,
        num_microbatches=num_microbatches,
        schedule=schedule,
        recompute=recompute,
    )
