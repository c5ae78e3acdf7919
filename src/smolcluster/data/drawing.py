"""What is drawn at random as samples are made: from PyTorch's generator, the process's, or one's own."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional, init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smolcluster.utils.isolated_rng import isolated_python, python_state
from smolcluster.utils.seed import derive_seed

NUM_WATCHED = 8
"""Calls that are watched: for draws from the generators of `random` and NumPy, and for new generators."""
DRAWING = threading.Lock()
"""Held while something draws from the process's generators, or from its own."""
MOST_PARTS, MOST_SEARCHED = 100, 10_000
"""In containers of how many parts generators of one's own are looked for, and among how many things."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OF_ALL = (torch.default_generator, random._inst, np.random.mtrand._rand)
"""The process's generators."""
_NO_OWNERS = (Tensor, np.ndarray, ModuleType, FunctionType, type)
_OTHERS = ("datasets.",)
"""Packages whose generators give an order, under a seed that the user has said."""


class Drawing:
    """What is drawn at random by a dataset, or by a collate function.

    The generators of `random` and NumPy are the process's. They are seeded only for what draws from them,
    which is found out at its first calls: the model of a user may draw from them in another thread.
    """

    def __init__(self, drawer: object) -> None:
        self._drawer = drawer
        self._num_watched, self._is_of_all = 0, False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """It may have been told the epoch, and make generators for that."""
        self._found: list[Any] | None = None
        self._num_looks = 0

    @property
    def _own(self) -> list[Any]:
        """The generators that it keeps, such as those of its transforms."""
        if self._found is None:
            self._found = generators_in(self._drawer)
        return self._found

    def look_again(self) -> bool:
        """Look for generators that its last call has made and that it keeps; False: there are no new ones.

        After `NUM_WATCHED` calls of an epoch it is taken to make none.
        """
        if self._num_looks == NUM_WATCHED:
            return False
        self._num_looks += 1
        before, self._found = self._own, generators_in(self._drawer)
        return not {id(each) for each in self._found} <= {id(each) for each in before}

    @contextmanager
    def under(self, seed: int) -> Iterator[None]:
        """What this thread draws meanwhile comes from generators of `seed`."""
        with OfThread(seed), self.of_process(seed):
            yield

    @contextmanager
    def of_process(self, seed: int) -> Iterator[None]:
        """The same of the process's generators alone, where they are drawn from, and its own."""
        is_watched = self._num_watched < NUM_WATCHED and not self._is_of_all
        is_of_all = is_watched or self._is_of_all
        if not (is_of_all or self._own):
            yield
            return
        with DRAWING, isolated_python(seed) if is_of_all else nullcontext():
            self.seed_own(seed)
            begun = python_state() if is_watched else None
            yield
            if begun is not None:
                self._num_watched += 1
                self._is_of_all = begun != python_state()

    def seed_own(self, seed: int) -> None:
        """Seed the generators that it keeps, each in another way."""
        for number, each in enumerate(self._own):
            reseed(each, derive_seed(seed, "own", number))


def generators_in(thing: object) -> list[Any]:
    """The generators that a dataset keeps, and what it is made of, such as its transforms."""
    found: list[Any] = []
    parts = [thing]
    seen = {id(each) for each in (thing, *_OF_ALL)}
    for each in parts:  # which grow meanwhile
        if isinstance(each, GENERATORS):
            found.append(each)
        elif len(parts) < MOST_SEARCHED:
            new = [part for part in _parts(each) if id(part) not in seen]
            seen.update(map(id, new))
            parts += new
    return found


def _parts(thing: object) -> list[object]:
    if isinstance(thing, _NO_OWNERS) or type(thing).__module__.startswith(_OTHERS):
        return []
    if isinstance(thing, dict | list | tuple):
        within = list(thing.values()) if isinstance(thing, dict) else list(thing)
        return within if len(within) <= MOST_PARTS else []
    try:
        return list(vars(thing).values())
    except TypeError:  # it has no attributes
        return []


def reseed(generator: Any, seed: int) -> None:
    """Let a generator draw under this seed from now on."""
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            own = generator.bit_generator
            own.state = type(own)(seed).state
        case np.random.RandomState():
            generator.seed(seed % 2**32)
        case random.Random():
            generator.seed(seed)


class _Generators:
    """A generator for each kind of device that is drawn on, all of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._by_kind: dict[str, torch.Generator] = {}

    def added(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of what draws, with a generator if it has none."""
        if kwargs.get("generator") is not None:
            return kwargs
        kind = _device(args, kwargs).type
        kind = "cpu" if kind == "meta" else kind  # nothing is drawn there, and it has no generators
        if kind not in self._by_kind:
            self._by_kind[kind] = torch.Generator(kind).manual_seed(self._seed)
        return kwargs | {"generator": self._by_kind[kind]}


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Where a function draws."""
    if (stated := kwargs.get("device")) is not None:
        return torch.device(stated)
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    first = next(tensors, None)
    return torch.get_default_device() if first is None else first.device


class OfThread(TorchFunctionMode):
    """Draws from generators of its own: the process's are everybody's, and another thread may compute."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generators = _Generators(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_GENERATOR:
            with _Inside(self._generators):
                return func(*args, **kwargs)
        if func in _RANDOM:
            kwargs = self._generators.added(args, kwargs)
        return func(*args, **kwargs)


class _Inside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a generator to what a function draws that takes none itself. It makes all else slower."""

    def __init__(self, generators: _Generators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(each.name == "generator" for each in func._schema.arguments):
            kwargs = self._generators.added(args, kwargs)
        return func(*args, **kwargs)


_RANDOM = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(torch.bernoulli, torch.multinomial, torch.poisson, torch.binomial),
        *(torch._standard_gamma, torch._sample_dirichlet),  # of distributions, such as Beta
        *(getattr(Tensor, name) for name in ("bernoulli", "multinomial", "bernoulli_", "random_")),
        *(
            getattr(Tensor, f"{name}_")
            for name in ("uniform", "normal", "exponential", "log_normal")
        ),
        *(getattr(Tensor, f"{name}_") for name in ("cauchy", "geometric")),
        *(init.uniform_, init.normal_, init.trunc_normal_, init.orthogonal_, init.sparse_),
        *(init.kaiming_uniform_, init.kaiming_normal_, init.xavier_uniform_, init.xavier_normal_),
    }
)
_WITHOUT_GENERATOR = frozenset(
    getattr(place, name)
    for place in (torch, functional)
    for name in dir(place)
    if any(word in name for word in ("dropout", "rrelu", "gumbel"))
)
