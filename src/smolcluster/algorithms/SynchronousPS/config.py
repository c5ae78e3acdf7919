"""What SyncPS alone understands of a configuration."""

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, NonNegativeFloat

from smolcluster.configs.problems import HAS_KEY
from smolcluster.configs.schema import AlgorithmConfig, NodeName, Settings, Wait
from smolcluster.errors import ConfigError

if TYPE_CHECKING:
    from smolcluster.configs.problems import HAS_KEY

SHARES_TOLERANCE = 1e-6
"""How far from 1 shares may add up: three times 0.333333 is meant as a whole."""


class SyncPSConfig(AlgorithmConfig):
    """SyncPS's own keys: of the cluster file, and `polyak_alpha` of the training file."""

    training_keys: ClassVar = frozenset({"polyak_alpha"})
    local: ClassVar = MappingProxyType({"timeout": None})  # nobody is timed out for being late
    claims: ClassVar = MappingProxyType(
        {
            "batch_share": "any other worker takes as many batches as it can",
            "global_batch_size": "elsewhere a step is one worker's batch, of batch_size",
        }
    )
    by_node: ClassVar = frozenset({"batch_share"})

    timeout: Wait | None = Field(
        None,
        description="SyncPS: seconds from a step's first part to backups for late ones; null: overdue ones "
        "only.",
    )
    batch_share: dict[NodeName, NonNegativeFloat] | None = Field(
        None,
        description="SyncPS: each node's share of the global batch; null: by measured speed.",
    )
    polyak_alpha: float = Field(
        0.5, ge=0, le=1, description="SyncPS: weight of the server when replicas are blended."
    )

    def pinned(self, settings: Settings) -> dict[str, Any]:
        return {"global_batch_size": settings.global_batch_size}

    def check(self, settings: Settings) -> None:
        """Every worker has a sample of each step; shares are of the workers and make a whole."""
        cluster, samples = settings.cluster, settings.global_batch_size
        if samples < cluster.num_workers:
            raise ConfigError(
                f"global_batch_size is {samples}, must be at least num_workers, {cluster.num_workers}, so "
                "that each worker has a sample of every step; raise global_batch_size, or lower num_workers "
                "and shorten workers"
            )
        if self.batch_share is None:
            return
        for name in self.batch_share:
            cluster.check_known(("batch_share",), name, verb=HAS_KEY)
        without = next((name for name in cluster.workers if name not in self.batch_share), None)
        if without:
            raise ConfigError(
                f"batch_share has no share for the worker {without!r}, must have one for each "
                f"({', '.join(cluster.workers)})"
            )
        total = math.fsum(self.batch_share.values())
        if round(abs(total - 1), 9) > SHARES_TOLERANCE:  # 1 - 0.999999 is 1.00000000003e-6
            raise ConfigError(f"batch_share adds up to {total:.9g}, must add up to 1")
