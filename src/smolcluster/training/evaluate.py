"""What a model is worth on a split: loss, and accuracy or perplexity."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from smolcluster.configs.schema import Precision
from smolcluster.data.dataset import NO_TERM, Measure, Samples
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.loss import autocast, logits_loss, loss_sum
from smolcluster.training.replica import DIVERGENCE_REMEDY

BATCH_SIZE = 1024
BATCH_TERMS = 4096
"""Samples of one label, or tokens, that are evaluated at a time."""
LARGEST_EXPONENT = 700.0
"""Of e, that still fits a float."""


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a split.

    Attributes:
        loss: mean cross-entropy over all targets.
        accuracy: share of the targets that the largest logit hits, 0..1; None where that says little.
    """

    loss: float
    accuracy: float | None

    @property
    def perplexity(self) -> float | None:
        """e^loss: among how many equally likely tokens the model hesitates; None of labels."""
        if self.accuracy is not None:
            return None
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    @property
    def values(self) -> dict[str, float]:
        """Its numbers by the names of metrics."""
        named = {
            "val_loss": self.loss,
            "val_accuracy": self.accuracy,
            "val_perplexity": self.perplexity,
        }
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        """As it stands in a line of the log."""
        if self.accuracy is not None:
            return f"validation loss {self.loss:.4f}, accuracy {self.accuracy:.4f}"
        return f"validation loss {self.loss:.4f}, perplexity {self.perplexity:.4g}"


def evaluate(
    model: nn.Module,
    samples: Samples,
    device: torch.device,
    *,
    measure: Measure = "accuracy",
    precision: Precision = "fp32",
    batch_size: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate `model`, which lies on `device`, on every sample of a split.

    The model is put into evaluation mode and left there, so give a copy (`Replica.copy_model`).
    `batch_size` samples are evaluated at a time; None: what takes little memory. `before_batch` may raise.

    Raises:
        NonFiniteLoss: the mean loss is NaN or infinite.
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    if batch_size is None:
        num_terms = samples.batch(torch.zeros(1, dtype=torch.int64))[1].numel()
        batch_size = BATCH_SIZE if num_terms == 1 else max(1, BATCH_TERMS // num_terms)
    loss, hits, num_targets = 0.0, 0, 0
    with torch.inference_mode(), autocast(precision, device):
        for start in range(0, samples.num_samples, batch_size):
            before_batch()
            indices = torch.arange(start, min(start + batch_size, samples.num_samples))
            inputs, targets = (tensor.to(device) for tensor in samples.batch(indices))
            if inputs.is_floating_point():
                inputs = inputs.to(dtype)
            num_targets += int((targets != NO_TERM).sum())
            if measure == "perplexity":
                loss += loss_sum(model, inputs, targets).item()
                continue
            logits = model(inputs)
            loss += logits_loss(logits, targets).item()
            hits += int((logits.argmax(dim=-1) == targets).sum())
    mean = loss / num_targets
    if not math.isfinite(mean):
        raise NonFiniteLoss(
            f"validation loss is {mean}: the weights have diverged; {DIVERGENCE_REMEDY}"
        )
    accuracy = hits / num_targets if measure == "accuracy" else None
    return Evaluation(loss=mean, accuracy=accuracy)
