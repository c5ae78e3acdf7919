"""How a workload is trained where its author says so in Python: optimizer, schedule, precision, average."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from smolcluster.configs.keys import refused
from smolcluster.configs.schema import GradientClipping, Precision, TrainConfig
from smolcluster.training.hooks import NO_HOOKS, Hooks
from smolcluster.training.muon import Split

ParameterGroup = Mapping[str, Any]
"""Parameters under `params`, and what the optimizer shall do with them, as `torch.optim` takes groups."""
Groups = Callable[[nn.Module], Sequence[ParameterGroup]] | Sequence[ParameterGroup]
"""Groups of parameters; without a function `names`, patterns such as `*.bias`, stand for `params`."""
OptimizerFactory = Callable[..., Optimizer]
Schedule = Callable[[int, int], float]
"""(samples applied, samples of the whole run) to the factor on the learning rate."""


@dataclass(frozen=True)
class OptimizerSpec:
    """Which optimizer: its name or what makes it, its arguments and groups, and the peak learning rate."""

    kind: str | OptimizerFactory
    arguments: Mapping[str, Any] = field(default_factory=dict)
    groups: Groups | None = None
    learning_rate: float = 1.0
    split: Split | None = None
    """Of muon, for a part of a model: how the whole model's parameters were divided."""


@dataclass(frozen=True)
class Training:
    """How to train, the same on every process. None: what the configuration says.

    Attributes:
        optimizer: a name as in the configuration; or a class of `torch.optim`, or what else makes an
            optimizer of parameter groups and keyword arguments, `lr` among them.
        optimizer_args: keyword arguments of the optimizer, besides `lr` and `weight_decay`.
        groups: the model's trainable parameters in groups with options of their own; an `lr` follows the
            schedule as the learning rate does. None: matrices decay, all else does not.
        learning_rate, weight_decay, gradient_clipping, precision, ema_decay: as in the configuration.
        schedule: what the learning rate is multiplied by, instead of `lr_schedule`.
        hooks: functions that hear how the run goes on.
    """

    optimizer: str | OptimizerFactory | None = None
    optimizer_args: Mapping[str, Any] | None = None
    groups: Groups | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    schedule: Schedule | None = None
    gradient_clipping: GradientClipping | None = None
    precision: Precision | None = None
    ema_decay: float | None = None
    hooks: Hooks = NO_HOOKS

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """The configuration with what is said here in its place.

        Raises:
            ConfigError: a value is none that the configuration may have.
        """
        said = {
            name: value
            for name in (
                "learning_rate",
                "weight_decay",
                "gradient_clipping",
                "precision",
                "ema_decay",
            )
            if (value := getattr(self, name)) is not None
        }
        if not said:
            return config
        # an own schedule stands in place of lr_schedule, which the learning rate need not fit then
        unused = {} if self.schedule is None else {"lr_schedule": None}
        try:
            checked = type(config).model_validate(dict(config) | said | unused)
        except ValidationError as error:
            raise refused(type(config), error, "Training") from None
        return config.model_copy(update={name: getattr(checked, name) for name in said})

    def optimizer_for(self, config: TrainConfig) -> OptimizerSpec:
        """The optimizer that is meant, `config` being what `applied_to` has given."""
        kind = config.optimizer if self.optimizer is None else self.optimizer
        arguments = config.optimizer_args if self.optimizer_args is None else self.optimizer_args
        return OptimizerSpec(kind, arguments, self.groups, config.learning_rate)
