"""Buffers that a model changes as it computes, such as the running statistics of batch norm.

They belong to the model's state and travel with its weights; what never changes never travels. Which ones
change is found out after the first batches by comparing all, and later from PyTorch's version counters, which
cost no pass. Batch norm's kernels do not count there, but its number of batches does: when one buffer of a
module begins to change, all others of that module are compared. Changes through `.data` do not count there
either: all are compared again when weights are looked at (`state_watch.py`).

Frozen parameters that the model's own code changes, such as a teacher that follows the weights, are buffers
in all but name, and count as such if the first batches change them.

Values are carried as float64: floating-point buffers and integers up to 2^53 are exact in it, and so is
a + (b - a) = b, whoever adds the difference.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from smolcluster.errors import ConfigError, ModelChanged, NonFiniteLoss

BufferValues = Mapping[int, Tensor]
"""Values of buffers, or differences of these, each flat (n,) float64 on the CPU, by the buffer's number."""

NUM_FIRST = 3
"""After so many batches, rehearsed ones aside, all buffers are compared, and frozen parameters."""
SINGLE = (bool, int, float, Tensor)
COMPILED = "_orig_mod."
"""What `torch.compile` puts into the names of a module's parameters and buffers."""


def plain_name(name: str) -> str:
    """The name of a parameter or buffer, whether its module was compiled or not."""
    return name.replace(COMPILED, "")


@dataclass
class _Slot:
    """Where a buffer is found: a module may put another tensor into its place."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size
    initial: Tensor | None
    """On the CPU, because most buffers never change; None: of a frozen parameter it is not known (yet)."""
    seen: tuple[Tensor | None, int]
    """The tensor that was last looked at, and its version counter."""
    is_parameter: bool = False

    @property
    def is_variance(self) -> bool:
        return isinstance(self.module, _BatchNorm) and self.key == "running_var"

    def bounded(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """What has been added up, where a buffer of this type and meaning can hold it."""
        if self.is_variance:
            return sums.clamp(min=0.0)
        if dtype == torch.bool:
            return sums.clamp(0.0, 1.0)
        if dtype.is_floating_point or dtype.is_complex:
            return sums
        return sums.clamp(float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max))

    @property
    def tensor(self) -> Tensor | None:
        """None: the module has removed it."""
        tensor: Tensor | None = getattr(self.module, self.key, None)
        return tensor

    @property
    def shared(self) -> Tensor | None:
        """The tensor; None: it is a cache of this machine, which has another shape or is not there.

        Raises:
            ConfigError: a buffer of the model's state has changed its shape.
        """
        tensor = self.tensor
        if tensor is None or tensor.shape == self.shape:
            return tensor
        if self.is_persistent:
            raise ConfigError(
                f"model: buffer {self.name} has changed its shape from {tuple(self.shape)} to "
                f"{tuple(tensor.shape)}; keep the shape, or register it with persistent=False"
            )
        return None

    @property
    def has_moved(self) -> bool:
        """Whether another tensor is there than was seen, or its version counter says that it was written."""
        tensor, (seen, version) = self.tensor, self.seen
        return tensor is not seen or (tensor is not None and tensor._version != version)

    @property
    def is_persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set

    def keep_initial(self) -> None:
        """What is there now is what it began with, unless that is known."""
        tensor = self.tensor
        if self.initial is None and tensor is not None and not tensor.is_meta:
            self.initial = tensor.detach().to("cpu", copy=True)


class ModelBuffers:
    """The buffers of a model, numbered in the order of `named_buffers`, the same on all machines.

    Attributes:
        names: of all, without what `torch.compile` adds; those of `frozen` come last.
        frozen: names of frozen parameters that are buffers as well, if the first batches change them.
        changing: numbers of those that have changed, in order.
    """

    def __init__(self, model: nn.Module, frozen: Sequence[str] = ()) -> None:
        self._model = model
        self._slots = []
        for name, buffer in model.named_buffers():
            owner, _, key = name.rpartition(".")
            seen = buffer, buffer._version
            initial = buffer.detach() if buffer.is_meta else buffer.detach().to("cpu", copy=True)
            module = model.get_submodule(owner)
            self._slots.append(_Slot(plain_name(name), module, key, buffer.shape, initial, seen))
        self._num_buffers, self.frozen = len(self._slots), tuple(frozen)
        for name, each in model.named_parameters():
            if plain_name(name) in self.frozen:
                owner, _, key = name.rpartition(".")
                slot = _Slot(
                    plain_name(name),
                    model.get_submodule(owner),
                    key,
                    each.shape,
                    None,
                    seen=(each, each._version),
                    is_parameter=True,
                )
                self._slots.append(slot)
        self.names = [slot.name for slot in self._slots]
        self.changing: list[int] = []
        self._base: dict[int, Tensor] = {}
        self._num_batches = 0
        self._has_looked = False
        self._caches: dict[str, Tensor] = {}

    @property
    def has_own(self) -> bool:
        """Whether others than batch norm's have changed."""
        modules = (self._slots[number].module for number in self.changing)
        return any(not isinstance(each, _BatchNorm) for each in modules)

    def numel(self, number: int) -> int:
        """How many values a buffer has; a complex number is two. A sparse one never travels.

        Raises:
            IndexError: there is no such buffer.
        """
        slot = self._slots[number]
        if slot.initial is None:
            return slot.shape.numel()
        return _real(slot.initial).numel() if _is_dense(slot.initial) else 0

    def precision(self, number: int) -> float:
        """What rounding may change of a value of 1 in a buffer, which is there; 0 of whole numbers."""
        tensor = self._slots[number].tensor
        dtype = torch.bool if tensor is None else tensor.dtype
        return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0

    def before_batch(self) -> None:
        """A batch will be computed: before the first ones, keep what frozen parameters are."""
        self._num_batches += 1
        if self._num_batches <= NUM_FIRST:
            for slot in self._slots[self._num_buffers :]:
                slot.keep_initial()
        elif self._num_batches == NUM_FIRST + 1:  # those that have not changed are let go
            for number in range(self._num_buffers, len(self._slots)):
                if number not in self.changing:
                    self._slots[number].initial = None

    def forget_batches(self) -> None:
        """Those so far were rehearsed, with weights that no step had changed: the first are yet to come."""
        self._num_batches = 0

    def find(self) -> None:
        """Find out which buffers have changed since the last call.

        Raises:
            ConfigError: a buffer of the model's state has changed its shape, or a sparse one its values.
        """
        if self._num_batches in range(1, NUM_FIRST + 1) or not self._has_looked:
            self._has_looked = True
            self.look()
            return
        quiet = sorted(set(range(self._num_buffers)).difference(self.changing))
        moved = {
            id(self._slots[number].module) for number in quiet if self._slots[number].has_moved
        }
        for number in quiet:
            if id(self._slots[number].module) in moved:
                self._look_at(number)

    def look(self) -> None:
        """Compare all buffers with what they were when the model was made."""
        for number in range(len(self._slots)):
            if number not in self.changing:
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        slot = self._slots[number]
        tensor, (seen, version) = slot.tensor, slot.seen
        slot.seen = tensor, 0 if tensor is None else tensor._version
        now = slot.shared
        if now is None or now.is_meta or slot.initial is None:  # an outline's has no values
            return
        if not _is_dense(now) or not _is_dense(slot.initial):
            if now is not seen or now._version != version:
                raise ConfigError(
                    f"model: buffer {slot.name} is {now.layout} and changes as the model computes, and only "
                    "dense ones can be sent: keep its indices and its values as buffers of their own"
                )
            return
        if not _is_same(now, slot.initial.to(now.device)):
            self._note(number)

    def _note(self, number: int) -> None:
        if number not in self.changing:
            self._slots[number].keep_initial()
            self.changing = sorted([*self.changing, number])

    def will_be(self, values: Mapping[str, Tensor]) -> None:
        """Frozen parameters are about to get these values, by name: those that differ have changed."""
        for number in range(self._num_buffers, len(self._slots)):
            now, given = self._slots[number].tensor, values.get(self.names[number])
            if now is None or given is None or now.is_meta or now.shape != given.shape:
                continue
            if not torch.equal(now.detach().cpu(), given.cpu()):
                self._note(number)

    def check_none_is_new(self) -> None:
        """See to it that computing has not registered buffers which hold more than a cache of this machine.

        Raises:
            ModelChanged: it has, and nobody else has them.
        """
        known = set(self.names)
        for name, buffer in self._model.named_buffers():
            if (plain := plain_name(name)) in known:
                continue
            owner, _, key = name.rpartition(".")
            is_cache = key in self._model.get_submodule(owner)._non_persistent_buffers_set
            before = self._caches.get(plain)
            if is_cache and (before is None or before.shape != buffer.shape):
                self._caches[plain] = buffer.detach().to("cpu", copy=True)
            elif not is_cache or not _is_same(buffer.detach().cpu(), before):
                raise ModelChanged(
                    f"model: buffer {plain} is not there before the model computes, and then has shape "
                    f"{tuple(buffer.shape)}: register it with values of that shape when the model is made, "
                    "such as torch.zeros, so that all machines have it"
                )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undo what the block does to the buffers' values. Caches that get another shape stay so."""
        kept = [
            slot
            for number, slot in enumerate(self._slots)
            if number < self._num_buffers or number in self.changing
        ]
        before = [
            (slot, tensor, tensor.detach().clone())
            for slot in kept
            if (tensor := slot.tensor) is not None
        ]
        try:
            yield
        finally:
            for slot, tensor, values in before:
                _bring_back(slot, tensor, values)

    def values(self) -> dict[int, Tensor]:
        """Copies of the buffers that have changed."""
        shared = {number: self._slots[number].shared for number in self.changing}
        found = {number: each for number, each in shared.items() if each is not None}
        tensors = [_real(each.detach()) for each in found.values()]
        if not tensors:
            return {}
        if tensors[0].device.type == "mps":  # it has no float64
            tensors = [tensor.cpu() for tensor in tensors]
        flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).cpu()
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        return dict(zip(found, pieces, strict=True))

    def mark(self) -> None:
        """`difference` and `restore` mean the values of now."""
        self._base = self.values()

    def restore(self) -> None:
        """Bring all that has changed since `mark` or `load` back."""
        self.put({number: self._base_of(number) for number in self.changing})

    def difference(self) -> dict[int, Tensor]:
        """What has been added to each buffer since `mark` or `load`.

        Raises:
            NonFiniteLoss: the difference is NaN or infinite; the buffer is named.
            ConfigError: so it is because the buffer began as NaN or infinite.
        """
        self.find()
        moved = {}
        for number, now in self.values().items():
            moved[number] = now - self._base_of(number)
            if not bool(torch.isfinite(moved[number]).all()):
                raise self._not_finite(number)
        return moved

    def _not_finite(self, number: int) -> NonFiniteLoss | ConfigError:
        initial = self._initial(number)
        bad = initial[~torch.isfinite(initial)]
        if not bad.numel():
            return NonFiniteLoss(f"buffer {self.names[number]} has become NaN or infinite")
        return ConfigError(
            f"model: buffer {self.names[number]} begins as {bad[0].item()} and changes as the model "
            "computes, and a difference from that cannot be sent; begin it with finite values"
        )

    def load(self, values: BufferValues) -> None:
        """Give the buffers these values, as `put`; `difference` and `restore` mean them from now on.

        What has changed since is found first: a batch may have failed before anybody looked.
        """
        self.find()
        self.put(values)
        self._base = dict(values)

    def put(self, values: BufferValues) -> None:
        """Give the buffers these values; those that are left out have the ones that they began with."""
        for number in self.changing:
            if number not in values:
                self._store(number, self._initial(number))
        for number, flat in values.items():
            self._note(number)
            self._store(number, flat)

    def add(self, difference: BufferValues, num_workers: int = 1) -> None:
        """Add a difference to integers, which are rounded, and its `num_workers`-th part to all others.

        Differences are taken from older values, so that those of several workers may add up to more than
        there is: a variance stays at 0 or above, and an integer within its type's range, a bool in 0 and 1.
        """
        for number, flat in difference.items():
            self._note(number)
            tensor = self._slots[number].shared
            if tensor is None:
                continue
            is_whole = not self.precision(number)
            sums = _wide(tensor) + (flat if is_whole else flat / num_workers)
            self._store(number, self._slots[number].bounded(sums, tensor.dtype))

    def to_save(self) -> dict[str, Tensor]:
        """The buffers of the model's state, by name: those that are persistent, or have changed."""
        return {
            slot.name: tensor
            for number, slot in enumerate(self._slots[: self._num_buffers])
            if (slot.is_persistent or number in self.changing)
            and (tensor := slot.tensor) is not None
            and _is_dense(tensor)
        }

    @property
    def passing(self) -> list[str]:
        """The buffers that have changed, but are not persistent."""
        slots = (self._slots[number] for number in self.changing if number < self._num_buffers)
        return [slot.name for slot in slots if not slot.is_persistent]

    @property
    def unsaved(self) -> list[str]:
        """The buffers of the model's state that no checkpoint can hold: sparse ones."""
        slots = self._slots[: self._num_buffers]
        return [
            slot.name
            for slot in slots
            if slot.is_persistent and (tensor := slot.tensor) is not None and not _is_dense(tensor)
        ]

    def by_name(self) -> dict[str, Tensor]:
        slots = self._slots[: self._num_buffers]
        return {slot.name: each for slot in slots if (each := slot.tensor) is not None}

    def _base_of(self, number: int) -> Tensor:
        base = self._base.get(number)
        return self._initial(number) if base is None else base

    def _initial(self, number: int) -> Tensor:
        slot = self._slots[number]
        slot.keep_initial()
        assert slot.initial is not None  # noqa: S101 - it has values, or nobody asks
        return _wide(slot.initial)

    def _store(self, number: int, flat: Tensor) -> None:
        target = self._slots[number].shared
        if target is None:
            return
        real = _real(target.detach())
        if not real.is_floating_point():
            flat = flat.round()
        narrow = flat.to(real.dtype) if real.device.type == "mps" else flat
        real.copy_(narrow.view(real.shape))


def mean_buffers(parts: Sequence[tuple[int, BufferValues]]) -> dict[int, Tensor]:
    """b_i, what each part of n_i samples has added to the buffers, as the mean: Σ (n_i / Σ n) b_i.

    All parts begin with the same buffers, so this is also the difference to the mean of where they ended.
    """
    num_samples = sum(size for size, _ in parts)
    mean: dict[int, Tensor] = {}
    for size, added in parts:
        for number, values in added.items():
            share = values * (size / num_samples)
            mean[number] = mean[number] + share if number in mean else share
    return mean


@contextmanager
def kept_attributes(owners: Iterable[object]) -> Iterator[None]:
    """Undo what the block does to numbers and tensors that objects have as attributes, such as a count.

    What is changed in place stays, and so does what is new.
    """
    kept = [
        (own, {key: each for key, each in own.items() if each is None or isinstance(each, SINGLE)})
        for own in (getattr(owner, "__dict__", {}) for owner in owners)
    ]
    try:
        yield
    finally:
        for own, before in kept:
            own.update(before)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or not (_is_dense(one) and _is_dense(other)):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@torch.no_grad()
def _bring_back(slot: _Slot, tensor: Tensor, values: Tensor) -> None:
    """Let a buffer be this tensor with these values again, unless it is a cache of another shape now."""
    now = slot.tensor
    if now is not tensor:
        if not slot.is_persistent and (now is None or now.shape != values.shape):
            return
        holder = slot.module._parameters if slot.is_parameter else slot.module._buffers
        holder[slot.key] = tensor  # type: ignore[assignment]
    if _is_dense(tensor) and not _is_same(tensor, values):
        tensor.copy_(values)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> Tensor:
    return _real(tensor.detach()).cpu().reshape(-1).to(torch.float64)
