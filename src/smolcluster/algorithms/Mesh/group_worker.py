"""A mesh as one worker: this process is rank 0, holds the session, and starts the other ranks here.

A rank that ends or hangs ends this process, which names it: whoever supervises it starts it again, and it
begins with the server's weights.
"""

import json
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.children import END_S
from smolcluster.algorithms.Mesh.child_ranks import ChildRanks
from smolcluster.algorithms.Mesh.config import MeshConfig, check_tags, pick_backend
from smolcluster.algorithms.Mesh.group_rank import END, START_S, GroupRank, Setup, be_rank, part_of
from smolcluster.algorithms.Mesh.groups import check_torch, lost_named, own_device
from smolcluster.algorithms.Mesh.meeting import joined, part
from smolcluster.algorithms.Mesh.watch import Failure, Watch
from smolcluster.algorithms.spreading import SpreadContext, check_can_be_spread, parts_of
from smolcluster.configs.schema import MeshSizes, NodeConfig
from smolcluster.errors import DEVICE_FAILED, ConfigError, PeerLost, RankLost
from smolcluster.training.build import TrainingContext, most_at_once
from smolcluster.training.compute import BatchLoss
from smolcluster.training.local_copy import ends
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.wire.messages import Welcome

NO_REASON = frozenset({BUG, DEVICE_FAILED, PeerLost.exit_code})
"""Exit codes of a rank that another process may do better than."""
SILENCE_S = 30.0
"""Of a rank that is believed to be gone: it is on this machine, and no network between."""


class Group:
    """All ranks, of which this process is rank 0: what computes for a worker.

    Attributes:
        own: rank 0's part.
    """

    divisor = 1.0

    def __init__(
        self, setups: Sequence[Setup], training: TrainingContext, log: logging.Logger
    ) -> None:
        """Start the other ranks, and wait until they are there.

        Raises:
            RankLost: one has ended; names it.
        """
        self._is_within = False
        """Whether an order was begun, and has not come to a good end."""
        self._is_closed = False
        pipes = [multiprocessing.Pipe(duplex=False) for _ in setups[1:]]
        self._orders = [says for _, says in pipes]
        setup, node = setups[0], setups[0].node
        bodies = [
            partial(be_rank, other, hears)
            for other, (hears, _) in zip(setups[1:], pipes, strict=True)
        ]
        self.others = ChildRanks(bodies, node=node, timeout_s=START_S, log=log)
        for hears, _ in pipes:
            hears.close()
        self._watch = Watch(
            self.others.store,
            0,
            len(setups),
            log,
            node=node,
            hang_timeout_s=setup.mesh.hang_timeout_s,
            silence_s=SILENCE_S,
            look=self.others.failed,
            leave=self._leave,
        )
        try:
            with self._loss_named():  # no order yet: until then ranks may load a dataset
                groups = joined(
                    self._watch, {}, setup.mesh, device=setup.device, check=self._check_alive
                )
                layers = training.replica.layers
                self.own: GroupRank = part_of(setup, groups, training.workload, log, layers)
                self._watch.rest()
        except BaseException:
            self.close()
            raise

    def order(self, name: str, *given: Any, **told: Any) -> Any:
        """See `Executor.order`; what comes of it on this rank.

        Raises:
            RankLost: one has ended; names it.
        """
        if name == "take":
            told["places"] = ends(place for place, _ in given[0])
        with self._loss_named(), self._watch.ordered(name):
            self._say(name, told)
            return self.own.obey(name, told, *given)

    def compute(self, indices: Tensor, epoch: int, start: int, scale: float) -> BatchLoss:
        told = {"epoch": epoch, "start": start, "scale": scale}
        loss: BatchLoss = self.order("compute", indices=indices.tolist(), **told)
        return loss

    @property
    def grad_norm(self) -> float:
        return self.own.grad_norm

    @property
    def moments(self) -> Mapping[str, Tensor]:
        return self.own.moments

    def wait_until_ready(self, check: Callable[[], None] | None = None) -> None:
        """All ranks are here from the beginning on."""

    def close(self) -> None:
        """Let the ranks end."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.close()
        if self._is_within or self.others.ended():  # they wait for each other, and hear nothing
            self.others.end()  # first: what is destroyed may wait for a rank that is stopped
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        with suppress(PeerLost):
            self._say(END, {})
        part(0, len(self._orders) + 1, self.others.store)
        self.others.end(END_S)

    def _say(self, order: str, told: Mapping[str, Any]) -> None:
        """Raises PeerLost: a rank has ended."""
        line = json.dumps([order, told]).encode()
        for rank, orders in enumerate(self._orders, 1):
            try:
                orders.send_bytes(line)
            except OSError as error:
                raise PeerLost(f"rank {rank} hears nothing: {error}") from error

    def _check_alive(self) -> None:
        """Raises PeerLost: a rank has ended before all were there."""
        if (failure := self.others.failed()) is not None:
            raise PeerLost(failure.reason)

    @contextmanager
    def _loss_named(self) -> Iterator[None]:
        """Name the rank by which what all ranks do together has failed.

        Raises:
            RankLost: one has ended.
        """
        self._is_within = True
        try:
            with lost_named():
                yield
        except PeerLost as error:
            raise self._loss(self._watch.first_failed(error), str(error)) from error
        self._is_within = False

    def _loss(self, failure: Failure | None, otherwise: str = "") -> RankLost:
        """A rank's end; one that says itself why it ends would end so again."""
        if failure is None:
            return RankLost(f"the ranks of this worker have parted: {otherwise}")
        loss = RankLost(str(failure))
        code = self.others.code_of(failure.rank) if failure.rank else None
        if code is not None and code > 0 and code not in NO_REASON:
            loss.exit_code = code
        return loss

    def _leave(self, _code: int) -> None:
        """End this process, whose training thread waits for a rank that has ended, or hangs."""
        self.others.end()
        os._exit(self._loss(self._watch.failure).exit_code)


def spread(
    welcome: Welcome,
    training: TrainingContext,
    *,
    node: NodeConfig,
    name: str,
    workload: str | None,
    log: logging.Logger,
) -> SpreadContext:
    """Spread what is trained over the ranks that node `name` is to have; `training` is its outline.

    Args:
        workload: the name of the function that makes it; None: what the run's configuration names.

    Raises:
        ConfigError: this machine, the model or the batch does not allow it.
        RankLost: a rank has ended as it began; names it.
    """
    assert node.ranks is not None  # noqa: S101 - else nobody asks
    check_torch()
    check_can_be_spread(welcome, training, name, "ranks")
    size = node.ranks.world_size
    devices = [own_device(node.device, rank, "ranks to null") for rank in range(size)]
    backend = pick_backend("auto", devices[0].type)
    check_tags(backend, node.ranks.pp, f"nodes.{name}.ranks.pp")
    train = training.recipe.applied_to(welcome.run.train)
    at_once = most_at_once(train, node.microbatch)
    mesh = mesh_for(node.ranks, train.samples_per_push, at_once, name)
    setups = [
        Setup(
            node=name,
            device=device,
            num_threads=node.threads or max(1, (os.cpu_count() or 1) // size),
            dataset=node.dataset,
            workload=workload,
            run=welcome.run,
            mesh=mesh,
            bucket_bytes=training.replica.bucket_bytes,
        )
        for device in devices
    ]
    log.info("this worker has %d ranks, %s", size, node.ranks)
    group = Group(setups, training, log)
    return SpreadContext(**parts_of(training), others=group)


def mesh_for(sizes: MeshSizes, batch_size: int, at_once: int | None, name: str) -> MeshConfig:
    """The mesh that computes batches of so many samples, `at_once` of them a rank at most.

    Raises:
        ConfigError: they cannot be divided.
    """
    share, rest = divmod(batch_size, sizes.num_shares)
    possible = [number for number in range(sizes.pp, share + 1) if share % number == 0]
    if rest or not possible:
        least = sizes.num_shares * sizes.pp
        raise ConfigError(
            f"nodes.{name}.ranks is {sizes}, but a batch has {batch_size} samples: batch_size must be a "
            f"multiple of {least} there"
        )
    wanted = max(2 * sizes.pp if sizes.pp > 1 else 1, math.ceil(share / (at_once or share)))
    number = next((each for each in possible if each >= wanted), possible[-1])
    return MeshConfig(mesh=sizes, microbatches=number)
