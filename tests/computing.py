"""Forward, backward and evaluation on a test's own tensors, with the built-in workloads' loss."""

from functools import partial

import torch
from torch import Tensor, nn

from smolcluster.data.dataset import Samples
from smolcluster.training import compute
from smolcluster.training.builtin import accuracy, cross_entropy, perplexity
from smolcluster.training.evaluate import Evaluation, evaluate, evaluation_of
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction, Metric, OfLoss

ACCURACY: dict[str, Metric] = {"accuracy": accuracy}
PERPLEXITY: dict[str, Metric] = {"perplexity": OfLoss(perplexity)}


def forward_backward(
    replica: Replica, inputs: Tensor, targets: Tensor, microbatch: int | None = None
) -> float:
    """The batch's mean cross-entropy, whose gradient is in the replica then; `microbatch` samples at once."""
    parts = []
    for rows in torch.split(torch.arange(len(inputs)), microbatch or len(inputs)):
        batch = inputs[rows], targets[rows]
        parts.append(compute.Microbatch(len(rows), partial(tuple, batch)))
    return compute.forward_backward(replica, cross_entropy, parts).mean


def evaluated(
    model: nn.Module,
    samples: Samples,
    metrics: dict[str, Metric] = ACCURACY,
    batch_size: int | None = 1024,
    loss: LossFunction = cross_entropy,
) -> Evaluation:
    """Evaluate on the CPU."""
    totals = evaluate(
        model,
        samples,
        torch.device("cpu"),
        loss=loss,
        metrics=metrics,
        batch_size=batch_size,
    )
    return evaluation_of(totals, metrics)
