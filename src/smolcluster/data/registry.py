"""The datasets that a configuration can name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.dataset import Dataset
from smolcluster.data.digits import load_digits
from smolcluster.data.mnist import load_mnist
from smolcluster.errors import ConfigError
from smolcluster.utils.words import nearest

DatasetLoader = Callable[[DatasetConfig, int], Dataset]


def _digits(config: DatasetConfig, seed: int) -> Dataset:  # noqa: ARG001 - bundled: no place
    return load_digits(seed)


def _mnist(config: DatasetConfig, seed: int) -> Dataset:  # noqa: ARG001 - it brings its own split
    return load_mnist(config.root, download=config.download)


DATASETS: Mapping[str, DatasetLoader] = MappingProxyType({"digits": _digits, "MNIST": _mnist})


def load_dataset(config: DatasetConfig, seed: int) -> Dataset:
    """Load the dataset that `config.name` names onto the CPU.

    Args:
        config: its name, and where this machine keeps it.
        seed: draws the held-out samples where a dataset has no validation split of its own.

    Raises:
        ConfigError: no such dataset.
        DataError: its files are missing, damaged or cannot be fetched.
    """
    if config.name not in DATASETS:
        known = ", ".join(DATASETS)
        meant = nearest(config.name, DATASETS)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(f"dataset.name is {config.name!r}, allowed: {known}{hint}")
    return DATASETS[config.name](config, seed)
