"""The copy of the weights that a worker's own steps change, and the weights that it began with.

Where a worker takes many steps between two exchanges, it keeps θ, which its steps change, θ_start, from which
its change Δ = θ_start - θ is counted, and θ of a fragment when its change was sent: what was learnt since
then is kept when the fragment's new weights come. A `LocalCopy` says what becomes of them, and an `Executor`
has it done: by this process, by the ranks of a mesh or by the stages of a pipeline, each with a `Part`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from smolcluster.configs.schema import GradientClipping
from smolcluster.training.kept import KeptSteps
from smolcluster.training.optimizer import LocalOptimizer, clip_factor
from smolcluster.training.places import meeting, pieces, total
from smolcluster.training.replica import Replica

Fragments = Sequence[Sequence[slice]]
"""Parts of a model, each as places in its flat weights; its values are those of the places, one after the
other."""
Place = tuple[int, int]
"""Start and stop in the flat weights."""
Given = Iterable[tuple[slice, Tensor]]
"""Places in the flat weights, and their values (numel,)."""


def ends(places: Iterable[slice]) -> tuple[Place, ...]:
    return tuple((place.start, place.stop) for place in places)


class Values(Protocol):
    """A fragment's values (numel,), which may lie elsewhere."""

    def __getitem__(self, place: slice, /) -> Tensor:
        """Those of a place, on the CPU; it is asked for one place after the other."""


class Executor(Protocol):
    """The processes that have the weights and the gradient of the newest batch: this one or others."""

    @property
    def grad_norm(self) -> float:
        """The L2 norm of the mean gradient."""

    @property
    def divisor(self) -> float:
        """The gradient that `Weights` have, divided by this, is the mean over the loss terms."""

    @property
    def moments(self) -> Mapping[str, Tensor]:
        """The optimizer's moments that lie in this process, by name."""

    def order(self, name: str, *given: Any, **told: Any) -> Any:
        """Call the method of this name of the `Part` of each process; returns what comes of it.

        `given` are tensors on the CPU, `told` plain values.
        """


class LocalCopy:
    """A worker's copy of the weights, in fragments; it steps after `TrainingContext.compute`.

    Attributes:
        sent: the fragments whose change is on its way.
    """

    def __init__(self, executor: Executor, fragments: Fragments) -> None:
        """Begin with the executor's weights of now as θ_start."""
        self.executor, self._fragments = executor, fragments
        self.sent: set[int] = set()
        self._num_terms: dict[int, float] = {}
        """By fragment: loss terms of the gradients that were added up."""
        self._clip = 1.0
        self._bound: float | None = None
        executor.order("begin", fragments=tuple(map(ends, fragments)))

    def add_gradient(self, num_terms: float, held: Collection[int] = ()) -> None:
        """Add the gradient, of so many loss terms, to the sums of all fragments but those `held`."""
        weight = num_terms / self.executor.divisor
        self.executor.order("add_gradient", weight=weight, held=sorted(held))
        for number in set(range(len(self._fragments))).difference(held):
            self._num_terms[number] = self._num_terms.get(number, 0.0) + num_terms

    def clip(self, clipping: GradientClipping) -> float:
        """Have `step` clip the gradient if that is enabled; its L2 norm before."""
        norm = self.executor.grad_norm
        self._clip, self._bound = clip_factor(norm, clipping), clipping.bound
        return norm

    def step(self, learning_rate: float, held: Collection[int] = ()) -> None:
        """Step along the gradient; the fragments `held` stay as they are."""
        clip = self._clip / self.executor.divisor
        told = {"held": sorted(held), "clip": clip, "bound": self._bound}
        self.executor.order("step", learning_rate=learning_rate, **told)

    def change(self, fragment: int, *, is_gradient: bool = False) -> Values:
        """Δ = θ_start - θ of a fragment, or the mean of the gradients that were added up."""
        num_terms = self._num_terms.get(fragment, 0.0) if is_gradient else None
        return Change(self.executor, fragment, self._fragments[fragment], num_terms)

    def mark_sent(self, fragment: int) -> None:
        """The change of now is on its way; gradients are added up anew."""
        self.executor.order("mark_sent", fragment=fragment)
        self.sent.add(fragment)
        self._num_terms.pop(fragment, None)

    def follow(self, fragment: int, values: Tensor, *, is_difference: bool) -> None:
        """Take a fragment's new weights θ', and keep what was learnt since its change was sent.

        θ = θ' + (θ_now - θ_at_send); without a change that was sent, since θ_start. `values` (numel,), on the
        CPU, are θ', or a difference to be taken from θ_start.
        """
        places = pieces(self._fragments[fragment], slice(0, len(values)))
        given = [(place, values[within]) for place, within in places]
        self.executor.order("take", given, fragment=fragment, is_difference=is_difference)
        self.sent.discard(fragment)

    def load(self, weights: Sequence[Tensor]) -> None:
        """Begin with these flat weights, in pieces: what was sent or added up is void."""
        self.sent.clear()
        self._num_terms.clear()
        given, start = [], 0
        for each in weights:
            given.append((slice(start, start + len(each)), each))
            start += len(each)
        self.executor.order("take", given, fragment=None, is_difference=False)

    def reset(self) -> None:
        """Forget the moments."""
        self.executor.order("reset")

    def save(self, kept: KeptSteps, step: int, more: Mapping[str, Tensor], keep_last: int) -> None:
        """Keep the moments of now, and `more`, under a step of the run."""
        kept.save(step, {**self.executor.moments, **more}, keep_last)
        self.executor.order("save", folder=str(kept.folder), step=step, keep_last=keep_last)

    def take_up(self, kept: KeptSteps, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        """Go on with the moments of the newest step up to this one; that step, and what was kept."""
        if (found := kept.load(step)) is None:
            return None
        step, moments = found
        if self.executor.order("take_up", moments, folder=str(kept.folder), step=step):
            return found
        self.reset()
        return None


@dataclass(frozen=True)
class Change:
    """What a worker sends of a fragment; it is fetched as it is asked for.

    `num_terms`: loss terms of the gradients whose mean it is; None: it is θ_start - θ.
    """

    executor: Executor
    fragment: int
    places: Sequence[slice]
    num_terms: float | None

    def __getitem__(self, place: slice, /) -> Tensor:
        places = ends(each for each, _ in pieces(self.places, place))
        told = {"places": places, "is_gradient": self.num_terms is not None}
        values: Tensor = self.executor.order("read", fragment=self.fragment, **told)
        return (values.div_(self.num_terms) if self.num_terms else values).cpu()


class Part(ABC):
    """What a process has of θ, θ_start, θ at the send of each fragment, and sums of gradients.

    They lie in tensors, by number, each with some elements of the flat weights.

    Attributes:
        gradients: the newest batch's, of each tensor.
        now, start: by fragment, and then by number: θ and θ_start.
    """

    gradients: Sequence[Tensor]

    def __init__(self, theta: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """`theta`: tensors of this type that others change in place."""
        self.theta, self.dtype, self.device = theta, dtype, device
        self.fragments: Fragments = ()
        self.now: list[dict[int, Tensor]] = []
        self.start: list[dict[int, Tensor]] = []
        self._sent: dict[int, dict[int, Tensor]] = {}
        self._sums: dict[int, dict[int, Tensor]] = {}
        self._moved: set[int] = set()
        """Fragments whose θ may not be θ_start."""

    @abstractmethod
    def of(self, places: Sequence[slice]) -> Sequence[int]:
        """The numbers of the tensors that lie in these places."""

    @abstractmethod
    def fill(self, place: slice, tensors: Mapping[int, Tensor], out: Tensor) -> None:
        """Copy to `out` (place,) what of a place this process tells; `tensors`, by number, are like θ's."""

    @abstractmethod
    def put(self, place: slice, values: Tensor, tensors: Mapping[int, Tensor]) -> None:
        """Copy what of `values` (place,) lies here into `tensors`."""

    @abstractmethod
    def step_along(self, learning_rate: float) -> None:
        """Step θ along the gradients."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the moments."""

    def begin(self, fragments: Sequence[Sequence[Place]]) -> None:
        """Follow these fragments, each some places in the flat weights, with θ of now as θ_start."""
        self.fragments = [[slice(*place) for place in places] for places in fragments]
        self.now = [{i: self.theta[i] for i in self.of(places)} for places in self.fragments]
        self.start = [_copies(each) for each in self.now]
        self._forget()

    def _forget(self) -> None:
        for each in (self._sent, self._sums, self._moved):
            each.clear()

    def add_gradient(self, weight: float, held: Collection[int]) -> None:
        """Add the gradient, times `weight`, to the sums of all fragments but those `held`."""
        for number in set(range(len(self.now))).difference(held):
            if (sums := self._sums.get(number)) is None:
                self._sums[number] = {i: self.gradients[i] * weight for i in self.now[number]}
                continue
            for i, sum_ in sums.items():
                sum_.add_(self.gradients[i], alpha=weight)

    def step(
        self, learning_rate: float, held: Collection[int], clip: float, bound: float | None
    ) -> None:
        """Step along the gradient, times `clip` and within ±`bound`; fragments `held` stay as they are."""
        for gradient in self.gradients:
            if clip != 1.0:
                gradient.mul_(clip)
            if bound is not None:
                gradient.clamp_(-bound, bound)
        kept = {number: _copies(self.now[number]) for number in self._moved.intersection(held)}
        self._moved.update(set(range(len(self.now))).difference(held))
        self.step_along(learning_rate)
        for number in held:
            _copy(kept.get(number, self.start[number]), self.now[number])

    def read(self, fragment: int, places: Sequence[Place], is_gradient: bool) -> Tensor:
        """What this process tells of places in a fragment's θ_start - θ, or in its sum of gradients.

        (numel,); elements that others tell are 0.
        """
        if is_gradient:
            return self._filled(places, self._sums.get(fragment, {}))
        now = self._filled(places, self.now[fragment])
        return self._filled(places, self.start[fragment]).sub_(now)

    def _filled(self, places: Sequence[Place], tensors: Mapping[int, Tensor]) -> Tensor:
        wanted = [slice(*place) for place in places]
        out = torch.zeros(total(wanted), dtype=self.dtype, device=self.device)
        for place, within in pieces(wanted, slice(0, len(out))):
            self.fill(place, tensors, out[within])
        return out

    def mark_sent(self, fragment: int) -> None:
        """The change of now is on its way; gradients are added up anew."""
        has_moved = fragment in self._moved
        self._sent[fragment] = _copies(self.now[fragment]) if has_moved else self.start[fragment]
        self._sums.pop(fragment, None)

    def take(self, given: Given, fragment: int | None, is_difference: bool) -> None:
        """Take a fragment's new weights as `LocalCopy.follow`; None: all weights as `LocalCopy.load`."""
        if fragment is None:
            self._put(given, dict(enumerate(self.theta)))
            for now, start in zip(self.now, self.start, strict=True):
                _copy(now, start)
            self._forget()
            return
        now, start = self.now[fragment], self.start[fragment]
        new = {i: torch.empty_like(each) for i, each in now.items()}
        self._put(given, new)
        before = self._sent.pop(fragment, start)
        for i, each in now.items():
            each.sub_(before[i])
            if is_difference:
                start[i].sub_(new[i])
            else:
                start[i].copy_(new[i])
            each.add_(start[i])

    def _put(self, given: Given, tensors: Mapping[int, Tensor]) -> None:
        for place, values in given:
            self.put(place, values, tensors)


class Layers(Part):
    """A `Part` of whole parameters, all of which this process tells."""

    def __init__(self, layers: Iterable[tuple[slice, Replica, slice]]) -> None:
        """`layers`: places in the flat weights, and the replicas that have them, and where."""
        known = list(layers)
        self._places = [place for place, _, _ in known]
        self.gradients = [replica.grads[own] for _, replica, own in known]
        theta = [replica.params[own] for _, replica, own in known]
        like = theta[0] if theta else torch.empty(0)
        super().__init__(theta, like.dtype, like.device)

    def of(self, places: Sequence[slice]) -> list[int]:
        return [
            number
            for number, own in enumerate(self._places)
            if any(place.start <= own.start < place.stop for place in places)
        ]

    def fill(self, place: slice, tensors: Mapping[int, Tensor], out: Tensor) -> None:
        for number, values in tensors.items():
            own, there = meeting(self._places[number], place)
            if own.start < own.stop:
                out[there].copy_(values[own])

    def put(self, place: slice, values: Tensor, tensors: Mapping[int, Tensor]) -> None:
        for number, own_values in tensors.items():
            own, given = meeting(self._places[number], place)
            if own.start < own.stop:
                own_values[own].copy_(values[given])


class InProcess(Layers):
    """The `Executor` that is this process, and its `Part`: the whole model."""

    divisor = 1.0

    def __init__(self, replica: Replica, optimizer: LocalOptimizer) -> None:
        self._replica, self._optimizer = replica, optimizer
        super().__init__((place, replica, place) for _, place in replica.layers)

    def order(self, name: str, *given: Any, **told: Any) -> Any:
        return getattr(self, name)(*given, **told)

    @property
    def grad_norm(self) -> float:
        with self._replica.meter("apply"):
            return self._replica.grad_norm()

    @property
    def moments(self) -> Mapping[str, Tensor]:
        return self._optimizer.state

    def step_along(self, learning_rate: float) -> None:
        with self._replica.meter("apply"):
            self._optimizer.step(learning_rate)

    def reset(self) -> None:
        self._optimizer.reset()

    def save(self, folder: str, step: int, keep_last: int) -> None:
        """Nothing: the `LocalCopy` keeps the moments of this process."""

    def take_up(self, moments: Mapping[str, Tensor], folder: str, step: int) -> bool:  # noqa: ARG002
        """Go on with these moments, as far as they are the optimizer's."""
        self._optimizer.resume(moments)
        return True


def _copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {number: each.clone() for number, each in tensors.items()}


def _copy(tensors: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
    for number, each in tensors.items():
        into[number].copy_(each)
