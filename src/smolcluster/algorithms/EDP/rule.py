"""EDP's two update rules, as pure functions: what a push that was computed on old weights is worth.

`gradient`: an asynchronous parameter server applies every push as one optimizer step (Dean et al. 2012,
"Large scale distributed deep networks"; Recht et al. 2011, 1106.5730). A push whose staleness is τ moves the
weights less: the learning rate of its step is multiplied by

    s(τ) = (1 + τ)^-a

the polynomial rule of FedAsync (Xie et al., 1903.03934), here on the learning rate and not on the gradient,
because Adam would cancel a factor on the gradient. τ counts the pushes *of other workers* that were applied
since this worker's last pull: its own are in its copy, for it steps
that copy itself (but for the step at which it pulls).

`mixing`: FedAsync itself. A push brings the weights that a worker has come to, and the server moves towards
them:

    w <- (1 - α) w + α w_worker,    α = mixing_rate · s(τ)

`mixing_rate` is below 1, so that not even a fresh worker's weights replace the server's outright, and with
them what the others have taught it. Departure: FedAsync's workers start every push from weights that they
have just pulled, here they pull every `worker_update_interval` steps, and the weights in a push hold all the
steps since then.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from smolcluster.algorithms.EDP.config import StalenessConfig
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import NonFiniteLoss
from smolcluster.ps.store import Stores
from smolcluster.training.optimizer import clip_factor

NUM_NORMS = 64
OUT_OF_PROPORTION = 1e6
"""So many times the largest of the newest norms, and 1, a push is refused."""
SUSPICIOUS = 100.0
"""So many times the median of the newest norms a push is named when the weights are ruined."""
LARGEST_NORM = 1e18
"""Squares of larger values overflow in float32, and Adam's moments with them."""


def staleness(version: int, base_version: int, own_versions: Iterable[int]) -> int:
    """τ of a push that reaches the server at `version` and was computed on a pull of `base_version`.

    `own_versions` are the versions that the same worker's pushes made.
    """
    own = sum(base_version < made <= version for made in own_versions)
    return version - base_version - own


def scale(tau: int, exponent: float) -> float:
    """s(τ) = (1+τ)^-a, the factor on the learning rate."""
    return float((1 + tau) ** -exponent)


def too_stale(tau: int, config: StalenessConfig) -> bool:
    """Whether a push is beyond the bound and must be dropped."""
    return config.bound is not None and tau > config.bound


def mixing_weight(tau: int, mixing_rate: float, exponent: float) -> float:
    """α = mixing_rate · s(τ), the share of a worker's weights in the new ones."""
    return mixing_rate * scale(tau, exponent)


class PushRefused(NonFiniteLoss):
    """A push would ruin the server's weights: nothing of it has been applied."""


class Norms:
    """Norms of the newest pushes that were applied, and what is out of all proportion to them."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float, str]] = deque(maxlen=NUM_NORMS)

    def add(self, norm: float, whose: str) -> None:
        """A push of this norm was applied; `whose` names it."""
        self._newest.append((norm, whose))

    @property
    def limit(self) -> float:
        """The largest norm that is plausible now; never above `LARGEST_NORM`."""
        largest = max((norm for norm, _ in self._newest), default=LARGEST_NORM)
        return min(LARGEST_NORM, OUT_OF_PROPORTION * max(1.0, largest))

    @property
    def suspect(self) -> str:
        """Whose push stands out so much that it may have ruined the weights; empty if none does."""
        if not self._newest:
            return ""
        norm, whose = max(self._newest)
        if norm < SUSPICIOUS * statistics.median(norm for norm, _ in self._newest):
            return ""
        num_pushes = len(self._newest)
        return f"; of the newest {num_pushes} pushes one stands out, of {whose}: its norm was {norm:.3g}"


def mix(stores: Stores, weights: Tensor, alpha: float, limit: float = math.inf) -> float:
    """w <- (1 - α) w + α w_worker; return the L2 norm of w_worker - w.

    `weights` (num_params,) are the worker's.

    Raises:
        PushRefused: the norm is not finite, or above `limit`; the weights are as before.
    """
    stores.take_difference(weights)
    distance = check_norm(stores.norm(), limit)
    stores.mix(alpha)
    return distance


def apply_gradient(
    stores: Stores,
    gradient: Tensor,
    learning_rate: float,
    clipping: GradientClipping,
    limit: float = math.inf,
) -> float:
    """Clip `gradient` (num_params,), take one optimizer step, and return the norm before clipping.

    Raises:
        PushRefused: the norm is not finite, or above `limit` and not clipped; the weights are as before.
    """
    stores.take(gradient)
    norm = check_norm(stores.norm(), math.inf if clipping.enabled else limit)
    stores.step(clip_factor(norm, clipping), learning_rate, clipping.bound)
    return norm


def check_norm(norm: float, limit: float = LARGEST_NORM) -> float:
    """Return the norm of a push, or of what was to be one.

    Raises:
        PushRefused: it is not finite, or above `limit`.
    """
    if not math.isfinite(norm):
        raise PushRefused(f"its norm is {norm}")
    if norm > limit:
        raise PushRefused(f"its norm of {norm:.3g} is out of all proportion (above {limit:.3g})")
    return norm
