import pytest
import torch

from smolcluster.configs.schema import ModelConfig
from smolcluster.errors import ConfigError
from smolcluster.models.registry import MODELS, build_model


def test_every_registered_model_is_built_for_the_data() -> None:
    for name in MODELS:
        model = build_model(ModelConfig(type=name, hidden=16), input_dim=20, num_classes=7)
        assert model(torch.zeros(3, 20)).shape == (3, 7)


def test_hidden_is_the_width_of_the_hidden_layer() -> None:
    model = build_model(ModelConfig(hidden=33), input_dim=20, num_classes=7)
    assert model.get_parameter("fc1.weight").shape == (33, 20)


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.type is 'SimpelNN'.*did you mean SimpleNN"):
        build_model(ModelConfig(type="SimpelNN"), input_dim=20, num_classes=7)
