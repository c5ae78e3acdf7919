"""Adam (Kingma & Ba, 1412.6980), AdamW (Loshchilov & Hutter, 1711.05101) and SGD, flat.

The arithmetic is PyTorch's own, through the functional form of its optimizers, in one fused call
where the device has such kernels. The classes of `torch.optim` are left aside because making one
imports PyTorch's compiler, which costs a small machine seconds in every process and is never used here.
Before a step the gradient is clipped by the norm of the whole (Pascanu et al., 1211.5063).
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from smolcluster.configs.schema import FLAT_OPTIMIZERS, GradientClipping
from smolcluster.errors import ConfigError
from smolcluster.training.kept import is_like
from smolcluster.utils.words import hint_at, show

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})
MUON = "muon"
STEP_COUNT, MOMENTUM = "step", "momentum_buffer"
OF_ADAM = MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-8})
OF_SGD = MappingProxyType({"momentum": 0.0, "dampening": 0.0, "nesterov": False})
OF_MUON = MappingProxyType({"momentum": 0.95, "nesterov": True, "ns_steps": 5, **OF_ADAM})
"""Arguments and their defaults."""
CLASSES = MappingProxyType({"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"})
"""What PyTorch calls them."""
_KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"adam": OF_ADAM, "adamw": OF_ADAM, "sgd": OF_SGD, MUON: OF_MUON}
)
_OWN_KEYS = MappingProxyType({"lr": "learning_rate", "weight_decay": "weight_decay"})
"""Arguments that are settings of their own, and what these are called."""


class LocalOptimizer(Protocol):
    """What a worker steps its own copy of the weights with."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What it has learnt of the steps before, by name."""

    def step(self, learning_rate: float) -> None: ...

    def resume(self, stored: Mapping[str, Tensor]) -> None:
        """Go on with such a state, which other tensors may stand beside; with its own if it is none."""

    def reset(self) -> None:
        """Forget what it has learnt."""


@dataclass(frozen=True)
class FlatRule:
    """What makes a `FlatOptimizer` for weights that lie elsewhere: the arguments of its constructor."""

    name: str
    arguments: Mapping[str, Any]
    weight_decay: float
    num_decayed: int


class FlatState(ABC):
    """An optimizer of flat weights by its state.

    Attributes:
        name: what people call it.
        state: what a continued run needs, by name; empty for sgd. Copy into its tensors to restore it.
            `step` counts the steps taken; the others are flat (num_params,).
    """

    name: str
    state: dict[str, Tensor]
    _grads: Tensor

    @property
    def moments(self) -> dict[str, Tensor]:
        """The state without the count of steps."""
        return {name: tensor for name, tensor in self.state.items() if name != STEP_COUNT}

    def reset(self) -> None:
        for tensor in self.state.values():
            tensor.zero_()

    def resume(self, stored: Mapping[str, Tensor]) -> None:
        if is_like(self.state, stored):
            for name, tensor in self.state.items():
                tensor.copy_(stored[name])

    def step(self, learning_rate: float) -> None:
        self.step_with(self._grads, learning_rate)

    @abstractmethod
    def step_with(self, gradient: Tensor, learning_rate: float, *, owned: bool = False) -> None:
        """Take a step with this gradient, on the same device."""


class FlatOptimizer(FlatState):
    """An elementwise update rule, and its state."""

    def __init__(
        self,
        name: str,
        params: Tensor,
        grads: Tensor,
        weight_decay: float,
        num_decayed: int | None = None,
        *,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Set up the rule that changes `params` in place by their gradient `grads`, both (num_params,).

        Args:
            name: adam, adamw or sgd; muon, which `MuonOptimizer` completes.
            weight_decay: added to the gradient as weight_decay · params (adam, sgd), or taken from
                the weights as learning_rate · weight_decay · params (adamw).
            num_decayed: so many weights, from the first one, decay; None: all do.
            arguments: betas and eps (adam, adamw), or momentum, dampening and nesterov (sgd), as PyTorch
                means them.

        Raises:
            ConfigError: no such optimizer, or an argument that it does not know.
        """
        if name not in FLAT_OPTIMIZERS:
            raise ConfigError(f"optimizer is {name!r}, allowed: {', '.join(FLAT_OPTIMIZERS)}")
        self._arguments = checked_arguments(name, arguments)
        self.name = name
        self._params = params
        self._grads = grads
        self._weight_decay = weight_decay
        self._num_decayed = params.numel() if num_decayed is None else num_decayed
        self._fused = params.device.type in FUSED_DEVICES
        self.state = {}
        if moments := moments_of(name, self._arguments):
            counter_device = params.device if self._fused else torch.device("cpu")
            count = torch.zeros((), dtype=torch.float32, device=counter_device)
            self.state = {STEP_COUNT: count} | {each: torch.zeros_like(params) for each in moments}

    def part(self, place: slice) -> Self:
        """The rule for a slice of the weights, in the same memory.

        The first slice counts the steps of the whole, each other one counts its own.
        """
        if place == slice(0, self._params.numel()):
            return self
        part = copy.copy(self)
        part._params, part._grads = self._params[place], self._grads[place]
        part._num_decayed = min(max(0, self._num_decayed - place.start), part._params.numel())
        part.state = {name: tensor[place] for name, tensor in self.moments.items()}
        if self.state:
            count = self.state[STEP_COUNT]
            part.state[STEP_COUNT] = count.clone() if place.start else count
        return part

    @property
    def rule(self) -> FlatRule:
        return FlatRule(self.name, self._arguments, self._weight_decay, self._num_decayed)

    def step_with(
        self,
        gradient: Tensor,
        learning_rate: float,
        *,
        owned: bool = False,  # noqa: ARG002 - for optimizers that change it
    ) -> None:
        """Change the weights by one step with this gradient (num_params,), on the same device."""
        step = self._sgd_step if self.name == "sgd" else self._adam_step
        for place, decay in self._stretches():
            if place.start < place.stop:
                step(place, gradient[place], learning_rate, decay)
        if self.state:
            self.state[STEP_COUNT] += 1

    def _stretches(self) -> list[tuple[slice, float]]:
        """Where the weights lie that are stepped elementwise, and how they decay."""
        border = self._num_decayed if self._weight_decay else 0
        return [(slice(0, border), self._weight_decay), (slice(border, self._params.numel()), 0.0)]

    def _adam_step(
        self, place: slice, gradient: Tensor, learning_rate: float, weight_decay: float
    ) -> None:
        first, second = (self.state[name] for name in moments_of(self.name, self._arguments))
        adam(
            [self._params[place]],
            [gradient],
            [first[place]],
            [second[place]],
            [],
            [self.state[STEP_COUNT].clone()],
            foreach=False,
            fused=self._fused,
            decoupled_weight_decay=self.name != "adam",
            amsgrad=False,
            beta1=self._arguments["betas"][0],
            beta2=self._arguments["betas"][1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._arguments["eps"],
            maximize=False,
        )

    def _sgd_step(
        self, place: slice, gradient: Tensor, learning_rate: float, weight_decay: float
    ) -> None:
        arguments = self._arguments
        buffer = self.state[MOMENTUM][place] if self.state else None
        is_damped = arguments["dampening"] and bool(
            self.state[STEP_COUNT]
        )  # the first one never is
        sgd(
            [self._params[place]],
            [gradient],
            [buffer],
            foreach=False,
            fused=self._fused,
            weight_decay=weight_decay,
            momentum=arguments["momentum"],
            lr=learning_rate,
            dampening=arguments["dampening"] if is_damped else 0.0,
            nesterov=arguments["nesterov"],
            maximize=False,
        )


def checked_arguments(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of adam, adamw, sgd or muon, those that are not given by default.

    Raises:
        ConfigError: it does not take one of them or its value, or they do not fit each other.
    """
    defaults = _KNOWN[name]
    its = CLASSES.get(name)
    other = f"; a class of torch.optim, such as {its}, takes more" if its else ""
    check_names(name, given, list(defaults), other)
    for key, value in given.items():
        is_allowed, allowed = _ALLOWED[key]
        if not is_allowed(value):
            raise ConfigError(f"optimizer_args.{key} is {show(value)}, must be {allowed}")
    arguments = {**defaults, **given}
    is_damped = arguments.get("dampening")
    if arguments.get("nesterov") and not (arguments["momentum"] > 0 and not is_damped):
        raise ConfigError(
            "optimizer_args.nesterov is true, which needs momentum above 0 and no dampening"
        )
    return arguments


def _is_number(value: object, least: float = 0.0, below: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return least <= float(value) < below


def _are_betas(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_is_number(each, below=1.0) for each in value)
    )


_ALLOWED: Mapping[str, tuple[Callable[[object], bool], str]] = MappingProxyType(
    {
        "betas": (_are_betas, "two numbers of 0 or more, below 1"),
        "eps": (_is_number, "a number of 0 or more"),
        "momentum": (_is_number, "a number of 0 or more"),
        "dampening": (lambda value: _is_number(value, -math.inf), "a number"),
        "nesterov": (lambda value: isinstance(value, bool), "true or false"),
        "ns_steps": (
            lambda value: isinstance(value, int) and _is_number(value),
            "a whole number of 0 or more",
        ),
    }
)
"""What the values of arguments must be, as PyTorch's classes check them."""


def check_names(
    optimizer: str, given: Collection[str], known: Collection[str] | None, others: str = ""
) -> None:
    """Refuse keyword arguments that an optimizer does not take; `known`: those that it takes, None: any.

    Raises:
        ConfigError: there is one; the message names it and the nearest that is known, and ends with `others`.
    """
    for name in given:
        if name in _OWN_KEYS:
            raise ConfigError(
                f"optimizer_args has {name}, which is not said there; set {_OWN_KEYS[name]} itself"
            )
        if known is not None and name not in known:
            raise ConfigError(
                f"optimizer_args has {name}, which {optimizer} does not take; it takes {', '.join(known)}"
                f"{others}{hint_at(name, known)}"
            )


def moments_of(name: str, arguments: Mapping[str, Any]) -> Sequence[str]:
    """What a rule with these arguments keeps of each weight, by name."""
    if name == "sgd":
        return [MOMENTUM] if arguments.get("momentum") else []
    if name == MUON:
        return [MOMENTUM, "exp_avg_sq"]
    return ["exp_avg", "exp_avg_sq"]


def bucket_norms(flat: Tensor, buckets: Sequence[slice]) -> list[float]:
    """The L2 norm of each bucket of a flat tensor. Combine them with `math.hypot`, which is in float64.

    A sum of millions of squares in float32 would lose the small ones.
    """
    norms = torch.stack([torch.linalg.vector_norm(flat[bucket]) for bucket in buckets]).tolist()
    for number, norm in enumerate(norms):
        if math.isinf(norm):  # a sum of squares may overflow where the elements do not
            values = flat[buckets[number]].to("cpu")
            norms[number] = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norms


def clip_factor(norm: float, clipping: GradientClipping) -> float:
    """The factor that clips a gradient of this L2 norm: that of `torch.nn.utils.clip_grad_norm_`.

    It is 1 where clipping by the norm is not enabled.
    """
    if not clipping.enabled or clipping.max_norm is None:
        return 1.0
    return min(1.0, clipping.max_norm / (norm + 1e-6))
