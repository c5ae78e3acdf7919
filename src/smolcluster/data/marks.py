"""What two machines know a sample by, so that data which differ are refused and not trained on.

A mark is one text for the sample's structure (names, types, shapes) and one for each value in it. What is
exact (whole numbers, texts, bytes) is compared by its hash. Numbers of floating point are compared by their
root mean square and by a projection on fixed noise, within `TOLERANCE`, because another machine's decoder or
processor may round differently. Each sample is read several times under one seed; a value that differs
between the readings, such as of an augmentation with a generator of its own, is not compared. Of a path only
the last name counts.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from smolcluster.data.loading import set_epoch
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.wire.messages import MOST_MARKED_VALUES

Mark = tuple[str, ...]
"""Values after the first `MOST_MARKED_VALUES` are not compared, only their structure is."""
READINGS = 3
PATIENCE_S = 5.0
"""How long samples are read; those that are then not read often enough are not compared."""
MOST_SKETCHED = 1 << 16
"""Numbers of a tensor that its sketch is made of, evenly spread over it."""
TOLERANCE = 5e-3
"""Of a sketch, beside the root mean square."""
UNKNOWN = "?"
SAME_DATA = (
    "each process has to make the same samples in the same order; sort what comes from a set, glob or "
    "os.listdir, and split and shuffle with a seed (random_split(..., generator=torch.Generator()."
    "manual_seed(0))), and seed NumPy's and random's generators where they make data; processes that are "
    "started by hand need the same PYTHONHASHSEED"
)
SAME_ORDER = (
    "let it draw from the generators of PyTorch, NumPy or random, which are seeded, and go "
    "through no set"
)


def marks_of(dataset: Any, indices: Sequence[int]) -> tuple[Mark, ...]:
    """The marks of a dataset's samples; one that cannot be read, or not soon, has a mark that fits all."""
    reader = reader_of(dataset)
    began = time.monotonic()
    marks = []
    for index in indices:
        readings: list[Mark] = []
        while len(readings) < READINGS and time.monotonic() - began < PATIENCE_S:
            readings.append(_reading(reader, index))
        marks.append(_steady(readings) if len(readings) == READINGS else (UNKNOWN,))
    return tuple(marks)


def chosen(num_samples: int) -> list[int]:
    """Which samples are compared: the first, the middle and the last one."""
    return sorted({0, num_samples // 2, max(0, num_samples - 1)})


def first_difference(own: Sequence[Mark], theirs: Sequence[Mark]) -> int | None:
    """The place of the first mark that differs; None: all may be of the same samples."""
    for place, (one, other) in enumerate(zip(own, theirs, strict=False)):
        if _differs(one, other):
            return place
    return None


def _differs(one: Mark, other: Mark) -> bool:
    if UNKNOWN in (one[0], other[0]):
        return False
    if one[0] != other[0] or len(one) != len(other):
        return True
    return any(map(value_differs, one[1:], other[1:]))


def value_differs(one: str, other: str) -> bool:
    """Whether marks of two values say that these differ."""
    if UNKNOWN in (one, other):
        return False
    if not (":" in one and ":" in other):
        return one != other
    (size, along), (size_there, along_there) = (
        map(float, each.split(":")) for each in (one, other)
    )
    allowed = TOLERANCE * max(size, size_there) + 1e-12
    return abs(size - size_there) > allowed or abs(along - along_there) > allowed


def _steady(readings: Sequence[Mark]) -> Mark:
    first = readings[0]
    if any(each[0] != first[0] or len(each) != len(first) for each in readings):
        return (UNKNOWN,)
    return tuple(
        values[0] if len(set(values)) == 1 else UNKNOWN for values in zip(*readings, strict=True)
    )


def _reading(dataset: Any, index: int) -> Mark:
    """A mark of one reading, under a seed of the sample's; the process's generators are left alone."""
    try:
        with isolated_rng(seed=index):
            return _mark(dataset[index])
    except (Exception, SystemExit):  # it will be told of where it is to be trained on
        return (UNKNOWN,)


def reader_of(dataset: Any) -> Any:
    """A shallow copy in its first epoch, which some have been told of and others not yet.

    What a dataset opens as it is first read is not for a process that is forked later.
    """
    try:
        own = copy.copy(dataset)
        if hasattr(own, "__dict__") and hasattr(vars(own).get("dataset"), "__getitem__"):
            own.dataset = reader_of(own.dataset)
        set_epoch(own, 0)
    except Exception:
        return dataset
    return own


def _mark(sample: Any) -> Mark:
    structure, values = [], []
    for place, (path, kind, value) in enumerate(_values(sample, "")):
        structure.append(f"{path}|{kind}")
        if place < MOST_MARKED_VALUES:
            values.append(value())
    return (xxh3_64_hexdigest("\n".join(structure)), *values)


def _values(node: Any, path: str) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Path, kind and mark of each value in a tree."""
    match node:
        case Mapping():
            for key in sorted(node, key=repr):
                yield from _values(node[key], f"{path}.{key!r}")
        case list() | tuple() if not _are_numbers(node):
            for number, each in enumerate(node):
                yield from _values(each, f"{path}[{number}]")
        case str() | PurePath():
            name = PurePath(node).name if PurePath(node).is_absolute() else str(node)
            yield path, "text", lambda: xxh3_64_hexdigest(name)
        case bytes() | bytearray() | set() | frozenset():
            plain = node if isinstance(node, bytes | bytearray) else repr(sorted(node, key=repr))
            yield path, type(node).__name__, lambda: xxh3_64_hexdigest(plain)
        case Tensor():
            yield path, f"{node.dtype} {tuple(node.shape)}", lambda: mark_of_tensor(node)
        case _:
            array = _array(node)
            if array is None:
                yield path, type(node).__qualname__, lambda: UNKNOWN
            else:
                yield path, f"{array.dtype.kind} {array.shape}", lambda: _of_array(array)


def _are_numbers(node: Sequence[Any]) -> bool:
    return bool(node) and all(isinstance(each, int | float) for each in node)


def _array(node: Any) -> NDArray[Any] | None:
    """Numbers, also those of a picture; None: it is something else."""
    is_number = isinstance(node, int | float | complex | np.generic | list | tuple)
    if not (is_number or hasattr(node, "__array_interface__")):
        return None
    array = np.asarray(node)
    return array if array.dtype.kind in "biufc" else None


def mark_of_tensor(tensor: Tensor) -> str:
    """The mark of a tensor's values, of any shape."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return UNKNOWN
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if plain.is_floating_point():
        plain = plain.to(torch.float64)
    return _of_array(plain.numpy())


def _of_array(array: NDArray[Any]) -> str:
    if array.dtype.kind in "biu":
        return xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())
    flat = array.reshape(-1)
    flat = flat[:: max(1, -(-flat.size // MOST_SKETCHED))].astype(np.complex128)
    flat = np.nan_to_num(np.concatenate([flat.real, flat.imag]))
    if not flat.size:
        return "0.0:0.0"
    noise = np.random.RandomState(0).standard_normal(flat.size)
    size = float(np.sqrt(np.mean(flat**2)))
    along = float(flat @ noise / math.sqrt(float(noise @ noise)))
    return f"{size:.9g}:{along:.9g}"
