"""Batches as bytes: a JSON skeleton, and the raw memory of the tensors that it names.

    skeleton_nbytes u32 | skeleton (JSON) | padding | tensor | padding | tensor | ...

A batch is a tree of dicts, lists and tuples (sizes of tensors and packed sequences among them) over tensors,
NumPy arrays and plain values: None, bool, int, float and str. In the skeleton a plain value stands for
itself, and everything else is an object with one field that says what it is. Tensors and arrays are
little-endian, row by row, each at a multiple of `ALIGNMENT` bytes; whole numbers of 64 bits travel as the
smallest type that holds them, and tensors of floats as a codec of `codec/rows.py` writes them.

Nothing that is received can name code: unknown types, sizes that do not add up, and trees deeper than
`MAX_DEPTH` are refused. Tensors cost no more memory than they have bytes, but 64-bit whole numbers and what
a codec has written, at most eight times as much. Skeletons cost more than their bytes as objects of Python,
and are bounded for that by `MAX_SKELETON_NBYTES` and `MAX_NODES`.
"""

import copy
import math
import struct
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from smolcluster.codec.rows import decode_rows, encode_rows, encoded_form, is_coded
from smolcluster.data.dataset import Batch
from smolcluster.errors import DataError, ProtocolError

ALIGNMENT = 64
COPIED_NBYTES = 64 * 1024
"""Copying so many bytes costs about as much as a frame of their own."""
MAX_DEPTH = 32
MAX_DIMS = 16
MAX_NUMEL = 2**53
MAX_FIELDS = 256
MAX_NAME_CHARS = 100
"""Of a field of a named tuple, whose class is kept."""
MAX_SKELETON_NBYTES = 16 * 1024 * 1024
MAX_NODES = 1 << 20
"""Values, lists and objects in a skeleton."""
MAX_NAMED_TUPLES = 256
"""Classes of named tuples that are kept, so that those of one batch are those of the next."""
DTYPES = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16),
            *(torch.float32, torch.float64, torch.complex64, torch.complex128),
        )
    }
)
NARROW = (torch.uint8, torch.int16, torch.int32)
"""What 64-bit whole numbers are tried to be sent as."""
_HEAD = struct.Struct("!I")
_PLAIN = (str, bool, int)


@dataclass
class Encoded:
    """A batch as pieces of memory, in order, which refer to its tensors; `nbytes` in all."""

    pieces: list[memoryview] = field(default_factory=list)
    nbytes: int = 0

    def add(self, piece: memoryview) -> None:
        """Append a piece, and what brings the next one to a multiple of `ALIGNMENT`."""
        padding = -piece.nbytes % ALIGNMENT
        self.pieces += [each for each in (piece, memoryview(bytes(padding))) if each.nbytes]
        self.nbytes += piece.nbytes + padding

    def cut(self, nbytes: int) -> Iterator[memoryview]:
        """The same bytes in pieces of `nbytes`, but for the last one; each in memory of its own."""
        rest = bytearray()
        for piece in self.pieces:
            start = 0
            while start < piece.nbytes:
                taken = piece[start : start + nbytes - len(rest)]
                rest += taken
                start += taken.nbytes
                if len(rest) == nbytes:
                    yield memoryview(rest)
                    rest = bytearray()
        if rest:
            yield memoryview(rest)

    def slices(self, nbytes: int) -> Iterator[memoryview]:
        """The same bytes in pieces of at most `nbytes`; what is large is referred to, not copied."""
        small = bytearray()
        for piece in self.pieces:
            is_small = piece.nbytes <= min(nbytes, COPIED_NBYTES)
            if small and (not is_small or len(small) + piece.nbytes > nbytes):
                yield memoryview(small)
                small = bytearray()
            if is_small:
                small += piece
                continue
            for start in range(0, piece.nbytes, nbytes):
                yield piece[start : start + nbytes]
        if small:
            yield memoryview(small)


def encode(batch: Batch, codec: str = "fp32") -> Encoded:
    """Lay out a batch, whose tensors of floats are written as a codec of `codec/rows.py` says.

    Raises:
        DataError: something in it cannot travel; the message says what, and where in the batch.
    """
    encoder = _Encoder(codec)
    tree = encoder.node(batch, "batch", 0)
    skeleton, num_nodes = orjson.dumps(tree), _num_nodes(tree)
    if num_nodes > MAX_NODES:
        raise DataError(
            f"a batch has {num_nodes:,} values in lists and dicts, at most {MAX_NODES:,} can be sent; make "
            "tensors of them in collate"
        )
    if len(skeleton) > MAX_SKELETON_NBYTES:
        raise DataError(
            f"the plain values of a batch take {len(skeleton):,} bytes, at most {MAX_SKELETON_NBYTES:,} "
            "can be sent; make tensors of them in collate"
        )
    encoded = Encoded()
    encoded.add(memoryview(_HEAD.pack(len(skeleton)) + skeleton))
    for tensor in encoder.tensors:
        encoded.add(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data))
    return encoded


def _num_nodes(skeleton: Any) -> int:
    match skeleton:
        case dict():
            return 1 + sum(map(_num_nodes, skeleton.values()))
        case list():
            return 1 + sum(map(_num_nodes, skeleton))
    return 1


class _Encoder:
    """Makes the skeleton of a batch, and notes the `tensors` that it names, as they travel."""

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self.tensors: list[Tensor] = []

    def node(self, node: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise DataError(
                f"{path} lies deeper than {MAX_DEPTH} levels, and cannot be sent to workers"
            )
        match node:
            case Tensor():
                return {"tensor": self._tensor(node, path, self._codec)}
            case np.ndarray() | np.generic() if node.dtype.kind in "biufc":
                native = np.array(node, node.dtype.newbyteorder("="), order="C")
                try:
                    values = torch.from_numpy(native)
                except TypeError:  # PyTorch has no such type, as of NumPy's longdouble
                    raise _cannot_travel(node, path) from None
                return {"array": self._tensor(values, path, "fp32")}
            case Mapping():
                return {"dict": [self._item(*item, path, depth) for item in node.items()]}
            case list() | tuple():
                return self._sequence(node, path, depth)
        return _plain(node, path)

    def _sequence(self, node: list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
        items = [self.node(each, f"{path}[{place}]", depth + 1) for place, each in enumerate(node)]
        match node:
            case list():
                return items
            case torch.Size():
                return {"size": items}
            case PackedSequence():
                return {"packed": items}
        fields = getattr(node, "_fields", None)
        return {"tuple": items} if fields is None else {"named": [list(fields), items]}

    def _item(self, key: Any, value: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(key, _PLAIN):
            raise DataError(
                f"{path} has the key {key!r}; only text and numbers can be sent as keys"
            )
        return [key, self.node(value, f"{path}[{key!r}]".replace("'", '"'), depth + 1)]

    def _tensor(self, tensor: Tensor, path: str, codec: str) -> list[Any]:
        """Type of a tensor, type or codec on the wire, and shape."""
        name = str(tensor.dtype).removeprefix("torch.")
        is_plain = tensor.layout is torch.strided and not tensor.is_nested
        if not is_plain or tensor.is_quantized or name not in DTYPES:
            raise DataError(
                f"{path} is a tensor of {tensor.dtype} with layout {tensor.layout}, which cannot be sent to "
                "workers; make it dense in collate"
            )
        if tensor.is_meta or tensor.dim() > MAX_DIMS:
            raise DataError(f"{path} is a tensor without values or of too many dimensions")
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu")
        if is_coded(plain, codec):
            sent, sent_as = encode_rows(plain, codec), codec
        else:
            sent = _narrow(plain)
            sent_as = str(sent.dtype).removeprefix("torch.")
        self.tensors.append(sent.contiguous())
        return [name, sent_as, list(tensor.shape)]


def _plain(node: Any, path: str) -> Any:
    match node:
        case None | bool():
            return node
        case int() if -(2**63) <= node < 2**63:
            return int(node)
        case float():
            return float(node) if math.isfinite(node) else {"float": str(float(node))}
        case str() if node.isascii() or _is_text(node):
            return str(node)
    raise _cannot_travel(node, path)


def _narrow(tensor: Tensor) -> Tensor:
    if tensor.dtype is not torch.int64 or not tensor.numel():
        return tensor
    low, high = (int(bound) for bound in torch.aminmax(tensor))
    for dtype in NARROW:
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return tensor.to(dtype)
    return tensor


def _is_text(text: str) -> bool:
    """Whether it is Unicode that can be written: half a surrogate pair cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _cannot_travel(node: Any, path: str) -> DataError:
    what = repr(node) if isinstance(node, (int, str)) else f"a {type(node).__qualname__}"
    return DataError(
        f"{path} is {what[:60]}, which cannot be sent to workers: only tensors, arrays, numbers, text and "
        "dicts, lists and tuples of them can; leave it out in the dataset or in collate"
    )


def decode(data: memoryview) -> Batch:
    """The batch that somebody has sent; its tensors refer to `data`, which may be written to.

    Raises:
        ProtocolError: it is not exactly one batch.
    """
    try:
        return _Decoder(data).batch()
    except (orjson.JSONDecodeError, struct.error, RecursionError) as error:
        raise ProtocolError(f"a batch's skeleton cannot be read: {error}") from None


class _Decoder:
    def __init__(self, data: memoryview) -> None:
        (nbytes,) = _HEAD.unpack(data[: _HEAD.size])
        self._end = _HEAD.size + nbytes
        if nbytes > MAX_SKELETON_NBYTES or self._end > data.nbytes:
            raise ProtocolError(f"a batch's skeleton of {nbytes} bytes is longer than the batch")
        self._data = data

    def batch(self) -> Batch:
        skeleton = orjson.loads(self._data[_HEAD.size : self._end])
        if (num_nodes := _num_nodes(skeleton)) > MAX_NODES:
            raise ProtocolError(f"a batch's skeleton has {num_nodes} nodes, at most {MAX_NODES}")
        self._end += -self._end % ALIGNMENT
        batch = self._node(skeleton, 0)
        if self._end != self._data.nbytes:
            raise ProtocolError(
                f"a batch has {self._data.nbytes} bytes, its tensors end at {self._end}"
            )
        return batch

    def _node(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ProtocolError(f"a batch is deeper than {MAX_DEPTH} levels")
        match node:
            case None | bool() | int() | float() | str():
                return node
            case list():
                return [self._node(each, depth + 1) for each in node]
            case dict() if len(node) == 1:
                [(kind, content)] = node.items()
                return self._object(kind, content, depth)
        raise ProtocolError("a batch's skeleton holds what is no part of a batch")

    def _object(self, kind: str, content: Any, depth: int) -> Any:
        match kind, content:
            case "tensor", _:
                return self._tensor(content)
            case "array", _:
                return self._array(content)
            case "float", "nan" | "inf" | "-inf":
                return float(content)
            case "dict", list():
                return self._dict(content, depth)
            case "tuple" | "size" | "packed", list():
                return _tuple(kind, [self._node(each, depth + 1) for each in content])
            case "named", [list() as fields, list() as items]:
                return _named(fields, [self._node(each, depth + 1) for each in items])
        raise ProtocolError("a batch's skeleton holds what is no part of a batch")

    def _array(self, spec: Any) -> NDArray[Any]:
        try:
            return self._tensor(spec).numpy()
        except TypeError:
            raise ProtocolError("a batch's array is of a type that NumPy has not") from None

    def _dict(self, items: list[Any], depth: int) -> dict[Any, Any]:
        batch = {}
        for item in items:
            match item:
                case [str() | bool() | int() as key, value] if key not in batch:
                    batch[key] = self._node(value, depth + 1)
                case _:
                    raise ProtocolError("a dict of a batch has an item that is none")
        return batch

    def _tensor(self, spec: Any) -> Tensor:
        match spec:
            case [str() as name, str() as sent, list() as shape] if _is_shape(shape):
                dtype, sent_as = DTYPES.get(name), DTYPES.get(sent)
            case _:
                raise ProtocolError("a batch's tensor is not described by type and shape")
        if dtype is not None and dtype.is_floating_point and sent != name:
            return self._coded(dtype, tuple(shape), sent)
        is_narrow = dtype is torch.int64 and sent_as in NARROW
        if dtype is None or sent_as is None or not (dtype is sent_as or is_narrow):
            raise ProtocolError(f"a batch's tensor is {sent!a} and to be {name!a}"[:200])
        values = self._values(sent_as, shape)
        if sent_as is torch.bool and values.numel() and int(values.view(torch.uint8).max()) > 1:
            raise ProtocolError("a batch's truth values are not 0 or 1")
        return values.to(dtype)

    def _coded(self, dtype: torch.dtype, shape: tuple[int, ...], codec: str) -> Tensor:
        try:
            values = self._values(*encoded_form(shape, codec))
            return decode_rows(values, dtype, shape, codec)
        except ValueError as error:
            raise ProtocolError(str(error)[:200]) from None

    def _values(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The next tensor."""
        start, numel = self._end, math.prod(shape)
        nbytes = numel * dtype.itemsize
        self._end += nbytes + -nbytes % ALIGNMENT
        if self._end > self._data.nbytes:
            raise ProtocolError(f"a batch's tensor ends at byte {self._end} of {self._data.nbytes}")
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        values = torch.frombuffer(self._data, dtype=dtype, count=numel, offset=start)
        return values.view(tuple(shape))


def _is_shape(shape: list[Any]) -> bool:
    """Whether it is a tensor's: bounded also where a 0 makes it empty."""
    known = all(type(size) is int and size >= 0 for size in shape)
    return (
        known
        and len(shape) <= MAX_DIMS
        and math.prod(map(max, shape, [1] * len(shape))) <= MAX_NUMEL
    )


def _named(fields: list[Any], values: list[Any]) -> Any:
    """A named tuple: attributes of these names, and nothing else of the sender's class."""
    known = len(fields) <= MAX_FIELDS and all(
        isinstance(name, str) and len(name) <= MAX_NAME_CHARS for name in fields
    )
    if not known or len(fields) != len(values):
        raise ProtocolError("a batch's named tuple has other names than values")
    try:
        kind = _named_tuple(tuple(fields))
    except ValueError:
        raise ProtocolError("a batch's named tuple has names that are none") from None
    return kind(*values)


def _tuple(kind: str, values: list[Any]) -> tuple[Any, ...]:
    """A tuple, a tensor's size, or a packed sequence."""
    match kind, values:
        case "tuple", _:
            return tuple(values)
        case "size", _ if _is_shape(values):
            return torch.Size(values)
        case "packed", [Tensor(), Tensor() as at, Tensor() | None, Tensor() | None] if (
            at.dim() == 1
        ):
            return PackedSequence(*values)
    raise ProtocolError(f"a batch's {kind} is none")


@lru_cache(maxsize=MAX_NAMED_TUPLES)
def _named_tuple(fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple("NamedTuple", fields)


def map_tensors(
    batch: Batch,
    change: Callable[[Tensor], Tensor],
    otherwise: Callable[[Any], Any] = lambda node: node,
) -> Batch:
    """The batch with what `change` makes of each of its tensors, taken in order, in fresh containers.

    Containers keep their kinds, dataclasses among them. `otherwise` gives what becomes of all else.
    """
    mapped = partial(map_tensors, change=change, otherwise=otherwise)
    match batch:
        case Tensor():
            return change(batch)
        case Mapping():
            return _mapping_of(batch, mapped)
        case list() | tuple():
            return _sequence_of(batch, mapped)
    if not is_dataclass(batch) or isinstance(batch, type):
        return otherwise(batch)
    copied = copy.copy(batch)
    for each in fields(batch):
        object.__setattr__(copied, each.name, mapped(getattr(batch, each.name)))  # may be frozen
    return copied


def _mapping_of(batch: Any, mapped: Callable[[Any], Any]) -> Any:
    """A dict, or a mapping of the batch's kind, such as an OrderedDict, where that can be written to."""
    if isinstance(batch, UserDict):  # what tokenizers of transformers return, which has attributes
        held = copy.copy(batch)
        held.data = mapped(batch.data)
        return held
    values = {key: mapped(value) for key, value in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    copied = copy.copy(batch)
    for key, value in values.items():  # outputs of transformers refuse `update`
        copied[key] = value
    return copied


def _sequence_of(batch: Any, mapped: Callable[[Any], Any]) -> Any:
    values = map(mapped, batch)
    match batch:
        case torch.Size():
            return batch
        case PackedSequence():
            data, sizes, *indices = values
            return type(batch)(data, sizes.cpu(), *indices)  # PyTorch wants the sizes there
        case list():
            copied = copy.copy(batch)
            copied[:] = values
            return copied
    if type(batch) is tuple or hasattr(
        batch, "n_sequence_fields"
    ):  # what `max` returns is one of these
        return type(batch)(values)
    made = tuple.__new__(type(batch), values)  # a constructor of its own may take something else
    if hasattr(batch, "__dict__"):
        vars(made).update(vars(batch))
    return made


def tensors_in(batch: Batch) -> list[Tensor]:
    """A batch's tensors, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def sliced(batch: Batch, num_samples: int, size: int) -> list[Batch]:
    """A batch of so many samples as batches of `size`, but for the last one.

    Tensors and arrays are cut by their first dimension, lists and tuples of plain values where they are as
    long as there are samples; all else is in every piece. It is one piece where a tensor has another number
    of rows, and where a list holds as many alike trees as there are samples: it may be one a sample.
    """
    if size >= num_samples or not has_a_row_a_sample(batch, num_samples):
        return [batch]
    starts = range(0, num_samples, size)
    return [rows(batch, num_samples, slice(start, start + size)) for start in starts]


def has_a_row_a_sample(batch: Batch, num_samples: int) -> bool:
    """Whether a batch of so many samples can be cut, see `sliced`."""
    return _has_rows(batch, num_samples) and _is_by_rows(batch, num_samples)


def _has_rows(node: Any, num_samples: int) -> bool:
    match node:
        case Tensor() | np.ndarray():
            return node.ndim > 0 and len(node) == num_samples
        case Mapping():
            return any(_has_rows(each, num_samples) for each in node.values())
        case list() | tuple():
            return any(_has_rows(each, num_samples) for each in node)
    return False


def _is_by_rows(node: Any, num_samples: int) -> bool:
    """Whether every tensor and array in it has, beyond doubt, one row a sample."""
    match node:
        case Tensor() | np.ndarray():
            return node.ndim == 0 or len(node) == num_samples
        case Mapping():
            return all(_is_by_rows(each, num_samples) for each in node.values())
        case list() | tuple():
            may_be_samples = (
                len(node) == num_samples
                and not hasattr(node, "_fields")
                and any(map(_is_tree, node))
                and len(set(map(_kind, node))) == 1
            )
            return not may_be_samples and all(_is_by_rows(each, num_samples) for each in node)
    return True


def _kind(node: Any) -> tuple[Any, ...]:
    """What the same field has in all samples."""
    return (node.dtype, node.ndim) if isinstance(node, (Tensor, np.ndarray)) else (type(node),)


def rows(node: Any, num_samples: int, wanted: slice) -> Any:
    """Some of the samples of a batch of so many, which has a row for each."""
    match node:
        case torch.Size():
            pass  # it may have as many numbers as there are samples
        case Tensor() | np.ndarray():
            return node[wanted] if _has_rows(node, num_samples) else node
        case Mapping():
            return {key: rows(each, num_samples, wanted) for key, each in node.items()}
        case list() | tuple() if len(node) == num_samples and not any(map(_is_tree, node)):
            return type(node)(node[wanted])
        case tuple() if hasattr(node, "_fields"):
            return type(node)(*(rows(each, num_samples, wanted) for each in node))
        case list() | tuple():
            return type(node)(rows(each, num_samples, wanted) for each in node)
    return node


def _is_tree(node: Any) -> bool:
    return isinstance(node, (Tensor, np.ndarray, Mapping, list, tuple))
