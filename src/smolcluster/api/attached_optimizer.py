"""The optimizer of an attached loop: what it may be, and how its `step` becomes the cluster's."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.errors import ConfigError

MARK = "_smolcluster_step"
KNOWS_SCALES = "_step_supports_amp_scaling"
"""What an optimizer has for which `torch.amp.GradScaler` skips no step, but tells it of the scale."""
_NUMBERS: Mapping[str, Callable[[float], float]] = {"bool": bool, "int": int, "float": float}
_Count = tuple[int, str]
"""A number of a group: which group, and the number's key there."""
Step = Callable[[Callable[[], Any] | None], Any]
"""Takes a step with the gradients of now, after the closure if there is one; returns what that does."""


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, step: Step) -> Iterator[Callable[..., Any]]:
    """In the block `optimizer.step()` is `step`; gives the method that it was before."""
    original: Callable[..., Any] = optimizer.step
    knew_scales = optimizer.__dict__.get(KNOWS_SCALES)
    setattr(optimizer, MARK, original)
    setattr(optimizer, KNOWS_SCALES, True)
    optimizer.step = MethodType(_step_of, step)  # type: ignore[method-assign]
    try:
        yield original
    finally:
        del optimizer.step
        if original != optimizer.step:  # somebody else had wrapped it as well
            optimizer.step = original  # type: ignore[method-assign]
        delattr(optimizer, MARK)
        delattr(optimizer, KNOWS_SCALES)
        if knew_scales is not None:
            setattr(optimizer, KNOWS_SCALES, knew_scales)


def _step_of(step: Step, closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
    return step(closure)


setattr(_step_of, "_wrapped_by_lr_sched", True)  # noqa: B010 - schedulers leave it alone


def unscale(optimizer: torch.optim.Optimizer) -> float | None:
    """Divide the gradients by the loss scale of a `torch.amp.GradScaler`, where one steps this optimizer.

    Returns the scale if a gradient has overflowed, 1 if it is not known any more; None: none has.
    """
    found, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    if found is None:
        return None
    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined] # it is done with here
    factor = 1.0 if scale is None else float(scale)
    if float(found):
        return factor
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(factor)
    return None


class LoopOptimizer:
    """A loop's optimizer, with which a worker steps its copy of the weights: at the loop's learning rate."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        named: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        """`step`: the optimizer's own; `named`: the trained parameters, by their names in the run."""
        self._optimizer, self._step, self._named = optimizer, step, named
        self._at_first = {each: _copied(optimizer.state.get(each, {})) for _, each in named}
        self._counts_at_first = self._counts()
        self._counted: set[_Count] = set()
        """What the optimizer's own steps change of its groups' numbers."""

    def step(self, learning_rate: float) -> None:  # noqa: ARG002 - the loop's schedule has set it
        before = self._counts()
        self._step()
        self._counted |= {
            each for each, value in self._counts().items() if before.get(each) != value
        }

    def _counts(self) -> dict[_Count, float]:
        """Numbers of the groups but their learning rate, which is the schedule's; flags are none."""
        return {
            (number, key): value
            for number, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if type(value) in (int, float) and key != "lr"
        }

    def reset(self) -> None:
        for parameter, state in self._at_first.items():
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = _copied(state)
        for number, key in self._counted:
            group = self._optimizer.param_groups[number]
            group.pop(key, None)
            if (number, key) in self._counts_at_first:
                group[key] = self._counts_at_first[number, key]

    @property
    def state(self) -> dict[str, Tensor]:
        """All tensors and numbers of the state, by `CLASS/PARAMETER/KEY/TYPE`.

        What a group counts has its number in the parameter's place, after a dot, with which no parameter's
        name begins.
        """
        owners = [(name, self._optimizer.state.get(each, {})) for name, each in self._named]
        counts = self._counts()
        for number, key in sorted(self._counted & counts.keys()):
            owners.append((f".{number}", {key: counts[number, key]}))
        kind = type(self._optimizer).__name__
        return {
            f"{kind}/{name}/{key}/{type(value).__name__}": _as_tensor(value)
            for name, state in owners
            for key, value in state.items()
            if isinstance(value, (Tensor, float, int))
        }

    def resume(self, stored: Mapping[str, Tensor]) -> None:
        saved = self._optimizer.state_dict()
        order = [id(each) for group in self._optimizer.param_groups for each in group["params"]]
        numbers = {name: order.index(id(each)) for name, each in self._named if id(each) in order}
        groups = {f".{number}": group for number, group in enumerate(saved["param_groups"])}
        found: dict[int, dict[str, Any]] = {}
        counted: set[_Count] = set()
        for place, tensor in stored.items():
            kind, *parts = place.split("/")
            if kind != type(self._optimizer).__name__:
                continue
            name, key, to_number = "/".join(parts[:-2]), parts[-2], _NUMBERS.get(parts[-1])
            value = tensor if to_number is None else to_number(tensor.item())
            if name in numbers:
                found.setdefault(numbers[name], {})[key] = value
            elif name in groups:
                groups[name][key] = value
                counted.add((int(name[1:]), key))
        self._counted |= counted
        if found or counted:
            self._optimizer.load_state_dict({**saved, "state": found})


def _as_tensor(value: Tensor | float) -> Tensor:
    return (
        torch.tensor(value, dtype=torch.float64) if type(value) is float else torch.as_tensor(value)
    )


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def check_optimizer(model: nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"attach: the optimizer is a {type(optimizer).__name__}, must be one torch.optim.Optimizer; for "
            "several models give it all their parameters"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("attach: LBFGS computes several gradients a step; use another optimizer")
    if hasattr(optimizer, MARK):
        raise ConfigError("attach: this optimizer is attached already; leave that block first")
    known = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                raise ConfigError(
                    f"attach: the optimizer has a parameter of shape {tuple(param.shape)} that is not the "
                    "model's; put all that is trained into one module, such as nn.ModuleDict"
                )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("model: no parameter is trainable; set requires_grad on at least one")


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What a wrapper such as accelerate's steps in the end.

    Raises:
        ConfigError: it scales losses, for which it keeps the `step` that the optimizer had before.
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        raise ConfigError(
            f"attach: the optimizer is a {type(optimizer).__name__} with a gradient scaler of its own, which "
            "steps past the cluster: use bf16 instead of fp16, or torch.amp.GradScaler in a loop of your own"
        )
    return innermost(inner)
