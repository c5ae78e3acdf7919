"""Brings all weights and moments of a mesh to rank 0 while training goes on.

Training waits until each rank has copied its part: rank 0 to where it belongs, the others to memory of their
hosts that they keep for it. A thread of each rank then sends or receives the copies, over a group of Gloo
that nothing else uses, whatever the mesh's backend.

Gloo says that a connection is broken to whoever waits for something that has not begun to arrive, and to
nobody else. So another thread of rank 0 waits for the word by which each rank ends.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.groups import STEP_TIMEOUT
from smolcluster.algorithms.Mesh.links import work_of
from smolcluster.algorithms.Mesh.shards import Shard, Shards
from smolcluster.algorithms.Mesh.trainer import WEIGHTS, MeshTrainer
from smolcluster.utils.background import Background

LOOK_EVERY_S = 0.5
END_TAG = 1
"""Of a rank's last word."""


class StateGathering:
    """A rank's part in it. Every rank must make it at once, and call `begin` at the same steps."""

    def __init__(self, trainer: MeshTrainer, shards: Shards) -> None:
        groups = trainer.groups
        self._trainer, self._own = trainer, shards.sent
        said = groups.all_told(
            [
                [each.begin, each.numel, each.width, each.rows, each.columns]
                for each in self._own.values()
            ]
        )
        self._others = [[Shard(*each) for each in rank] for rank in said[1:]]
        self._group: Any = dist.new_group(backend="gloo", timeout=STEP_TIMEOUT)
        self._copies: dict[tuple[int, str], Tensor] = {}
        largest = max((each.size for rank in self._others for each in rank), default=0)
        self._received = torch.empty(largest if groups.rank == 0 else 0, dtype=trainer.dtype)
        self._thread = Background("gathering", partial(torch.set_num_threads, 1))
        self._watching = Background("gathering's end")
        self._running: list[Future[None]] = []
        self._num_here = 0
        self._is_abandoned = threading.Event()

    @property
    def has_failed(self) -> bool:
        """Whether the one that was begun last has; what rank 0 has may be of two steps then."""
        return any(each.done() and each.exception() is not None for each in self._running)

    def begin(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Copy this rank's part, and let it go to rank 0; waits for the gathering before this one.

        `state`: of rank 0, the flat tensor of each moment, and the weights as `WEIGHTS`, to be filled.

        Raises:
            RuntimeError: the gathering before has failed, as where a rank has ended.
        """
        self.wait()
        optimizer = self._trainer.optimizer
        moments = (WEIGHTS, *(optimizer.moment_names if optimizer.num_steps else ()))
        for slot, shard in self._own.items():
            kept = {WEIGHTS: self._trainer.slots[slot].local, **optimizer.moments(slot)}
            for moment in moments:
                if state is None:
                    self._copy(slot, moment, kept[moment])
                else:
                    shard.place_whole(kept[moment], state[moment])
        if state is None:
            self._running = [self._thread.submit(partial(self._send, moments))]
            return
        self._running = [
            self._watching.submit(partial(self._hear_ends, self._awaited_ends())),
            self._thread.submit(partial(self._receive, moments, state)),
        ]

    def wait(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Return when what was begun last is over; `on_progress` is called as it gets on.

        Raises:
            RuntimeError: it has failed, or was abandoned.
        """
        running, num_here = self._running, -1
        while wait(running, 0.0).not_done and not self.has_failed:
            if self._is_abandoned.is_set():
                raise RuntimeError("the weights are not waited for any more")
            if self._num_here != num_here:
                num_here = self._num_here
                on_progress()
            wait(running, LOOK_EVERY_S, FIRST_EXCEPTION)
        for each in filter(Future.done, running):
            each.result()

    def abandon(self) -> None:
        """Let all who wait, now or later, do so no more: this process ends at once."""
        self._is_abandoned.set()

    def _copy(self, slot: int, moment: str, local: Tensor) -> None:
        copy = self._copies.get((slot, moment))
        if copy is None:
            copy = torch.empty(local.shape, dtype=local.dtype)
            self._copies[slot, moment] = copy
        copy.copy_(local)

    def _send(self, moments: Sequence[str]) -> None:
        for slot in self._own:
            for moment in moments:
                dist.send(self._copies[slot, moment], dst=0, group=self._group)
        dist.send(torch.zeros(1), dst=0, group=self._group, tag=END_TAG)

    def _receive(self, moments: Sequence[str], state: Mapping[str, Tensor]) -> None:
        for rank, shards in enumerate(self._others, 1):
            for shard in shards:
                part = self._received[: shard.size]
                for moment in moments:
                    dist.recv(part, src=rank, group=self._group)
                    shard.place_whole(part, state[moment])
                    self._num_here += 1

    def _awaited_ends(self) -> list[dist.Work]:
        """The last words of all ranks, which are waited for from now on."""
        return [
            work_of(dist.irecv(torch.zeros(1), src=rank, group=self._group, tag=END_TAG))
            for rank, _ in enumerate(self._others, 1)
        ]

    def _hear_ends(self, ends: Sequence[dist.Work]) -> None:
        for each in ends:
            each.wait()
