"""float16: the loss scale belongs to the run, and what overflows is skipped by everybody and counted."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import Cluster, local_settings
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.data.dataset import Batch
from smolcluster.data.digits import load_digits
from smolcluster.data.permutation import EpochOrders
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload, cross_entropy
from smolcluster.training.loop import training_steps
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.training.workload import Terms, Workload
from smolcluster.wire.messages import Welcome
from tiers import at_night

NODES = ("pi5", "win")
CPU = torch.device("cpu")
FACTOR = 2000.0
"""Of the loss: with it the gradient overflows until the scale has been halved some times."""


def settings_for(algorithm: AlgorithmName, num_workers: int, *overrides: str) -> Settings:
    own = ["num_epochs=1", "model.hidden=16", f"min_workers={num_workers}", "precision=fp16"]
    if algorithm == "edp":
        own += ["worker_update_interval=1", "batch_size=64"]
    else:
        own += ["global_batch_size=64"]
    return local_settings(*own, *overrides, workers=num_workers, algorithm=algorithm)


def workload_of(settings: Settings) -> Workload:
    def loss(model: nn.Module, batch: Batch) -> Terms:
        total, count = cross_entropy(model, batch)
        return total * FACTOR, count

    workload = builtin_workload(settings.train, load_digits(settings.cluster.seed))
    workload.loss = loss
    return workload


def alone(settings: Settings) -> tuple[list[float], TrainingContext]:
    train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
    workload = workload_of(settings)
    training = build(train, seed, settings.node.dataset, CPU, workload=workload)
    return [step.loss for step in training_steps(training, train)], training


def run(
    settings: Settings, folder: Path, algorithm: AlgorithmName, *, resume: bool = False
) -> Cluster:
    workload = workload_of(settings)
    cluster = Cluster(settings, folder, algorithm=algorithm, workload=workload, resume=resume)
    num_workers = settings.cluster.num_workers
    workers = [cluster.worker(i + 1, node=NODES[i]) for i in range(num_workers)]
    if resume:
        cluster.server.finish()
        for worker in workers:
            worker.finish()
    else:
        cluster.finish(*workers)
    return cluster


def losses_of(cluster: Cluster) -> Sequence[float]:
    return [record.values["loss"] for record in cluster.metrics.steps]


def overflows_of(cluster: Cluster) -> list[float]:
    return [record.values["overflows"] for record in cluster.metrics.steps]


def num_overflows(training: TrainingContext) -> int:
    assert training.replica.scaler is not None
    return training.replica.scaler.num_overflows


def test_one_process_trains_as_with_pytorch_s_gradient_scaler() -> None:
    settings = settings_for("syncps", 1)
    losses, training = alone(settings)
    workload = workload_of(settings)
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
    for start in range(0, 1438, 64):
        indices = order[start : start + 64]
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


@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_one_worker_trains_as_one_process_overflows_and_all(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, 1)
    cluster = run(settings, tmp_path, algorithm)
    expected, training = alone(settings)
    assert losses_of(cluster) == pytest.approx(expected, rel=1e-5)
    assert num_overflows(cluster.training) == num_overflows(training)
    theirs, own = cluster.training.replica, training.replica
    torch.testing.assert_close(theirs.params, own.params, rtol=1e-4, atol=1e-6)
    assert theirs.optimizer.state[STEP_COUNT] == own.optimizer.state[STEP_COUNT]
    assert overflows_of(cluster)[-1] == num_overflows(training)
    assert cluster.core.report.status("ended").overflows == num_overflows(training)
    assert sum("is skipped: a gradient overflowed" in line for line in cluster.log_lines) >= 3


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_step_that_overflows_on_one_worker_is_skipped_by_all(tmp_path: Path, codec: str) -> None:
    settings = settings_for("syncps", 2, f"codec={codec}", "learning_rate=0.01")
    workload = workload_of(settings)
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
    counts = overflows_of(cluster)
    assert counts == sorted(counts)
    assert losses_of(cluster)[-1] < 0.9 * losses_of(cluster)[0]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["syncps", *at_night("edp")])
def test_a_resumed_run_goes_on_with_the_loss_scale(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, 1, "checkpoint_steps=6", "keep_last=9")
    whole = run(settings, tmp_path, algorithm)
    first, *later = whole.store.list()  # of step 6, unless the disk was busy until a later one came
    for info in later:
        shutil.rmtree(info.path)
    resumed = run(settings, tmp_path, algorithm, resume=True)
    assert losses_of(resumed) == losses_of(whole)[first.step :]
    assert overflows_of(resumed) == overflows_of(whole)[first.step :]
    assert torch.equal(resumed.training.replica.params, whole.training.replica.params)
