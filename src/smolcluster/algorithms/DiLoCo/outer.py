"""The outer optimizer: what the server makes of the changes that workers bring.

A worker that began at θ_start and has come to θ_w brings Δ_w = θ_start - θ_w. The server takes their weighted
mean Δ̄ for a gradient (DiLoCo, Douillard et al., 2311.08105), with Nesterov's momentum:

    m <- β m + Δ̄;    θ <- θ - γ (Δ̄ + β m)

With γ = 1 and β = 0 that is local SGD: θ becomes the workers' mean. Where workers do not wait for each other,
a change is stale when it comes, and momentum is delayed (Liu et al., 2401.09135): see `DelayedNesterov`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.algorithms.DiLoCo.fragments import Fragment
from smolcluster.training.muon import MuonOptimizer

ALL = slice(None)

OUTER_LR, ASYNC_OUTER_LR = 0.7, 0.9
MOMENTUM, MUON_MOMENTUM = 0.5, 0.6

DISCOUNT = 0.5
"""ρ: this part of what others have changed meanwhile is taken off a stale change."""
ALIGNED, TURN = 0.3, 0.5
"""A change with a smaller cosine to momentum is corrected, and turned towards it by at most that weight."""


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

    def step(self, theta: Tensor, delta: Tensor, fragment: Fragment | None = None) -> None:
        """Step the weights `theta` (n,) in place along the mean change `delta` (n,).

        `fragment`: which n of the vector's values they are, each of which is stepped once an outer step.
        """
        state = self.state["momentum"]
        momentum = state if fragment is None else fragment.view(state)
        momentum.mul_(self.momentum).add_(delta)
        theta.sub_(delta, alpha=self.learning_rate)
        theta.sub_(momentum, alpha=self.learning_rate * self.momentum)
        if fragment is not None and len(fragment.places) > 1:
            fragment.scatter(momentum, state)

    @property
    def vectors(self) -> dict[str, Tensor]:
        """What of the state is one value a parameter, by name, each (size,)."""
        return {name: values for name, values in self.state.items() if values.ndim}


def refreshed(delta: Tensor, moved: Tensor, share: float) -> Tensor:
    """What a worker would have changed by, had it begun from the weights of now; a new tensor (n,).

    It began from θ_start, and other workers have moved the weights by `moved` = θ_start - θ since. A part ρ
    of their way it has gone itself:

        Δ' = (Δ - ρ (θ_start - θ)) / (1 - ρ (1 - w))

    `share` is its weight w, so others move the weights by 1 - w of a steady movement: the denominator leaves
    the speed of that as it is. A constant ρ stands for the curvature of delay-compensated SGD (Zheng et al.,
    1609.08326). Without it, several stale changes together go beyond where each of them led.
    """
    return delta.sub(moved, alpha=DISCOUNT).div_(1 - DISCOUNT * (1 - share))


def turn(delta: Tensor, momentum: Tensor, blocks: Sequence[slice]) -> None:
    """Turn each block of a change `delta` (n,) towards `momentum` (n,), in place.

    HeLoCo (2606.00271), with c the cosine of a block Δ and its momentum m, and f = |Δ| / (|Δ| + |m|):

        c >= 0.3      Δ stays
        0 <= c < 0.3  u = (1 - λ) Δ / |Δ| + λ m / |m|,  λ = 0.5 (1 - c) f;    Δ <- |Δ| u / |u|
        c < 0         Δ <- Δ - (-c f) c |Δ| m / |m|

    Sums are in float64, so that they do not depend on where the values lie in memory.

    Departure: the paper's blocks are tensors, here they may be any, such as buckets. Its constants c_ok, k_d,
    k_s, β_max and κ are 0.3, 0.5, 1, 1 and 1, chosen here.
    """
    for block in blocks:
        own, reference = delta[block], momentum[block]
        exact = own.cpu().double(), reference.cpu().double()  # MPS has no float64
        own_norm, norm = (float(each.norm()) for each in exact)
        if not (own_norm and norm):
            continue
        cosine = float(exact[0].dot(exact[1])) / own_norm / norm
        confidence = own_norm / (own_norm + norm)
        if cosine < 0:
            own.add_(reference, alpha=cosine * cosine * confidence * own_norm / norm)
        elif cosine < ALIGNED:
            weight = TURN * (1 - cosine) * confidence
            own.mul_(1 - weight).add_(reference, alpha=weight * own_norm / norm)
            own.mul_(own_norm / float(own.cpu().double().norm()))


class DelayedNesterov(OuterOptimizer):
    """Delayed Nesterov of asynchronous local SGD (2401.09135, algorithm 3, with c = 0), of corrected changes.

    Each change Δ_i is applied when it comes, `refreshed` and with momentum turned towards that (`turn`), by
    its worker's share w_i (Σ w = 1 over the workers), without momentum:

        θ <- θ - γ w_i Δ_i

    and after every `momentum_delay`-th one momentum moves by the mean of these, and the weights by momentum:

        m <- β m + Σ w_i Δ_i / Σ w_i;    θ <- θ - γ β m

    Departure: the paper divides a change by the delay too, for the two are one number there; here the delay
    divides the momentum term alone, and a change counts by its worker's share. With N workers of equal
    changes, none of them stale or against momentum, and a delay of N it is `OuterOptimizer`, whose
    synchronous `step` it has as well; a longer delay is less momentum.
    """

    def __init__(
        self,
        size: int,
        learning_rate: float,
        momentum: float,
        momentum_delay: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`momentum_delay`: in changes applied."""
        super().__init__(size, learning_rate, momentum, device=device, dtype=dtype)
        self.momentum_delay = momentum_delay
        self.state |= {
            "delayed": torch.zeros(size, dtype=dtype, device=device),
            "num_delayed": torch.zeros((), dtype=torch.int64),
            "delayed_share": torch.zeros((), dtype=torch.float64),
        }

    def count(self, share: float) -> float | None:
        """Count a change; returns the sum of the shares if momentum moves with this one, else None."""
        self.state["num_delayed"] += 1
        self.state["delayed_share"] += share
        if self.state["num_delayed"] < self.momentum_delay:
            return None
        total = float(self.state["delayed_share"])
        for name in ("num_delayed", "delayed_share"):
            self.state[name].zero_()
        return total

    def apply(
        self,
        theta: Tensor,
        delta: Tensor,
        share: float,
        moves_by: float | None,
        place: slice = ALL,
        *,
        start: Tensor | None = None,
        blocks: Sequence[slice] = (ALL,),
    ) -> None:
        """Change the weights `theta` (n,) in place by one worker's `delta` (n,), of weight `share`.

        Args:
            theta: the weights.
            delta: what the worker has changed them by; it stays as it is.
            share: w_i.
            moves_by: what `count` has said.
            place: which n of the vector's values they are.
            start: the weights that `delta` is counted from, (n,); None: those of now.
            blocks: places among the n values, of which each is turned towards momentum by itself.
        """
        delta = delta.clone() if start is None else refreshed(delta, start - theta, share)
        if self.momentum:
            turn(delta, self.state["momentum"][place], blocks)
        theta.sub_(delta, alpha=self.learning_rate * share)
        delayed = self.state["delayed"][place]
        delayed.add_(delta, alpha=share)
        if moves_by is None:
            return
        momentum = self.state["momentum"][place].mul_(self.momentum)
        if moves_by > 0:
            momentum.add_(delayed, alpha=1 / moves_by)
        theta.sub_(momentum, alpha=self.learning_rate * self.momentum)
        delayed.zero_()


def outer_defaults(
    num_rounds: int, *, has_muon: bool = False, is_async: bool = False
) -> tuple[float, float]:
    """γ and β of a run of so many outer steps.

    γ is 0.7 (DiLoCo, 2311.08105). β is 0.5, and 0.6 with Muon inside, the default of MuLoCo (2505.23725). A
    single round is local SGD: the mean of the workers. Where changes are applied one by one, momentum acts
    half as often, and γ is 0.9: so changes that agree add up to about as much.

    Changes of successive rounds that agree add up to γ / (1 - β) times as much: 1.4 with 0.5, 3.5 with 0.8, 7
    with DiLoCo's 0.9. So a learning rate that suits one machine is too high with much momentum, and the
    longer the run is at that rate, the more is lost. A GPT of 0.1 million parameters on tiny Shakespeare,
    four workers, AdamW, rate 0.006, 10 local steps, fp32, one seed, validation loss:

    | rounds | synchronous | β = 0.5 | 0.7 | 0.8 |
    |---|---|---|---|---|
    | 49 | 2.074 | 2.220 | 2.220 | |
    | 147 | 1.927 | 1.965 | 2.233 | 2.429 |
    | 49, Muon, rate 0.008 | 1.964 | | 2.040 (0.6) | 2.083 |

    Where the inner rate is chosen anew for each β, few rounds want little momentum and 200 hardly care. Four
    workers on the digits, γ = 0.7, the best of four inner rates, mean of three seeds, ± 0.01
    (`benchmarks/diloco.py --part momentum --seeds 3`):

    | rounds | β = 0 | 0.3 | 0.5 | 0.7 | 0.8 | 0.9 |
    |---|---|---|---|---|---|---|
    | 6 | 0.749 | 0.515 | 0.401 | 0.370 | 0.372 | 0.410 |
    | 12 | 0.237 | 0.176 | 0.148 | 0.161 | 0.224 | 0.344 |
    | 25 | 0.109 | 0.092 | 0.087 | 0.099 | 0.114 | 0.198 |
    | 50 | 0.079 | 0.075 | 0.074 | 0.081 | 0.087 | 0.121 |
    | 100 | 0.068 | 0.068 | 0.069 | 0.075 | 0.081 | 0.083 |
    | 200 | 0.069 | 0.070 | 0.067 | 0.070 | 0.061 | 0.064 |
    """
    if num_rounds <= 1:
        return 1.0, 0.0
    learning_rate = ASYNC_OUTER_LR if is_async else OUTER_LR
    return learning_rate, MUON_MOMENTUM if has_muon else MOMENTUM


CHANGES_PER_DELAY = 2
"""Of each worker, after which momentum acts where workers do not wait for each other."""


def new_outer(context: ServerContext, total_batches: int) -> OuterOptimizer:
    """The outer optimizer; γ and β, where nothing is said, are those that suit the inner optimizer."""
    num_workers, config = context.settings.cluster.num_workers, context.run.of(DiLoCoConfig)
    replica = context.training.replica
    num_rounds = total_batches // num_workers // (config.local_steps or 1)
    is_sparse = config.codec_up == "topk"
    has_muon = isinstance(replica.optimizer, MuonOptimizer)
    is_async = config.mode == "async"
    defaults = outer_defaults(num_rounds, has_muon=has_muon, is_async=is_async)
    rate, momentum = (1.0, 0.0) if is_sparse else defaults
    make: Callable[..., OuterOptimizer] = OuterOptimizer
    if is_async:
        make = partial(DelayedNesterov, momentum_delay=CHANGES_PER_DELAY * num_workers)
    return make(
        replica.num_params,
        rate if config.outer_lr is None else config.outer_lr,
        momentum if config.outer_momentum is None else config.outer_momentum,
        device=replica.device,
        dtype=replica.params.dtype,
    )
