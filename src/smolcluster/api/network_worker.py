"""`NetworkWorker`: a process that computes for an `Orchestrator`; it has a model's code, and no data.

NetworkWorker(gpu_id=0, config=config, model_ctor=make_model, master_ip="10.0.0.1").connect_and_train()
"""

import logging
import multiprocessing
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from smolcluster.algorithms.children import spawned
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.observed import WorkerRun
from smolcluster.algorithms.supervision import decide
from smolcluster.api.config import DistributedConfig
from smolcluster.api.losses import LOSS, OutputLoss, code_digest, loss_of, named_loss
from smolcluster.api.settings import library_log, worker_settings
from smolcluster.configs.schema import RunConfig
from smolcluster.configs.spec import get_algorithm, spec_of
from smolcluster.data.dataset import Elsewhere
from smolcluster.errors import ConfigError
from smolcluster.observability.logs import console_logger
from smolcluster.runs.paths import runs_root
from smolcluster.server.joining import RunOver
from smolcluster.server.link import Participant, WorkerSetup, follow
from smolcluster.training.build import TrainingContext
from smolcluster.training.recipe import Training
from smolcluster.training.stages.build import outline
from smolcluster.training.workload import LossFunction, Metric, Workload
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.utils.device import use_threads
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_duration
from smolcluster.utils.user_code import user_code
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import Welcome, sets_of
from smolcluster.wire.security import cluster_secret

ModelCtor = Callable[[], nn.Module]
NO_CUDA = "no CUDA on this machine: each GPU id is a process on what there is, such as the CPU"
NEEDS = "model_ctor and the loss must be functions of a module, for each GPU has a process"
POLL_S = 0.1
END_S = 15.0
"""How long a process may take to end by itself."""
RESTARTS = 3
"""How often in a row a process that was killed or met an internal error is started again."""


class NetworkWorker:
    """One worker, on one GPU."""

    def __init__(
        self,
        gpu_id: int = 0,
        config: DistributedConfig | None = None,
        model_ctor: ModelCtor | None = None,
        master_ip: str | None = None,
        master_port: int | None = None,
        *,
        loss_fn: OutputLoss | None = None,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        training: Training = Training(),  # noqa: B008 - it is frozen
        name: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Describe the worker; nothing is connected yet.

        Args:
            gpu_id: the CUDA device; without CUDA the worker computes on what there is.
            config: what the orchestrator says of the run wins; None: all defaults.
            model_ctor: makes the orchestrator's model, whose weights the worker takes.
            master_ip, master_port: where the orchestrator is; None: as in `config`.
            loss_fn, loss, training: as given to `Orchestrator.register_model`; PyTorch's losses need not be.
            metrics: the same, which the worker with the last layers computes where layers are spread.
            name: in the run, of this worker alone; None: the host's and the GPU's.
            threads: compute threads; None: PyTorch's choice.

        Raises:
            ConfigError: there is no such GPU or no model, or a name or number cannot be one.
        """
        if model_ctor is None:
            raise ConfigError("a NetworkWorker needs model_ctor, a function that makes the model")
        self.config = (config or DistributedConfig()).model_copy()
        if self.config.tensor_parallel:
            raise ConfigError(
                "tensor_parallel is True: the orchestrator starts all ranks on its own machine, and takes no "
                "NetworkWorker; over several machines `smolcluster launch mesh` divides layers"
            )
        if master_ip is not None:
            self.config.master_ip = master_ip
        if master_port is not None:
            self.config.master_port = master_port
        self.name = name or self.config.worker_name or _name_of(gpu_id)
        self._model_ctor = model_ctor
        self._training, self._metrics = training, metrics
        self._loss = None if loss_fn is None and loss is None else loss_of(loss_fn, loss)
        node: dict[str, Any] = {"device": device_of(gpu_id)}
        if threads is not None:
            node["threads"] = threads
        self.settings = worker_settings(self.config, self.name, node)

    def connect_and_train(self) -> None:
        """Join the orchestrator's run, and compute until it is over; come back after a lost connection.

        Raises:
            ConnectTimeout: there was no orchestrator within `config.start_timeout` seconds.
            RunFailed: the run ended badly.
            AuthError: the secret is missing, or is not the orchestrator's.
            SmolclusterError: what else ended it, in one line.
        """
        log = console_logger()
        if self.settings.node.device is None and multiprocessing.parent_process() is None:
            log.info(NO_CUDA)
        place = WorkerSetup(
            node=self.settings.node,
            hello=introduce(self.name),
            address=Address(self.config.master_ip, self.config.master_port),
            secret=cluster_secret(
                self.settings.node.secret_file, makes=is_loopback_name(self.config.master_ip)
            ),
            start_timeout_s=self.config.start_timeout,
            encryption=self.settings.cluster.encryption,
            log=log,
        )
        use_threads(self.settings.num_threads())
        try:
            welcome = place.ask()
        except RunOver as news:
            log.info("the run is over: %s", news)
            return
        assert welcome.worker_id is not None  # noqa: S101 - we have asked for it
        rank = welcome.worker_id - 1
        spec = get_algorithm(welcome.run.algorithm)
        make_participant: Callable[[Welcome, TrainingContext], Participant]
        make_participant = spec.module("worker").Worker
        root = runs_root(self.settings.node.runs_dir)
        with (
            library_log("worker", self.name, rank) as node_log,
            closing(WorkerRun(self.name, rank, node_log, root)) as own,
        ):
            follow(
                replace(
                    place,
                    hello=introduce(self.name, rank + 1, sets_of(spec.name)),
                    log=node_log.logger,
                    workload=self._workload(welcome.run),
                    own_folder=own.own_folder,
                    on_run_known=own.begin,
                    on_stats=own.take,
                ),
                make_participant,
            )

    def _workload(self, run: RunConfig) -> Workload:
        """What is trained; its data are the orchestrator's."""

        loss = self._loss or named_loss(run.train.workload_args.get(LOSS))
        built: list[nn.Module] = []
        if spec_of(run.algorithm).has_whole_model:
            with user_code("model_ctor"):
                built = [self._model_ctor()]
            digest = code_digest(built[0], loss)
        else:
            digest = code_digest(outline(Workload(self._model_ctor, loss, Elsewhere(0))), loss)

        def new_model() -> nn.Module:
            return built.pop() if built else self._model_ctor()

        workload = Workload(
            new_model, loss, Elsewhere(0), metrics=self._metrics, training=self._training
        )
        workload.source = digest
        return workload


def device_of(gpu_id: int) -> str | None:
    """The device that a GPU's number means; None: this machine has no CUDA, and computes on what it has.

    Raises:
        ConfigError: there is CUDA, and no such device.
    """
    count = torch.cuda.device_count()
    if gpu_id < 0 or 0 < count <= gpu_id:
        most = f"0 to {count - 1}" if count else "0 or more"
        raise ConfigError(f"gpu_id is {gpu_id}, must be {most} on this machine")
    return f"cuda:{gpu_id}" if count else None


def run_workers(
    gpu_ids: Sequence[int],
    config: DistributedConfig,
    model_ctor: ModelCtor,
    *,
    restarts: int = RESTARTS,
    **options: Any,
) -> int:
    """A process for each GPU, so that one's error ends no other; returns 0, or the first bad exit code.

    A process that was killed, or met an internal error, is started again, `restarts` times in a row.
    `options`: of `NetworkWorker`, each of which can be pickled, as `model_ctor` can: functions of a module.

    Raises:
        ConfigError: there is no such GPU, or a number is there twice.
    """
    if not gpu_ids or len(set(gpu_ids)) < len(gpu_ids):
        raise ConfigError(f"gpu_ids is {list(gpu_ids)}, must be different numbers, at least one")
    log = console_logger()
    if None in [device_of(gpu_id) for gpu_id in gpu_ids]:
        options.setdefault("threads", max(1, (os.cpu_count() or 1) // len(gpu_ids)))
        log.info(NO_CUDA)
    # What is wrong with the options is raised here, once, and not by each of the processes.
    NetworkWorker(gpu_ids[0], config, model_ctor, **options)
    lives, codes = {}, dict.fromkeys(gpu_ids, 0)
    for gpu_id in gpu_ids:
        start = partial(spawned, partial(_work, gpu_id, config, model_ctor, options), NEEDS)
        lives[gpu_id] = living(f"the worker of GPU {gpu_id}", start, restarts, log)
    try:
        while lives:
            for gpu_id, life in list(lives.items()):
                try:
                    next(life)
                except StopIteration as ended:
                    codes[gpu_id] = ended.value
                    del lives[gpu_id]
            time.sleep(POLL_S)
    finally:
        for life in lives.values():
            life.close()
    return next(filter(None, codes.values()), 0)


def living(
    name: str, start: Callable[[], BaseProcess], allowed: int, log: logging.Logger
) -> Generator[None, None, int]:
    """A worker's processes, one after the other, looked at whenever this is asked to go on.

    Returns the exit code of the last one; closed before, it ends that one.
    """
    num_restarts = 0
    while True:
        process, began = start(), time.monotonic()
        try:
            while (code := process.exitcode) is None:
                yield
        finally:
            _end(process)
        decision = decide(code, time.monotonic() - began, num_restarts, allowed)
        num_restarts = decision.num_restarts
        if decision.delay_s is None:
            if decision.reason:
                log.error("%s %s, and is not started again", name, decision.reason)
            return code if code >= 0 else 128 - code
        delay = Deadline(decision.delay_s)
        log.warning(
            "%s %s; it is started again in %s",
            name,
            decision.reason,
            format_duration(decision.delay_s),
        )
        while not delay.expired:
            yield


def _end(process: BaseProcess) -> None:
    if process.exitcode is None:
        process.terminate()
    process.join(END_S)
    if process.exitcode is None:
        process.kill()
        process.join()


def _work(
    gpu_id: int, config: DistributedConfig, model_ctor: ModelCtor, options: dict[str, Any]
) -> None:
    """Be the process of one GPU; it ends when its parent does."""
    threading.Thread(target=_follow_parent, name="parent", daemon=True).start()
    worker = partial(NetworkWorker, gpu_id, config, model_ctor, **options)
    raise SystemExit(guarded(lambda: worker().connect_and_train()))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _name_of(gpu_id: int) -> str:
    """The host's name and the GPU's."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().partition(".")[0]).strip("-._")
    return f"{host[:40] or 'worker'}-gpu{gpu_id}"
