"""A user's model is moved to a device and put into training or evaluation mode by its own methods.

Models override `to`, `train` and `eval`, and many overrides return nothing: what they return is ignored,
what they do is respected. A part that the user has put into evaluation mode, in a model that is in training
mode, stays in it where that is meant: norms and other single layers (frozen batch norm), and parts of which
nothing is trained (a frozen backbone). A larger part that is trained is put into training mode, as
`model.train()` does, because `from_pretrained` returns models in evaluation mode.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from smolcluster.errors import ConfigError
from smolcluster.utils.user_code import user_code


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model to `device`.

    Raises:
        ConfigError: its own `to` has left a parameter or buffer elsewhere.
        UserCodeError: its own `to` raised an exception.
    """
    with user_code("to"):
        model.to(device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != device.type:
            raise ConfigError(
                f"model: {name} is on {tensor.device} after {type(model).__name__}.to({device}): it must "
                "move the module itself (super().to(...)), what it returns is not used"
            )


def begin_training(model: nn.Module) -> list[str]:
    """Put a model into training mode; returns the names of the parts that stay in evaluation mode.

    Raises:
        ConfigError: its `train` cannot be called as that of `torch.nn.Module`.
        UserCodeError: its own `train` raised an exception.
    """
    resting = _resting(model)
    modes = [modes_of(part) for part in resting.values()]
    _switch(model, "train", model.train)
    for each in modes:
        restore_modes(each)
    return list(resting)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode in this block, and each part in its own mode again after it.

    Raises:
        ConfigError: its `eval` cannot be called as that of `torch.nn.Module`.
        UserCodeError: its own `eval` raised an exception.
    """
    modes = modes_of(model)
    try:
        _switch(model, "eval", model.eval)
        yield
    finally:
        restore_modes(modes)


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Of each part, whether it is in training mode."""
    return {module: module.training for module in model.modules()}


def restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Put each part into the mode that it had."""
    for module, is_training in modes.items():
        module.training = is_training


def _switch(model: nn.Module, method: str, change: Callable[[], object]) -> None:
    try:
        inspect.signature(change).bind()
    except TypeError:
        raise ConfigError(
            f"model: {type(model).__name__}.{method} needs arguments, but it takes the place of "
            f"torch.nn.Module.{method}, which puts layers into their mode: call it otherwise, such as fit"
        ) from None
    except ValueError:  # it does not say what it takes
        pass
    with user_code(method):
        change()


def _resting(model: nn.Module) -> dict[str, nn.Module]:
    """The parts that shall stay in evaluation mode, by name; of nested ones the outermost."""
    if not model.training:
        return {}
    found: dict[str, nn.Module] = {}
    waiting = [("", model)]
    while waiting:
        prefix, parent = waiting.pop()
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if child.training:
                waiting.append((f"{path}.", child))
            elif _is_meant(child):
                found[path] = child
    return found


def _is_meant(part: nn.Module) -> bool:
    """Whether evaluation mode of a part was chosen for it, and is not just how it was loaded."""
    is_layer = next(part.children(), None) is None
    return is_layer or not any(each.requires_grad for each in part.parameters())
