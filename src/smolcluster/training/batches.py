"""A batch of samples on its way to a user's functions: on their device, and in containers of their own."""

import copy
import logging
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from smolcluster.data.dataset import Batch
from smolcluster.errors import UserCodeError

T = TypeVar("T")


def placed(
    batch: Batch, device: torch.device, dtype: torch.dtype, *, lowers_doubles: bool = True
) -> Batch:
    """The batch with its tensors on `device`, in fresh containers of its kinds.

    Real numbers become `dtype`, that of the parameters. Without `lowers_doubles` those of more precision stay
    as they are (times in float64, say), but where the parameters have half precision.
    """
    on_device = partial(placed, device=device, dtype=dtype, lowers_doubles=lowers_doubles)
    match batch:
        case Tensor():
            return batch.to(device, _taken(batch.dtype, dtype, lowers_doubles=lowers_doubles))
        case PackedSequence():
            taken = _taken(batch.data.dtype, dtype, lowers_doubles=lowers_doubles)
            moved: PackedSequence = batch.to(device, taken)  # type: ignore[arg-type]
            return moved
        case Mapping() | UserDict():
            return _mapping(batch, on_device)
        case list() | tuple() if not isinstance(batch, torch.Size):
            values = map(on_device, batch)
            return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return _object(batch, on_device, device)


def _taken(given: torch.dtype, taken: torch.dtype, *, lowers_doubles: bool) -> torch.dtype:
    """The type in which a tensor is given to a model that computes in `taken`."""
    is_kept = given.itemsize > taken.itemsize >= torch.float32.itemsize and not lowers_doubles
    return given if is_kept or not given.is_floating_point else taken


def _mapping(batch: Any, on_device: Callable[[Any], Any]) -> Any:
    if isinstance(batch, UserDict):  # what tokenizers of transformers return, which has attributes
        held = copy.copy(batch)
        held.data = on_device(batch.data)
        return held
    values = {key: on_device(value) for key, value in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    copied: Any = copy.copy(batch)  # of its kind, such as an OrderedDict
    copied.update(values)
    return copied


def _object(batch: Any, on_device: Callable[[Any], Any], device: torch.device) -> Any:
    """A dataclass with its fields on the device; another object where it says how it gets there."""
    if is_dataclass(batch) and not isinstance(batch, type):
        copied: Any = copy.copy(batch)
        for each in fields(batch):
            object.__setattr__(copied, each.name, on_device(getattr(batch, each.name)))
        return copied
    moves = getattr(batch, "to", None)
    return moves(device) if callable(moves) and device.type != "cpu" else batch


class Doubles:
    """Whether samples in float64 must become float32, because the model takes nothing else.

    They reach the loss as they are. Where that fails for their type, as in a layer with float32 weights, they
    are cast from then on, which is said once.
    """

    def __init__(self) -> None:
        self.log: logging.Logger | None = None
        self.are_lowered = False

    def attempt(
        self,
        compute: Callable[[], T],
        batches: Iterable[Batch],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """What `compute` returns of these batches, perhaps after `undo` with what was float64 as float32.

        Raises:
            UserCodeError: it raised an exception.
        """
        try:
            return compute()
        except UserCodeError as error:
            if not self._lower(error, batches):
                raise
        undo()
        return compute()

    def _lower(self, error: UserCodeError, batches: Iterable[Batch]) -> bool:
        about = str(error.__cause__).lower()
        is_about_types = any(word in about for word in ("dtype", "double", "datatype"))
        if self.are_lowered or not is_about_types or not any(map(_has_doubles, batches)):
            return False
        self.are_lowered = True
        if self.log is not None:
            self.log.info(
                "samples in float64 are cast to float32, which the model computes in: `.float()` in the "
                "dataset does the same"
            )
        return True


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """The tensors in a batch's containers, in order."""
    match batch:
        case Tensor():
            yield batch
        case Mapping() | UserDict():
            for value in batch.values():
                yield from tensors_of(value)
        case list() | tuple():
            for value in batch:
                yield from tensors_of(value)
    if is_dataclass(batch) and not isinstance(batch, type):
        for each in fields(batch):
            yield from tensors_of(getattr(batch, each.name))


def _has_doubles(batch: Batch) -> bool:
    return any(each.dtype is torch.float64 for each in tensors_of(batch))
