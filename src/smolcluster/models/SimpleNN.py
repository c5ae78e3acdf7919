"""The two-layer perceptron that small classification runs train."""

from types import MappingProxyType

from torch import Tensor, nn

from smolcluster.configs.schema import Activation

ACTIVATIONS = MappingProxyType({"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh})


class SimpleNN(nn.Module):
    """Linear, activation, Linear: `input_dim` features to `out` logits through `hidden` units."""

    def __init__(
        self, input_dim: int, hidden: int, out: int, activation: Activation = "relu"
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden)
        self.activation = ACTIVATIONS[activation]()
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, input_dim) to logits (batch, out)."""
        logits: Tensor = self.fc2(self.activation(self.fc1(inputs)))
        return logits

    def stages(self) -> list[nn.Module]:
        """Two layers: up to the activation, and the logits."""
        return [nn.Sequential(self.fc1, self.activation), self.fc2]
