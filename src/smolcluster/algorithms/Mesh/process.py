"""A rank as a process: its configuration, its device, its log, and its part of the run."""

import json
import os
import platform
import signal
from collections.abc import Callable, MutableMapping
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from smolcluster.algorithms.Mesh import loop
from smolcluster.algorithms.Mesh.config import MeshConfig, check_tags, pick_backend
from smolcluster.algorithms.Mesh.groups import Groups, check_torch, own_device
from smolcluster.algorithms.Mesh.meeting import is_elsewhere, open_store, together
from smolcluster.algorithms.Mesh.ranks import Ranks, place_here
from smolcluster.algorithms.Mesh.watch import Failure, launcher_gone
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.algorithms.process import process_log
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import SINGLE
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.paths import create_run, runs_root
from smolcluster.training.builtin import load_workload
from smolcluster.training.workload import Workload
from smolcluster.utils.device import use_threads
from smolcluster.utils.stopping import leave_signals
from smolcluster.version import __version__
from smolcluster.wire.security import (
    GROUP_SECRET,
    Secret,
    cluster_secret,
    secret_of_text,
)


def be_rank(
    ranks: Ranks,
    settings: Settings,
    *,
    start_timeout_s: float,
    launcher: int | None,
    vocab_size: int | None,
    run_id: str | None,
    resume: str | None,
    has_progress: bool = True,
    workload: Workload | None = None,
    node: str | None = None,
    on_failure: Callable[[Failure], None] = lambda _: None,
) -> None:
    """Be the rank that `ranks` names; rank 0 owns the run.

    Args:
        settings: of this rank's machine, and of the mesh.
        launcher: the process with which this one ends; None: it does not.
        vocab_size: what was asked for; the vocabulary is the tokenizer's.
        has_progress: whether rank 0 shows how far the run is, and what came of it.
        workload: what is trained; None: what the settings name.
        node: this machine's name in all that is said of the rank; None: its host name.
        on_failure: hears once who has failed first.

    Raises:
        ConfigError: what this machine, the model or the batch cannot do.
        ConnectTimeout: ranks are missing; names them.
        PeerLost: another rank failed first, which is named.
    """
    rank, node = ranks.here.start, node or platform.node()
    config = settings.of(MeshConfig)
    device = device_for(config, settings)
    _, num_here = place_here(os.environ)
    use_threads(settings.node.threads or max(1, (os.cpu_count() or 1) // num_here))
    console = SteadyConsole(stderr=True)
    with process_log("rank", node, rank or None, console=console) as log:
        if rank == 0 and vocab_size is not None:
            log.logger.info("--vocab-size %d: the vocabulary is the tokenizer's", vocab_size)
        secret = group_secret(os.environ, ranks, settings.node.secret_file)
        with (
            closing(open_store(rank, ranks, secret, start_timeout_s, log.logger)) as store,
            together(
                ranks,
                store,
                told(settings, config),
                config,
                log.logger,
                node=node,
                device=device,
                encryption=settings.cluster.encryption,
                look=partial(launcher_gone, launcher, rank, node),
                on_failure=on_failure,
            ) as groups,
        ):
            if rank == 0:
                own_run(
                    Owner(
                        SINGLE,
                        "rank",
                        node,
                        settings,
                        workload=workload,
                        replica_device=torch.device("cpu"),
                    ),
                    log,
                    lambda context: loop.train(context, config, groups),
                    run_id=run_id,
                    resume=resume,
                    progress=console if has_progress else None,
                    output=SteadyConsole() if has_progress else None,
                )
            else:
                _follow(settings, config, groups, log, workload)


def device_for(config: MeshConfig, settings: Settings) -> torch.device:
    """What this rank computes on.

    Raises:
        ConfigError: this machine cannot do that, or its ranks cannot be connected.
    """
    check_torch()
    local, _ = place_here(os.environ)
    device = own_device(settings.node.device, local, "take a parameter server")
    check_tags(pick_backend(config.backend, device.type), config.mesh.pp, "mesh.pp")
    return device


def group_secret(environ: MutableMapping[str, str], ranks: Ranks, file: Path | None) -> Secret:
    """What the ranks prove to each other: what started them has told it, or the cluster's secret.

    Only rank 0's machine makes one where there is none.

    Raises:
        AuthError: it is missing, or open to others.
    """
    told = environ.pop(GROUP_SECRET, None)
    if told is not None:
        return secret_of_text(told)
    makes = ranks.here.start == 0 or not is_elsewhere(ranks.address)
    return cluster_secret(file, makes=makes)


def told(settings: Settings, config: MeshConfig) -> dict[str, str]:
    """What must be the same on all ranks, by what it is: nothing that belongs to one machine."""
    run = settings.run_config("rank", SINGLE)
    train = run.train.model_dump(mode="json")
    mesh = (
        config.model_dump(mode="json", exclude={"instruction_log", "hang_timeout_s"})
        | config.portable
    )
    return {
        "smolcluster": __version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "seed": str(run.seed),
        "encryption": settings.cluster.encryption,
        **{key: json.dumps(value) for key, value in {**train, **mesh}.items()},
        "workload": str(run.workload),
    }


def _follow(
    settings: Settings,
    config: MeshConfig,
    groups: Groups,
    log: NodeLog,
    workload: Workload | None,
) -> None:
    """Be a rank that does what rank 0 says; its log lies in the run's folder."""
    workload = workload or load_workload(
        settings.train, settings.cluster.seed, settings.node.dataset, log.logger
    )
    settings = settings.with_batch_size(workload.batch_size)
    run = settings.run_config("rank", SINGLE)

    def begin(run_id: str) -> Path:
        paths = create_run(runs_root(settings.node.runs_dir), run_id, newest=False)
        log.file_logs_to(paths.log_file("rank", groups.watch.node, groups.rank), run_id)
        return paths.root

    leave_signals(signal.SIGINT, signal.SIGTERM)  # rank 0 says when it is over
    loop.follow(workload, run.train, config, groups, seed=run.seed, begin=begin, log=log.logger)
