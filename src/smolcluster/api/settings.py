"""From a `DistributedConfig` to the settings that processes of a cluster have."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from smolcluster.api.config import DistributedConfig
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.overrides import node_overrides
from smolcluster.configs.resolve import resolve
from smolcluster.configs.schema import Settings
from smolcluster.observability.logs import NodeLog

SOURCE = "DistributedConfig"
SERVER = "orchestrator"
"""The name of the orchestrator's node."""
DATASET = "workload"
"""What a dataset is called that was handed over in Python."""


def server_settings(
    config: DistributedConfig, workers: Sequence[str], train: Mapping[str, Any]
) -> Settings:
    """What the orchestrator has been told; `train`: keys of a training file besides.

    Raises:
        ConfigError: a value, an override or a variable of the environment is wrong.
    """
    config.check()
    is_mesh, clip = config.tensor_parallel, config.max_grad_norm
    sizes = config.mesh if is_mesh else None
    threads = {"threads": max(1, (os.cpu_count() or 1) // sizes.world_size)} if sizes else {}
    own: dict[str, Any] = dict(  # noqa: C408 - names of keys, one of which is an algorithm's as well
        mesh=sizes and sizes.model_dump(),
        microbatches=config.num_microbatches if config.spreads_layers or is_mesh else None,
        heartbeat_timeout_s=config.ack_timeout,
        reconnect_timeout_s=config.reconnect_timeout,
        timeout=config.activation_timeout if config.is_shared else None,
    )
    settings = resolve(
        cluster=_cluster(config, workers, SERVER, threads)
        | {key: value for key, value in own.items() if value is not None},
        train={
            "batch_size": config.batch_size,
            "gradient_accumulation": config.gradient_accumulation,
            "learning_rate": config.learning_rate,
            "optimizer": config.optimizer,
            "weight_decay": config.weight_decay,
            "gradient_clipping": {"enabled": False} if clip is None else {"max_norm": clip},
            "precision": "bf16" if config.use_amp else "fp32",
            "dataset": {"name": DATASET, "source": "server"},
            **train,
        },
        node_name=SERVER,
        overrides=config.overrides,
        environ=os.environ,
        cluster_file=SOURCE,
        train_file=SOURCE,
    )
    check_algorithm(settings, config.runs_algorithm)
    return settings


def rank_settings(
    config: DistributedConfig, train: Mapping[str, Any], samples_per_step: int
) -> Settings:
    """What each rank of `tensor_parallel` has been told; `train` as above.

    Raises:
        ConfigError: as `server_settings`.
    """
    names = [f"worker{number + 1}" for number in range(config.num_workers)]
    step = {"batch_size": samples_per_step, "gradient_accumulation": 1}
    settings = server_settings(config, names, {**train, **step})
    whole = settings.train.model_copy(update={"global_batch_size": samples_per_step})
    return replace(settings, train=whole)  # a loader's batches are smaller


def worker_settings(config: DistributedConfig, name: str, node: Mapping[str, Any]) -> Settings:
    """What a worker of this name has been told; `node`: keys of its machine besides.

    Raises:
        ConfigError: a value, an override or a variable of the environment is wrong.
    """
    return resolve(
        cluster=_cluster(config, [name], name, node),
        train={"dataset": {"name": DATASET, "source": "server"}},
        node_name=name,
        overrides=node_overrides(config.overrides),
        environ=os.environ,
        cluster_file=SOURCE,
        train_file=SOURCE,
    )


def _cluster(
    config: DistributedConfig,
    workers: Sequence[str],
    here: str,
    node: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    own = dict(node or {})
    if config.secret_file is not None:
        own["secret_file"] = str(config.secret_file)
    return {
        "host_ip": dict.fromkeys((SERVER, *workers), config.master_ip),
        "bind": [config.master_ip],
        "port": config.master_port,
        "server": SERVER,
        "workers": list(workers),
        "num_workers": len(workers),
        "min_workers": min(config.num_workers, len(workers)),
        "seed": config.seed,
        "start_timeout_s": config.start_timeout,
        "metrics_port": None,
        "nodes": {here: own},
    }


@contextmanager
def library_log(component: str, node: str, rank: int | None = None) -> Iterator[NodeLog]:
    """The log of a process that is the user's: its file has the traceback of what ended it."""
    log = NodeLog(component, node, rank)
    try:
        yield log
    except BaseException as error:
        log.logger.log(logging.DEBUG, "%s", error, exc_info=error)
        raise
    finally:
        log.close()
