"""A model of your own: dict batches, batch norm, frozen features, and two layers that share a weight.

bash launch_syncps.sh --local --workload examples/own_model/train.py:workload
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from smolcluster import Workload


class Reader(nn.Module):
    """Reads a digit of 8 x 8 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Linear(64, width).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.digits = nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels (batch, 64) to logits (batch, 10)."""
        hidden = self.norm(self.features(pixels)).relu()
        logits: Tensor = self.digits(self.second(self.first(hidden).relu()).relu())
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["pixels"]), batch["digit"])


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    hits = model(batch["pixels"]).argmax(dim=-1) == batch["digit"]
    return hits.sum(), len(hits)


def samples() -> list[dict[str, Tensor]]:
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
    return [
        {"pixels": image, "digit": torch.tensor(digit)}
        for image, digit in zip(pixels, digits.target.tolist(), strict=True)
    ]


def workload(width: int = 64) -> Workload:
    data = samples()
    return Workload(
        lambda: Reader(width), loss, data[:1500], data[1500:], metrics={"accuracy": accuracy}
    )
