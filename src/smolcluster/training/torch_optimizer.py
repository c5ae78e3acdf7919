"""Any `torch.optim.Optimizer` on a replica's flat tensors: PyTorch's classes by name, and a user's own.

Elementwise classes get one flat parameter for each stretch of weights of one group. All others get a view of
each parameter in its own shape. Their state is moved into flat tensors as well, so that it can be saved, and
sent bucket by bucket. Making one imports PyTorch's compiler, which takes seconds.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from smolcluster.configs.schema import FLAT_OPTIMIZERS, ElementwiseName
from smolcluster.errors import ConfigError
from smolcluster.training.muon import CHOOSERS, Matrix, MuonOptimizer, choose
from smolcluster.training.optimizer import (
    CLASSES,
    MUON,
    STEP_COUNT,
    FlatOptimizer,
    FlatState,
    check_names,
    checked_arguments,
)
from smolcluster.training.recipe import Groups, OptimizerFactory, OptimizerSpec, ParameterGroup
from smolcluster.utils.user_code import user_code, wrong_result
from smolcluster.utils.words import hint_at

ELEMENTWISE = frozenset(get_args(ElementwiseName))
SCALARS, EXTRA = "scalars", "extra"
"""State that has not the weights' shape: numbers on the CPU, and tensors on the weights' device."""

Number = bool | int | float
NUM_PROBED = 3
"""So many steps of a user's own optimizer show what it counts."""
_Counted = tuple[int, str, type[Number]]
"""A number of a group: which group, its key, and its type."""


@dataclass(frozen=True)
class Piece:
    """Weights that the optimizer takes for one parameter: where they lie, their shape, and their group."""

    place: slice
    shape: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class _Entry:
    """Where one entry of a piece's state, or a number of a group, lies: in which flat tensor, and where."""

    owner: int
    """The piece; of a number of a group, which group, from -1 on downwards."""
    key: str
    tensor: str
    place: slice
    shape: tuple[int, ...]
    number: type[Number] | None
    """What it is, if it is no tensor."""


class TorchOptimizer(FlatState):
    """An optimizer of PyTorch's kind, with the interface of `FlatOptimizer`.

    Attributes:
        state: as there; flat tensors (num_params,) by the optimizer's names, 0 where a parameter has none,
            besides `scalars` and `extra`.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]],
        pieces: Sequence[Piece],
        flat: "Flat",
    ) -> None:
        """Set up the optimizer that changes `flat.params` in place by `flat.grads`.

        Args:
            spec: gives its arguments, and the learning rate that `lr` of a group is relative to.
            factory: called with groups of parameters, `lr` and the arguments.
            groups: the options of each group.
            pieces: all weights, in order.

        Raises:
            ConfigError: it cannot be made so, or cannot take a step from gradients alone.
            UserCodeError: the same, of a user's own.
        """
        self._factory, self._base_rate = factory, spec.learning_rate
        self.name = getattr(factory, "__name__", type(factory).__name__)
        self._arguments = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in spec.arguments.items()
        }
        self._pieces, self._groups = pieces, groups
        self._params, self._grads = flat.params, flat.grads
        self._entries: list[_Entry] = []
        self.state: dict[str, Tensor] = {STEP_COUNT: torch.zeros((), dtype=torch.float32)}
        self._lay_out(*self._probe())
        self._make()

    @torch.no_grad()
    def _probe(self) -> tuple[list[dict[str, Any]], list[_Counted]]:
        """The state after a step of copies of the weights, by piece, and what groups count."""
        weights = [nn.Parameter(self._params[each.place].clone()) for each in self._pieces]
        for piece, weight in zip(self._pieces, weights, strict=True):
            weight.data = weight.data.view(piece.shape)
        name = _torch_name(self._factory)
        try:
            with user_code("training.optimizer"):
                optimizer = self._new(weights)
                before = _counts(optimizer)
                _step_once(optimizer, weights)
                states = [dict(optimizer.state[weight]) for weight in weights]
                for _ in range(1, NUM_PROBED if name is None else 1):
                    _step_once(optimizer, weights)
        except Exception as error:
            if name is None:
                raise
            cause = error.__cause__ or error
            remedy = (
                "; set optimizer to muon, which leaves those to AdamW" if name == "Muon" else ""
            )
            raise ConfigError(
                f"optimizer {name} cannot train this model: {cause}{remedy}"
            ) from error
        own, *groups = (
            [key for key, number in now.items() if number != kept.get(key, 0)]
            for now, kept in zip(_counts(optimizer), before, strict=True)
        )
        own += [str(key) for key in optimizer.state if not isinstance(key, Tensor)]
        if own:
            raise ConfigError(
                f"optimizer {self.name} keeps {own[0]} to itself, which cannot be saved and sent: keep it in "
                "its groups, or in the state of each parameter"
            )
        for state, weight in zip(states, weights, strict=True):
            self._check_known(_held(state), optimizer.state[weight])
        return states, [
            (number, key, type(optimizer.param_groups[number][key]))
            for number, keys in enumerate(groups)
            for key in keys
            if key != "lr"
        ]

    def _check_known(self, known: Set[str], state: Mapping[str, Any]) -> None:
        for key in _held(state) - known:
            raise ConfigError(
                f"optimizer {self.name} makes a state {key!r} of a parameter after its first step, when what "
                "is saved and sent is settled: make it in the first one"
            )

    def _new(self, weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        members: list[list[nn.Parameter]] = [[] for _ in self._groups]
        for piece, weight in zip(self._pieces, weights, strict=True):
            members[piece.group].append(weight)
        groups = [
            {**options, "params": own}
            for options, own in zip(self._groups, members, strict=True)
            if own
        ]
        return self._factory(groups, lr=self._base_rate, **self._arguments)

    def _make(self) -> None:
        """A new optimizer on the flat weights themselves, without any state."""
        self._weights = [
            nn.Parameter(self._params[each.place].view(each.shape), requires_grad=False)
            for each in self._pieces
        ]
        self._optimizer = self._new(self._weights)
        self._rates = [group["lr"] / self._base_rate for group in self._optimizer.param_groups]
        self._is_new = True

    def _lay_out(self, states: Sequence[Mapping[str, Any]], counted: Sequence[_Counted]) -> None:
        """Give each entry of the state its place, and make the flat tensors."""
        shaped = self._keys_of_weights_shape(states)
        sizes = {SCALARS: 0, EXTRA: 0}
        for number, (piece, state) in enumerate(zip(self._pieces, states, strict=True)):
            for key, value in state.items():
                if value is None:
                    continue
                if key in shaped:
                    entry = _Entry(number, key, key, piece.place, piece.shape, None)
                else:
                    shape, kind = _measured(key, value)
                    on_cpu = kind is not None or value.device.type == "cpu"
                    tensor = SCALARS if on_cpu and not shape else EXTRA
                    start = sizes[tensor]
                    sizes[tensor] += 1 if kind else value.numel()
                    place = slice(start, sizes[tensor])
                    entry = _Entry(number, key, tensor, place, shape, kind)
                self._entries.append(entry)
        for group, key, kind in counted:
            place = slice(sizes[SCALARS], sizes[SCALARS] + 1)
            self._entries.append(_Entry(-1 - group, key, SCALARS, place, (), kind))
            sizes[SCALARS] += 1
        self._known = [_held(state) for state in states]
        if max(sizes.values()) > self._params.numel():
            raise ConfigError(
                f"optimizer {self.name} keeps more numbers of another shape than the model has weights, and "
                "these cannot be sent; choose another one"
            )
        dtype = self._params.dtype
        self.state |= {key: torch.zeros_like(self._params) for key in sorted(shaped)}
        if sizes[SCALARS]:
            self.state[SCALARS] = torch.zeros(sizes[SCALARS], dtype=dtype)
        if sizes[EXTRA]:
            self.state[EXTRA] = torch.zeros(sizes[EXTRA], dtype=dtype, device=self._params.device)

    def _keys_of_weights_shape(self, states: Sequence[Mapping[str, Any]]) -> frozenset[str]:
        def fits(key: str) -> bool:
            pairs = zip(self._pieces, states, strict=True)
            return all(
                isinstance(state[key], Tensor)
                and tuple(state[key].shape) == piece.shape
                and state[key].dtype == self._params.dtype
                and state[key].device == self._params.device
                for piece, state in pairs
                if state.get(key) is not None
            )

        keys = {key for state in states for key, value in state.items() if value is not None}
        if taken := keys & {SCALARS, EXTRA}:
            raise ConfigError(f"optimizer {self.name} has a state {min(taken)!r}: rename it")
        return frozenset(key for key in keys if key != STEP_COUNT and fits(key))

    def part(self, place: slice) -> Self:
        """See `FlatOptimizer.part`.

        Raises:
            ConfigError: it is not the whole.
        """
        if place != slice(0, self._params.numel()):
            raise ConfigError(f"optimizer {self.name} works on whole models, in one store only")
        return self

    @torch.no_grad()
    def step_with(self, gradient: Tensor, learning_rate: float, *, owned: bool = False) -> None:
        """Take a step with this gradient (num_params,), on the same device.

        It is copied unless it is `owned`: some optimizers change it, and it may still have to be sent.
        """
        if not owned:
            gradient = gradient.clone()
        begins = not self.state[STEP_COUNT]
        if begins and not self._is_new:
            self._make()
        if not begins:
            self._install()
        for group, share in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = share * learning_rate
        for piece, weight in zip(self._pieces, self._weights, strict=True):
            weight.grad = gradient[piece.place].view(piece.shape)
        with user_code("training.optimizer"):
            self._optimizer.step()
        for weight in self._weights:
            weight.grad = None
        self._is_new = False
        self._collect()
        self.state[STEP_COUNT] += 1

    def _views(self) -> Iterator[tuple[_Entry, dict[str, Any], Tensor]]:
        for entry in self._entries:
            own = (
                self._optimizer.state[self._weights[entry.owner]]
                if entry.owner >= 0
                else self._optimizer.param_groups[-1 - entry.owner]
            )
            yield entry, own, self.state[entry.tensor][entry.place].view(entry.shape)

    def _install(self) -> None:
        """Let the optimizer find its state in the flat tensors, which may have been filled by others."""
        for entry, own, view in self._views():
            if entry.number is not None:
                own[entry.key] = entry.number(view.item())
            elif not _is_same(own.get(entry.key), view):
                own[entry.key] = view

    def _collect(self) -> None:
        """Take over what the optimizer has put into memory of its own."""
        for known, weight in zip(self._known, self._weights, strict=True):
            self._check_known(known, self._optimizer.state[weight])
        for entry, own, view in self._views():
            value = own[entry.key]
            if not isinstance(value, Tensor):
                view.fill_(value)
            elif not _is_same(value, view):
                own[entry.key] = view.copy_(value)


def _held(state: Mapping[str, Any]) -> Set[str]:
    return {key for key, value in state.items() if value is not None}


def _step_once(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()


def _counts(optimizer: torch.optim.Optimizer) -> list[dict[str, Number]]:
    """What may be a count of an optimizer itself, and of each of its groups; flags are none."""
    owners: list[dict[str, Any]] = [vars(optimizer), *optimizer.param_groups]
    return [
        {key: each for key, each in owner.items() if type(each) in (int, float)} for owner in owners
    ]


def _is_same(tensor: object, view: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.data_ptr() == view.data_ptr()
        and (tensor.dtype == view.dtype)
    )


def _measured(key: str, value: object) -> tuple[tuple[int, ...], type[Number] | None]:
    """The shape of an entry of a state, and of what type a number is."""
    if isinstance(value, Tensor):
        return tuple(value.shape), None
    if isinstance(value, Number):
        return (), type(value)
    raise ConfigError(
        f"the optimizer's state {key!r} is of type {type(value).__name__}, which cannot be saved and sent; "
        "keep tensors and numbers there"
    )


def _torch_name(factory: Callable[..., Any]) -> str | None:
    """What PyTorch calls its own class; None: it is somebody else's."""
    name = getattr(factory, "__name__", "")
    return name if getattr(torch.optim, name, None) is factory else None


def torch_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of `torch.optim` of that name: nothing else can be named.

    Raises:
        ConfigError: there is none.
    """
    known = {
        each: kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and each != "Optimizer"
    }
    short = name.removeprefix("torch.optim.")
    if short not in known:
        raise ConfigError(
            f"optimizer is {name!r}, allowed: adam, adamw, sgd, muon, or a class of torch.optim "
            f"({', '.join(sorted(known))}){hint_at(short, known)}"
        )
    return known[short]


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse an optimizer of a configuration, or its arguments, that no model could be trained with.

    Raises:
        ConfigError: there is no such optimizer, or it does not take these arguments.
    """
    if name == MUON:
        arguments = _without_choosers(arguments)
    if name in FLAT_OPTIMIZERS:
        checked_arguments(name, arguments)
    else:
        _check_taken(torch_class(name), arguments)


def _check_taken(factory: OptimizerFactory, arguments: Mapping[str, Any]) -> None:
    name, known = getattr(factory, "__name__", "the optimizer"), _parameters_of(factory)
    if known is not None:
        known = [each for each in known if each not in ("params", "lr", "weight_decay")]
    check_names(name, arguments, known)


def _without_choosers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Muon's arguments but those that say which parameters it steps."""
    return {key: each for key, each in arguments.items() if key not in CHOOSERS}


Optimizer = FlatOptimizer | TorchOptimizer


@dataclass(frozen=True)
class Flat:
    """Parameters by name, with their places in the flat `params` and `grads`, both (num_params,)."""

    trainable: Sequence[tuple[str, nn.Parameter]]
    places: Sequence[slice]
    params: Tensor
    grads: Tensor


def new_optimizer(
    spec: OptimizerSpec, model: nn.Module, flat: Flat, weight_decay: float
) -> Optimizer:
    """The optimizer of a model whose weights lie in flat tensors, matrices first.

    Raises:
        ConfigError: no such optimizer, arguments that it does not know, or groups that do not fit the model.
        UserCodeError: a user's own optimizer or groups raised an exception.
    """
    if isinstance(spec.kind, str) and spec.kind in CLASSES and spec.groups is None:
        num_decayed = sum(weight.numel() for _, weight in flat.trainable if weight.ndim > 1)
        return FlatOptimizer(
            spec.kind, flat.params, flat.grads, weight_decay, num_decayed, arguments=spec.arguments
        )
    if spec.kind == MUON:
        return _muon(spec, model, flat, weight_decay)
    factory = (
        torch_class(CLASSES.get(spec.kind, spec.kind)) if isinstance(spec.kind, str) else spec.kind
    )
    _check_taken(factory, spec.arguments)
    groups, numbers = _grouped(spec, model, flat.trainable)
    known = _parameters_of(factory) if isinstance(factory, type) else None
    if known is None or "weight_decay" in known:
        groups = [{"weight_decay": weight_decay, **options} for options in groups]
    elif weight_decay:
        raise ConfigError(
            f"weight_decay is {weight_decay:g}, which the optimizer does not know; set it to 0"
        )
    shapes = [tuple(weight.shape) for _, weight in flat.trainable]
    pieces = list(map(Piece, flat.places, shapes, numbers))
    if _torch_name(factory) in ELEMENTWISE:
        pieces = _merged(pieces)
    return TorchOptimizer(spec, factory, groups, pieces, flat)


def _muon(spec: OptimizerSpec, model: nn.Module, flat: Flat, weight_decay: float) -> MuonOptimizer:
    if spec.groups is not None:
        raise ConfigError(
            "training.groups is set, but optimizer is muon, which has groups of its own: leave groups out, "
            "and name what AdamW shall train in optimizer_args.adamw"
        )
    split = spec.split or choose(model, flat.trainable, spec.arguments)
    matrices = [
        Matrix(place.start, *weight.shape)
        for (name, weight), place in zip(flat.trainable, flat.places, strict=True)
        if name in split.by_muon
    ]
    return MuonOptimizer(
        flat.params,
        flat.grads,
        weight_decay,
        sum(weight.numel() for _, weight in flat.trainable if weight.ndim > 1),
        matrices=matrices,
        arguments=_without_choosers(spec.arguments),
        split=split,
    )


def _parameters_of(factory: OptimizerFactory) -> Collection[str] | None:
    """The names of what it takes; None: any, or nobody knows."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    return None if takes_any else known


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """One flat piece for each stretch of one group."""
    merged: list[Piece] = []
    for piece in pieces:
        start, stop = piece.place.start, piece.place.stop
        if merged and merged[-1].group == piece.group:
            start = merged.pop().place.start
        merged.append(Piece(slice(start, stop), (stop - start,), piece.group))
    return merged


def _grouped(
    spec: OptimizerSpec, model: nn.Module, trainable: Sequence[tuple[str, nn.Parameter]]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The options of each group, and which group each parameter is in."""
    if spec.groups is None:
        return [{}, {"weight_decay": 0.0}], [int(weight.ndim <= 1) for _, weight in trainable]
    groups = _groups_of(spec.groups, model)
    options = [
        {key: group[key] for key in group if key not in ("params", "names")} for group in groups
    ]
    numbers = []
    for name, weight in trainable:
        found = [number for number, group in enumerate(groups) if _holds(group, name, weight)]
        if len(found) != 1:
            problem = "in none of the groups: add it, or set requires_grad to False"
            if found:
                problem = f"in groups {found[0] + 1} and {found[1] + 1}: leave it in one"
            raise ConfigError(f"training.groups: parameter {name} is {problem}")
        numbers += found
    return options, numbers


def _groups_of(groups: Groups, model: nn.Module) -> list[ParameterGroup]:
    if not callable(groups):
        return list(groups)
    with user_code("training.groups"):
        made = [dict(group) for group in groups(model)]
        for group in made:
            one = group["params"]
            group["params"] = [one] if isinstance(one, Tensor) else list(one)
    known = {id(weight) for weight in model.parameters()}
    for group in made:
        if any(id(weight) not in known for weight in group["params"]):
            raise wrong_result(
                "training.groups", groups, "a group holds what is no parameter of the model"
            )
    return list(made)


def _holds(group: ParameterGroup, name: str, weight: nn.Parameter) -> bool:
    if "names" in group:
        patterns = group["names"]
        every = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatchcase(name, pattern) for pattern in every)
    return any(each is weight for each in group["params"])
