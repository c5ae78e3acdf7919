"""What holds for every worker that others compute for: ranks of its machine, or stages on several."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from smolcluster.errors import ConfigError
from smolcluster.training.build import TrainingContext
from smolcluster.wire.messages import Welcome


@dataclass(frozen=True)
class GatheredChange:
    """What a fragment has changed by; it is gathered from those that have it as it is asked for."""

    gather: Callable[[slice], Tensor]

    def __getitem__(self, place: slice, /) -> Tensor:
        return self.gather(place)


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
