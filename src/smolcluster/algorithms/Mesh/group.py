"""A rank's part of a mesh that is one worker: it does what rank 0 says, together with all others.

Rank 0 names an order and its arguments; every rank, itself included, calls the method of that name. What is
large goes by the mesh's own collectives, a bucket at a time.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import Computed, MeshTrainer
from smolcluster.errors import UserCodeError
from smolcluster.training.kept import KeptSteps
from smolcluster.training.local_copy import Followed
from smolcluster.training.places import pieces
from smolcluster.training.replica import cut

ORDERS = frozenset(
    {
        "begin",
        "compute",
        "step",
        "change",
        "mark_sent",
        "follow",
        "load",
        "forget_sent",
        "reset",
        "save",
        "take_up",
    }
)
"""Methods of `GroupRank` that rank 0 may name."""
NUM_STEPS = "num_steps"
LOST = "gloo", "connection closed"
"""What backends say when another rank has gone."""
Place = tuple[int, int]
"""Start and stop."""


def is_of_another(error: BaseException) -> bool:
    """Whether another rank's end may have led to it; sharded weights are gathered within the model's code."""
    cause = error.__cause__ if isinstance(error, UserCodeError) else error
    if isinstance(cause, BrokenPipeError | dist.DistError):
        return True
    return isinstance(cause, RuntimeError) and any(word in str(cause).lower() for word in LOST)


class GroupRank:
    """What this rank has of the weights θ and θ_start, and of the optimizer; see `LocalCopy`."""

    def __init__(
        self,
        trainer: MeshTrainer,
        layers: Sequence[tuple[str, slice]],
        bucket_bytes: int,
        log: logging.Logger,
    ) -> None:
        """`layers`: each parameter's place in the flat weights; `bucket_bytes`: of what goes at a time."""
        self._trainer, self._log = trainer, log
        self._shards = Shards(trainer.slots, layers, trainer.groups)
        self._locals = dict(enumerate(slot.local for slot in trainer.slots))
        self._length = max(1, bucket_bytes // trainer.dtype.itemsize)
        self._num_params = max(place.stop for _, place in layers)
        self._computed: Computed | None = None
        self._fragments: list[list[slice]] = []
        self._slots: list[list[int]] = []
        """Of each fragment."""
        self._followed = Followed([])

    @property
    def sent(self) -> Collection[int]:
        """The fragments whose change is on its way."""
        return self._followed.sent.keys()

    def begin(self, fragments: Sequence[Sequence[Place]]) -> None:
        """Follow these fragments, each of some places in the flat weights, with fresh moments."""
        self._fragments = [[slice(*place) for place in places] for places in fragments]
        self._slots = [self._shards.of(places) for places in self._fragments]
        self._followed = Followed([[self._locals[i] for i in slots] for slots in self._slots])
        self.reset()

    def compute(self, indices: Sequence[int], epoch: int, start: int, scale: float) -> Computed:
        """Loss and gradient of these samples, which `step` uses."""
        chosen = torch.tensor(indices, dtype=torch.int32)
        self._computed = self._trainer.compute(chosen, epoch, start, scale)
        return self._computed

    def step(self, learning_rate: float, held: Sequence[int]) -> None:
        if self._computed is None:
            raise RuntimeError("a step without a gradient")
        computed, self._computed = self._computed, None
        with self._followed.holding(held):
            self._trainer.apply(computed, learning_rate)

    def change(self, fragment: int, place: Place) -> Tensor:
        """A place in a fragment's values of θ_start - θ, on rank 0, and on the CPU there."""
        part = slice(*place)
        start, now = self._empty(part).zero_(), self._empty(part).zero_()
        slots = self._slots[fragment]
        starts = dict(zip(slots, self._followed.start[fragment], strict=True))
        nows = dict(zip(slots, self._followed.now[fragment], strict=True))
        for flat, within in pieces(self._fragments[fragment], part):
            self._shards.fill(flat, starts, start[within])
            self._shards.fill(flat, nows, now[within])
        dist.reduce(start.sub_(now), dst=0)
        return start.cpu()

    def mark_sent(self, fragment: int) -> None:
        self._followed.mark_sent(fragment)

    def follow(self, fragment: int, is_difference: bool, values: Tensor | None = None) -> None:
        """`values` (numel,), on the CPU, are given to rank 0 alone."""
        slots, places = self._slots[fragment], self._fragments[fragment]
        new = {i: torch.empty_like(self._locals[i]) for i in slots}
        numel = sum(place.stop - place.start for place in places)
        for bucket in cut(numel, self._length):
            told = self._told(bucket, None if values is None else values[bucket])
            for flat, within in pieces(places, bucket):
                self._shards.put(flat, told[within], new)
        self._followed.follow(fragment, [new[i] for i in slots], is_difference=is_difference)

    def load(self, weights: Sequence[Tensor] | None = None) -> None:
        """`weights`, on the CPU, flat in buckets, are given to rank 0 alone."""
        for number, bucket in enumerate(cut(self._num_params, self._length)):
            told = self._told(bucket, None if weights is None else weights[number])
            self._shards.put(bucket, told, self._locals)
        self._followed.restart()

    def forget_sent(self) -> None:
        self._followed.sent.clear()

    def reset(self) -> None:
        self._trainer.optimizer.resume([{} for _ in self._locals], 0)

    def save(
        self, folder: str, step: int, keep_last: int, more: Mapping[str, Tensor] | None = None
    ) -> None:
        """Each rank keeps its own moments, in a folder of its own."""
        moments = {
            f"{number}.{name}": tensor
            for number in self._locals
            for name, tensor in self._trainer.optimizer.moments(number).items()
        }
        count = torch.tensor(self._trainer.num_steps)
        self._kept(folder).save(step, {**moments, NUM_STEPS: count, **(more or {})}, keep_last)

    def take_up(self, folder: str, step: int) -> tuple[int, dict[str, Tensor]] | None:
        """Go on with the moments of the newest step up to this one, if all ranks have theirs of it."""
        found = self._kept(folder).load(step)
        moments = None if found is None else self._moments_in(found[1])
        usable = -1 if found is None or moments is None else found[0]
        everyone = self._trainer.groups.all_told(usable)
        if found is None or moments is None or any(each != usable for each in everyone):
            return None
        self._trainer.optimizer.resume(moments, int(found[1][NUM_STEPS]))
        return found

    def _moments_in(self, kept: Mapping[str, Tensor]) -> list[dict[str, Tensor]] | None:
        """The moments of each slot; None: they are of other parts, as of another mesh."""
        if NUM_STEPS not in kept:
            return None
        names = self._trainer.optimizer.moment_names if int(kept[NUM_STEPS]) else ()
        moments = [
            {name: kept[key] for name in names if (key := f"{number}.{name}") in kept}
            for number in self._locals
        ]
        is_ours = all(
            each.keys() == set(names)
            and all(tensor.shape == self._locals[number].shape for tensor in each.values())
            for number, each in enumerate(moments)
        )
        return moments if is_ours else None

    def _kept(self, folder: str) -> KeptSteps:
        rank = self._trainer.groups.rank
        own = Path(folder) / f"rank-{rank}" if rank else Path(folder)
        return KeptSteps(own, self._log)

    def _told(self, place: slice, values: Tensor | None) -> Tensor:
        """What rank 0 has of a place, on every rank."""
        told = self._empty(place)
        if values is not None:
            told.copy_(values)
        dist.broadcast(told, src=0)
        return told

    def _empty(self, place: slice) -> Tensor:
        trainer = self._trainer
        device = trainer.groups.device
        return torch.empty(place.stop - place.start, dtype=trainer.dtype, device=device)
