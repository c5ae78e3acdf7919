"""A loss with weights of its own, which nobody trains, and one with buffers, which lie where it computes.

Buffers that it changes, such as a running centre, would be each process's own, and in no checkpoint: they are
refused as well.

In a loop of one's own the parameters of a loss (ArcFace, CenterLoss, learnt weights of tasks) are given to
the optimizer. Here it has the model's alone. A loss that is itself a module is refused before anything
begins; of any other one the graph of its first values tells which parameters would get a gradient and are
not the model's.
"""

from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.data.dataset import Batch
from smolcluster.data.pytree import tensors_in
from smolcluster.errors import ConfigError
from smolcluster.training.modes import move
from smolcluster.training.state_watch import mark
from smolcluster.utils.words import a_few

NUM_WATCHED = 2
"""So many values of a loss are examined; the first one may be of a part that has no terms."""
_MOST_DEEP = 4
_REMEDY = (
    "which nobody trains, because the optimizer has those of the model: make it a part of the model, or set "
    "requires_grad_(False) on what is to stay as it is"
)


def modules_of(function: object) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a loss or metric is, or refers to, each with a name: not those within these."""
    return ((name, each) for name, each in _held_by(function) if isinstance(each, nn.Module))


def _held_by(function: object) -> Iterator[tuple[str, nn.Module | Tensor]]:
    known: set[int] = set()
    waiting = [("", function, 0)]
    while waiting:
        name, thing, depth = waiting.pop()
        if id(thing) in known or depth > _MOST_DEEP:
            continue
        known.add(id(thing))
        if isinstance(thing, nn.Module | Tensor):
            yield name, thing
        else:
            waiting += [(each, part, depth + 1) for each, part in _parts(thing)]


def _parts(thing: Any) -> list[tuple[str, Any]]:
    """What a callable object refers to, by name."""
    if isinstance(thing, partial):
        values = (thing.func, *thing.args, *thing.keywords.values())
        return [(getattr(each, "__name__", ""), each) for each in values]
    if isinstance(thing, dict):
        return [(str(key), each) for key, each in thing.items()]
    if isinstance(thing, list | tuple):
        return [(str(number), each) for number, each in enumerate(thing)]
    code = getattr(thing, "__code__", None)
    if code is None:
        own = getattr(thing, "__dict__", {}) if callable(thing) else {}
        return list(own.items())
    found = [("", owner)] if (owner := getattr(thing, "__self__", None)) is not None else []
    names = getattr(thing, "__globals__", {})
    found += [
        (name, names[name])
        for name in code.co_names
        if isinstance(names.get(name), nn.Module | Tensor)
    ]
    cells = getattr(thing, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=False):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # not bound yet
            continue
    return found


def holders_of(loss: object) -> Iterator[object]:
    """What a loss may keep numbers and tensors in: itself, whose method it is, and its modules."""
    own = getattr(loss, "__wrapped__", loss)
    yield from (own, getattr(own, "__self__", None))
    for _, module in modules_of(own):
        yield from module.modules()


def check_untrained(what: str, function: object) -> None:
    """See that a loss is no module with parameters to train.

    Raises:
        ConfigError: it is, or it is a method of one.
    """
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, nn.Module):
        return
    names = [name for name, each in owner.named_parameters() if each.requires_grad]
    if names:
        raise ConfigError(
            f"the {what} {type(owner).__name__} has parameters ({a_few(names)}), {_REMEDY}"
        )


class WatchedLoss:
    """A loss whose first values are examined for parameters that are not the model's."""

    def __init__(self, loss: Callable[[nn.Module, Batch], Any]) -> None:
        self._loss = loss
        self._num_left = NUM_WATCHED
        update_wrapper(self, loss, updated=())

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        """What the loss returns.

        Raises:
            ConfigError: it would give a gradient to a parameter that nobody trains.
        """
        if not self._num_left:
            return self._loss(model, batch)
        outputs: set[object] = set()

        def note(_module: object, _given: object, output: Any) -> None:
            named = vars(output) if isinstance(output, SimpleNamespace) else output
            outputs.update(each.grad_fn for each in tensors_in(named))

        before, names = self._buffers(model), self._names()
        with model.register_forward_hook(note):
            result = self._loss(model, batch)
        now = self._buffers(model)
        total = result[0] if isinstance(result, tuple) and result else result
        if isinstance(total, Tensor) and total.grad_fn is not None:
            self._num_left -= 1
            self._check(model, total, outputs, names)
            if moved := [name for name, each in now.items() if each != before.get(name)]:
                raise ConfigError(
                    f"the loss changes its buffers ({a_few(moved)}), which are each process's own, and in no "
                    "checkpoint: make it a part of the model, or put what it holds into evaluation mode"
                )
        return result

    def _buffers(self, model: nn.Module) -> dict[str, object]:
        """What differs if the values of a buffer do that is the loss's, and not the model's."""
        own = {id(each) for each in model.buffers()}
        return {
            f"{name}.{inner}".lstrip("."): mark(each)
            for name, module in modules_of(self._loss)
            for inner, each in module.named_buffers()
            if id(each) not in own
        }

    def _check(
        self, model: nn.Module, total: Tensor, outputs: set[object], names: dict[int, str]
    ) -> None:
        """What lies behind the model's outputs is its own: it may stand for what stages have computed."""
        own = {id(each) for each in model.parameters()}
        others = [
            each
            for each in _leaves(total, outputs)
            if id(each) not in own and (isinstance(each, nn.Parameter) or id(each) in names)
        ]
        if others:
            named = [names.get(id(each), f"one of shape {tuple(each.shape)}") for each in others]
            raise ConfigError(
                f"the loss depends on parameters that are not the model's ({a_few(named)}), {_REMEDY}"
            )

    def _names(self) -> dict[int, str]:
        """Of the parameters and other tensors that the loss refers to."""
        names = {}
        for name, held in _held_by(self._loss):
            inside = held.named_parameters() if isinstance(held, nn.Module) else [("", held)]
            names.update({id(each): f"{name}.{inner}".strip(".") for inner, each in inside})
        return names


def _leaves(total: Tensor, behind: set[object]) -> Iterator[Tensor]:
    """The leaves that a backward pass from `total`, not through `behind`, would give a gradient to."""
    seen = set(behind)
    waiting: list[Any] = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable
        waiting.extend(each for each, _ in node.next_functions)


def bring_modules(functions: list[object], device: torch.device, but: object) -> None:
    """Move the modules on the CPU that losses and metrics refer to, with buffers such as weights of classes.

    `but`: one that stays, the model that is trained if it was made before.

    Raises:
        UserCodeError, ConfigError: see `move`.
    """
    for function in functions:
        for _, module in modules_of(function):
            devices = {each.device.type for each in (*module.parameters(), *module.buffers())}
            if module is not but and devices == {"cpu"} != {device.type}:
                move(module, device)
