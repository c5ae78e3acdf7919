"""`tensor_parallel` of an orchestrator: its workers are ranks of a mesh, processes of its own machine."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.Mesh import loop
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.process import be_rank, device_and_backend, together
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.algorithms.supervision import spawned
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.runs.summary import Summary
from smolcluster.training.hooks import Hooks
from smolcluster.training.workload import Workload
from smolcluster.utils.addresses import free_port
from smolcluster.utils.device import use_threads
from smolcluster.wire.security import GROUP_SECRET, new_secret

NEEDS = (
    "the model, its loss and its data must be of a module's own classes and functions, for each rank of "
    "tensor_parallel is a process"
)
END_S = 15.0
"""How long a rank may take to end by itself."""


@contextmanager
def local_ranks(
    make_settings: Callable[[], Settings], workload: Workload, log: logging.Logger
) -> Iterator[Callable[[ServerContext], Summary]]:
    """What trains a run on them, for its owner, which is rank 0; the others are there as long as the block.

    `make_settings` is called in each process.

    Raises:
        ConfigError: this machine cannot do it, or what is trained cannot be given to another process.
        PeerLost: another rank failed first, which is named.
    """
    if workload.is_stream:
        raise ConfigError(
            "tensor_parallel is True, but the training data are a stream, which only one process can read: "
            "give a dataset with __getitem__ and __len__"
        )
    settings = make_settings()
    config = settings.of(MeshConfig)
    device, backend = device_and_backend(config, settings)
    size, port = config.mesh.world_size, free_port()
    use_threads(settings.node.threads)

    told = new_secret()

    def ranks(rank: int) -> Ranks:
        return Ranks(range(rank, rank + 1), size, True, "localhost", port)

    followed = _for_others(workload)
    processes: list[BaseProcess] = []
    try:
        for rank in range(1, size):
            processes.append(
                spawned(
                    partial(_be_rank, ranks(rank), told, make_settings, followed),
                    NEEDS,
                    daemon=True,
                )
            )
        os.environ[GROUP_SECRET] = told  # which is taken out at once
        meeting = together(
            ranks(0),
            config,
            settings,
            log,
            device=device,
            backend=backend,
            start_timeout_s=settings.cluster.start_timeout_s,
            check=partial(_check_alive, processes),
        )
        with meeting as groups:
            yield lambda context: loop.train(context, config, groups)
        for process in processes:
            process.join(END_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _for_others(workload: Workload) -> Workload:
    """What ranks that follow need of it: rank 0 evaluates, and calls the hooks."""
    return Workload(
        workload.maker,
        workload.loss,
        workload.train,
        metrics={},  # the default cannot be pickled
        name=workload.name,
        fingerprint=workload.fingerprint,
        training=replace(workload.training, hooks=Hooks()),
    )


def _check_alive(processes: Sequence[BaseProcess]) -> None:
    """Raises LaunchError: a rank has ended before all were there."""
    for rank, process in enumerate(processes, start=1):
        if process.exitcode is not None:
            raise LaunchError(
                f"rank {rank} of tensor_parallel has ended (exit code {process.exitcode}): its message is "
                "above"
            )


def _be_rank(
    ranks: Ranks, told: str, make_settings: Callable[[], Settings], workload: Workload
) -> None:
    os.environ |= {"LOCAL_RANK": str(ranks.here.start), GROUP_SECRET: told}

    def body() -> None:
        settings = make_settings()
        be_rank(
            ranks,
            settings,
            start_timeout_s=settings.cluster.start_timeout_s,
            launcher=os.getppid(),
            tells=None,
            vocab_size=None,
            run_id=None,
            resume=None,
            workload=workload,
        )

    raise SystemExit(guarded(body))
