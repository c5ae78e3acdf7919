"""Workloads for `own_model.py`: images of 150 kB, and a loader that takes a set part of a step."""

import time

import torch
from torch import Tensor, nn

from smolcluster import Workload

SIDE = 224
"""3 x 224 x 224 bytes are 150 kB."""
BATCH = 16
NUM_SAMPLES = 2000


class Images:
    """Made-up images, bytes as they come from a decoded file."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        generator = torch.Generator().manual_seed(1)
        self._image = torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self._load_s)  # as a disk, and without a core
        return {"image": self._image + index % 7, "label": torch.tensor(index % 10)}


class Classifier(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 24, 7, stride=4), nn.ReLU(), nn.Conv2d(24, 48, 5, stride=2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48 * 16, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, height, width) to logits (batch, 10)."""
        logits: Tensor = self.layers(images.to(torch.float32) / 255)
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def images(load_ms: float = 0.0) -> Workload:
    """What is trained; each sample takes `load_ms` to load."""
    return Workload(Classifier, loss, Images(load_ms / 1000), name="images")
