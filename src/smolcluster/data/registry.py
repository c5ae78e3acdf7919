"""The datasets that a configuration can name."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from smolcluster.configs.schema import DatasetConfig, GPTConfig, ModelConfig
from smolcluster.data.corpus import load_corpus, load_stdlib
from smolcluster.data.dataset import Dataset
from smolcluster.data.digits import load_digits
from smolcluster.data.mnist import load_mnist
from smolcluster.data.wikitext import load_huggingface
from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at

TextLoader = Callable[[DatasetConfig, int, logging.Logger], Dataset]

LABELLED = ("digits", "MNIST")
TEXTS: Mapping[str, TextLoader] = MappingProxyType(
    {
        "stdlib": load_stdlib,
        "text": load_corpus,
        "wikitext": load_huggingface,
        "snli": load_huggingface,
        "huggingface": load_huggingface,
    }
)


def load_dataset(
    config: DatasetConfig, seed: int, model: ModelConfig, log: logging.Logger
) -> Dataset:
    """Load the dataset that `config.name` names onto the CPU.

    `seed` draws the held-out samples where labels have no validation split of their own; `model` says
    how many tokens a sample of text has.

    Raises:
        ConfigError: no such dataset or path, or the model is not made for it.
        DataError: its files are missing, damaged or cannot be fetched.
    """
    if config.name == "digits":
        return load_digits(seed)
    if config.name == "MNIST":
        return load_mnist(config.root, download=config.download)
    check_name(config.name, model)
    assert isinstance(model, GPTConfig)  # noqa: S101 - as checked
    return TEXTS[config.name](config, model.max_seq_len, log)


def check_name(name: str, model: ModelConfig) -> None:
    """Refuse a dataset that cannot be loaded, or text for a model that is not made for it.

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    names = (*LABELLED, *TEXTS)
    if name not in names:
        allowed = ", ".join(names)
        raise ConfigError(f"dataset.name is {name!r}, allowed: {allowed}{hint_at(name, names)}")
    if name in TEXTS and not isinstance(model, GPTConfig):
        raise ConfigError(
            f"dataset.name is {name}, which is text, but model.type is {model.type}; set "
            "model.type=GPT and its sizes, or choose another dataset"
        )
