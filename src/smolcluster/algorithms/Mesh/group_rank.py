"""A rank of a mesh that is one worker, other than rank 0: `python -m smolcluster.algorithms.Mesh.group_rank`.

On its standard input: a line with its `Setup`, then orders, a line each, until `END`. When the input ends
without it, rank 0 has gone, and so does this process, whatever it is doing.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch._C._distributed_c10d import FileStore

from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.Mesh.config import MeshConfig, pick_backend
from smolcluster.algorithms.Mesh.group import GroupRank, is_of_another
from smolcluster.algorithms.Mesh.groups import STEP_TIMEOUT, Groups
from smolcluster.algorithms.Mesh.meeting import use_interface
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.algorithms.process import process_log
from smolcluster.configs.schema import DatasetPlace, RunConfig
from smolcluster.training.builtin import load_workload
from smolcluster.training.workload import Workload
from smolcluster.utils.device import pick_device, use_threads

QUIET_S = 20.0
"""How long a rank waits to be ended before it says that another one has."""
END = "end"


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
