"""The initial weights of a part of a model, equal bit for bit to those of the whole, without the whole.

    with recording() as tape:
        model = workload.new_model()        # on `meta`: shapes alone
    tape.fill(parts)                        # modules of it, whose tensors become real

New tensors are on `meta`, and what is done to them is written down. Later all that the wanted tensors depend
on is done again for real; of what others drew from PyTorch's generator only that is repeated, on memory that
is given back at once, so that the generator is where it would have been. Where the model's maker seeds a
generator, or sets it back as `torch.random.fork_rng` does, that is done again as well. Code that makes a
model is not to notice: tensors say that they are not on `meta`, because libraries leave out initial values
there.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from smolcluster.errors import SmolclusterError
from smolcluster.utils.seed import derive_seed

_META = torch.device("meta")
alone = threading.RLock()
"""Of who makes a model: PyTorch's generator and `nn.init`, whose functions libraries replace, are shared."""
_START = -1
"""Stands for the number of a call before all others."""


class CannotRecord(SmolclusterError):
    """Initial weights come about in a way that cannot be repeated for a part of them."""


class _Call:
    """An operation on tensors of `meta`: which storages it has to do with, and what it does to them."""

    def __init__(self, operation: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        self.operation = operation
        # a tensor may get other memory later (`.data = ...`), so what is kept are others of the same memory
        args, kwargs, result = tree_map(_alias, (args, dict(kwargs), result))
        self.args, self.kwargs, self.result = args, kwargs, result
        given, made = _places((args, kwargs)), _places(result)
        self.places = given | made
        is_composite = not isinstance(operation, torch._ops.OpOverload)
        self.draws = is_composite or torch.Tag.nondeterministic_seeded in operation.tags
        self.makes_values = is_composite or _makes_values(operation, made - given)
        self.resumes: int | Tensor | None = None
        """The generator's state before a call that draws, where the one before did not leave it so."""

    @property
    def generator(self) -> torch.Generator:
        """What the call draws from."""
        given = tree_flatten((self.args, self.kwargs))[0]
        return next((each for each in given if isinstance(each, torch.Generator)), _default())


class _States:
    """Where generators stand while nothing is drawn from them, because tensors are on `meta`.

    After each call that draws its generator is given a state of that call alone. So it is seen whether the
    next call goes on from there, from where an earlier one had left it, or from a seed.
    """

    def __init__(self) -> None:
        state = self._state_of(_default())
        self._known = {state: _START}
        self._left = {id(_default()): state}

    def before(self, generator: torch.Generator) -> int | Tensor | None:
        """Where a call begins: after another call, in a state; None: after the last one of `generator`."""
        state = self._state_of(generator)
        if state == self._left.get(id(generator)):
            return None
        if state in self._known:
            return self._known[state]
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def after(self, generator: torch.Generator, number: int) -> None:
        """Call `number` has drawn from it."""
        generator.manual_seed(derive_seed(number, "recording"))
        state = self._left[id(generator)] = self._state_of(generator)
        self._known[state] = number

    @staticmethod
    def _state_of(generator: torch.Generator) -> bytes:
        return generator.get_state().numpy().tobytes()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was done to tensors of `meta`, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._states = _States()
        self._end: int | Tensor | None = None

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
        with _disable_current_modes():
            call = _Call(operation, args, kwargs, result)
            if call.draws and not call.places:
                raise CannotRecord(f"{operation} draws weights from values of this machine")
            if call.draws:
                call.resumes = self._states.before(call.generator)
                self._states.after(call.generator, len(self._calls))
        if call.places:
            self._calls.append(call)

    def end(self) -> None:
        """Nothing more is written down."""
        self._end = self._states.before(_default())

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
        resumed = {self._end, *(call.resumes for call in self._calls)}
        states = {_START: _default().get_state()}
        with torch.no_grad():
            for number, call in enumerate(self._calls):
                if call.draws:
                    _resume(call.generator, call.resumes, states)
                if number in needed:
                    _repeat(call, made)
                elif call.draws:
                    _repeat(call, {})
                if call.draws and number in resumed:
                    states[number] = call.generator.get_state()
                for place in call.places - wanted:
                    if last_use[place] == number:
                        made.pop(place, None)
        _resume(_default(), self._end, states)
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
    """Make new tensors on `meta` in this block, and write down what is done to them; one thread at a time.

    PyTorch's generator is afterwards as it was before.
    """
    with alone:
        begin = _default().get_state()
        tape = Tape()
        truncated = nn.init._no_grad_trunc_normal_  # draws until all values are within bounds

        def draw_truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            tape.note(truncated, (tensor, *args), kwargs, tensor)
            return tensor

        nn.init._no_grad_trunc_normal_ = draw_truncated
        try:
            with tape, _Unnoticed():
                yield tape
            tape.end()
        finally:
            _default().set_state(begin)
            nn.init._no_grad_trunc_normal_ = truncated


def _slots(modules: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where the modules keep their tensors: each table, name in it, and tensor."""
    for module in dict.fromkeys(each for root in modules for each in root.modules()):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield table, name, tensor


def _default() -> torch.Generator:
    return torch.default_generator


def _resume(
    generator: torch.Generator, where: int | Tensor | None, states: Mapping[int, Tensor]
) -> None:
    """Let it stand there: after a call of `states`, or in that state."""
    if where is not None:
        generator.set_state(states[where] if isinstance(where, int) else where)


def _repeat(call: _Call, made: dict[int, torch.UntypedStorage]) -> None:
    """Do it on real memory, of which `made` has each storage's; what is missing there is new."""

    def real(value: Any) -> Any:
        return _view(value, made) if isinstance(value, Tensor) and _is_meta(value) else value

    result = call.operation(*tree_map(real, call.args), **tree_map(real, call.kwargs))
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


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and _is_meta(value) else value


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _places(tree: Any) -> set[int]:
    """The storages on `meta` of a tree's tensors."""
    return {_place(each) for each in _tensors(tree) if _is_meta(each)}


def _place(tensor: Tensor) -> int:
    """Names a tensor's storage as long as the tape keeps it."""
    return int(tensor.untyped_storage()._cdata)
