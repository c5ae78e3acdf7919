"""Adam (Kingma & Ba, 1412.6980), AdamW (Loshchilov & Hutter, 1711.05101) and SGD, flat.

The arithmetic is PyTorch's own, through the functional form of its optimizers, in one fused call
where the device has such kernels. The classes of `torch.optim` are left aside because making one
imports PyTorch's compiler, which costs a small machine seconds in every process and is never used here.
"""

from collections.abc import Iterable, Iterator

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

    def __init__(
        self,
        name: str,
        params: Tensor,
        grads: Tensor,
        weight_decay: float,
        num_decayed: int | None = None,
    ) -> None:
        """Set up the rule for weights `params` and their gradient `grads`, both (num_params,).

        Args:
            name: adam, adamw or sgd.
            params: changed in place by each step.
            grads: read by each step.
            weight_decay: added to the gradient as weight_decay · params (adam, sgd), or taken from
                the weights as learning_rate · weight_decay · params (adamw).
            num_decayed: so many weights, from the first one, decay; None: all do.

        Raises:
            ConfigError: no such optimizer.
        """
        if name not in NAMES:
            raise ConfigError(f"optimizer is {name!r}, allowed: {', '.join(NAMES)}")
        self._name = name
        self._params = params
        self._grads = grads
        self._weight_decay = weight_decay
        self._num_decayed = params.numel() if num_decayed is None else num_decayed
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
        step = self._sgd_step if self._name == "sgd" else self._adam_step
        for place, gradient in pieces:
            for part, decay in self._parts(place):
                values = gradient[part.start - place.start : part.stop - place.start]
                step(part, values, learning_rate, decay)
        if self.state:
            self.state["step"] += 1

    def _parts(self, place: slice) -> Iterator[tuple[slice, float]]:
        """A place cut where the weight decay ends, and the decay of each part."""
        border = max(place.start, min(self._num_decayed, place.stop))
        if not self._weight_decay or border == place.stop:
            yield place, self._weight_decay
            return
        if border > place.start:
            yield slice(place.start, border), self._weight_decay
        yield slice(border, place.stop), 0.0

    def _adam_step(
        self, place: slice, gradient: Tensor, learning_rate: float, weight_decay: float
    ) -> None:
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
            weight_decay=weight_decay,
            eps=EPSILON,
            maximize=False,
        )

    def _sgd_step(
        self, place: slice, gradient: Tensor, learning_rate: float, weight_decay: float
    ) -> None:
        sgd(
            [self._params[place]],
            [gradient],
            [None],
            foreach=False,
            fused=self._fused,
            weight_decay=weight_decay,
            momentum=0.0,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
