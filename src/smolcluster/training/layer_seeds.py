"""What a model draws at random as it computes, such as dropout masks, by seed, microbatch, layer and call.

Before each layer PyTorch's generators are seeded by the run's seed, the place of the microbatch's first
sample, the layer's number, and which call of the layer within the microbatch it is; and once more when the
model has returned, for what its loss draws. So masks do not depend on who computes a layer: a single process,
a stage of a pipeline or of a mesh; two passes through a model in one loss have masks of their own.

Activation checkpointing calls a layer again during the backward, with the generators as they were before the
first time. The seed that they had then tells which call is repeated, and that call's seed is used again.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from smolcluster.data.dataset import Place
from smolcluster.data.drawing import DRAWING, NUM_WATCHED
from smolcluster.utils.isolated_rng import python_state, seed_python
from smolcluster.utils.seed import derive_seed

LOSS = -1
"""In a layer's place: what the loss draws once its model has returned."""


class PythonSeeds:
    """Seeds what `random` and NumPy draw from, which is the process's, for a model and its loss.

    Another thread may be making a sample that draws from the same. It is waited for only where model or loss
    draw, too, which is found out at the first microbatches.
    """

    def __init__(self) -> None:
        self._num_watched, self._is_drawn = 0, False
        self._seeded: bytes | None = None
        """The state after the last seeding, while it is found out."""

    def begin(self, seed: int) -> None:
        """A microbatch begins."""
        is_watched = self._num_watched < NUM_WATCHED and not self._is_drawn
        if not DRAWING.acquire(blocking=is_watched or self._is_drawn):
            return
        try:
            if is_watched:
                self._num_watched += 1
                self._is_drawn = self._seeded not in (None, python_state())
            seed_python(seed)
            self._seeded = python_state() if is_watched else None
        finally:
            DRAWING.release()


class LayerSeeds:
    """Seeds the generators of one device; a callback of a stage.

    Attributes:
        device: whose generator is seeded.
        place: of the first sample of the microbatch that is computed.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        *,
        part: int = 0,
        python: PythonSeeds | None = None,
    ) -> None:
        """`part`: of each sequence, where several processes share sequences: each draws its own.

        `python`: of the same model and loss, which other microbatches have begun already.
        """
        self._python = python or PythonSeeds()
        self._seed, self.device, self._part = seed, device, part
        self.place = Place(seed, 0, 0)
        self._calls: dict[int, int] = {}
        """The number of each layer's last call within the microbatch, from 0."""
        self._turns: dict[nn.Module, int] = {}
        """How often a module that is several layers was called within the microbatch."""
        self._used: dict[tuple[int, int, int], int] = {}
        """The seeds of layers (layer, part), by the seed that the generator had before."""

    def at(self, place: Place) -> None:
        """A microbatch's layers begin to compute, perhaps once more."""
        self.place = place
        self._calls.clear()
        self._turns.clear()

    def begin(self, place: Place) -> None:
        """A microbatch begins; what its loss draws before the model is called follows as well.

        What is drawn from NumPy's generator and Python's follows from the microbatch alone.
        """
        self.at(place)
        seed = self._derived(0, 0)
        seed_generators(seed, self.device)
        self._python.begin(seed)

    def forget(self) -> None:
        """A step has ended: none of its layers is computed again."""
        self._used.clear()

    def __call__(self, layer: int) -> None:
        """Layer number `layer` begins; the first one has whole sequences, and so has the loss."""
        if not _in_backward():
            self._calls[layer] = self._calls.get(layer, -1) + 1
        self._begin(layer, 0 if layer <= 0 else self._part)

    def sequences_cut(self) -> None:
        """Within the first layer: from here on there is a part of each sequence."""
        self._begin(0, self._part)

    def _begin(self, layer: int, part: int) -> None:
        key = (layer, part, torch.default_generator.initial_seed())
        if not _in_backward():
            self._used[key] = self._derived(layer, part)
        seed_generators(self._used.get(key) or self._derived(layer, part), self.device)

    def _derived(self, layer: int, part: int) -> int:
        names: list[int | str] = [self.place.epoch, self.place.start, layer]
        if part:
            names.append(part)
        if call := self._calls.get(layer, 0):
            names += ["call", call]
        return derive_seed(self._seed, "dropout", *names)

    def model_returned(self) -> None:
        """What the loss draws now must not depend on where the last layer was computed."""
        self(LOSS)

    @contextmanager
    def hooked(self, model: nn.Module, layers: Sequence[nn.Module | None]) -> Iterator[None]:
        """Seed as these layers of a whole model begin, and as it returns; None: one that draws nothing.

        The first one begins with the model itself, since what stands before a model's blocks is not always a
        module that is called. Without layers the model draws nothing, and nothing is seeded.
        """
        numbers = defaultdict[nn.Module, list[int]](list)
        for number, each in enumerate(layers):
            if each is not None:
                numbers[each].append(number)
        with ExitStack() as hooks:
            for each, own in numbers.items():
                if own[0] == 0:
                    hooks.enter_context(model.register_forward_pre_hook(self._hook([0])))
                if own != [0]:
                    hooks.enter_context(each.register_forward_pre_hook(self._hook(own)))
            if layers:
                hooks.enter_context(model.register_forward_hook(self._after))
            yield

    def _after(self, module: nn.Module, *_: object) -> None:
        if module.training:
            self.model_returned()

    def _hook(self, numbers: Sequence[int]) -> Any:
        def seed(module: nn.Module, _inputs: object) -> None:
            if not module.training:
                return
            number = numbers[0] if len(numbers) == 1 else self._turn(module, numbers)
            if number or len(numbers) == 1:  # else the model itself has begun the first layer
                self(number)

        return seed

    def _turn(self, module: nn.Module, numbers: Sequence[int]) -> int:
        """Which of its layers a module is now, in each pass one after the other."""
        if _in_backward():
            before = torch.default_generator.initial_seed()
            return next((each for each in numbers if (each, 0, before) in self._used), numbers[0])
        turn = self._turns.get(module, 0)
        self._turns[module] = turn + 1
        return numbers[turn % len(numbers)]


def _in_backward() -> bool:
    """Whether autograd runs in this thread: then a layer that is called is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed PyTorch's generators of the CPU and of one device.

    `torch.manual_seed` asks for every kind of device, which takes 0.1 ms and more.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def drawing_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module | None]:
    """The module of `model` that each layer begins with; None: the layer draws nothing at random.

    A layer need not be a module of the model: it may hold several, of which the first is called first. One
    that occurs several times has its module each time.
    """
    known = set(model.modules())
    found: list[nn.Module | None] = []
    for number, layer in enumerate(layers):
        inside = (each for each in layer.modules() if each in known)
        first = next(inside, None) if may_draw(layer) else None
        is_repeated = layer in layers[:number]
        found.append(first if is_repeated or first not in found else None)
    return found


def may_draw(layer: nn.Module) -> bool:
    """Whether computing a layer could draw random numbers: PyTorch's own modules are known, others may."""
    return any(_draws(each) for each in layer.modules())


def _draws(module: nn.Module) -> bool:
    match module:
        case _DropoutNd():
            return module.p > 0
        case nn.MultiheadAttention() | nn.RNNBase():
            return module.dropout > 0
        case nn.RReLU() | nn.FractionalMaxPool2d() | nn.FractionalMaxPool3d():
            return True
    return not type(module).__module__.startswith("torch.nn.modules.")
