"""A worker that others compute for, in processes of their own."""

import torch
from torch import nn

from harness import local_settings
from own_workloads import CPU, Rows
from smolcluster.algorithms.spreading import parts_of
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.workload import Workload


def test_who_does_not_compute_loads_no_samples() -> None:
    """Samples that nobody takes would be kept until the run is over."""
    settings = local_settings()
    data = Rows(torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))
    workload = Workload(lambda: nn.Linear(2, 2), cross_entropy, data)
    training = build(settings.train, 1, settings.node.dataset, CPU, workload=workload)
    assert training.prefetch is not None
    spread = TrainingContext(**parts_of(training))
    spread.want(spread.order(0), 0, 0)
    assert spread.prefetch is None
    assert spread.num_samples == 8
