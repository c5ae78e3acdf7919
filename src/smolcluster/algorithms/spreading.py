"""A worker that others compute for: ranks of its machine, or stages on several.

An algorithm whose workers take local steps finds in `SpreadContext` what it finds in any process: what
computes a batch, and the executor of a `LocalCopy`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from torch import Tensor

from smolcluster.errors import ConfigError, NonFiniteLoss, PeerLost
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.local_copy import Executor
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.wire.messages import Welcome


class Others(Executor, Protocol):
    """The processes that compute for a worker."""

    def compute(self, indices: Tensor, epoch: int, start: int, scale: float) -> BatchLoss:
        """As `TrainingContext.compute`; loss and `grad_norm` may be NaN or infinite.

        The loss is multiplied by `scale` for the backward alone.
        """

    def wait_until_ready(self, check: Callable[[], None] | None = None) -> None:
        """See `TrainingContext.wait_until_ready`."""

    def close(self) -> None:
        """Let them end, with the exception that is being handled, if one is."""


@dataclass(frozen=True, kw_only=True)
class SpreadContext(TrainingContext):
    """What a worker trains with that others compute for; `replica` is an outline."""

    others: Others

    @property
    def executor(self) -> Executor:
        return self.others

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        scale = self.replica.loss_scale
        loss = self.others.compute(indices, epoch, start, scale)
        norm = self.others.grad_norm
        if math.isfinite(loss.mean) and math.isfinite(norm):
            return loss
        if math.isfinite(loss.mean) and self.replica.may_overflow:
            return loss._replace(overflow=scale)
        what = f"gradient's norm is {norm}" if math.isfinite(loss.mean) else f"loss is {loss.mean}"
        raise NonFiniteLoss(f"the {what}; {DIVERGENCE_REMEDY}")

    def rehearse(self, num_samples: int) -> bool:
        try:
            self.others.compute(self.order(0)[:num_samples], 0, 0, 1.0)
        except PeerLost:
            self.wait_until_ready()
            return False
        return True

    def wait_until_ready(self, check: Callable[[], None] | None = None) -> None:
        self.others.wait_until_ready(check)

    def close(self) -> None:
        self.others.close()
        super().close()


def check_can_be_spread(
    welcome: Welcome, training: TrainingContext, name: str, key: Literal["ranks", "stages"]
) -> None:
    """Refuse to spread what is trained over what node `name` has under `key`.

    Raises:
        ConfigError: the server sends the samples, or there are weights that are not trained.
    """
    if welcome.data is not None:
        raise ConfigError(
            f"the server sends the samples, but {name} has {key}, each of which reads its own: set "
            f"dataset.source to local, or nodes.{name}.{key} to null"
        )
    frozen = [each for each, one in training.replica.parameters.items() if not one.requires_grad]
    if frozen:
        raise ConfigError(
            f"the model has frozen weights ({frozen[0]}), which {key} cannot compare with the server's: set "
            f"nodes.{name}.{key} to null"
        )


def parts_of(training: TrainingContext) -> dict[str, Any]:
    """The parts of a context for which others compute: it loads no samples itself any more."""
    training.close()
    own = {each.name: getattr(training, each.name) for each in fields(training)}
    return own | {"prefetch": None}
