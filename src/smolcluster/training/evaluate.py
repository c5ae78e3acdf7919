"""Loss and accuracy of a model on a split."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.data.dataset import Split
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.replica import DIVERGENCE_REMEDY


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a split.

    Attributes:
        loss: mean cross-entropy over all targets.
        accuracy: share of the targets that the largest logit hits, 0..1.
    """

    loss: float
    accuracy: float


def evaluate(
    model: nn.Module, split: Split, device: torch.device, *, batch_size: int = 1024
) -> Evaluation:
    """Evaluate `model`, which lies on `device`, on every sample of `split`.

    The model is put into evaluation mode and left there, so give a copy (`Replica.copy_model`).
    `batch_size` samples are evaluated at a time.

    Raises:
        NonFiniteLoss: the mean loss is NaN or infinite.
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    loss = torch.zeros((), device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    num_targets = 0
    with torch.inference_mode():
        for start in range(0, split.num_samples, batch_size):
            indices = torch.arange(start, min(start + batch_size, split.num_samples))
            inputs, targets = split.batch(indices)
            logits, targets = _logits(model, inputs.to(device), targets.to(device), dtype)
            loss += functional.cross_entropy(logits, targets, reduction="sum")
            hits += (logits.argmax(dim=-1) == targets).sum()
            num_targets += targets.numel()
    mean = loss.item() / num_targets
    if not math.isfinite(mean):
        raise NonFiniteLoss(
            f"validation loss is {mean}: the weights have diverged; {DIVERGENCE_REMEDY}"
        )
    return Evaluation(loss=mean, accuracy=hits.item() / num_targets)


def _logits(
    model: nn.Module, inputs: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    logits = model(inputs)
    return logits.flatten(0, -2), targets.flatten()
