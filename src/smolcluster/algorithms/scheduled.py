"""The keys of algorithms that run a pipeline's schedule: they mean the same to each of them."""

from pydantic import Field, PositiveInt

from smolcluster.configs.schema import AlgorithmConfig
from smolcluster.training.schedules.instructions import SCHEDULES

ALIASES = {"zbv": "zb-v"}
"""What others call a schedule."""
NAMES = f"{', '.join(SCHEDULES)} ({', '.join(f'{old} is also called {new}' for new, old in ALIASES.items())})"
"""Of a mesh, for messages."""


class ScheduledConfig(AlgorithmConfig):
    """What a pipeline and a mesh both understand."""

    schedule: str = Field(
        "1f1b",
        description=f"PipelineParallel, Mesh: order of computations, one of {', '.join(SCHEDULES)}.",
    )
    microbatches: PositiveInt = Field(
        4,
        description="PipelineParallel, Mesh: parts of a batch (of a mesh: of a rank's share of it) that are "
        "on their way at the same time.",
    )
