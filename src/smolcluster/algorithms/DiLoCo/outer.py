"""The outer optimizer: what the server makes of the changes that workers bring.

A worker that began at θ_start and has come to θ_w brings Δ_w = θ_start - θ_w. The server takes their weighted
mean Δ̄ for a gradient (DiLoCo, Douillard et al., 2311.08105), with Nesterov's momentum:

    m <- β m + Δ̄;    θ <- θ - γ (Δ̄ + β m)

With γ = 1 and β = 0 that is local SGD: θ becomes the workers' mean.
"""

import torch
from torch import Tensor

ALL = slice(None)

BY_ROUNDS = ((1, 1.0, 0.0), (149, 0.7, 0.5), (999, 0.7, 0.8))
"""Up to so many rounds: γ, β."""
PAPERS = 0.7, 0.9


class OuterOptimizer:
    """Nesterov's momentum over a vector of parameters, which may be stepped part by part."""

    def __init__(
        self,
        size: int,
        learning_rate: float,
        momentum: float,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`learning_rate` is γ, `momentum` β; the state is `size` values of `dtype`."""
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.state = {"momentum": torch.zeros(size, dtype=dtype, device=device)}
        """What a checkpoint holds; to be copied into, not replaced."""

    def step(self, theta: Tensor, delta: Tensor, place: slice = ALL) -> None:
        """Step the weights `theta` (n,) in place along the mean change `delta` (n,).

        `place`: which n of the vector's values they are; each is stepped once an outer step.
        """
        momentum = self.state["momentum"][place]
        momentum.mul_(self.momentum).add_(delta)
        theta.sub_(delta, alpha=self.learning_rate)
        theta.sub_(momentum, alpha=self.learning_rate * self.momentum)


def outer_defaults(num_rounds: int) -> tuple[float, float]:
    """γ and β of a run of so many outer steps.

    Momentum of β takes some 1 / (1 - β) rounds to come to its speed and as many to forget, so the papers'
    0.9 lags where rounds are few. Validation loss with γ = 0.7, four workers on the digits, for the best of
    four inner learning rates, mean of three seeds, ± 0.01 (`benchmarks/diloco.py --part momentum --seeds 3`):

    | rounds | β = 0 | 0.3 | 0.5 | 0.7 | 0.8 | 0.9 |
    |---|---|---|---|---|---|---|
    | 6 | 0.749 | 0.515 | 0.401 | 0.370 | 0.372 | 0.410 |
    | 12 | 0.237 | 0.176 | 0.148 | 0.161 | 0.224 | 0.344 |
    | 25 | 0.109 | 0.092 | 0.087 | 0.099 | 0.114 | 0.198 |
    | 50 | 0.079 | 0.075 | 0.074 | 0.081 | 0.087 | 0.121 |
    | 100 | 0.068 | 0.068 | 0.069 | 0.075 | 0.081 | 0.083 |
    | 200 | 0.069 | 0.070 | 0.067 | 0.070 | 0.061 | 0.064 |

    From 1000 rounds on the papers' are taken. A single round is local SGD: the mean of the workers.
    """
    for most, learning_rate, momentum in BY_ROUNDS:
        if num_rounds <= most:
            return learning_rate, momentum
    return PAPERS
