import torch

from smolcluster.models.SimpleNN import SimpleNN


def test_maps_a_batch_of_features_to_logits() -> None:
    assert SimpleNN(64, 128, 10)(torch.zeros(5, 64)).shape == (5, 10)


def test_is_two_linear_layers_with_a_relu_between() -> None:
    model = SimpleNN(3, 4, 2)
    inputs = torch.randn(6, 3)

    hidden = (inputs @ model.fc1.weight.T + model.fc1.bias).clamp(min=0)
    torch.testing.assert_close(model(inputs), hidden @ model.fc2.weight.T + model.fc2.bias)
