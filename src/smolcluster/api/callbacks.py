"""`attach` for loops that belong to a library: callbacks for transformers.Trainer and for Lightning.

Both draw their samples themselves, a batch ahead, so the run counts how many: those of `optimizer.step()` are
its batch, an epoch has as many as the training data. Each process shuffles in an order of its own.
"""

import logging
import math
from collections.abc import Sized
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch

from smolcluster.api.attach import Cluster, attach
from smolcluster.errors import ConfigError
from smolcluster.utils.seed import derive_seed
from smolcluster.wire.security import Secret


class _Attached:
    """What the callbacks share: the block that begins with training and ends with it."""

    def __init__(
        self,
        cluster: str | Path = "cluster.yaml",
        *,
        name: str | None = None,
        secret: Secret | None = None,
        overrides: tuple[str, ...] = (),
    ) -> None:
        """Take what `attach` takes."""
        super().__init__()
        self._file = cluster
        self._how: dict[str, Any] = {"name": name, "secret": secret, "overrides": overrides}
        self.cluster: Cluster | None = None
        self._hook: Any = None

    def _begin(
        self,
        model: Any,
        optimizer: Any,
        loader: Any,
        *,
        batch_size: int,
        max_epochs: int,
        max_steps: int,
    ) -> None:
        """Attach; of `max_epochs` and `max_steps` a negative one sets no limit.

        Raises:
            ConfigError: the training data have no length.
        """
        self._end()  # of a training that was cut short
        dataset = getattr(loader, "dataset", None)
        if not isinstance(dataset, Sized):
            raise ConfigError(
                "attach: the training data have no length, so that nothing says when an epoch ends: give "
                "their dataset a __len__"
            )
        num_steps = math.ceil(len(dataset) / batch_size)
        num_epochs = _num_epochs(max_epochs, max_steps, num_steps)
        self.cluster = attach(
            model,
            optimizer,
            self._file,
            num_samples=len(dataset),
            batch_size=batch_size,
            num_epochs=num_epochs,
            **self._how,
        ).__enter__()
        _shuffle_apart(loader, self.cluster.rank)
        if num_epochs is not None:
            _say_if_short(max_steps, num_epochs * num_steps)

    @property
    def _is_over(self) -> bool:
        return self.cluster is not None and not self.cluster.running

    def _measured(self, values: dict[str, Any], prefix: str) -> None:
        """Tell the server what an evaluation has found, under names that begin with `val_`."""
        numbers: dict[str, Any] = {
            f"val_{name.removeprefix(prefix)}": float(value)
            for name, value in values.items()
            if name.startswith(prefix)
            and isinstance(value, (int, float, torch.Tensor))
            and math.isfinite(value)
        }
        if numbers and self.cluster is not None:
            self.cluster.log(**numbers)

    def _end(self) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.__exit__(None, None, None)


def _shuffle_apart(loader: Any, rank: int) -> None:
    """Let the loader's own shuffling, if it has any, draw another order than that of other processes."""
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    generator: Any = getattr(sampler, "generator", False)
    if generator is None:  # PyTorch's would seed it, perhaps alike in all processes
        begun = derive_seed(torch.initial_seed(), "attached", rank)
        sampler.generator = torch.Generator().manual_seed(begun)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(derive_seed(generator.initial_seed(), "attached", rank))
    if isinstance(seed := getattr(sampler, "initial_seed", None), int):
        sampler.initial_seed = derive_seed(seed, "attached", rank)


def _batch_size(loader: Any) -> int:
    """The samples of a batch.

    Raises:
        ConfigError: the loader does not say it.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:  # each sample is a batch
        return 1
    size: int | None = loader.batch_size or getattr(batch_sampler, "batch_size", None)
    if size is None:
        raise ConfigError(
            "attach: the training DataLoader has no batch_size, so that nothing says how many samples a step "
            "counts: give its batch_sampler an attribute batch_size"
        )
    return size


def _max_epochs(args: Any) -> int:
    """The limit of `TrainingArguments`; negative: `max_steps` is the one that holds."""
    return -1 if args.max_steps > 0 else max(1, int(args.num_train_epochs))


def _num_epochs(max_epochs: int, max_steps: int, steps_per_epoch: int) -> int | None:
    """The epochs of the run: those that begin within the Trainer's limit; None: it has none."""
    if max_epochs >= 0:
        return max(1, max_epochs)
    return max(1, math.ceil(max_steps / steps_per_epoch)) if max_steps >= 0 else None


def _say_if_short(max_steps: int, num_steps: int) -> None:
    if 0 < max_steps < num_steps:
        logging.getLogger("smolcluster").warning(
            "max_steps of this Trainer is %d, the run has %d steps: it stops before the run's end",
            max_steps,
            num_steps,
        )


def trainer_callback(cluster: str | Path = "cluster.yaml", **how: Any) -> Any:
    """A callback for `transformers.Trainer(callbacks=[…])`; arguments as those of `attach`.

    The optimizer and schedule are the Trainer's, whose `per_device_train_batch_size` and
    `gradient_accumulation_steps` make up a step, and whose `num_train_epochs` the run has; with `max_steps`,
    which the Trainer prefers, the epochs that so many steps begin. It stops when the run is over. Its
    evaluations are the run's.
    """
    base = import_module("transformers").TrainerCallback

    class TrainerCallback(_Attached, base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, _state: Any, _control: Any, **its: Any) -> None:
            batch_size = args.train_batch_size * args.gradient_accumulation_steps
            self._remove_hook()
            self._begin(
                its["model"],
                its["optimizer"],
                its["train_dataloader"],
                batch_size=batch_size,
                max_epochs=_max_epochs(args),
                max_steps=args.max_steps,
            )
            if args.gradient_accumulation_steps == 1:  # else a step has several losses
                self._hook = its["model"].register_forward_hook(self._hear_loss)

        def _hear_loss(self, model: Any, _inputs: Any, output: Any) -> None:
            loss = getattr(output, "loss", None)
            if model.training and self.cluster is not None and loss is not None:
                self.cluster.loss = loss.detach()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop |= self._is_over
            return control

        def on_evaluate(
            self, _args: Any, _state: Any, _control: Any, metrics: Any = None, **_: Any
        ) -> None:
            self._measured(dict(metrics or {}), "eval_")

        def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
            self._remove_hook()
            self._end()

        def _remove_hook(self) -> None:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    return TrainerCallback(cluster, **how)


def lightning_callback(cluster: str | Path = "cluster.yaml", **how: Any) -> Any:
    """A callback for Lightning's `Trainer(callbacks=[…])`; arguments as those of `attach`.

    For modules with one optimizer. What they log as `val_…` is an evaluation of the run, which has the
    Trainer's `max_epochs`; where only `max_steps` is given, the epochs that so many steps begin.

    Raises:
        ConfigError: Lightning is not installed, or there are several optimizers.
    """
    names = [name for name in ("lightning", "pytorch_lightning") if util.find_spec(name)]
    if not names:
        raise ConfigError("lightning_callback needs Lightning: install lightning")
    base = import_module(f"{names[0]}.pytorch" if names[0] == "lightning" else names[0]).Callback

    class LightningCallback(_Attached, base):  # type: ignore[misc, valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise ConfigError(
                    f"attach: the module has {len(trainer.optimizers)} optimizers, must have 1"
                )
            loader = trainer.train_dataloader
            self._begin(
                module,
                trainer.optimizers[0],
                loader,
                batch_size=_batch_size(loader) * trainer.accumulate_grad_batches,
                max_epochs=trainer.max_epochs,
                max_steps=trainer.max_steps,
            )
            if getattr(loader, "num_workers", 0):  # they have been told the first samples already
                iter(trainer.fit_loop._data_fetcher)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if self._is_over:
                trainer.should_stop = True

        def on_validation_end(self, trainer: Any, _module: Any) -> None:
            self._measured(dict(trainer.callback_metrics), "val_")

        def on_train_end(self, _trainer: Any, _module: Any) -> None:
            self._end()

        def on_exception(self, _trainer: Any, _module: Any, _error: BaseException) -> None:
            self._end()

    return LightningCallback(cluster, **how)
