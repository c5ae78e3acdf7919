"""From a configuration to a dataset and a replica that fit each other."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smolcluster.configs.schema import (
    DatasetPlace,
    GPTConfig,
    ModelConfig,
    SimpleNNConfig,
    TrainConfig,
)
from smolcluster.data.dataset import Dataset, Elsewhere
from smolcluster.data.registry import load_dataset
from smolcluster.errors import ConfigError
from smolcluster.models.registry import build_model
from smolcluster.training.evaluate import Evaluation, evaluate
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.utils.gpu import no_gpu, watched
from smolcluster.utils.meter import Meter
from smolcluster.utils.seed import derive_seed


@dataclass(frozen=True)
class TrainingContext:
    """What a process trains with.

    Attributes:
        dataset: the samples, on the replica's device.
        replica: the model with its initial weights, on the same device.
        seed: the run's.
        microbatch: samples that are computed at once; None: all that are asked for.
    """

    dataset: Dataset
    replica: Replica
    seed: int
    microbatch: int | None = None

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> float:
        """The mean loss of the training samples `indices` (n,), whose gradient is in the replica then.

        What dropout leaves out depends on the seed, on `epoch`, and on `start`, the place of the first
        sample in the epoch's order: there is no state of a generator to be saved.

        Raises:
            NonFiniteLoss: the loss or the gradient is NaN or infinite.
        """
        with self.replica.meter("data"):
            inputs, targets = self.dataset.train.batch(indices)
        return self.compute_batch(inputs, targets, epoch, start)

    def evaluate(
        self, model: nn.Module | None = None, before_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Evaluate a copy of the replica's model, or of its weights of now, on the validation split.

        `before_batch` is called now and then, and may raise: an evaluation can take long.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite.
        """
        return evaluate(
            self.replica.copy_model() if model is None else model,
            self.dataset.validation,
            self.replica.device,
            measure=self.dataset.measure,
            precision=self.replica.precision,
            before_batch=before_batch,
        )

    def example(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets that cost what a batch of so many samples costs."""
        if isinstance(self.dataset.train, Elsewhere):
            tokens = torch.zeros(num_samples, self.dataset.input_dim, dtype=torch.int64)
            return tokens, tokens
        return self.dataset.train.batch(torch.arange(num_samples))

    def compute_batch(
        self, inputs: Tensor, targets: Tensor, epoch: int = 0, start: int = 0
    ) -> float:
        """As `compute`, of samples that are at hand."""
        torch.manual_seed(derive_seed(self.seed, "dropout", epoch, start))
        return self.replica.forward_backward(inputs, targets, self.microbatch)


def build(
    train: TrainConfig,
    seed: int,
    place: DatasetPlace,
    device: torch.device,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    microbatch: int | None = None,
    dataset: Dataset | None = None,
    meter: Meter | None = None,
    log: logging.Logger | None = None,
) -> TrainingContext:
    """Load the dataset from this machine's `place`, unless it is given, and build the model for it.

    The initial weights are drawn on the CPU and depend on `seed` only: all machines begin alike.

    Raises:
        ConfigError: unknown dataset or model, or sizes of the model that do not fit the data.
        DataError: the dataset is missing or damaged.
    """
    if dataset is None:
        dataset = load_dataset(
            train.dataset.at(place), seed, train.model, log or logging.getLogger("smolcluster")
        )
    if train.dataset.source == "server" and dataset.tokens_per_sample is None:
        raise ConfigError(
            f"dataset.source is server, but dataset.name={dataset.name} is no text, and only text is sent; "
            "set dataset.source=local"
        )
    replica = build_replica(train, seed, dataset, device, bucket_bytes=bucket_bytes, meter=meter)
    if replica.meter.gpu is no_gpu:
        replica.meter.gpu = watched(device)
    return TrainingContext(dataset.to(device), replica, seed, most_at_once(train, microbatch))


def most_at_once(train: TrainConfig, microbatch: int | None) -> int | None:
    """How many samples this machine computes at once, of those of a step; None: all."""
    if train.gradient_accumulation == 1:
        return microbatch
    return min(train.batch_size, microbatch or train.batch_size)


def build_replica(
    train: TrainConfig,
    seed: int,
    dataset: Dataset,
    device: torch.device,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    meter: Meter | None = None,
) -> Replica:
    """Build the model of `train` for `dataset`, with the initial weights that `seed` gives.

    Raises:
        ConfigError: unknown model, or sizes that do not fit the data.
    """
    check_fit(train.model, dataset)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "weights"))
        model = build_model(train.model, dataset.input_dim, dataset.num_classes)
    return Replica(
        model,
        train.optimizer,
        weight_decay=train.weight_decay,
        device=device,
        bucket_bytes=bucket_bytes,
        precision=train.precision,
        meter=meter,
    )


def check_fit(model: ModelConfig, dataset: Dataset) -> None:
    """Raise ConfigError unless a model of this kind and these sizes can be trained on `dataset`."""
    is_text = dataset.measure == "perplexity"
    if is_text != isinstance(model, GPTConfig):
        kind, fitting = ("text", "GPT") if is_text else ("labelled samples", "SimpleNN")
        raise ConfigError(
            f"model.type is {model.type}, but dataset.name={dataset.name} is {kind}; set "
            f"model.type={fitting} and its sizes, or choose another dataset"
        )
    if isinstance(model, SimpleNNConfig):
        _check_sizes(model, dataset)


def _check_sizes(model: SimpleNNConfig, dataset: Dataset) -> None:
    if model.input_dim not in (None, dataset.input_dim):
        raise ConfigError(
            f"model.input_dim is {model.input_dim}, but dataset.name={dataset.name} has "
            f"{dataset.input_dim} features; set model.input_dim={dataset.input_dim} or null"
        )
    if model.out != dataset.num_classes:
        raise ConfigError(
            f"model.out is {model.out}, but dataset.name={dataset.name} has {dataset.num_classes} "
            f"classes; set model.out={dataset.num_classes}"
        )
