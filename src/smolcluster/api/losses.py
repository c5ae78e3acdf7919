"""A loss as PyTorch's are called, and what two machines know a model's and a loss's code by."""

import functools
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from smolcluster.data.dataset import Batch
from smolcluster.errors import ConfigError, DataError
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.workload import LossFunction, Terms

LOSS = "loss"
"""Where a run says how the loss is called."""
DEFAULT = "default"
_PARSES = threading.Lock()
"""Two threads that parse at the same time fail in CPython 3.11 (gh-106905); `inspect` parses."""
OutputLoss = Callable[[Any, Any], Tensor]
"""`(output, target)` to the mean loss, (), as PyTorch's losses have it."""


def loss_of(loss_fn: OutputLoss | None, loss: LossFunction | None) -> LossFunction:
    """The loss of a model and a batch; by default cross-entropy of the logits with the targets.

    Raises:
        ConfigError: both are given.
    """
    if loss_fn is not None and loss is not None:
        raise ConfigError("loss_fn and loss are both given: keep one of them")
    if loss is not None:
        return loss
    return cross_entropy if loss_fn is None else functools.partial(_of_output, loss_fn)


def loss_name(loss_fn: OutputLoss | None, loss: LossFunction | None) -> str | None:
    """What a worker knows the loss by: PyTorch's name, or DEFAULT; None: it must be given the function."""
    if loss is not None:
        return None
    if loss_fn is None:
        return DEFAULT
    if isinstance(loss_fn, nn.Module):
        name = type(loss_fn).__name__
        is_plain = (  # a class of one's own may have the name of PyTorch's
            _losses().get(name) is type(loss_fn) and _public(loss_fn) == _public(type(loss_fn)())
        )
    else:
        name = getattr(loss_fn, "__name__", "")
        is_plain = _losses().get(name) is loss_fn
    return name if is_plain else None


def named_loss(name: object) -> LossFunction:
    """The loss that `loss_name` named on another machine; of PyTorch alone.

    Raises:
        ConfigError: it is the other machine's own.
    """
    if name == DEFAULT:
        return cross_entropy
    found = _losses().get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            "the orchestrator's loss is a function of its own, which does not travel: give this worker the "
            "same loss_fn or loss"
        )
    return functools.partial(_of_output, found() if isinstance(found, type) else found)


@functools.cache
def _losses() -> dict[str, Any]:
    """PyTorch's losses by name: functions, and classes of modules."""
    of_modules = {
        name: each
        for name, each in vars(nn).items()
        if name.endswith("Loss") and issubclass(each, nn.modules.loss._Loss)
    }
    endings = ("_loss", "cross_entropy", "cross_entropy_with_logits")
    return of_modules | {
        name: each for name, each in vars(functional).items() if name.endswith(endings)
    }


def _public(module: nn.Module) -> dict[str, Any]:
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return settings | {"state": sorted(module.state_dict())}


def _of_output(loss_fn: OutputLoss, model: nn.Module, batch: Batch) -> Terms | Tensor:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise DataError(
            f"loss_fn needs batches of (inputs, targets), and the loader gives a {type(batch).__name__}: "
            "give loss=, a function of the model and the batch, instead"
        )
    inputs, targets = batch
    return loss_fn(model(inputs), targets)


def code_digest(model: nn.Module, loss: object) -> str:
    """SHA-256 over the source of the model's class and of the loss, in hex; of libraries the name alone."""
    plain = getattr(model, "_orig_mod", model)  # of torch.compile
    texts = (_source(type(plain)), _source(loss))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _source(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        parts = (thing.func, *thing.args, *thing.keywords.values())
        return "".join(map(_source, parts))
    if isinstance(thing, nn.Module):
        return f"{_source(type(thing))}{thing!r}"
    name = getattr(thing, "__qualname__", None)
    if name is None:
        return (
            repr(thing) if isinstance(thing, int | float | str | bool) else type(thing).__qualname__
        )
    module = str(getattr(thing, "__module__", None)).partition(".")[0]
    if module in ("torch", "smolcluster", "builtins") or "<lambda>" in name:
        return str(name)
    try:
        with _PARSES:
            return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # typed by hand, or not written in Python
        return str(name)
