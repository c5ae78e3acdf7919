"""`Orchestrator`: the process that owns a model and its data, and trains it on workers that have neither.

config = DistributedConfig(master_ip="0.0.0.0", num_workers=2)
orchestrator = Orchestrator(config)
orchestrator.register_model(model, loss_fn=nn.CrossEntropyLoss())
orchestrator.wait_for_workers(timeout=60)
orchestrator.start_training(train_loader=train_loader, num_epochs=3)
orchestrator.save_checkpoint("model.safetensors")
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import SWITCH_INTERVAL_S
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.api.arrivals import Arrivals
from smolcluster.api.config import DistributedConfig
from smolcluster.api.layers import initial_weights, load_newest, on_meta
from smolcluster.api.losses import LOSS, OutputLoss, code_digest, loss_name, loss_of
from smolcluster.api.settings import (
    SERVER,
    library_log,
    rank_settings,
    server_settings,
)
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import SINGLE, get_algorithm
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.observability.logs import NodeLog, console_logger
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.summary import Summary
from smolcluster.training.buffers import plain_name
from smolcluster.training.copying import copied
from smolcluster.training.hooks import StepDone
from smolcluster.training.recipe import Training
from smolcluster.training.workload import LossFunction, Metric, Workload
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.wire.security import cluster_secret

SUFFIX = ".safetensors"


class Orchestrator:
    """Owns a run: its model, its data, and how far it is. Workers compute; see `NetworkWorker`."""

    def __init__(self, config: DistributedConfig | None = None) -> None:
        self.config = config or DistributedConfig()
        self.log = console_logger()
        self._model: nn.Module | None = None
        self._loss: LossFunction
        self._loss_name: str | None
        self._metrics: Mapping[str, Metric]
        self._training: Training
        self._profiles_memory = False
        self._arrivals: Arrivals | None = None
        self._has_trained = False

    def __enter__(self) -> "Orchestrator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for workers no more; `start_training` does that itself."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    @property
    def model(self) -> nn.Module:
        """The registered model, with the trained weights after `start_training`.

        Raises:
            ConfigError: there is none.
        """
        if self._model is None:
            raise ConfigError("no model is registered: call register_model(model) first")
        return self._model

    def register_model(
        self,
        model: nn.Module,
        loss_fn: OutputLoss | None = None,
        *,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        training: Training = Training(),  # noqa: B008 - it is frozen
    ) -> None:
        """Say what is trained; workers build the same with `model_ctor` and take these weights.

        Args:
            model: begins with its weights of now, and has the trained ones at the end.
            loss_fn: `(output, target)` to the mean loss, as PyTorch's losses; a batch is inputs and targets.
                None: cross-entropy of logits (…, classes) with class indices (…).
            loss: instead, `(model, batch)` to the sum of the batch's loss terms and their number, or a mean.
            metrics: as of a `Workload`.
            training: as of a `Workload`; what it says wins over the configuration.

        Raises:
            ConfigError: both kinds of loss are given.
        """
        self._loss, self._loss_name = loss_of(loss_fn, loss), loss_name(loss_fn, loss)
        self._model, self._metrics, self._training = model, metrics, training

    def enable_memory_profiling(self) -> None:
        """Measure the most memory of each phase on each worker, for status, metrics and report."""
        self._profiles_memory = True

    def wait_for_workers(self, timeout: float = 600.0) -> int:
        """Wait for `config.num_workers` workers, `timeout` seconds at most; returns how many are there.

        They stay until `start_training`, which others may join later, too. With `tensor_parallel` that one
        starts them itself, and nobody is waited for.

        Raises:
            ClusterEmpty: too few came in time.
            PortBusy, ConfigError: nothing can be received at `config.master_ip` and its port.
            AuthError: the cluster's secret cannot be read or made.
        """
        if self.config.tensor_parallel:
            return self.config.num_workers
        return self._listening().wait_for(self.config.num_workers, timeout)

    def _listening(self) -> Arrivals:
        if self._arrivals is None:
            settings = self._settings([], {})
            secret = cluster_secret(settings.node.secret_file, makes=True)
            for note in self.config.notes():
                self.log.info("%s", note)
            if not all(map(is_loopback_name, settings.cluster.bind or ())):
                self.log.info(
                    "workers need the secret %s, mode 0600: copy it to the same place on their machines, "
                    "such as by scp",
                    secret.path,
                )
            self._arrivals = Arrivals(settings, self.config.runs_algorithm, secret, self.log)
        return self._arrivals

    def start_training(
        self,
        train_loader: Any,
        val_loader: Any = None,
        num_epochs: int = 1,
        val_interval: int = 200,
        *,
        resume: str | None = None,
    ) -> Summary:
        """Train until every sample of every epoch has counted, once; returns what came of it.

        A step is of `batch_size * num_workers` samples where workers share it (syncps), and of `batch_size`
        elsewhere; `batch_size` is the loader's.

        Args:
            train_loader: a DataLoader or a dataset; its samples go to the workers.
            val_loader: the same, of what is held out; None: nothing is evaluated.
            num_epochs: passes over the training samples.
            val_interval: steps between two evaluations; 0: only one at the end.
            resume: the run that goes on from its newest checkpoint: its name, `latest` or `auto`, as
                `--resume` of a server; None: a new one.

        Raises:
            SmolclusterError: what ended the run, in one line.
        """
        workload = self._workload(train_loader, val_loader)
        train = {
            "num_epochs": num_epochs,
            "eval_steps": val_interval or sys.maxsize,
            "memory_profiling": self._profiles_memory,
            "workload_args": {LOSS: self._loss_name},
        }
        if self.config.tensor_parallel:
            return self._train_on_ranks(workload, train, resume)
        settings = self._settings(self._names(), train)
        owner = Owner(
            self.config.runs_algorithm,
            "server",
            SERVER,
            settings,
            cluster_secret(settings.node.secret_file, makes=True),
            workload,
        )
        serve = get_algorithm(self.config.runs_algorithm).module("server").serve

        def body(context: ServerContext) -> Summary:
            if not self.config.spreads_layers:
                summary: Summary = serve(context)
                self.model.load_state_dict(context.training.replica.model.state_dict())
            else:
                summary = serve(replace(context, initial=initial_weights(self.model, context)))
                load_newest(self.model, context, summary.steps)
            return summary

        with library_log("server", SERVER) as log, _switching_often():
            self.close()
            self._has_trained = True
            return self._own_run(owner, log, body, resume)

    def _train_on_ranks(
        self, workload: Workload, train: dict[str, Any], resume: str | None
    ) -> Summary:
        """Train on ranks that this process starts, itself being the first."""
        spec = get_algorithm(self.config.runs_algorithm)
        ranks = import_module(f"{spec.package}.local_ranks")
        share = (workload.batch_size or self.config.batch_size) * self.config.gradient_accumulation
        make_settings = partial(
            rank_settings, self.config, train, share * self.config.mesh.num_shares
        )
        owner = Owner(SINGLE, "trainer", SERVER, make_settings(), workload=workload)
        with (
            library_log("trainer", SERVER) as log,
            ranks.local_ranks(make_settings, workload, log.logger) as train_on,
        ):
            for note in self.config.notes():
                self.log.info("%s", note)

            def body(context: ServerContext) -> Summary:
                summary: Summary = train_on(context)
                self.model.load_state_dict(context.training.replica.model.state_dict())
                return summary

            return self._own_run(owner, log, body, resume)

    def _own_run(
        self,
        owner: Owner,
        log: NodeLog,
        body: Callable[[ServerContext], Summary],
        resume: str | None,
    ) -> Summary:
        console = None if self.config.compact_log else SteadyConsole(stderr=True)
        return own_run(
            owner,
            log,
            body,
            run_id=self.config.run_id,
            resume=resume,
            progress=console,
            output=console,
        )

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write the model's weights and buffers as safetensors, whatever the name; returns where they are.

        `safetensors.torch.load_file` reads them, `torch.load` does not. All of the run, its checkpoints
        included, is in the run's own folder.

        Raises:
            ConfigError: no model is registered.
            CheckpointError: it cannot be written.
        """
        target, model = Path(path), self.model
        persistent = model.state_dict()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # tied ones once
        tensors = {
            plain_name(name): tensor.detach().cpu().contiguous()
            for name, tensor in named.items()
            if name in persistent
        }
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, target)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{target} cannot be written: {error}") from error
        if target.suffix != SUFFIX:
            self.log.info(
                "%s is in the safetensors format: safetensors.torch.load_file reads it, torch.load cannot",
                target,
            )
        return target

    def _names(self) -> list[str]:
        """A name for each worker that training begins with: of those that wait, then invented ones."""
        if self._arrivals is None:
            if self._has_trained:
                raise ConfigError(
                    "the workers of the training before have ended with it: start them again, and call "
                    "wait_for_workers before start_training"
                )
            self.wait_for_workers()
        waiting = sorted(self._listening().names)
        invented = (f"worker{number}" for number in range(1, self.config.num_workers + 1))
        names = [*waiting, *(name for name in invented if name not in waiting)]
        return names[: max(self.config.num_workers, len(waiting))]

    def _settings(self, workers: list[str], train: Mapping[str, Any]) -> Settings:
        names = workers or [f"worker{number + 1}" for number in range(self.config.num_workers)]
        return server_settings(self.config, names, train)

    def _workload(self, train: Any, validation: Any) -> Workload:
        model = self.model
        workload = Workload(
            self._maker(),
            self._loss,
            train,
            validation,
            metrics=self._metrics,
            name=type(model).__name__,
            training=self._with_lines(self._training),
        )
        workload.source = code_digest(model, self._loss)
        return workload

    def _maker(self) -> Callable[[], nn.Module] | nn.Module:
        """What makes the model, where each process has a part of it."""
        if self.config.tensor_parallel:
            return partial(copied, self.model)
        return partial(on_meta, self.model) if self.config.spreads_layers else self.model

    def _with_lines(self, training: Training) -> Training:
        """The same that also logs a line every `log_step_every` steps."""
        every = self.config.log_step_every
        if not every:
            return training
        hooks = training.hooks

        def on_step(done: StepDone) -> None:
            if done.step % every == 0:
                self.log.info(
                    "step %d, epoch %d, %s samples: loss %.4f, learning rate %.3g",
                    done.step,
                    done.epoch + 1,
                    f"{done.samples_applied:,}",
                    done.loss,
                    done.learning_rate,
                )
            if hooks.on_step is not None:
                hooks.on_step(done)

        return replace(training, hooks=replace(hooks, on_step=on_step))


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let the threads that send not wait long for the one that computes, as in a server's process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
