from typing import get_args

import pytest
import torch
from torch.nn import functional

from smolcluster.configs.schema import Activation
from smolcluster.models.SimpleNN import SimpleNN


@pytest.mark.parametrize("name", get_args(Activation))
def test_is_two_linear_layers_with_the_named_activation_between(name: Activation) -> None:
    model = SimpleNN(3, 4, 2, name)
    inputs = torch.randn(6, 3)
    hidden = getattr(functional, name)(inputs @ model.fc1.weight.T + model.fc1.bias)
    torch.testing.assert_close(model(inputs), hidden @ model.fc2.weight.T + model.fc2.bias)
