"""A rank of a mesh that is one worker: it does what rank 0 says, together with all others.

Rank 0 names an order and its arguments; every rank, itself included, calls the method of that name. What is
large goes by the mesh's own collectives, a bucket at a time. Orders go through a pipe to each of the other
ranks, which rank 0 has started, so that they may wait for ever; when rank 0 has gone, so do they.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.algorithms.Mesh.meeting import reached, together
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.algorithms.Mesh.watch import launcher_gone
from smolcluster.algorithms.process import process_log
from smolcluster.configs.schema import DatasetPlace, GradientClipping, RunConfig
from smolcluster.errors import PeerLost
from smolcluster.training.builtin import load_workload
from smolcluster.training.compute import BatchLoss
from smolcluster.training.kept import KeptSteps, is_like
from smolcluster.training.local_copy import Part, Place
from smolcluster.training.workload import Workload
from smolcluster.utils.device import use_threads
from smolcluster.utils.stopping import SIGNALS, leave_signals
from smolcluster.wire.security import secret_of_text

START_S = 600.0
"""How long ranks wait for each other at the start."""
END = "end"
NUM_STEPS = "num_steps"
UNCLIPPED = GradientClipping(enabled=False)
"""`Part.step` has clipped already."""


@dataclass(frozen=True)
class Setup:
    """What a rank is told once.

    Attributes:
        workload: the name of the function that makes it; None: what the run's configuration names.
    """

    node: str
    device: torch.device
    num_threads: int | None
    dataset: DatasetPlace
    workload: str | None
    run: RunConfig
    mesh: MeshConfig
    bucket_bytes: int


class GroupRank(Shards, Part):
    """The `Part` of a rank: its shards, stepped by the mesh's optimizer."""

    def __init__(
        self,
        trainer: MeshTrainer,
        layers: Sequence[tuple[str, slice]],
        bucket_bytes: int,
        log: logging.Logger,
    ) -> None:
        """`layers`: as of `Shards`; `bucket_bytes`: of what goes at a time."""
        Shards.__init__(self, trainer, layers)
        theta = [slot.local for slot in trainer.slots]
        Part.__init__(self, theta, trainer.dtype, trainer.groups.device)
        self._trainer, self._optimizer, self._log = trainer, trainer.optimizer, log
        self._most_elements = max(1, bucket_bytes // trainer.dtype.itemsize)
        self.grad_norm = 0.0

    def obey(self, order: str, told: Mapping[str, Any], *given: Any) -> Any:
        """Call the method of this name; see `Executor.order`, whose `given` rank 0 alone has.

        Values go from rank 0 to all ranks, and what these read is summed there.
        """
        arguments = dict(told)
        if order == "take":
            places = [slice(*place) for place in arguments.pop("places")]
            values = [each for _, each in given[0]] if given else None
            given = (self.shared(places, values, self._most_elements),)
        found = getattr(self, order)(*given, **arguments)
        if order == "read":
            dist.reduce(found, dst=0)
        return found

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


def part_of(
    setup: Setup,
    groups: Groups,
    workload: Workload,
    log: logging.Logger,
    layers: Sequence[tuple[str, slice]] = (),
) -> GroupRank:
    """This rank's part; all ranks must build theirs at once. `layers`: as of `Shards`.

    Raises:
        ConfigError: what this machine, the model or the batch cannot do.
    """
    groups.check_data(workload, setup.run.seed)
    train = setup.run.train.model_copy(update={"global_batch_size": None})
    trainer = MeshTrainer(workload, train, setup.mesh, groups, seed=setup.run.seed)
    return GroupRank(trainer, layers, setup.bucket_bytes, log)


def be_rank(setup: Setup, orders: Connection, ranks: Ranks, secret: str) -> None:
    """Be another rank than rank 0, until that says that it is over."""
    raise SystemExit(guarded(partial(_follow, setup, orders, ranks, secret)))


def _follow(setup: Setup, orders: Connection, ranks: Ranks, secret: str) -> None:
    use_threads(setup.num_threads)
    rank, run = ranks.here.start, setup.run
    with process_log("rank", setup.node, rank) as log:
        told, port = secret_of_text(secret), ranks.port or 0
        with (
            closing(reached(ranks.address, port, told, START_S, log.logger)) as store,
            together(
                ranks,
                store,
                {},
                setup.mesh,
                log.logger,
                node=setup.node,
                device=setup.device,
                look=partial(launcher_gone, os.getppid(), rank, setup.node),
            ) as groups,
        ):
            train = run.train.model_copy(update={"workload": setup.workload})
            workload = load_workload(train, run.seed, setup.dataset, log.logger)
            own = part_of(setup, groups, workload, log.logger)
            leave_signals(*SIGNALS)  # rank 0 says when it is over
            for name, arguments in _heard(orders, groups):
                own.obey(name, arguments)


def _heard(orders: Connection, groups: Groups) -> Iterator[tuple[str, dict[str, Any]]]:
    """What rank 0 says, until that is `END`.

    Raises:
        PeerLost: rank 0 has gone.
    """
    while True:
        groups.note("waiting for rank 0's word", waits=True)
        try:
            name, arguments = json.loads(orders.recv_bytes())
        except EOFError:
            raise PeerLost("rank 0 has gone") from None
        if name == END:
            return
        yield name, arguments
