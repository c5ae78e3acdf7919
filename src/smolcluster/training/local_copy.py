"""The copy of the weights that a worker's own steps change, and the weights that it began with.

Where a worker takes many steps between two exchanges, it keeps θ, which its steps change, θ_start, from which
its change Δ = θ_start - θ is counted, and θ of a fragment when its change was sent: what was learnt since
then is kept when the fragment's new weights come. A `LocalCopy` has all three. Where they lie is its own
matter: in this process (`OwnCopy`), or in parts on several.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from smolcluster.configs.schema import GradientClipping
from smolcluster.training.kept import KeptSteps
from smolcluster.training.optimizer import LocalOptimizer
from smolcluster.training.replica import Replica

Fragments = Sequence[Sequence[slice]]
"""Parts of a model, each as places in its flat weights; its values are those of the places, one after the
other."""


class Values(Protocol):
    """A fragment's values (numel,), which may lie elsewhere."""

    def __getitem__(self, place: slice, /) -> Tensor:
        """Those of a place, on the CPU; it is asked for one place after the other."""


class LocalCopy(Protocol):
    """What takes a worker's own steps, after `TrainingContext.compute` has left a gradient."""

    @property
    def sent(self) -> Collection[int]:
        """The fragments whose change is on its way."""

    def clip(self, clipping: GradientClipping) -> float:
        """Clip the gradient if that is enabled, at the latest as `step` uses it; its L2 norm before."""

    def step(self, learning_rate: float, held: Collection[int] = ()) -> None:
        """Step along the gradient; the fragments `held` stay as they are."""

    def change(self, fragment: int) -> Values:
        """Δ = θ_start - θ of a fragment."""

    def mark_sent(self, fragment: int) -> None:
        """The change of now is on its way."""

    def follow(self, fragment: int, values: Tensor, *, is_difference: bool) -> None:
        """Take a fragment's new weights θ', and keep what was learnt since its change was sent.

        θ = θ' + (θ_now - θ_at_send); without a change that was sent, since θ_start. `values` (numel,), on the
        CPU, are θ', or a difference to be taken from θ_start.
        """

    def load(self, weights: Sequence[Tensor]) -> None:
        """Begin with these flat weights, in pieces: what was sent is void."""

    def forget_sent(self) -> None:
        """What is on its way will not be answered."""

    def reset(self) -> None:
        """Forget the moments."""

    def save(self, kept: KeptSteps, step: int, more: Mapping[str, Tensor], keep_last: int) -> None:
        """Keep the moments of now, and `more`, under a step of the run."""

    def take_up(self, kept: KeptSteps, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        """Go on with the moments of the newest step up to this one; that step, and what was kept."""


class Followed:
    """θ, θ_start and θ at the send of each fragment, in tensors of this process.

    Attributes:
        now: each fragment's θ; tensors that others change in place.
        start: each fragment's θ_start.
        sent: by fragment, θ when its change was sent.
        moved: fragments whose θ may not be θ_start.
    """

    def __init__(self, fragments: Sequence[Sequence[Tensor]]) -> None:
        self.now = fragments
        self.start = [[each.clone() for each in parts] for parts in fragments]
        self.sent: dict[int, list[Tensor]] = {}
        self.moved: set[int] = set()

    def restart(self) -> None:
        """θ of now is θ_start."""
        for now, start in zip(self.now, self.start, strict=True):
            _copy(now, start)
        self.sent.clear()
        self.moved.clear()

    def mark_sent(self, fragment: int) -> None:
        self.sent[fragment] = [each.clone() for each in self.now[fragment]]

    def follow(self, fragment: int, values: Sequence[Tensor], *, is_difference: bool) -> None:
        """As `LocalCopy.follow`, of tensors that are shaped as θ's."""
        now, start = self.now[fragment], self.start[fragment]
        since = self.sent.pop(fragment, None) or [each.clone() for each in start]
        for each, begin, before, given in zip(now, start, since, values, strict=True):
            if is_difference:
                begin.sub_(given)
            else:
                begin.copy_(given)
            each.sub_(before).add_(begin)

    @contextmanager
    def holding(self, fragments: Collection[int]) -> Iterator[None]:
        """Let the block step θ, but leave these fragments' as it was before; all steps are taken so."""
        kept = {
            number: [each.clone() for each in self.now[number]]
            for number in self.moved.intersection(fragments)
        }
        self.moved.update(set(range(len(self.now))).difference(fragments))
        yield
        for number in fragments:
            _copy(kept.get(number, self.start[number]), self.now[number])


class OwnCopy:
    """A `LocalCopy` that is this process's replica, stepped by its optimizer."""

    def __init__(self, replica: Replica, optimizer: LocalOptimizer, fragments: Fragments) -> None:
        self._replica, self._optimizer = replica, optimizer
        self._weights = Followed(
            [[replica.params[place] for place in places] for places in fragments]
        )

    @property
    def sent(self) -> Collection[int]:
        return self._weights.sent.keys()

    def start(self, fragment: int) -> Tensor:
        """θ_start of a fragment (numel,)."""
        return torch.cat(self._weights.start[fragment])

    def clip(self, clipping: GradientClipping) -> float:
        return self._replica.clip(clipping)

    def step(self, learning_rate: float, held: Collection[int] = ()) -> None:
        with self._weights.holding(held), self._replica.meter("apply"):
            self._optimizer.step(learning_rate)

    def change(self, fragment: int) -> Tensor:
        return self.start(fragment).sub_(torch.cat(list(self._weights.now[fragment]))).cpu()

    def mark_sent(self, fragment: int) -> None:
        self._weights.mark_sent(fragment)

    def follow(self, fragment: int, values: Tensor, *, is_difference: bool) -> None:
        sizes = [each.numel() for each in self._weights.now[fragment]]
        parts = torch.split(values.to(self._replica.device), sizes)
        self._weights.follow(fragment, parts, is_difference=is_difference)

    def load(self, weights: Sequence[Tensor]) -> None:
        self._replica.load(*weights)
        self._weights.restart()

    def forget_sent(self) -> None:
        self._weights.sent.clear()

    def reset(self) -> None:
        self._optimizer.reset()

    def save(self, kept: KeptSteps, step: int, more: Mapping[str, Tensor], keep_last: int) -> None:
        kept.save(step, {**self._optimizer.state, **more}, keep_last)

    def take_up(self, kept: KeptSteps, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        if (found := kept.load(step)) is not None:
            self._optimizer.resume(found[1])
        return found


def _copy(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for value, target in zip(values, into, strict=True):
        target.copy_(value)
