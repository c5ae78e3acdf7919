"""The state of optimizers and of float16's loss scale is the run's, and the same on all workers."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import DEADLINE_S, Cluster
from own_workloads import CPU, KINDS, NODES, alone, losses_of, scaled_digits, settings_for
from smolcluster.algorithms.SynchronousPS.step_receiver import StateArrived
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.data.permutation import EpochOrders
from smolcluster.server.assignment import Assigned
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.wire.messages import Welcome
from tiers import at_night

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


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_step_that_overflows_on_one_worker_is_skipped_by_all(tmp_path: Path, codec: str) -> None:
    own = (*FLOAT16.overrides, f"codec={codec}", "learning_rate=0.01", "num_epochs=1")
    settings = settings_for("syncps", 2, *own)
    workload = scaled_digits(settings)
    cluster = Cluster(settings, tmp_path, algorithm="syncps", workload=workload)
    made: list[Worker] = []

    def make(welcome: Welcome, training: TrainingContext) -> Worker:
        made.append(Worker(welcome, training))
        return made[-1]

    workers = [cluster.worker(i + 1, node=NODES[i], make=make) for i in range(2)]
    summary = cluster.finish(*workers)
    theirs, skipped = cluster.training.replica, num_overflows(cluster.training)
    assert skipped >= 3
    assert (summary.steps, summary.samples_applied) == (23, 1438)
    assert theirs.optimizer.state[STEP_COUNT] == 23 - skipped
    for worker in made:
        assert torch.equal(worker.replica.params, theirs.params)
        assert worker.replica.optimizer.state[STEP_COUNT] == 23 - skipped
    losses = losses_of(cluster)
    assert losses[-1] < 0.9 * losses[0]


class Waiting(Worker):
    """Computes nothing from step 6 on before another worker has the whole state."""

    def __init__(
        self, welcome: Welcome, training: TrainingContext, joined: threading.Event, *, late: bool
    ) -> None:
        super().__init__(welcome, training)
        self.other_has_joined, self.is_late = joined, late

    def join(self, arrived: StateArrived) -> None:
        super().join(arrived)
        if self.joined and self.is_late:
            self.other_has_joined.set()

    def work_on(self, task: Assigned) -> None:
        if self.version == 6:
            assert self.other_has_joined.wait(DEADLINE_S)
        super().work_on(task)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", *at_night("RMSprop", "NAdam")])
def test_who_joins_later_has_the_optimizer_s_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("harness.build", partial(build, bucket_bytes=1024))
    settings = settings_for("syncps", 2, *KINDS[name].overrides, "min_workers=1")
    cluster = Cluster(settings, tmp_path, algorithm="syncps")
    assert len(cluster.training.replica.buckets) > 1
    joined = threading.Event()
    made: list[Worker] = []

    def make(welcome: Welcome, training: TrainingContext) -> Worker:
        made.append(Waiting(welcome, training, joined, late=bool(made)))
        return made[-1]

    first = cluster.worker(1, node="pi5", make=make)
    while cluster.core.version < 6 and first.is_alive():
        threading.Event().wait(0.01)
    cluster.finish(first, cluster.worker(2, node="win", make=make))
    expected, _ = alone(settings)
    assert losses_of(cluster) == pytest.approx(expected, rel=1e-5)
    theirs = cluster.training.replica
    for worker in made:
        torch.testing.assert_close(worker.replica.params, theirs.params, rtol=0, atol=0)
        for key, tensor in theirs.optimizer.state.items():
            torch.testing.assert_close(worker.replica.optimizer.state[key], tensor, rtol=0, atol=0)
    assert made[1].version == cluster.core.version
