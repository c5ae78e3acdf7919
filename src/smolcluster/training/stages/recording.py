"""The initial weights of a part of a model, equal bit for bit to those of the whole, without the whole.

    with recording() as tape:
        model = workload.new_model()        # on `meta`: shapes alone
    tape.fill(parts)                        # modules of it, whose tensors become real

New tensors are on `meta`, and what is done to them is written down. Later all that the wanted tensors depend
on is done again for real; of what others drew from PyTorch's generator only that is repeated, on memory that
is given back at once, so that the generator is where it would have been. Code that makes a model is not to
notice: tensors say that they are not on `meta`, because libraries leave out initial values there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from smolcluster.errors import SmolclusterError

_META = torch.device("meta")


class CannotRecord(SmolclusterError):
    """Initial weights come about in a way that cannot be repeated for a part of them."""


class _Call:
    """An operation on tensors of `meta`: which storages it has to do with, and what it does to them."""

    def __init__(self, operation: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        self.operation, self.args, self.kwargs, self.result = operation, args, kwargs, result
        given, made = _places((args, kwargs)), _places(result)
        self.places = given | made
        is_composite = not isinstance(operation, torch._ops.OpOverload)
        self.draws = is_composite or torch.Tag.nondeterministic_seeded in operation.tags
        self.makes_values = is_composite or _makes_values(operation, made - given)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was done to tensors of `meta`, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        takes_device = any(each.name == "device" for each in func._schema.arguments)
        moved = takes_device and (not given or any(map(_is_meta, given)))
        result = func(*args, **({**kwargs, "device": _META} if moved else kwargs))
        self.note(func, args, kwargs, result)
        return result

    def note(self, operation: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Write a call down.

        Raises:
            CannotRecord: it takes from PyTorch's generator for tensors that are real already.
        """
        call = _Call(operation, args, kwargs, result)
        if call.places:
            self._calls.append(call)
        elif call.draws:
            raise CannotRecord(f"{operation} draws weights from values of this machine")

    def fill(self, modules: Sequence[nn.Module], device: torch.device | None = None) -> None:
        """Make the parameters and buffers of `modules` real, on `device` (None: the CPU).

        PyTorch's generator must be as it was when recording began, and is afterwards as if the whole model
        had been made.

        Raises:
            CannotRecord: a value of theirs was never written down.
        """
        slots = list(_slots(modules))
        wanted = _places([tensor for _, _, tensor in slots])
        needed = self._needed(wanted)
        made: dict[int, torch.UntypedStorage] = {}
        last_use = {
            place: number for number, call in enumerate(self._calls) for place in call.places
        }
        with torch.no_grad():
            for number, call in enumerate(self._calls):
                if number in needed:
                    _repeat(call, made)
                elif call.draws:
                    _repeat(call, {})
                for place in call.places - wanted:
                    if last_use[place] == number:
                        made.pop(place, None)
        real: dict[int, Tensor] = {}
        for table, name, tensor in slots:
            if _is_meta(tensor):
                table[name] = real.setdefault(id(tensor), _as_real(tensor, made, device))

    def _needed(self, wanted: set[int]) -> set[int]:
        """The numbers of the calls that the wanted storages depend on.

        Raises:
            CannotRecord: one holds what was in memory before.
        """
        needed: set[int] = set()
        places, unwritten = set(wanted), set(wanted)
        for number in range(len(self._calls) - 1, -1, -1):
            call = self._calls[number]
            if places.isdisjoint(call.places):
                continue
            needed.add(number)
            places |= call.places
            if call.makes_values:
                unwritten -= call.places
        if unwritten:
            raise CannotRecord("a weight is made from values that `torch.device('meta')` drops")
        return needed


class _Unnoticed(TorchFunctionMode):
    """Lets tensors say that they are not on `meta`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def recording() -> Iterator[Tape]:
    """Make new tensors on `meta` in this block, and write down what is done to them. One thread at a time."""
    tape = Tape()
    truncated = nn.init._no_grad_trunc_normal_  # draws until all values are within bounds

    def draw_truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tape.note(truncated, (tensor, *args), kwargs, tensor)
        return tensor

    nn.init._no_grad_trunc_normal_ = draw_truncated
    try:
        with tape, _Unnoticed():
            yield tape
    finally:
        nn.init._no_grad_trunc_normal_ = truncated


def _slots(modules: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where the modules keep their tensors: each table, name in it, and tensor."""
    for module in dict.fromkeys(each for root in modules for each in root.modules()):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield table, name, tensor


def _repeat(call: _Call, made: dict[int, torch.UntypedStorage]) -> None:
    """Do it on real memory, of which `made` has each storage's; what is missing there is new."""

    def real(value: Any) -> Any:
        return _view(value, made) if isinstance(value, Tensor) and _is_meta(value) else value

    result = call.operation(*tree_map(real, call.args), **tree_map(real, dict(call.kwargs)))
    for meta, value in zip(_tensors(call.result), _tensors(result), strict=True):
        if _is_meta(meta):
            made.setdefault(_place(meta), value.untyped_storage())


def _view(meta: Tensor, made: dict[int, torch.UntypedStorage]) -> Tensor:
    place = _place(meta)
    if place not in made:
        nbytes = meta.untyped_storage().nbytes()
        made[place] = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    view = torch.empty(0, dtype=meta.dtype)
    return view.set_(made[place], meta.storage_offset(), meta.size(), meta.stride())


def _as_real(
    meta: Tensor, made: dict[int, torch.UntypedStorage], device: torch.device | None
) -> Tensor:
    value = _view(meta.detach(), made).to(device or "cpu")
    if isinstance(meta, nn.Parameter):
        return nn.Parameter(value, requires_grad=meta.requires_grad)
    return value


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, Tensor)]


def _makes_values(operation: Any, new: set[int]) -> bool:
    """Whether it writes to memory that it was given, or makes `new` memory that is not as it was found."""
    infos = [each.alias_info for each in operation._schema.arguments]
    if any(info is not None and info.is_write for info in infos):
        return True
    return bool(new) and "empty" not in operation._schema.name


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _places(tree: Any) -> set[int]:
    """The storages on `meta` of a tree's tensors."""
    return {_place(each) for each in _tensors(tree) if _is_meta(each)}


def _place(tensor: Tensor) -> int:
    """Names a tensor's storage as long as the tape keeps it."""
    return int(tensor.untyped_storage()._cdata)
