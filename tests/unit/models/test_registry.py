import pytest
import torch
from pydantic import TypeAdapter

from smolcluster.configs.schema import GPTConfig, ModelConfig, SimpleNNConfig
from smolcluster.models.gpt import GPT
from smolcluster.models.registry import build_model
from smolcluster.models.SimpleNN import SimpleNN

MODELS = {"SimpleNN": SimpleNN, "GPT": GPT}
MODEL = TypeAdapter[SimpleNNConfig | GPTConfig](ModelConfig)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_that_a_configuration_names_is_built(name: str) -> None:
    model = build_model(MODEL.validate_python({"type": name}), input_dim=20, num_classes=7)
    assert type(model) is MODELS[name]


def test_a_perceptron_is_built_for_the_data() -> None:
    model = build_model(SimpleNNConfig(hidden=16), input_dim=20, num_classes=7)
    assert model(torch.zeros(3, 20)).shape == (3, 7)


def test_a_gpt_is_built_for_the_vocabulary() -> None:
    sizes = GPTConfig(model_dim=16, num_layers=1, num_heads=2, ff_dim=32, max_seq_len=12)
    model = build_model(sizes, input_dim=12, num_classes=7)
    assert model(torch.zeros(3, 12, dtype=torch.int64)).shape == (3, 12, 7)


def test_hidden_is_the_width_of_the_hidden_layer() -> None:
    model = build_model(SimpleNNConfig(hidden=33), input_dim=20, num_classes=7)
    assert model.get_parameter("fc1.weight").shape == (33, 20)


def test_a_perceptron_has_the_activation_that_is_named() -> None:
    model = build_model(SimpleNNConfig(activation="tanh"), input_dim=20, num_classes=7)
    assert isinstance(model.get_submodule("activation"), torch.nn.Tanh)
