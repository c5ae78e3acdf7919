"""From a configuration to a dataset and a replica that fit each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.configs.schema import DatasetConfig, DatasetPlace, ModelConfig, TrainConfig
from smolcluster.data.dataset import Dataset
from smolcluster.data.registry import load_dataset
from smolcluster.errors import ConfigError
from smolcluster.models.registry import build_model
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.utils.seed import derive_seed


@dataclass(frozen=True)
class Workbench:
    """What a process trains with.

    Attributes:
        dataset: the samples, on the replica's device.
        replica: the model with its initial weights, on the same device.
        microbatch: samples that are computed at once; None: all that are asked for.
    """

    dataset: Dataset
    replica: Replica
    microbatch: int | None = None

    def compute(self, indices: Tensor) -> float:
        """The mean loss of the training samples `indices` (n,), whose gradient is in the replica then.

        Raises:
            NonFiniteLoss: the loss or the gradient is NaN or infinite.
        """
        return self.replica.forward_backward(*self.dataset.train.batch(indices), self.microbatch)


def build(
    train: TrainConfig,
    seed: int,
    place: DatasetPlace,
    device: torch.device,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    microbatch: int | None = None,
) -> Workbench:
    """Load the dataset from this machine's `place` and build the model for it.

    The initial weights are drawn on the CPU and depend on `seed` only: all machines begin alike.

    Raises:
        ConfigError: unknown dataset or model, or sizes of the model that do not fit the data.
        DataError: the dataset is missing or damaged.
    """
    source = DatasetConfig(name=train.dataset.name, root=place.root, download=place.download)
    dataset = load_dataset(source, seed)
    replica = build_replica(train, seed, dataset, device, bucket_bytes=bucket_bytes)
    return Workbench(dataset.to(device), replica, microbatch)


def build_replica(
    train: TrainConfig,
    seed: int,
    dataset: Dataset,
    device: torch.device,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
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
    )


def check_fit(model: ModelConfig, dataset: Dataset) -> None:
    """Raise ConfigError unless the sizes that `model` states are those of `dataset`."""
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
