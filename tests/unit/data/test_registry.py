from pathlib import Path

import pytest

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.registry import load_dataset
from smolcluster.errors import ConfigError, DataError


def test_digits_need_no_folder_and_no_network() -> None:
    data = load_dataset(DatasetConfig(name="digits", download=False), seed=3)
    assert (data.name, data.input_dim) == ("digits", 64)


def test_mnist_is_looked_for_in_the_folder_that_is_given(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        load_dataset(DatasetConfig(name="MNIST", root=tmp_path, download=False), seed=3)


def test_an_unknown_dataset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"dataset\.name is 'mnist', allowed: digits, MNIST; did you mean MNIST\?"
    ):
        load_dataset(DatasetConfig(name="mnist"), seed=3)
