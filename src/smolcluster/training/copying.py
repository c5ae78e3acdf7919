"""A second model with the state of a first one: by copying it, or by making it again."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smolcluster.errors import SmolclusterError, UserCodeError


class _ByValue(TorchFunctionMode):
    """Lets `copy.deepcopy` take tensors that a graph has made, such as a stored loss, by their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model.

    Raises:
        UserCodeError: it holds what cannot be copied; the layer is named.
    """
    try:
        return _copied(model)
    except SmolclusterError:
        raise
    except Exception as error:
        name, layer = _refusing(model)
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserCodeError(
            f"model: {name} ({type(layer).__name__}) cannot be copied ({problem:.200}): give the Workload a "
            "function that makes the model, such as lambda: Model(...), or leave out of the layer what "
            "copy.deepcopy refuses, such as a lock; instead of torch.nn.utils.weight_norm use "
            "torch.nn.utils.parametrizations.weight_norm"
        ) from error


def second(model: nn.Module, make: Callable[[], nn.Module] | None) -> nn.Module:
    """A model with the parameters and buffers of `model`: a copy, or what `make` makes if it refuses that.

    Raises:
        UserCodeError: neither is possible; the layer is named.
    """
    try:
        return copied(model)
    except UserCodeError:
        made = None if make is None else make()
        if made is None or not _takes_over(made, model):
            raise
        return made


@torch.no_grad()
def _takes_over(made: nn.Module, model: nn.Module) -> bool:
    """Give `made` the values of `model`; False: it is not another one of the same kind."""
    own, theirs = _tensors(made), _tensors(model)
    if own.keys() != theirs.keys() or any(own[name] is theirs[name] for name in own):
        return False
    if any(own[name].shape != theirs[name].shape for name in own):
        return False
    for name, tensor in own.items():
        if tensor.layout == torch.strided:  # a sparse one is what it was made
            tensor.copy_(theirs[name])
    return True


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copied(model: nn.Module) -> nn.Module:
    with _ByValue():
        return copy.deepcopy(model)


def _refusing(model: nn.Module) -> tuple[str, nn.Module]:
    """The innermost layer that cannot be copied, with its name."""
    for name, layer in reversed(list(model.named_modules())):
        try:
            _copied(layer)
        except Exception:
            return (name and f"layer {name}") or "it", layer
    return "it", model
