"""A mesh as one worker: this process is rank 0, holds the session, and starts the other ranks here.

Orders go to the other ranks as lines on their standard input, so that they may wait for ever; when it ends,
so do they. A rank that ends or hangs ends this process, which names it: whoever supervises it starts it
again, and it begins with the server's weights.
"""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.group_rank import (
    END,
    GroupRank,
    Setup,
    is_of_another,
    join_group,
)
from smolcluster.algorithms.Mesh.groups import check_torch, own_device
from smolcluster.algorithms.spreading import SpreadContext, check_can_be_spread, parts_of
from smolcluster.configs.schema import MeshSizes, NodeConfig
from smolcluster.errors import DEVICE_FAILED, ConfigError, RankLost, UserCodeError
from smolcluster.training.build import TrainingContext, most_at_once
from smolcluster.training.compute import BatchLoss
from smolcluster.training.local_copy import ends
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.units import format_duration
from smolcluster.wire.messages import Welcome

START = "start"
POLL_S = 0.2
END_TIMEOUT_S = 10.0
"""How long ranks may take to end, and this process to say why it ends."""
PATIENCE_S, LEAST_PATIENCE_S, PATIENCE = 600.0, 30.0, 10.0
"""How long an order may take before any was done; at least; and times the longest so far."""


class Group:
    """All ranks, of which this process is rank 0: what computes for a worker.

    Attributes:
        own: rank 0's part.
    """

    divisor = 1.0

    def __init__(
        self,
        setups: Sequence[Setup],
        folder: "tempfile.TemporaryDirectory[str]",
        training: TrainingContext,
        log: logging.Logger,
    ) -> None:
        """Start the other ranks, and wait until they are there; they find each other by `folder`.

        Raises:
            RankLost: one has ended; names it.
        """
        self._log, self._folder = log, folder
        self._under_way: tuple[str, float] | None = None
        self._longest_s = 0.0
        self._closed = threading.Event()
        self._is_within = False
        """Whether an order was begun, and has not come to a good end."""
        self.children = {setup.rank: _started(setup) for setup in setups[1:]}
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        try:
            with self._doing(START):
                self.own: GroupRank = join_group(setups[0], training.workload, log)
        except BaseException:
            self._kill()
            raise

    def order(self, name: str, *given: Any, **told: Any) -> Any:
        """See `Executor.order`; what comes of it on this rank.

        Raises:
            RankLost: one has ended; names it.
        """
        if name == "take":
            told["places"] = ends(place for place, _ in given[0])
        with self._doing(name):
            for child in self.children.values():
                _say(child, name, told)
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
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._is_within:  # else they wait for each other, and read nothing
            for child in self.children.values():
                with suppress(OSError):
                    _say(child, END, {})
            end = time.monotonic() + END_TIMEOUT_S
            for child in self.children.values():
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, end - time.monotonic()))
        self._kill()
        dist.destroy_process_group()

    def _kill(self) -> None:
        self._closed.set()
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
            with suppress(OSError):
                assert child.stdin is not None  # noqa: S101 - as above
                child.stdin.close()
        self._folder.cleanup()

    @contextmanager
    def _doing(self, order: str) -> Iterator[None]:
        """Name the rank by which what all ranks do together has failed.

        Raises:
            RankLost: one has ended.
        """
        began = time.monotonic()
        self._under_way, self._is_within = (order, began), True
        try:
            yield
        except (RuntimeError, BrokenPipeError, UserCodeError) as error:
            if not is_of_another(error):
                raise
            end = time.monotonic() + END_TIMEOUT_S
            while (loss := self._ended()) is None and time.monotonic() < end:
                time.sleep(POLL_S / 4)
            self._kill()
            loss = loss or RankLost(f"the ranks of this worker have parted: {error}")
            raise loss from error
        finally:
            self._under_way = None
        self._is_within = False
        if order != START:
            self._longest_s = max(self._longest_s, time.monotonic() - began)

    def _ended(self) -> RankLost | None:
        for rank, child in self.children.items():
            if (code := child.poll()) is not None:
                return loss_of(rank, len(self.children) + 1, code)
        return None

    def _hangs(self) -> RankLost | None:
        """Whether what is under way takes longer than it can."""
        if (under_way := self._under_way) is None:
            return None
        order, began = under_way
        took_s = time.monotonic() - began
        if took_s < patience_s(self._longest_s):
            return None
        stopped = [str(rank) for rank, child in self.children.items() if is_stopped(child.pid)]
        told = f"; stopped: rank {', '.join(stopped)}" if stopped else ""
        return RankLost(f"the ranks have not done {order!r} for {format_duration(took_s)}{told}")

    def _watch(self) -> None:
        """End this process where its training thread waits for a rank that has ended, or hangs."""
        while not self._closed.wait(POLL_S):
            loss = self._ended() or self._hangs()
            if loss is None or self._closed.wait(END_TIMEOUT_S):
                continue
            if self._ended() is None and self._hangs() is None:
                continue
            self._log.error("%s", loss)
            self._kill()
            time.sleep(1.0)  # the log is written by other threads
            os._exit(loss.exit_code)


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
    train = training.recipe.applied_to(welcome.run.train)
    at_once = most_at_once(train, node.microbatch)
    mesh = mesh_for(node.ranks, train.samples_per_push, at_once, name)
    folder = tempfile.TemporaryDirectory(prefix="smolcluster-ranks-")
    layers = tuple((key, place.start, place.stop) for key, place in training.replica.layers)
    size = node.ranks.world_size
    setups = [
        Setup(
            node=name,
            rank=rank,
            store=str(Path(folder.name) / "store"),
            device=str(own_device(node.device, rank, "ranks to null")),
            num_threads=node.threads or max(1, (os.cpu_count() or 1) // size),
            dataset=node.dataset,
            workload=workload,
            run=welcome.run,
            mesh=mesh,
            layers=layers,
            bucket_bytes=training.replica.bucket_bytes,
        )
        for rank in range(size)
    ]
    log.info("this worker has %d ranks, %s", size, node.ranks)
    group = Group(setups, folder, training, log)
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


def _started(setup: Setup) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "smolcluster.algorithms.Mesh.group_rank"],
        stdin=subprocess.PIPE,
    )
    with suppress(BrokenPipeError):  # it has ended, which is found out
        _write(child, setup.model_dump_json())
    return child


def _say(child: "subprocess.Popen[bytes]", order: str, told: Mapping[str, Any]) -> None:
    _write(child, json.dumps([order, told]))


def _write(child: "subprocess.Popen[bytes]", line: str) -> None:
    assert child.stdin is not None  # noqa: S101 - `_started` has opened it
    child.stdin.write(f"{line}\n".encode())
    child.stdin.flush()


def patience_s(longest_s: float) -> float:
    """How long an order may take, after one that took `longest_s`; 0: none was done."""
    return max(LEAST_PATIENCE_S, PATIENCE * longest_s) if longest_s else PATIENCE_S


def loss_of(rank: int, world_size: int, code: int) -> RankLost:
    """A rank's end; one that says itself why it ends would end so again."""
    how = f"ended with code {code}: its message is above"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    loss = RankLost(f"rank {rank} of the {world_size} of this worker {how}")
    if code > 0 and code not in (BUG, DEVICE_FAILED):
        loss.exit_code = code
    return loss


def is_stopped(pid: int) -> bool:
    if not hasattr(os, "waitid"):
        return False
    flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, flags) is not None
    return False
