"""What PipelineParallel alone understands of a configuration."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from smolcluster.algorithms.scheduled import check_whole
from smolcluster.configs.schema import (
    FLAT_OPTIMIZERS,
    AlgorithmConfig,
    PipelineKeys,
    Settings,
    TrainConfig,
)
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import SCHEDULES
from smolcluster.utils.words import hint_at

if TYPE_CHECKING:
    from smolcluster.training.recipe import Training


class PipelineConfig(AlgorithmConfig, PipelineKeys):
    """PipelineParallel's own keys, all of the cluster file."""

    local: ClassVar[Mapping[str, Any]] = MappingProxyType({"shard_plan": "auto"})
    by_node: ClassVar[frozenset[str]] = frozenset({"shard_plan"})
    old_keys: ClassVar[frozenset[str]] = frozenset({"redundancy"})

    @property
    def recomputes(self) -> bool:
        """Whether a stage keeps a microbatch's input alone, and computes the rest again for its backward."""
        return self.activation_checkpointing == "full"

    def check(self, settings: Settings) -> None:
        """Refuse what cannot be cut, or not so."""
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule is {self.schedule!r}, must be one of {', '.join(SCHEDULES)}"
                f"{hint_at(self.schedule, SCHEDULES)}"
            )
        if self.activation_checkpointing == "selective":
            raise ConfigError(
                "activation_checkpointing is selective, but a stage computes all of its layers again or "
                "none: set it to full or none"
            )
        self._check_train(settings.train)
        if isinstance(self.shard_plan, dict):
            for node in self.shard_plan:
                if node not in settings.cluster.workers:
                    known = ", ".join(settings.cluster.workers)
                    raise ConfigError(
                        f"shard_plan names {node!r}, must be one of {known}"
                        f"{hint_at(node, settings.cluster.workers)}"
                    )

    def check_training(self, recipe: "Training", train: TrainConfig) -> None:
        """Refuse what the workload itself says and no pipeline does; `train` has it in its place.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        self._check_train(train)
        said = recipe.optimizer_for(train)
        if said.kind not in FLAT_OPTIMIZERS or said.groups is not None:
            raise ConfigError(
                f"the workload's optimizer is {said.kind!r} or has groups, a pipeline takes "
                f"{', '.join(FLAT_OPTIMIZERS)} without groups"
            )

    def _check_train(self, train: TrainConfig) -> None:
        check_whole(train, self.microbatches, f"microbatches is {self.microbatches}")
        if train.samples_per_step % self.microbatches:
            raise ConfigError(
                f"microbatches is {self.microbatches}, which does not divide the {train.samples_per_step} "
                "samples of a step: change microbatches or batch_size"
            )
        if train.precision == "fp16":
            raise ConfigError(
                "precision is fp16, which a pipeline does not scale losses for: set precision to bf16"
            )
        if train.optimizer not in FLAT_OPTIMIZERS:
            raise ConfigError(
                f"optimizer is {train.optimizer!r}, a pipeline takes {', '.join(FLAT_OPTIMIZERS)}"
            )
        if train.ema_decay is not None:
            raise ConfigError(
                f"ema_decay is {train.ema_decay:g}, but in a pipeline nobody averages weights: set it to null"
            )
