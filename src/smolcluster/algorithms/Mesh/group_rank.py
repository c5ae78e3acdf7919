"""A rank of a mesh that is one worker: it does what rank 0 says, together with all others.

Rank 0 names an order and its arguments; every rank, itself included, calls the method of that name. What is
large goes by the mesh's own collectives, a bucket at a time.

Other ranks than rank 0 are processes: `python -m smolcluster.algorithms.Mesh.group_rank`. On their standard
input comes a line with their `Setup`, then orders, a line each, until `END`. When the input ends without it,
rank 0 has gone, and so does the process, whatever it is doing.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.Mesh.config import MeshConfig, pick_backend
from smolcluster.algorithms.Mesh.groups import STEP_TIMEOUT, Groups
from smolcluster.algorithms.Mesh.meeting import use_interface
from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.algorithms.process import process_log
from smolcluster.configs.schema import DatasetPlace, GradientClipping, RunConfig
from smolcluster.errors import UserCodeError
from smolcluster.training.builtin import load_workload
from smolcluster.training.compute import BatchLoss
from smolcluster.training.kept import KeptSteps, is_like
from smolcluster.training.local_copy import Given, Part, Place
from smolcluster.training.replica import cut
from smolcluster.training.workload import Workload
from smolcluster.utils.device import pick_device, use_threads

QUIET_S = 20.0
"""How long a rank waits to be ended before it says that another one has."""
END = "end"
NUM_STEPS = "num_steps"
LOST = "gloo", "connection closed"
"""What backends say when another rank has gone."""
UNCLIPPED = GradientClipping(enabled=False)
"""`Part.step` has clipped already."""


class Setup(BaseModel):
    """What a rank is told once."""

    model_config = ConfigDict(extra="forbid")

    node: str
    rank: int
    store: str
    """The file by which ranks of this machine find each other."""
    device: str
    num_threads: int | None
    dataset: DatasetPlace
    workload: str | None
    """The name of the function that makes it; None: what the run's configuration names."""
    run: RunConfig
    mesh: MeshConfig
    layers: tuple[tuple[str, int, int], ...]
    """Each parameter's place in the flat weights."""
    bucket_bytes: int


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
        if not is_like(self.moments, moments):
            return False
        names = self._optimizer.moment_names
        kept = [
            {name: moments[f"{number}.{name}"] for name in names}
            for number in range(len(self.theta))
        ]
        self._optimizer.resume(kept, int(moments[NUM_STEPS]))
        return True

    def _kept(self, folder: str) -> KeptSteps:
        return KeptSteps(Path(folder) / f"rank-{self._trainer.groups.rank}", self._log)


def join_group(setup: Setup, workload: Workload, log: logging.Logger) -> GroupRank:
    """Wait for the other ranks, and build this one's part.

    Raises:
        ConfigError: what this machine, the model or the batch cannot do.
    """
    device = pick_device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = setup.mesh.mesh.world_size
    # all ranks are here: none of what they say to each other shall be heard elsewhere
    use_interface("lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        pick_backend(setup.mesh.backend, device.type),
        store=FileStore(setup.store, world_size),
        rank=setup.rank,
        world_size=world_size,
        timeout=STEP_TIMEOUT,
    )
    groups = Groups(setup.mesh.mesh, device)
    groups.check_data(workload, setup.run.seed)
    train = setup.run.train.model_copy(update={"global_batch_size": None})
    trainer = MeshTrainer(workload, train, setup.mesh, groups, seed=setup.run.seed)
    layers = [(name, slice(start, stop)) for name, start, stop in setup.layers]
    return GroupRank(trainer, layers, setup.bucket_bytes, log)


def main() -> int:
    return guarded(_be_rank)


def _be_rank() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 says when it is over
    setup = Setup.model_validate_json(sys.stdin.readline())
    orders: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), name="orders", daemon=True).start()
    use_threads(setup.num_threads)
    with process_log("rank", setup.node, setup.rank) as log:
        run = setup.run
        train = run.train.model_copy(update={"workload": setup.workload})
        workload = load_workload(train, run.seed, setup.dataset, log.logger)
        own = join_group(setup, workload, log.logger)
        while (order := orders.get())[0] != END:
            name, arguments = order
            try:
                own.obey(name, arguments)
            except Exception as error:
                if is_of_another(error):
                    time.sleep(QUIET_S)  # rank 0 names the other one, and ends this one
                raise
        dist.destroy_process_group()


def _read(orders: "queue.SimpleQueue[tuple[str, dict[str, Any]]]") -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        orders.put((name, arguments))
        if name == END:
            return
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
