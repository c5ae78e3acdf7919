"""A rank's part of a mesh that is one worker: it does what rank 0 says, together with all others.

Rank 0 names an order and its arguments; every rank, itself included, calls the method of that name. What is
large goes by the mesh's own collectives, a bucket at a time.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import UserCodeError
from smolcluster.training.compute import BatchLoss
from smolcluster.training.kept import KeptSteps
from smolcluster.training.local_copy import Given, Part, Place
from smolcluster.training.replica import cut

NUM_STEPS = "num_steps"
LOST = "gloo", "connection closed"
"""What backends say when another rank has gone."""
UNCLIPPED = GradientClipping(enabled=False)
"""`Part.step` has clipped already."""


def is_of_another(error: BaseException) -> bool:
    """Whether another rank's end may have led to it; sharded weights are gathered within the model's code."""
    cause = error.__cause__ if isinstance(error, UserCodeError) else error
    if isinstance(cause, BrokenPipeError | dist.DistError):
        return True
    return isinstance(cause, RuntimeError) and any(word in str(cause).lower() for word in LOST)


class GroupRank(Shards, Part):
    """The `Part` of a rank: its shards, stepped by the mesh's optimizer."""

    def __init__(
        self,
        trainer: MeshTrainer,
        layers: Sequence[tuple[str, slice]],
        bucket_bytes: int,
        log: logging.Logger,
    ) -> None:
        """`layers`: each parameter's place in the flat weights; `bucket_bytes`: of what goes at a time."""
        Shards.__init__(self, trainer.slots, layers, trainer.groups)
        theta = [slot.local for slot in trainer.slots]
        Part.__init__(self, theta, trainer.dtype, trainer.groups.device)
        self._trainer, self._optimizer, self._log = trainer, trainer.optimizer, log
        self._length = max(1, bucket_bytes // trainer.dtype.itemsize)
        self.grad_norm = 0.0

    def obey(self, order: str, told: Mapping[str, Any], *given: Any) -> Any:
        """Call the method of this name; see `Executor.order`, whose `given` rank 0 alone has.

        Values go from rank 0 to all ranks, and what these read is summed there.
        """
        arguments = dict(told)
        if order == "take":
            given = (self._shared(arguments.pop("places"), *given),)
        found = getattr(self, order)(*given, **arguments)
        if order == "read":
            dist.reduce(found, dst=0)
        return found

    def _shared(
        self, places: Sequence[Place], given: Given | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """What rank 0 is given of these places, a bucket at a time, on every rank."""
        values = [None] * len(places) if given is None else [each for _, each in given]
        for (start, stop), each in zip(places, values, strict=True):
            for bucket in cut(stop - start, self._length):
                numel = bucket.stop - bucket.start
                told = torch.empty(numel, dtype=self.dtype, device=self.device)
                if each is not None:
                    told.copy_(each[bucket])
                dist.broadcast(told, src=0)
                yield slice(start + bucket.start, start + bucket.stop), told

    def begin(self, fragments: Sequence[Sequence[Place]]) -> None:
        """As any `Part`, with fresh moments."""
        super().begin(fragments)
        self.reset()

    def compute(self, indices: Sequence[int], epoch: int, start: int, scale: float) -> BatchLoss:
        """The loss of these samples, whose gradient is here then."""
        chosen = torch.tensor(indices, dtype=torch.int32)
        found = self._trainer.compute(chosen, epoch, start, scale)
        self.gradients, self.grad_norm = found.gradients, found.grad_norm
        return BatchLoss(found.loss, found.num_terms)

    def step_along(self, learning_rate: float) -> None:
        self._optimizer.step(self.gradients, self.grad_norm, UNCLIPPED, learning_rate)

    def reset(self) -> None:
        self._optimizer.resume([{} for _ in self.theta], 0)

    @property
    def moments(self) -> dict[str, Tensor]:
        """What of the optimizer's state lies here, and the steps that it has taken."""
        found = {
            f"{number}.{name}": tensor
            for number in range(len(self.theta))
            for name, tensor in self._optimizer.moments(number).items()
        }
        return {**found, NUM_STEPS: torch.tensor(self._optimizer.num_steps)}

    def save(self, folder: str, step: int, keep_last: int) -> None:
        """Keep this rank's moments in a folder of its own; rank 0's are kept with the `LocalCopy`."""
        if self._trainer.groups.rank:
            self._kept(folder).save(step, self.moments, keep_last)

    def take_up(
        self, moments: Mapping[str, Tensor] | None = None, *, folder: str, step: int
    ) -> bool:
        """Go on with the moments of a step, of which rank 0 is given its own; whether all ranks have them."""
        if moments is None:
            found = self._kept(folder).load(step)
            moments = found[1] if found is not None and found[0] == step else {}
        return all(self._trainer.groups.all_told(self._resumed(moments)))

    def _resumed(self, moments: Mapping[str, Tensor]) -> bool:
        """Go on with such `moments`; False: they are of other parts, as of another mesh."""
        if NUM_STEPS not in moments:
            return False
        num_steps = int(moments[NUM_STEPS])
        names = self._optimizer.moment_names if num_steps else ()
        kept = [
            {name: moments[key] for name in names if (key := f"{number}.{name}") in moments}
            for number in range(len(self.theta))
        ]
        is_ours = all(
            each.keys() == set(names) and all(tensor.shape == own.shape for tensor in each.values())
            for each, own in zip(kept, self.theta, strict=True)
        )
        if is_ours:
            self._optimizer.resume(kept, num_steps)
        return is_ours

    def _kept(self, folder: str) -> KeptSteps:
        return KeptSteps(Path(folder) / f"rank-{self._trainer.groups.rank}", self._log)
