"""What EDP alone understands of a configuration."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt

from smolcluster.configs.schema import AlgorithmConfig, Section, Settings
from smolcluster.errors import ConfigError

SPREAD = ("adam", "adamw", "sgd")
"""Optimizers whose step of a part of the weights is that of the whole."""


def _below_one(rate: float) -> float:
    if rate >= 1:
        raise ValueError(
            "must be below 1: a fresh worker's weights would replace the server's outright"
        )
    return rate


class StalenessConfig(Section):
    """How EDP treats pushes that were computed on old weights."""

    exponent: NonNegativeFloat = Field(
        0.5, description="a in s(τ) = (1+τ)^-a, the factor on the learning rate."
    )
    bound: PositiveInt | None = Field(
        None, description="Pushes with a larger τ are dropped; null: none are."
    )


class EDPConfig(AlgorithmConfig):
    """EDP's own keys, all of the cluster file."""

    claims: ClassVar = MappingProxyType({"update_rule": "all other servers apply gradients"})

    update_rule: Literal["gradient", "mixing"] = Field(
        "gradient",
        description="EDP: apply pushed gradients, or average pushed weights in "
        "(FedAsync, 1903.03934).",
    )
    mixing_rate: Annotated[float, Field(gt=0), AfterValidator(_below_one)] = Field(
        0.6,
        description="EDP's update_rule mixing: weight of a fresh worker's weights.",
    )
    staleness: StalenessConfig = Field(
        StalenessConfig(), description="What EDP does with gradients of older weights."
    )

    @property
    def status_fields(self) -> dict[str, Any]:
        return {"staleness_bound": self.staleness.bound}

    def check(self, settings: Settings) -> None:
        """Weights must travel whole, and be mixed where all of them lie; on several hosts any may be cut."""
        cluster, optimizer = settings.cluster, settings.train.optimizer
        cluster.check_average(settings.train.ema_decay)
        if len(cluster.store_nodes) > 1 and optimizer not in SPREAD:
            raise ConfigError(
                f"optimizer is {optimizer} and servers lists {', '.join(cluster.store_nodes)}, but each host "
                f"steps a part of the weights, which only {', '.join(SPREAD)} can; set servers to null, take "
                "algorithm diloco, or set optimizer to adamw"
            )
        if self.update_rule == "mixing" and len(cluster.store_nodes) > 1:
            raise ConfigError(
                f"update_rule is mixing and servers lists {', '.join(cluster.store_nodes)}, but weights are "
                "mixed on one host; set servers to null, or update_rule to gradient"
            )
        if self.update_rule == "mixing" and cluster.codec not in (None, "fp32"):
            raise ConfigError(
                f"update_rule is mixing and codec is {cluster.codec}, but weights must travel whole; set "
                "codec to fp32, or update_rule to gradient"
            )
