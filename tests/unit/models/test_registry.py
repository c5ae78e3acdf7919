import torch

from smolcluster.configs.schema import GPTConfig, SimpleNNConfig
from smolcluster.models.registry import build_model


def test_a_perceptron_is_built_for_the_data() -> None:
    model = build_model(SimpleNNConfig(hidden=33, activation="tanh"), input_dim=20, num_classes=7)
    assert model(torch.zeros(3, 20)).shape == (3, 7)
    assert model.get_parameter("fc1.weight").shape == (33, 20)
    assert isinstance(model.get_submodule("activation"), torch.nn.Tanh)


def test_a_gpt_is_built_for_the_vocabulary() -> None:
    sizes = GPTConfig(model_dim=16, num_layers=1, num_heads=2, ff_dim=32, max_seq_len=12)
    model = build_model(sizes, input_dim=12, num_classes=7)
    assert model(torch.zeros(3, 12, dtype=torch.int64)).shape == (3, 12, 7)
