"""Training in a single process: the baseline that the distributed algorithms are compared with.

`training_steps` is the whole of it; `train_single` adds evaluation, metrics, events and summary.
EDP with one worker and an update interval of 1 takes exactly these steps.
"""

import logging
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from smolcluster.configs.resolve import Settings
from smolcluster.configs.schema import TrainConfig
from smolcluster.data.dataset import Dataset
from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import NonFiniteLoss, SmolclusterError
from smolcluster.observability.metrics import MetricRecord, Metrics
from smolcluster.runs.events import EpochFinished, Evaluated, EventLog, RunEnded, RunStarted
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Final, Pushes, Summary, Traffic, write_summary
from smolcluster.training.build import Workbench, build
from smolcluster.training.clipping import clip_gradient
from smolcluster.training.evaluate import Evaluation, evaluate
from smolcluster.training.replica import Replica
from smolcluster.training.schedule import learning_rate
from smolcluster.utils.device import describe, pick_device

CODEC = "none"


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step that has been taken.

    Attributes:
        step: steps taken, this one included.
        epoch: the epoch it belongs to, from 0.
        num_samples: samples of its batch.
        samples_applied: samples applied in the run, this batch included.
        loss: mean loss of the batch, before the step.
        learning_rate: of this step.
        grad_norm: L2 norm of the gradient before it was clipped.
        layer_norms: the same by parameter; empty unless `track_gradients`.
    """

    step: int
    epoch: int
    num_samples: int
    samples_applied: int
    loss: float
    learning_rate: float
    grad_norm: float
    layer_norms: Mapping[str, float]


def training_steps(
    replica: Replica,
    dataset: Dataset,
    train: TrainConfig,
    seed: int,
    microbatch: int | None = None,
) -> Iterator[TrainingStep]:
    """Train `replica` on every sample of every epoch, yielding after each step.

    A step takes `train.samples_per_step` samples, computed `microbatch` at once (None: all).

    Raises:
        NonFiniteLoss: naming step and layer; the weights are those before the step.
    """
    total_samples = train.num_epochs * dataset.train.num_samples
    step = samples_applied = 0
    for epoch in range(train.num_epochs):
        order = epoch_permutation(seed, epoch, dataset.train.num_samples)
        for indices in torch.split(order, train.samples_per_step):
            step += 1
            rate = learning_rate(train, samples_applied, total_samples)
            try:
                loss = replica.forward_backward(*dataset.train.batch(indices), microbatch)
            except NonFiniteLoss as error:
                raise NonFiniteLoss(f"step {step}: {error}") from error
            layer_norms = replica.layer_norms() if train.track_gradients else {}
            grad_norm = clip_gradient(replica, train.gradient_clipping)
            replica.step(rate)
            samples_applied += len(indices)
            yield TrainingStep(
                step, epoch, len(indices), samples_applied, loss, rate, grad_norm, layer_norms
            )


def train_single(
    settings: Settings, paths: RunPaths, metrics: Metrics, events: EventLog, log: logging.Logger
) -> Summary:
    """Train in this process, report, write `summary.json`, and return what it says.

    Raises:
        ConfigError: the model does not fit the data, or names are unknown.
        DataError: the dataset is missing or damaged.
        NonFiniteLoss: naming step and layer; the run has ended and no summary is written.
    """
    device = pick_device(settings.node.device)
    bench = build(settings.train, settings.cluster.seed, settings.node.dataset, device)
    reporter = _Reporter(settings.train, bench, metrics, events, log)
    events.write(_run_started(settings, bench, paths.run_id))
    log.info(
        "training %s on %s: %d samples an epoch, %d epochs, on %s",
        settings.train.model.type,
        bench.dataset.name,
        bench.dataset.train.num_samples,
        settings.train.num_epochs,
        describe(device),
    )
    try:
        for step in training_steps(
            bench.replica,
            bench.dataset,
            settings.train,
            settings.cluster.seed,
            settings.node.microbatch,
        ):
            reporter.after_step(step)
        summary = reporter.summary(paths.run_id)
        write_summary(paths.summary, summary)
    except (SmolclusterError, KeyboardInterrupt) as error:
        reporter.end(ok=False, reason=str(error) or "interrupted")
        raise
    reporter.end(ok=True, reason="all samples applied")
    return summary


class _Reporter:
    """Evaluates, and tells metrics, events and the log how the run goes on."""

    def __init__(
        self,
        train: TrainConfig,
        bench: Workbench,
        metrics: Metrics,
        events: EventLog,
        log: logging.Logger,
    ) -> None:
        self._train = train
        self._bench = bench
        self._metrics = metrics
        self._events = events
        self._log = log
        self._epoch_samples = bench.dataset.train.num_samples
        self._started = time.monotonic()
        self._last: TrainingStep | None = None
        self._epoch_loss = 0.0
        self._evaluation: tuple[int, Evaluation] | None = None

    def after_step(self, step: TrainingStep) -> None:
        """Report the step, and what is due after it."""
        if self._last is None or self._last.epoch != step.epoch:
            self._epoch_loss = 0.0
        self._epoch_loss += step.loss * step.num_samples / self._epoch_samples
        self._last = step
        self._metrics.log(MetricRecord("step", step.step, step.epoch, self._values(step)))
        if step.step % self._train.eval_steps == 0:
            self._evaluate(step)
        if step.samples_applied == (step.epoch + 1) * self._epoch_samples:
            self._events.write(
                EpochFinished(
                    epoch=step.epoch, step=step.step, samples_applied=step.samples_applied
                )
            )

    def _values(self, step: TrainingStep) -> dict[str, float]:
        values = {
            "loss": step.loss,
            "lr": step.learning_rate,
            "samples_applied": float(step.samples_applied),
            "total_samples": float(self._train.num_epochs * self._epoch_samples),
            "samples_per_s": step.samples_applied / max(self._wall_s(), 1e-9),
            "grad_norm": step.grad_norm,
        }
        values.update((f"grad_norm/{name}", norm) for name, norm in step.layer_norms.items())
        return values

    def _evaluate(self, step: TrainingStep) -> Evaluation:
        """Evaluate the weights of `step`, once only, and report it."""
        if self._evaluation is not None and self._evaluation[0] == step.step:
            return self._evaluation[1]
        replica, dataset = self._bench.replica, self._bench.dataset
        result = evaluate(replica.copy_model(), dataset.validation, replica.device)
        self._evaluation = (step.step, result)
        values = {"val_loss": result.loss, "val_accuracy": result.accuracy}
        self._metrics.log(MetricRecord("eval", step.step, step.epoch, values))
        self._events.write(
            Evaluated(
                epoch=step.epoch,
                step=step.step,
                val_loss=result.loss,
                val_accuracy=result.accuracy,
            )
        )
        self._log.info(
            "epoch %d of %d, step %d: validation loss %.4f, accuracy %.4f",
            step.epoch + 1,
            self._train.num_epochs,
            step.step,
            result.loss,
            result.accuracy,
        )
        return result

    def summary(self, run_id: str) -> Summary:
        """Evaluate the final weights and sum up the run."""
        last = self._last
        if last is None:
            raise RuntimeError("a summary needs at least one step")
        final = self._evaluate(last)
        return Summary(
            algorithm="single",
            run_id=run_id,
            wall_s=self._wall_s(),
            epochs=self._train.num_epochs,
            steps=last.step,
            train_samples=self._epoch_samples,
            samples_applied=last.samples_applied,
            codec=CODEC,
            pushes=Pushes(),
            leases_returned=0,
            final=Final(
                train_loss=self._epoch_loss, val_loss=final.loss, val_accuracy=final.accuracy
            ),
            bytes=Traffic(),
            workers=[],
        )

    def end(self, *, ok: bool, reason: str) -> None:
        """Write the run's last event."""
        self._events.write(
            RunEnded(
                ok=ok,
                reason=reason,
                wall_s=self._wall_s(),
                steps=self._last.step if self._last else 0,
                samples_applied=self._last.samples_applied if self._last else 0,
            )
        )

    def _wall_s(self) -> float:
        return time.monotonic() - self._started


def _run_started(settings: Settings, bench: Workbench, run_id: str) -> RunStarted:
    return RunStarted(
        run_id=run_id,
        algorithm="single",
        node=platform.node(),
        num_workers=1,
        num_epochs=settings.train.num_epochs,
        train_samples=bench.dataset.train.num_samples,
        batch_size=settings.train.samples_per_step,
        codec=CODEC,
        dataset=bench.dataset.name,
        model=settings.train.model.type,
        num_params=bench.replica.num_params,
    )
