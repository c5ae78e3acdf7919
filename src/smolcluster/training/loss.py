"""The loss that everything here is trained by: cross-entropy, summed over a batch's loss terms."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.configs.schema import Precision


@runtime_checkable
class ComputesLoss(Protocol):
    """A model that has a way of its own to its loss, such as one that never holds all logits at once."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over all targets but those of `NO_TERM`, ()."""


def loss_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the batch's loss terms, ().

    Args:
        model: maps inputs to logits (batch, classes) or (batch, seq, classes).
        inputs: (batch, …) as the model takes them.
        targets: class indices, (batch,) or (batch, seq); `NO_TERM` marks what is no loss term.
    """
    if isinstance(model, ComputesLoss):
        return model.loss(inputs, targets)
    return logits_loss(model(inputs), targets)


def logits_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (batch, classes) or (batch, seq, classes), summed over their targets, ()."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A block in which matrix products are computed in this precision, on this device."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
