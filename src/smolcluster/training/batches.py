"""A batch of samples on its way to a user's functions: on their device, and in containers of their own."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from smolcluster.data.dataset import Batch
from smolcluster.data.pytree import map_tensors, tensors_in
from smolcluster.errors import UserCodeError

T = TypeVar("T")


def placed(
    batch: Batch, device: torch.device, dtype: torch.dtype, *, lowers_doubles: bool = True
) -> Batch:
    """The batch with its tensors on `device`, in fresh containers of its kinds.

    Real numbers become `dtype`, that of the parameters. Without `lowers_doubles` those of more precision stay
    as they are (times in float64, say), but where the parameters have half precision.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, _taken(tensor.dtype, dtype, lowers_doubles=lowers_doubles))

    return map_tensors(batch, move, partial(_moved, device=device))


def apart(batch: Batch) -> Batch:
    """The batch in memory of its own, for one that is wanted again: a loss may normalise it in place."""
    return map_tensors(
        batch, Tensor.clone, lambda node: node.copy() if isinstance(node, np.ndarray) else node
    )


def _taken(given: torch.dtype, taken: torch.dtype, *, lowers_doubles: bool) -> torch.dtype:
    """The type in which a tensor is given to a model that computes in `taken`."""
    is_kept = given.itemsize > taken.itemsize >= torch.float32.itemsize and not lowers_doubles
    return given if is_kept or not given.is_floating_point else taken


def _moved(node: Any, device: torch.device) -> Any:
    """An object on the device, where it says how it gets there."""
    moves = getattr(node, "to", None)
    return moves(device) if callable(moves) and device.type != "cpu" else node


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
        return is_about_types and self.lower(batches)

    def lower(self, batches: Iterable[Batch]) -> bool:
        """Cast such samples from now on, if there are any in these batches; False: that changes nothing."""
        if self.are_lowered or not any(map(_has_doubles, batches)):
            return False
        self.are_lowered = True
        if self.log is not None:
            self.log.info(
                "samples in float64 are cast to float32, which the model computes in: `.float()` in the "
                "dataset does the same"
            )
        return True


def _has_doubles(batch: Batch) -> bool:
    return any(each.dtype is torch.float64 for each in tensors_in(batch))
