"""A model cut into layers, and a contiguous range of them as a stage of a pipeline.

A stage is a module of its own that holds the model's modules under the model's names, so that gradients,
optimizer states and checkpoints of all stages have the names that they have in one process.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from smolcluster.errors import ConfigError
from smolcluster.training.compute import trained_dtype
from smolcluster.training.layer_seeds import may_draw
from smolcluster.utils.user_code import user_code, wrong_result

_LAYERS = "_stage_layers"
"""Where a stage keeps its layers; its own parameters were registered before, under the model's names."""
CutModel = Callable[[nn.Module], Sequence[nn.Module]]
"""A model to its layers in order: each maps what the one before returned, any tree of tensors."""


class Stage(nn.Module):
    """Layers [start, end) of a model, one after the other.

    Attributes:
        start, end, num_layers: which of how many layers.
        tied: the names of parameters that an earlier or later stage has as well.
        held_before: the names of parameters and buffers that an earlier stage has as well.
        dtype: of the whole model's trained parameters, which this stage may have none of.
        model_draws: whether the whole model may draw random numbers as it computes.
        before_layer: called with a layer's number before it computes, such as to seed dropout.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], start: int, end: int) -> None:
        """Take `layers[start:end]` of `model`, of which `layers` are all.

        Raises:
            ConfigError: they have parameters that the model has not, or share some but a tied embedding.
        """
        super().__init__()
        self.start, self.end, self.num_layers = start, end, len(layers)
        self.model_draws, self.dtype = may_draw(model), trained_dtype(model)
        self.before_layer: Callable[[int], None] = lambda _: None
        own = layers[start:end]
        _register(self, model, own)
        self.add_module(_LAYERS, nn.ModuleList(own))
        self.tied = _shared(model.named_parameters(), own, [*layers[:start], *layers[end:]])
        tensors = (*model.named_parameters(), *model.named_buffers())
        self.held_before = _shared(tensors, own, layers[:start])

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    def own_layers(self) -> list[nn.Module]:
        """Its layers, where they are modules of their own; a model may have modules called `layers`."""
        return list(getattr(self, _LAYERS, ()))

    def model_modules(self) -> list[nn.Module]:
        """The topmost modules under the model's names."""
        return [each for name, each in self.named_children() if name != _LAYERS]

    def forward(self, value: Any) -> Any:
        """Map the model's input, or what layer `start - 1` returned, to what layer `end - 1` returns."""
        for number, layer in enumerate(getattr(self, _LAYERS), self.start):
            self.before_layer(number)
            value = layer(value)
        return value


def layers_of(
    model: nn.Module, cut: CutModel | None, *, may_be_one: bool = False
) -> list[nn.Module]:
    """The layers of a model: what `cut` says, or the model's own `stages()`, or a Sequential's modules.

    `may_be_one`: a model of which nobody says how it is cut is one layer.

    Raises:
        ConfigError: nobody says, or a layer's buffers change as it computes.
        UserCodeError: who says raised an exception, or returned no modules.
    """
    theirs = getattr(type(model), "stages", None)  # it may be something else, such as a number
    own: CutModel | None = cut or (theirs if callable(theirs) else None)
    if own is None and isinstance(model, nn.Sequential) and _runs_in_order(model):
        return _checked(list(model))  # one that occurs twice is computed twice
    if own is None and may_be_one:
        return _checked([model])
    if own is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how it is cut into layers: give Workload(stages=...), a "
            "function that returns a list of its modules, in order"
        )
    with user_code("stages"):
        found: Any = own(model)
    is_list = isinstance(found, Sequence) and bool(found)
    if not is_list or not all(isinstance(each, nn.Module) for each in found):
        raise wrong_result("stages", own, f"returned {found!r:.100}, must be a list of modules")
    return _checked(list(found))


def check_shared(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """See that of all layers of a model only first and last one share a parameter that is trained.

    Raises:
        ConfigError: others do.
    """
    holders = defaultdict[int, set[int]](set)
    for number, layer in enumerate(layers):
        for each in layer.parameters():
            holders[id(each)].add(number)
    for name, each in model.named_parameters():
        first, *others = sorted(holders[id(each)]) or [0]
        if each.requires_grad and others and [first, *others] != [0, len(layers) - 1]:
            raise ConfigError(
                f"layers {first} and {others[0]} of {len(layers)} share {name}: in a pipeline only the first "
                "and the last layer may share a parameter that is trained, such as a tied embedding; a mesh "
                "takes others as well"
            )


def _runs_in_order(model: nn.Sequential) -> bool:
    return type(model).forward is nn.Sequential.forward


def _checked(layers: list[nn.Module]) -> list[nn.Module]:
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, _BatchNorm):
                raise ConfigError(
                    f"a pipeline or mesh cannot train {type(module).__name__}, whose statistics are of "
                    "microbatches: use GroupNorm or LayerNorm"
                )
    return layers


def _register(stage: nn.Module, model: nn.Module, own: Sequence[nn.Module]) -> None:
    """Give `stage` the modules and parameters of its layers under their names in `model`."""
    modules = {id(module): name for name, module in model.named_modules() if name}
    tensors = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
    # first what is tied, so that it has the model's own name also where that one's module is not
    here = _tensors_of(own)
    for name, each in _with_several_names(model):
        if id(each) in here:
            place_at(stage, name, each, is_kept=_is_kept(model, name))
    for module in _topmost(own, set(modules)):
        place_at(stage, modules[id(module)], module)
    known = {id(each) for each in (*stage.parameters(), *stage.buffers())}
    for layer in own:
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if id(tensor) in known:
                continue
            if id(tensor) not in tensors:
                raise ConfigError(
                    f"stages: {name} of a layer is no parameter or buffer of the model"
                )
            own_name = tensors[id(tensor)]
            place_at(stage, own_name, tensor, is_kept=_is_kept(model, own_name))
            known.add(id(tensor))


def _with_several_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of several modules, such as a tied embedding, under the model's names."""
    names = defaultdict[int, list[tuple[str, Tensor]]](list)
    for prefix, module in model.named_modules():
        own = (
            *module.named_parameters(prefix, recurse=False),
            *module.named_buffers(prefix, recurse=False),
        )
        for name, each in own:
            names[id(each)].append((name, each))
    return [several[0] for several in names.values() if len(several) > 1]


def _is_kept(model: nn.Module, name: str) -> bool:
    """Whether a parameter or buffer is part of the model's state; buffers need not be."""
    owner, _, key = name.rpartition(".")
    return key not in model.get_submodule(owner)._non_persistent_buffers_set


def _topmost(layers: Sequence[nn.Module], known: set[int]) -> Iterator[nn.Module]:
    """The modules in `known` that are in no other one of these layers."""
    for layer in layers:
        if id(layer) in known:
            yield layer
        else:
            yield from _topmost(list(layer.children()), known)


def place_at(
    root: nn.Module, name: str, content: nn.Module | Tensor, *, is_kept: bool = True
) -> None:
    """Register a module, parameter or buffer under a dotted name, in empty modules where need be.

    `is_kept`: whether a buffer is persistent.
    """
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(content, nn.Module):
        root.add_module(last, content)
    elif isinstance(content, nn.Parameter):
        root.register_parameter(last, content)
    else:
        root.register_buffer(last, content, persistent=is_kept)


def _shared(
    tensors: Iterable[tuple[str, Tensor]], own: Sequence[nn.Module], others: Sequence[nn.Module]
) -> tuple[str, ...]:
    """The names of the parameters and buffers that these layers have, and others as well."""
    both = _tensors_of(own) & _tensors_of(others)
    return tuple(name for name, each in tensors if id(each) in both)


def _tensors_of(layers: Sequence[nn.Module]) -> set[int]:
    """The parameters and buffers of layers, by id."""
    return {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
