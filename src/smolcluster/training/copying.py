"""A second model with the state of a first one: by copying it, or by making it again.

Copies have memory of their own for each parameter, and so has a replica. What two parameters shared would be
shared no longer, so that is refused.
"""

import copy
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smolcluster.errors import ConfigError, SmolclusterError, UserCodeError

MOST_COPIED = 1 << 26
"""Parameters of a model that is copied only to look at something."""


class _ByValue(TorchFunctionMode):
    """Lets `copy.deepcopy` take tensors that a graph has made, such as a stored loss, by their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def is_copied_soon(model: nn.Module) -> bool:
    """Whether a model is small enough to be copied only to look at something."""
    return sum(each.numel() for each in model.parameters()) <= MOST_COPIED


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model.

    Raises:
        UserCodeError: it holds what cannot be copied; the layer is named.
        ConfigError: see `check_apart`.
    """
    check_apart(model)
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


class _Uncompiled:
    """Lets the process compile nothing while a block of any thread is open.

    PyTorch's own block puts back what it found, which of two that overlap may be the other's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open, self._stance = 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compile nothing in this block: it would take longer than what is only to be looked at."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1 and "torch._dynamo" in sys.modules:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._stance.close()


uncompiled = _Uncompiled()


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


def check_apart(model: nn.Module) -> None:
    """See that no trained parameter lies in the memory of another parameter, or of a buffer.

    Raises:
        ConfigError: one does, such as after `b.weight.data = a.weight.data`.
    """
    by_memory = defaultdict(list)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if type(each.data) is Tensor and each.layout == torch.strided and each.numel():
            by_memory[each.untyped_storage()._cdata].append((*_bytes_of(each), name, each))
    for members in by_memory.values():
        members.sort(key=itemgetter(0))
        for number, (_, stop, name, one) in enumerate(members):
            for begins, _, other_name, other in islice(members, number + 1, None):
                if begins >= stop:
                    break
                if (one.requires_grad or other.requires_grad) and _overlap(one, other):
                    raise ConfigError(
                        f"model: {other_name} lies in the memory of {name} (.data = …), but in training each "
                        "parameter has its own: let both be one (b.weight = a.weight), or clone() what one "
                        "gets of the other"
                    )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins in its memory, and where it ends."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum(int((size - 1) * stride) for size, stride in steps)
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + numel) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, of which the first begins first in one memory, have elements in common."""
    if one.itemsize != other.itemsize:
        return True
    offset = other.storage_offset() - one.storage_offset()
    size = max(_bytes_of(one)[1], _bytes_of(other)[1]) - _bytes_of(one)[0]
    marks = torch.zeros(size // one.itemsize, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), offset).any())


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
    known: dict[int, Any] = {}
    with _ByValue():
        made = copy.deepcopy(model, known)
        for each in model.modules():  # which PyTorch restores without what is in their __slots__
            for name in _slots_of(each):
                setattr(known[id(each)], name, copy.deepcopy(getattr(each, name), known))
    return made


def _slots_of(module: nn.Module) -> list[str]:
    slots = (name for kind in type(module).__mro__ for name in vars(kind).get("__slots__", ()))
    return [
        name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(module, name)
    ]


def _refusing(model: nn.Module) -> tuple[str, nn.Module]:
    """The innermost layer that cannot be copied, with its name."""
    for name, layer in reversed(list(model.named_modules())):
        try:
            _copied(layer)
        except Exception:
            return (name and f"layer {name}") or "it", layer
    return "it", model
