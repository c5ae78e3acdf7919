"""EDP with averaged weights between real sessions over TCP, in one process."""

from pathlib import Path

import pytest
import torch

from harness import Cluster, local_settings
from smolcluster.algorithms.EDP.server import Server
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.build import build
from smolcluster.training.loop import training_steps

MIXING = "update_rule=mixing"


def test_two_workers_learn_and_every_sample_counts_once(tmp_path: Path) -> None:
    cluster = Cluster(local_settings(MIXING, "num_epochs=12", "min_workers=2", workers=2), tmp_path)
    summary = cluster.finish(cluster.worker(1), cluster.worker(2))
    assert summary.pushes.applied == summary.steps == len(cluster.metrics.steps)
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy > 0.85
    assert {record.rank for record in cluster.metrics.steps} == {0, 1}


def test_one_worker_that_always_pulls_takes_mixing_rate_times_the_step(tmp_path: Path) -> None:
    """w + α (w - lr · g - w): plain gradient descent in a single process, at a learning rate of α · lr."""
    settings_alone = local_settings("optimizer=sgd", "learning_rate=0.06", "num_epochs=4")
    settings = local_settings(
        MIXING,
        "worker_update_interval=1",
        "optimizer=sgd",
        "learning_rate=0.1",
        "num_epochs=4",
        workers=1,
    )
    cluster = Cluster(settings, tmp_path)
    cluster.finish(cluster.worker(1))

    train, seed = settings_alone.train, settings.cluster.seed
    alone = build(train, seed, settings.node.dataset, torch.device("cpu"))
    steps = training_steps(alone, train)
    expected = [step.loss for step in steps]
    losses = [record.values["loss"] for record in cluster.metrics.steps]
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(
        cluster.training.replica.params, alone.replica.params, rtol=1e-4, atol=1e-6
    )


def test_stale_pushes_are_dropped_and_their_samples_still_count_once(tmp_path: Path) -> None:
    settings = local_settings(
        MIXING, "staleness.bound=1", "num_epochs=3", "worker_update_interval=5", "min_workers=3"
    )
    cluster = Cluster(settings, tmp_path)
    summary = cluster.finish(*(cluster.worker(rank + 1) for rank in range(3)))
    assert all(record.values["staleness"] <= 1 for record in cluster.metrics.steps)
    assert summary.pushes.stale > 0


def test_final_weights_that_are_not_finite_are_no_result(tmp_path: Path) -> None:
    """A neuron of minus infinity is silent: neither the loss nor the accuracy shows it."""

    class Broken(Server):
        def apply(self, *args: object) -> None:
            super().apply(*args)  # type: ignore[arg-type]
            if self.dispatcher.done:
                place = dict(self.replica.layers)["fc1.bias"]
                self.replica.params[place.start] = -torch.inf

    cluster = Cluster(local_settings(MIXING, "num_epochs=1", workers=1), tmp_path, Broken)
    cluster.worker(1)
    failure = cluster.server.failure()
    assert isinstance(failure, NonFiniteLoss)
    assert "layer fc1.bias at the end of the run" in str(failure)
