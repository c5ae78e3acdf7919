"""Optimizers of PyTorch's and of a user's, schedules and precision: by both algorithms as in one process."""

import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from harness import DEADLINE_S, Cluster, local_settings
from smolcluster.algorithms.SynchronousPS.step_receiver import StateArrived
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.server.assignment import Assigned
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.loop import training_steps
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.wire.messages import Welcome
from tiers import at_night

OPTIMIZERS = {
    "momentum": (
        "optimizer=sgd",
        "optimizer_args.momentum=0.9",
        "learning_rate=0.05",
        "ema_decay=0.8",
    ),
    "RMSprop": ("optimizer=torch.optim.RMSprop", "weight_decay=0.01"),
    "NAdam": (
        "optimizer=NAdam",
        "gradient_clipping.max_norm=null",
        "gradient_clipping.max_value=0.01",
    ),
    "Adafactor": ("optimizer=Adafactor", "learning_rate=0.05"),
    "muon": ("optimizer=muon", "weight_decay=0.1", "gradient_clipping.max_norm=0.5"),
}
NODES = ("pi5", "win")
WAYS: list[tuple[AlgorithmName, int]] = [("edp", 1), ("syncps", 2)]


def settings_for(algorithm: AlgorithmName, num_workers: int, *overrides: str) -> Settings:
    own = ["num_epochs=1", "model.hidden=16", f"min_workers={num_workers}"]
    if algorithm == "edp":
        own += ["worker_update_interval=1", "batch_size=64"]
    else:
        own += ["global_batch_size=64"]
    return local_settings(*own, *overrides, workers=num_workers, algorithm=algorithm)


def alone(settings: Settings) -> tuple[list[float], TrainingContext]:
    """The losses of every step of a single process with the same batches."""
    train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
    training = build(train, seed, settings.node.dataset, torch.device("cpu"))
    return [step.loss for step in training_steps(training, train)], training


def run(settings: Settings, folder: Path, algorithm: AlgorithmName) -> Cluster:
    cluster = Cluster(settings, folder, algorithm=algorithm)
    num_workers = settings.cluster.num_workers
    cluster.finish(*(cluster.worker(i + 1, node=NODES[i]) for i in range(num_workers)))
    return cluster


def losses_of(cluster: Cluster) -> Sequence[float]:
    return [record.values["loss"] for record in cluster.metrics.steps]


@pytest.mark.parametrize(("algorithm", "num_workers"), WAYS)
@pytest.mark.parametrize("name", ["momentum", *at_night("RMSprop", "NAdam")])
def test_any_optimizer_trains_as_in_one_process(
    tmp_path: Path, algorithm: AlgorithmName, num_workers: int, name: str
) -> None:
    settings = settings_for(algorithm, num_workers, *OPTIMIZERS[name])
    cluster = run(settings, tmp_path, algorithm)
    expected, training = alone(settings)
    assert losses_of(cluster) == pytest.approx(expected, rel=1e-5)
    theirs, own = cluster.training.replica, training.replica
    # Sums of gradients round otherwise than one gradient; Muon's bfloat16 makes that a hundredth of a step.
    most = 1e-4 if name == "muon" else 1e-6
    torch.testing.assert_close(theirs.params, own.params, rtol=1e-4, atol=most)
    if theirs.ema_decay is not None:
        assert theirs.average is not None
        assert own.average is not None
        torch.testing.assert_close(theirs.average, own.average, rtol=1e-4, atol=1e-6)
    assert theirs.optimizer.state.keys() == own.optimizer.state.keys() >= {STEP_COUNT}


class Follower(Worker):
    """Says when it has the whole state."""

    def __init__(
        self, welcome: Welcome, training: TrainingContext, joined: threading.Event
    ) -> None:
        super().__init__(welcome, training)
        self.has_joined = joined

    def join(self, arrived: StateArrived) -> None:
        super().join(arrived)
        if self.joined:
            self.has_joined.set()


class Patient(Worker):
    """Computes nothing more from step 6 on before somebody else has joined."""

    def __init__(
        self, welcome: Welcome, training: TrainingContext, joined: threading.Event
    ) -> None:
        super().__init__(welcome, training)
        self.other_has_joined = joined

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
    settings = settings_for("syncps", 2, "min_workers=1", *OPTIMIZERS[name])
    cluster = Cluster(settings, tmp_path, algorithm="syncps")
    assert len(cluster.training.replica.buckets) > 1
    joined = threading.Event()
    made: list[Worker] = []

    def make(welcome: Welcome, training: TrainingContext) -> Worker:
        kind = Follower if made else Patient
        made.append(kind(welcome, training, joined))
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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
@pytest.mark.parametrize("name", ["momentum", "NAdam", "Adafactor", "muon"])
def test_a_resumed_run_goes_on_with_the_optimizer_s_state(
    tmp_path: Path, algorithm: AlgorithmName, name: str
) -> None:
    settings = settings_for(algorithm, 1, "checkpoint_steps=5", "keep_last=9", *OPTIMIZERS[name])
    whole = run(settings, tmp_path, algorithm)
    first, *later = whole.store.list()  # of step 5, unless the disk was busy until a later one came
    for info in later:
        shutil.rmtree(info.path)
    resumed = Cluster(settings, tmp_path, algorithm=algorithm, resume=True)
    assert resumed.core.version == first.step
    worker = resumed.worker(1, node=NODES[0])
    resumed.server.finish()
    worker.finish()
    assert losses_of(resumed) == losses_of(whole)[first.step :]
    ours, theirs = resumed.training.replica, whole.training.replica
    assert torch.equal(ours.params, theirs.params)
    assert torch.equal(ours.evaluated, theirs.evaluated)
