"""What a model is worth on a split: its loss, and the workload's metrics."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from smolcluster.configs.schema import Precision
from smolcluster.data.dataset import Samples
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.compute import autocast, placed
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.training.workload import LossFunction, Metric, OfLoss, count_terms

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a split: the mean over its loss terms, and metrics by name."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """Its numbers by the names of a run's metrics."""
        return {"val_loss": self.loss} | {
            f"val_{name}": self.metrics[name] for name in self.metrics
        }

    def __str__(self) -> str:
        """As it stands in a line of the log."""
        parts = [f"validation loss {self.loss:.4f}"]
        parts += [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        return ", ".join(parts)


def evaluate(
    model: nn.Module,
    samples: Samples,
    device: torch.device,
    *,
    loss: LossFunction,
    metrics: Mapping[str, Metric] = {},
    precision: Precision = "fp32",
    batch_size: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate `model`, which lies on `device`, on every sample of a split.

    The model is put into evaluation mode and left there, so give a copy (`Replica.copy_model`).
    `batch_size` samples are evaluated at a time. `before_batch` may raise.

    Raises:
        NonFiniteLoss: the mean loss is NaN or infinite.
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    batch_size = batch_size or DEFAULT_BATCH_SIZE
    measured = {"": loss} | {name: of for name, of in metrics.items() if not isinstance(of, OfLoss)}
    sums, counts = dict.fromkeys(measured, 0.0), dict.fromkeys(measured, 0)
    with torch.inference_mode(), autocast(precision, device):
        for start in range(0, samples.num_samples, batch_size):
            before_batch()
            indices = torch.arange(start, min(start + batch_size, samples.num_samples))
            batch = placed(samples.batch(indices), device, dtype)
            for name, measure in measured.items():
                total, num_terms = count_terms(measure(model, batch), len(indices))
                sums[name] += total.item()
                counts[name] += int(num_terms)
    means = {name: sums[name] / max(1, counts[name]) for name in measured}
    mean = means.pop("")
    if not math.isfinite(mean):
        raise NonFiniteLoss(
            f"validation loss is {mean}: the weights have diverged; {DIVERGENCE_REMEDY}"
        )
    derived = {name: of.value(mean) for name, of in metrics.items() if isinstance(of, OfLoss)}
    return Evaluation(mean, means | derived)
