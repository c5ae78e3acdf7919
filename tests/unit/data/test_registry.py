import logging
from pathlib import Path

import pytest

from smolcluster.configs.schema import DatasetConfig, GPTConfig, ModelConfig, SimpleNNConfig
from smolcluster.data.dataset import Dataset
from smolcluster.data.registry import TEXTS, load_dataset
from smolcluster.errors import ConfigError

PERCEPTRON = SimpleNNConfig()


def load(config: DatasetConfig, model: ModelConfig = PERCEPTRON) -> Dataset:
    return load_dataset(config, 3, model, logging.Logger("test"))


def test_digits_need_no_folder_and_no_network() -> None:
    data = load(DatasetConfig(name="digits", download=False))
    assert (data.name, data.input_dim) == ("digits", 64)


def test_an_unknown_dataset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"dataset\.name is 'mnist', allowed: digits, MNIST, stdlib, text, wikitext, snli, "
        r"huggingface; did you mean MNIST\?",
    ):
        load(DatasetConfig(name="mnist"))


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_refused_where_the_model_is_no_language_model(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"dataset\.name is {name}, which is text, but model\.type is SimpleNN"
    ):
        load(DatasetConfig(name=name, download=False))


def test_text_is_cut_to_the_models_length(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("some text to learn\n" * 1000)
    place = DatasetConfig(name="text", root=root, cache=tmp_path / "cache")
    data = load(place, GPTConfig(max_seq_len=24))
    assert data.input_dim == 24
