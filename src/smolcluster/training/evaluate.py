"""What a model is worth on a split: its loss, and the workload's metrics."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.configs.schema import Precision
from smolcluster.data.dataset import Batch, Samples
from smolcluster.data.loading import every_index
from smolcluster.data.pytree import tensors_in
from smolcluster.errors import DataError, NonFiniteLoss, UserCodeError
from smolcluster.training.batches import Doubles, apart, placed
from smolcluster.training.compute import autocast, trained_dtype
from smolcluster.training.labels import LabelsSeen, lacks_labels
from smolcluster.training.replica import DIVERGENCE_REMEDY, first_non_finite
from smolcluster.training.workload import (
    LossFunction,
    Metric,
    OfLoss,
    described,
    real_count,
)
from smolcluster.utils.units import format_loss
from smolcluster.utils.user_code import user_code, wrong_result

DEFAULT_BATCH_SIZE = 32
WITHOUT_GRAPH = "does not require grad"
"""In PyTorch's error where something is to be differentiated, such as for forces, and gradients are off."""
LOSS = "loss"
"""What `Totals` call the loss; no metric has its name."""
Totals = Mapping[str, tuple[float, float]]
"""Of the loss and of each metric, by name: the sum over terms, and their number."""


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a split: the mean over its loss terms, and metrics by name."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        return {"val_loss": self.loss} | {
            f"val_{name}": self.metrics[name] for name in self.metrics
        }

    def __str__(self) -> str:
        parts = [f"validation loss {format_loss(self.loss)}"]
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
    dtype: torch.dtype | None = None,
    doubles: Doubles | None = None,
) -> Totals:
    """Evaluate `model`, which lies on `device`, on every sample of a split; sums may be NaN or infinite.

    The model is put into evaluation mode and left there. Gradients are off, but for a loss or metric that
    fails for that. `batch_size` samples are evaluated at a time. `before_batch` may raise. `dtype`: of
    samples of floating point; None: that of the model's trained parameters. `doubles`: what is known of
    samples in float64. The loss and each metric are given a batch in containers of their own.

    Raises:
        UserCodeError: data, loss or a metric raised an exception, or what one returned is no number.
        DataError: the loss of some samples is NaN or infinite, and it is not for the weights.
    """
    model.eval()
    seen = LabelsSeen(model)
    doubles = doubles or Doubles()
    dtype = dtype or trained_dtype(model)
    batch_size = batch_size or DEFAULT_BATCH_SIZE
    measured = {LOSS: loss} | {
        name: of for name, of in metrics.items() if not isinstance(of, OfLoss)
    }
    sums, counts = dict.fromkeys(measured, 0.0), dict.fromkeys(measured, 0.0)
    bad: DataError | None = None
    num_good, has_bad_values = 0, False
    for indices in torch.split(every_index(samples), batch_size):
        before_batch()
        with user_code("data"):
            batch = samples.batch(indices)
        with torch.no_grad(), autocast(precision, device):
            place = partial(_placed, batch, device, dtype, doubles)
            gathered = doubles.attempt(place, [batch])
            for name, measure in measured.items():
                what = name if name == LOSS else f"metric {name}"
                fresh = partial(placed, gathered, device, dtype)
                value = partial(_value, measure, what, model, fresh, doubles=doubles, seen=seen)
                result = doubles.attempt(value, [gathered])
                total, num_terms = seen.count(result, len(indices), of=measure, what=what)
                is_number = math.isfinite(float(total))
                if not is_number and lacks_labels(gathered):
                    continue
                if name == LOSS:
                    num_good += is_number
                    if math.isnan(float(total)) and bad is None:
                        held = _bad_value(gathered)
                        bad, has_bad_values = _of_samples(indices, held), held is not None
                sums[name] += float(total)
                counts[name] += real_count(num_terms, of=measure, what=what)
    if bad is not None and (num_good or has_bad_values):
        raise bad
    return {name: (sums[name], counts[name]) for name in measured}


def _placed(batch: Batch, device: torch.device, dtype: torch.dtype, doubles: Doubles) -> Batch:
    """The batch on the device, which may have no float64, as MPS."""
    with user_code("data"):
        return placed(batch, device, dtype, lowers_doubles=doubles.are_lowered)


def _bad_value(batch: Batch) -> float | None:
    """The first value of a batch that is NaN or infinite, if there is one."""
    floats = (each for each in tensors_in(batch) if each.is_floating_point())
    return next((value for each in floats if (value := first_non_finite(each)) is not None), None)


def _of_samples(indices: Tensor, value: float | None) -> DataError:
    """What is wrong with samples whose loss is NaN; `value`: what they hold that is no number."""
    why = f"because they hold {value}: leave them out, or mend them"
    if value is None:
        why = "that of others is a number: a mean over no terms is none; return (sum, number) of the terms"
    return DataError(
        f"the loss of the held-out samples {int(indices[0])} to {int(indices[-1])} is nan, {why}"
    )


def evaluation_of(totals: Totals, metrics: Mapping[str, Metric]) -> Evaluation:
    """The means over all terms, and what follows from the loss.

    Raises:
        NonFiniteLoss: the mean loss is NaN or infinite.
        UserCodeError: what follows from it raised an exception, or is no number.
    """
    means = {name: total / (count or 1.0) for name, (total, count) in totals.items()}
    mean = means.pop(LOSS)
    if not math.isfinite(mean):
        raise NonFiniteLoss(
            f"validation loss is {mean}: the weights have diverged; {DIVERGENCE_REMEDY}"
        )
    derived = {
        name: _of_loss(name, of, mean) for name, of in metrics.items() if isinstance(of, OfLoss)
    }
    return Evaluation(mean, means | derived)


def _value(
    measure: LossFunction,
    what: str,
    model: nn.Module,
    fresh: Callable[..., Batch],
    *,
    doubles: Doubles,
    seen: LabelsSeen,
) -> Any:
    """What a loss or metric returns for a batch of its own; with gradients where it takes some itself."""

    def value() -> Any:
        batch = apart(fresh(lowers_doubles=doubles.are_lowered))
        with user_code(what), seen.watching():
            return measure(model, batch)

    try:
        return value()
    except UserCodeError as error:
        if WITHOUT_GRAPH not in str(error.__cause__):
            raise
    with torch.enable_grad():
        return value()


def _of_loss(name: str, metric: OfLoss, loss: float) -> float:
    with user_code(f"metric {name}"):
        result: object = metric.value(loss)
    if isinstance(result, Real) or (isinstance(result, Tensor) and result.numel() == 1):
        return float(result)
    problem = f"returned {described(result)}, must be a number"
    raise wrong_result(f"metric {name}", metric.value, problem)
