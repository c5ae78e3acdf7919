"""Schedules of a pipeline, as a mesh and a pipeline are told them."""

from smolcluster.configs.schema import TrainConfig
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import SCHEDULES, Schedule, generate
from smolcluster.utils.words import hint_at

ALIASES = {"zbv": "zb-v"}
"""What others call a schedule."""
NAMES = f"{', '.join(SCHEDULES)} ({', '.join(f'{old} is also called {new}' for new, old in ALIASES.items())})"
"""Of a mesh, for messages."""


def check_whole(train: TrainConfig, num_parts: int, what: str) -> None:
    """Refuse to cut what is to stay whole; `what` says the keys that cut a step, and their values.

    Raises:
        ConfigError: `batch` is whole, and a step has several parts.
    """
    if train.batch == "whole" and num_parts > 1:
        raise ConfigError(
            f"batch is whole, but {what}, which cuts a step into {num_parts} parts: use edp or diloco, or "
            "set batch to cut"
        )


def mesh_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """What each of so many ranks along `mesh.pp` computes.

    Raises:
        ConfigError: there is no such schedule, or it cannot be made of these numbers.
    """
    known = (*SCHEDULES, *ALIASES)
    if name not in known:
        raise ConfigError(f"schedule is {name!r}, must be one of {NAMES}{hint_at(name, known)}")
    if num_ranks == 1:
        return generate("gpipe" if num_microbatches == 1 else "1f1b", 1, num_microbatches)
    if num_microbatches < num_ranks:
        raise ConfigError(
            f"microbatches is {num_microbatches}, fewer than the {num_ranks} stages of mesh.pp, so that most "
            f"ranks would wait: set microbatches to {2 * num_ranks} or more"
        )
    return generate(ALIASES.get(name, name), num_ranks, num_microbatches)
