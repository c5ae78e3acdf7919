"""Adam (Kingma & Ba, 1412.6980), AdamW (Loshchilov & Hutter, 1711.05101) and SGD, flat.

The arithmetic is PyTorch's own, through the functional form of its optimizers, in one fused call
where the device has such kernels. The classes of `torch.optim` are left aside because making one
imports PyTorch's compiler, which costs a small machine seconds in every process and is never used here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from smolcluster.errors import ConfigError

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})
NAMES = ("adam", "adamw", "sgd")


class FlatOptimizer:
    """An elementwise update rule, and its state.

    Attributes:
        state: what a continued run needs, by name; empty for sgd. Copy into its tensors to restore it.
            `step` counts the steps taken; the others are flat (num_params,).
    """

    def __init__(self, name: str, params: Tensor, grads: Tensor, weight_decay: float) -> None:
        """Set up the rule for weights `params` and their gradient `grads`, both (num_params,).

        Args:
            name: adam, adamw or sgd.
            params: changed in place by each step.
            grads: read by each step.
            weight_decay: added to the gradient as weight_decay · params (adam, sgd), or taken from
                the weights as learning_rate · weight_decay · params (adamw).

        Raises:
            ConfigError: no such optimizer.
        """
        if name not in NAMES:
            raise ConfigError(f"optimizer is {name!r}, allowed: {', '.join(NAMES)}")
        self._name = name
        self._params = params
        self._grads = grads
        self._weight_decay = weight_decay
        self._fused = params.device.type in FUSED_DEVICES
        self.state = {} if name == "sgd" else self._moments()

    def _moments(self) -> dict[str, Tensor]:
        counter_device = self._params.device if self._fused else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=counter_device),
            "exp_avg": torch.zeros_like(self._params),
            "exp_avg_sq": torch.zeros_like(self._params),
        }

    def reset(self) -> None:
        """Forget all steps, as if none had been taken."""
        for tensor in self.state.values():
            tensor.zero_()

    def step(self, learning_rate: float) -> None:
        """Change the weights by one step."""
        self.step_pieces([(slice(0, self._params.numel()), self._grads)], learning_rate)

    @torch.no_grad()
    def step_pieces(self, pieces: Iterable[tuple[slice, Tensor]], learning_rate: float) -> None:
        """Change the weights by one step, of which the gradient comes in pieces, and only there.

        Each piece is a place in the flat tensors and the gradient there, on the weights' device. The
        weights become those that `step` would give.
        """
        for place, gradient in pieces:
            if self._name == "sgd":
                self._sgd_step(place, gradient, learning_rate)
            else:
                self._adam_step(place, gradient, learning_rate)
        if self.state:
            self.state["step"] += 1

    def _adam_step(self, place: slice, gradient: Tensor, learning_rate: float) -> None:
        adam(
            [self._params[place]],
            [gradient],
            [self.state["exp_avg"][place]],
            [self.state["exp_avg_sq"][place]],
            [],
            [self.state["step"].clone()],
            foreach=False,
            fused=self._fused,
            decoupled_weight_decay=self._name == "adamw",
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=learning_rate,
            weight_decay=self._weight_decay,
            eps=EPSILON,
            maximize=False,
        )

    def _sgd_step(self, place: slice, gradient: Tensor, learning_rate: float) -> None:
        sgd(
            [self._params[place]],
            [gradient],
            [None],
            foreach=False,
            fused=self._fused,
            weight_decay=self._weight_decay,
            momentum=0.0,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
