"""Any tree of tensors as bytes and back, its tensors written as `codec/rows.py` says."""

from typing import Any

import torch
from torch import Tensor

from smolcluster.codec.rows import decode_rows, encode_rows, is_coded
from smolcluster.data import pytree
from smolcluster.data.dataset import Batch
from smolcluster.data.pytree import DTYPES, Encoded, map_tensors, tensors_in
from smolcluster.errors import ProtocolError


def on_cpu(tree: Batch) -> Batch:
    """The tree's values on the CPU, without their graphs; what is there already is not copied."""
    return map_tensors(tree, lambda tensor: tensor.detach().to("cpu"))


def nbytes_of(tree: Batch) -> int:
    """Bytes of the tree's tensors."""
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def encode(tree: Batch, codec: str) -> Encoded:
    """Lay out a tree on the CPU: how each tensor was written, in order, and the tree of what was written.

    Raises:
        DataError: something in it cannot travel.
    """
    specs: list[Any] = []

    def write(tensor: Tensor) -> Tensor:
        if not is_coded(tensor, codec):
            specs.append(None)
            return tensor
        specs.append([codec, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        return encode_rows(tensor, codec)

    written = map_tensors(tree, write)
    return pytree.encode([specs, written])


def decode(data: memoryview) -> Batch:
    """The tree that somebody has sent; tensors that were sent as they are refer to `data`.

    Raises:
        ProtocolError: it is not exactly one tree.
    """
    match pytree.decode(data):
        case [list() as specs, written]:
            left = iter(specs)
            tree = map_tensors(written, lambda tensor: _read(tensor, next(left, "")))
            if next(left, "") != "":
                raise ProtocolError("a tree names more tensors than it has")
            return tree
    raise ProtocolError("it is no tree of tensors and how they were written")


def _read(sent: Tensor, spec: Any) -> Tensor:
    match spec:
        case None:
            return sent
        case [str() as codec, str() as dtype, list() as shape] if _are_sizes(shape):
            try:
                return decode_rows(sent, _float_type(dtype), tuple(shape), codec)
            except ValueError as error:
                raise ProtocolError(str(error)) from None
    raise ProtocolError("it is not said how a tensor was written")


def _are_sizes(shape: list[Any]) -> bool:
    return all(type(size) is int and 0 < size <= pytree.MAX_NUMEL for size in shape)


def _float_type(name: str) -> torch.dtype:
    dtype = DTYPES.get(name)
    if dtype is None or not dtype.is_floating_point:
        raise ProtocolError(f"a tensor was {name!a}, which is no type of floats"[:200])
    return dtype
