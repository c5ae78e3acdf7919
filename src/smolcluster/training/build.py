"""From a configuration and a workload to what a process trains with."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from smolcluster.configs.schema import DatasetPlace, TrainConfig
from smolcluster.data.dataset import Batch, Elsewhere
from smolcluster.errors import ConfigError, DataError
from smolcluster.training.builtin import load_workload
from smolcluster.training.compute import BatchLoss, Part, forward_backward
from smolcluster.training.evaluate import Evaluation, evaluate
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.training.workload import Workload
from smolcluster.utils.gpu import no_gpu, watched
from smolcluster.utils.meter import Meter
from smolcluster.utils.seed import derive_seed


@dataclass(frozen=True)
class TrainingContext:
    """What a process trains with.

    Attributes:
        workload: what is trained, its data on the replica's device.
        replica: the model with its initial weights, on the same device.
        seed: the run's.
        microbatch: samples that are computed at once; None: all that are asked for.
        eval_batch_size: samples that are evaluated at once; None: few.
    """

    workload: Workload
    replica: Replica
    seed: int
    microbatch: int | None = None
    eval_batch_size: int | None = None

    @property
    def num_samples(self) -> int:
        """Training samples, which make an epoch."""
        return self.workload.train.num_samples

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        """The mean loss of the training samples `indices` (n,), whose gradient is in the replica then.

        What dropout leaves out, and what PyTorch's generator draws as samples are gathered, depends on the
        seed, on `epoch`, and on `start`, the place of the first sample in the epoch's order: there is no
        state of a generator to be saved.

        Raises:
            NonFiniteLoss: the loss or the gradient is NaN or infinite.
        """
        return self._compute(indices, self.workload.train.batch, epoch, start)

    def compute_rows(self, rows: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        """As `compute`, of samples that somebody else has sent.

        Raises:
            DataError: they do not fit the model.
        """
        samples = self.workload.train
        if not isinstance(samples, Elsewhere):
            raise DataError("samples that this machine has itself")
        samples.check(rows)
        return self._compute(rows, samples.batch_of, epoch, start)

    def _compute(
        self, samples: Tensor, gather: Callable[[Tensor], Batch], epoch: int, start: int
    ) -> BatchLoss:
        torch.manual_seed(derive_seed(self.seed, "dropout", epoch, start))
        pieces = torch.split(samples, self.microbatch or len(samples))
        parts = [Part(len(piece), partial(gather, piece)) for piece in pieces]
        return forward_backward(self.replica, self.workload.loss, parts)

    def check_buffers(self) -> None:
        """Look for buffers that change as the model computes, which one machine alone can train so far.

        Raises:
            ConfigError: there is one; the message names it.
        """
        before = {name: buffer.clone() for name, buffer in self.replica.model.named_buffers()}
        if not before:
            return
        self.rehearse(1)
        for name, buffer in self.replica.model.named_buffers():
            if not torch.equal(before[name], buffer):
                raise ConfigError(
                    f"model: buffer {name} changes as the model computes, and would differ between machines; "
                    "train in one process, or keep it constant"
                )

    def rehearse(self, num_samples: int) -> None:
        """Compute what costs as much as a batch of so many samples."""
        samples = self.workload.train
        if isinstance(samples, Elsewhere):
            self.compute_rows(samples.example(num_samples))
        else:
            self.compute(torch.arange(num_samples))

    def evaluate(
        self, model: nn.Module | None = None, before_batch: Callable[[], None] = lambda: None
    ) -> Evaluation | None:
        """Evaluate a copy of the replica's model, or of its weights of now; None: nothing is held out.

        `before_batch` is called now and then, and may raise: an evaluation can take long.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite.
        """
        workload = self.workload
        if workload.validation is None:
            return None
        return evaluate(
            self.replica.copy_model() if model is None else model,
            workload.validation,
            self.replica.device,
            loss=workload.loss,
            metrics=workload.metrics,
            precision=self.replica.precision,
            batch_size=workload.eval_batch_size or self.eval_batch_size,
            before_batch=before_batch,
        )


def build(
    train: TrainConfig,
    seed: int,
    place: DatasetPlace,
    device: torch.device,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    microbatch: int | None = None,
    workload: Workload | None = None,
    meter: Meter | None = None,
    log: logging.Logger | None = None,
) -> TrainingContext:
    """Build the model of `workload`; None: of the one that `train` names, with data from `place`.

    The initial weights are drawn on the CPU and depend on `seed` only: all machines begin alike.

    Raises:
        ConfigError: unknown dataset or model, or sizes of the model that do not fit the data.
        DataError: the dataset is missing or damaged.
    """
    if workload is None:
        workload = load_workload(train, seed, place, log)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "weights"))
        model = workload.new_model()
    replica = Replica(
        model,
        train.optimizer,
        weight_decay=train.weight_decay,
        device=device,
        bucket_bytes=bucket_bytes,
        precision=train.precision,
        meter=meter,
    )
    if replica.meter.gpu is no_gpu:
        replica.meter.gpu = watched(device)
    at_once = most_at_once(train, microbatch)
    return TrainingContext(workload.to(device), replica, seed, at_once, at_once or train.batch_size)


def most_at_once(train: TrainConfig, microbatch: int | None) -> int | None:
    """How many samples this machine computes at once, of those of a step; None: all."""
    if train.gradient_accumulation == 1:
        return microbatch
    return min(train.batch_size, microbatch or train.batch_size)
