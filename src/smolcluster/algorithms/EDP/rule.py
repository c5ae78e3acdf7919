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

from collections.abc import Iterable

from smolcluster.algorithms.EDP.config import StalenessConfig


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
