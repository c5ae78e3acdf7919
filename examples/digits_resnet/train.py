"""A small ResNet with batch norm on scikit-learn's digits.

bash launch_edp.sh --local --workload examples/digits_resnet/train.py:workload \
    --override workload_args.channels=16
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from smolcluster import Workload

Batch = tuple[Tensor, Tensor]
NUM_TRAINED = 1500


class Block(nn.Module):
    """Two convolutions and a way around them (He et al., 1512.03385)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        hidden = self.first_norm(self.first(images)).relu()
        return (self.second_norm(self.second(hidden)) + images).relu()


def resnet(channels: int, num_blocks: int) -> nn.Module:
    """A model that maps images (batch, 1, 8, 8) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        *(Block(channels) for _ in range(num_blocks)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 10),
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, digits = batch
    return functional.cross_entropy(model(images), digits)


def accuracy(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    images, digits = batch
    return (model(images).argmax(dim=-1) == digits).sum(), len(digits)


def workload(channels: int = 8, num_blocks: int = 2) -> Workload:
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    digits = torch.tensor(data.target)
    train, held_out = slice(0, NUM_TRAINED), slice(NUM_TRAINED, None)
    return Workload(
        lambda: resnet(channels, num_blocks),
        loss,
        TensorDataset(images[train], digits[train]),
        TensorDataset(images[held_out], digits[held_out]),
        metrics={"accuracy": accuracy},
    )
