"""Sees to it that the layers of a stage leave their state alone, as `training/state_watch.py` does elsewhere.

Where ranks have parts of the weights, whole ones are there only as long as a layer computes: what it changes
in them is lost. And ranks share no buffers: those of the model's state must not change either.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smolcluster.errors import ModelChanged
from smolcluster.training.buffers import plain_name
from smolcluster.training.state_watch import Turns, changed, kind_of, made_late, mark, refrozen

_REMEDY = "train it without a mesh (train, or launch edp, syncps or diloco), where it is shared"
Place = tuple[nn.Module, str]
"""A module, and the name that it has for one of its own parameters or buffers."""
Hook = Callable[..., None]


@dataclass(frozen=True)
class _Seen:
    """What a parameter or buffer is at a time."""

    identity: int
    is_trained: bool
    address: int
    mark: object
    tensor: Tensor = field(compare=False)
    """Kept, so that no other one has its identity."""


class LayersWatch:
    """Looks at one stage."""

    def __init__(self, stage: nn.Module, layers: Sequence[nn.Module]) -> None:
        """`layers` of the stage, each computed by a call; what is in none is looked at around the whole."""
        state = (*stage.named_parameters(), *stage.named_buffers())
        names = {id(each): plain_name(name) for name, each in state}
        self._names = {
            (module, key): names[id(tensor)]
            for module in stage.modules()
            for key, tensor in _state_of(module)
        }
        within = [list(layer.modules()) for layer in layers]
        known = {module for modules in within for module in modules}
        rest = [module for module in stage.modules() if module not in known]
        self._parts = [*zip(layers, within, strict=True), (stage, rest)]
        self._turns = Turns()

    @contextmanager
    def looking(self, epoch: int) -> Iterator[None]:
        """If it is time to, look at each layer's first call in the block, which computes a step's samples.

        Raises:
            ModelChanged: a layer has changed parameters or buffers; one is named.
        """
        with ExitStack() as hooks:
            for layer, modules in self._parts if self._turns.come(epoch) else ():
                begin, end = self._around(modules)
                # within those by which FSDP gathers the layer's weights and lets them go
                hooks.callback(layer.register_forward_pre_hook(begin).remove)
                hooks.callback(layer.register_forward_hook(end, prepend=True).remove)
            yield

    def _around(self, modules: Sequence[nn.Module]) -> tuple[Hook, Hook]:
        calls: list[dict[Place, _Seen]] = []

        def begin(*_: object) -> None:
            calls.append({} if calls else _look(modules))

        def end(*_: object) -> None:
            if len(calls) == 1:
                before, after = calls[0], _look(modules)
                for place in before | after:
                    if before.get(place) != after.get(place):
                        raise self._difference(place, before.get(place), after.get(place))

        return begin, end

    def _difference(self, place: Place, old: _Seen | None, new: _Seen | None) -> ModelChanged:
        module, key = place
        name = self._names.get(place, key)
        if key in module._buffers:
            return ModelChanged(
                f"model: buffer {name} ({kind_of(module)}) changes as the model computes, and ranks of "
                f"a mesh share no buffers: {_REMEDY}; a cache is registered with persistent=False"
            )
        if old is None:
            return made_late(name)
        if new is not None and old.is_trained != new.is_trained:
            return refrozen(name, is_frozen=old.is_trained)
        if not old.is_trained:
            return changed(name, module, "is frozen, but changes", _REMEDY)
        return changed(name, module, _what_happened(old, new))


def _what_happened(old: _Seen, new: _Seen | None) -> str:
    if new is None:
        return "is removed"
    if old.identity != new.identity:
        return "is replaced by another one"
    return "gets other memory (.data = …)" if old.address != new.address else "changes"


def _look(modules: Sequence[nn.Module]) -> dict[Place, _Seen]:
    found = {}
    for module in modules:
        for key, tensor in _state_of(module):
            whole = tensor.detach()
            own = whole.to_local() if isinstance(whole, DTensor) else whole
            now = mark(own.clone())  # memory that NumPy has seen cannot be let go by FSDP
            found[module, key] = _Seen(
                id(tensor), tensor.requires_grad, own.data_ptr(), now, tensor
            )
    return found


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and those of its buffers that are the model's state."""
    caches = module._non_persistent_buffers_set
    buffers = {key: each for key, each in module._buffers.items() if key not in caches}
    for key, tensor in (*module._parameters.items(), *buffers.items()):
        if tensor is not None:
            yield key, tensor
