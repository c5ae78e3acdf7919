"""`tensor_parallel` of an orchestrator: its workers are ranks of a mesh, processes of its own machine."""

import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from smolcluster.algorithms.children import END_S
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.Mesh import loop
from smolcluster.algorithms.Mesh.child_ranks import ChildRanks
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.meeting import together
from smolcluster.algorithms.Mesh.process import be_rank, device_for, told
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.runs.summary import Summary
from smolcluster.training.hooks import Hooks
from smolcluster.training.workload import Workload
from smolcluster.utils.device import use_threads
from smolcluster.wire.security import GROUP_SECRET


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
    device, node = device_for(config, settings), platform.node()
    use_threads(settings.node.threads)
    body = partial(_be_rank, make_settings, _for_others(workload))
    others = ChildRanks(
        [body] * (config.mesh.world_size - 1),
        node=node,
        timeout_s=settings.cluster.start_timeout_s,
        log=log,
    )
    patience_s = 0.0
    try:
        with together(
            others.ranks[0],
            others.store,
            told(settings, config),
            config,
            log,
            node=node,
            device=device,
            encryption=settings.cluster.encryption,
            look=others.failed,
            check=partial(_check_alive, others),
        ) as groups:
            yield lambda context: loop.train(context, config, groups)
        patience_s = END_S
    finally:
        others.end(patience_s)


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


def _check_alive(others: ChildRanks) -> None:
    """Raises LaunchError: a rank has ended before all were there."""
    if (ended := others.ended()) is not None:
        rank, code = ended
        raise LaunchError(
            f"rank {rank} of tensor_parallel has ended (exit code {code}): its message is above"
        )


def _be_rank(
    make_settings: Callable[[], Settings], workload: Workload, ranks: Ranks, secret: str
) -> None:
    os.environ |= {"LOCAL_RANK": str(ranks.here.start), GROUP_SECRET: secret}

    def body() -> None:
        settings = make_settings()
        be_rank(
            ranks,
            settings,
            start_timeout_s=settings.cluster.start_timeout_s,
            launcher=os.getppid(),
            vocab_size=None,
            run_id=None,
            resume=None,
            workload=workload,
        )

    raise SystemExit(guarded(body))
