"""float16: the loss scale belongs to the run, and what overflows is skipped by everybody."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import harness
from harness import Cluster
from own_workloads import CPU, KINDS, NODES, alone, scaled_digits, settings_for
from several_hosts import on_hosts
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.data.permutation import EpochOrders
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.wire.messages import Welcome

FLOAT16 = KINDS["float16"]


def num_overflows(training: TrainingContext) -> int:
    assert training.replica.scaler is not None
    return training.replica.scaler.num_overflows


def test_one_process_trains_as_with_pytorch_s_gradient_scaler() -> None:
    settings = settings_for("syncps", 1, *FLOAT16.overrides, "num_epochs=1")
    workload = scaled_digits(settings)
    losses, training = alone(settings, workload)
    train = settings.train
    reference = build(train, settings.cluster.seed, settings.node.dataset, CPU, workload=workload)
    model, order = reference.replica.model, EpochOrders(reference.order)[0]
    weights = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    for (name, _), weight in zip(list(model.named_parameters()), weights, strict=True):
        *path, last = name.split(".")
        setattr(model.get_submodule(".".join(path)), last, weight)
    optimizer = torch.optim.Adam(weights, lr=train.learning_rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    expected, num_skipped = [], 0
    for indices in torch.split(order, 64):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            total, _ = workload.loss(model, workload.train.batch(indices))
            loss = total / len(indices)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = scaler.get_scale()
        nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(optimizer)
        scaler.update()
        num_skipped += scaler.get_scale() < before
        expected.append(loss.item())
    assert num_skipped == num_overflows(training) >= 3
    assert losses == pytest.approx(expected, rel=1e-4)
    assert training.replica.scaler is not None
    assert training.replica.scaler.scale == scaler.get_scale()
    assert training.replica.optimizer.state[STEP_COUNT] == len(losses) - num_skipped


@pytest.mark.parametrize(("codec", "num_hosts"), [("fp32", 1), ("int8", 1), ("int8", 3)])
def test_a_step_that_overflows_on_one_worker_is_skipped_by_all(
    tmp_path: Path, codec: str, num_hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "build", partial(build, bucket_bytes=1024))
    own = (*FLOAT16.overrides, f"codec={codec}", "learning_rate=0.01", "num_epochs=1")
    settings = settings_for("syncps", 2, *own, on_hosts(num_hosts))
    workload = scaled_digits(settings)
    cluster = Cluster(settings, tmp_path, algorithm="syncps", workload=workload)
    made: list[Worker] = []

    def make(welcome: Welcome, training: TrainingContext) -> Worker:
        made.append(Worker(welcome, training))
        return made[-1]

    stores = [cluster.start_store(node) for node in settings.cluster.store_nodes[1:]]
    workers = [cluster.worker(i + 1, node=NODES[i], make=make) for i in range(2)]
    summary = cluster.finish(*workers, *stores)
    theirs, skipped = cluster.training.replica, num_overflows(cluster.training)
    assert skipped >= 3
    assert (summary.steps, summary.samples_applied) == (23, 1438)
    assert theirs.optimizer.state[STEP_COUNT] == 23 - skipped
    for worker in made:
        assert torch.equal(worker.replica.params, theirs.params)
        assert worker.replica.optimizer.state[STEP_COUNT] == 23 - skipped
    losses = cluster.losses
    assert losses[-1] < 0.9 * losses[0]
