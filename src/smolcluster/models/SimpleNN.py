"""The two-layer perceptron that small classification runs train."""

from torch import Tensor, nn


class SimpleNN(nn.Module):
    """Linear, ReLU, Linear: `input_dim` features to `out` logits through `hidden` units."""

    def __init__(self, input_dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, input_dim) to logits (batch, out)."""
        logits: Tensor = self.fc2(self.relu(self.fc1(inputs)))
        return logits
