"""The models that a configuration can name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from smolcluster.configs.schema import ModelConfig
from smolcluster.errors import ConfigError
from smolcluster.models.SimpleNN import SimpleNN
from smolcluster.utils.words import nearest

ModelBuilder = Callable[[ModelConfig, int, int], nn.Module]


def _simple_nn(config: ModelConfig, input_dim: int, num_classes: int) -> nn.Module:
    return SimpleNN(input_dim, config.hidden, num_classes)


MODELS: Mapping[str, ModelBuilder] = MappingProxyType({"SimpleNN": _simple_nn})


def build_model(config: ModelConfig, input_dim: int, num_classes: int) -> nn.Module:
    """Build the model that `config.type` names, on the CPU, with PyTorch's default initial weights.

    Args:
        config: the model's type and sizes; its `input_dim` and `out` give way to the next two.
        input_dim: features a sample.
        num_classes: logits a sample.

    Raises:
        ConfigError: no such model.
    """
    if config.type not in MODELS:
        known = ", ".join(MODELS)
        meant = nearest(config.type, MODELS)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(f"model.type is {config.type!r}, allowed: {known}{hint}")
    return MODELS[config.type](config, input_dim, num_classes)
