"""EDP between real sessions over TCP, in one process: what is trained, and what goes wrong."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import Cluster, computing_after, local_settings
from own_workloads import alone, run
from smolcluster.algorithms.EDP.server import Server
from smolcluster.algorithms.EDP.worker import Worker
from smolcluster.errors import (
    NonFiniteLoss,
    RunFailed,
)
from smolcluster.runs.events import LeaseReturned, PushDropped, WorkerLeft
from smolcluster.server import link
from smolcluster.server.assignment import Assigned
from smolcluster.server.push import Pushed
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.messages import Push
from tiers import at_night
from waiting import Clock

MIXING = "update_rule=mixing"


@pytest.mark.slow
def test_mixing_one_worker_s_steps_is_plain_gradient_descent(tmp_path: Path) -> None:
    """w + α (w - lr · g - w): at a learning rate of α · lr; `test_as_one_process` has the other rule."""
    plain = "num_epochs=4", "optimizer=sgd"
    own = MIXING, "worker_update_interval=1", "learning_rate=0.1"
    cluster = run(local_settings(*plain, *own, workers=1), tmp_path, "edp")
    expected, single = alone(local_settings(*plain, "learning_rate=0.06"), algorithm="edp")
    assert len(expected) == 4 * 45
    assert cluster.losses == pytest.approx(expected, rel=1e-4)
    ours, theirs = cluster.training.replica.params, single.replica.params
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "codec"),
    [
        ("use_quantization=true", "int8"),
        *at_night(("codec=null", "fp32"), ("codec=int4", "int4"), (MIXING, "fp32")),
    ],
)
def test_three_workers_learn_and_apply_every_sample_once(
    tmp_path: Path, override: str, codec: str
) -> None:
    cluster = Cluster(local_settings(override, "num_epochs=12", "min_workers=3"), tmp_path)
    summary = cluster.finish(*(cluster.worker(rank + 1) for rank in range(3)))
    assert summary.samples_applied == 12 * summary.train_samples
    assert summary.pushes.applied == summary.steps == len(cluster.metrics.steps)
    assert summary.codec == codec
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy > 0.85
    assert sum(share.samples for share in summary.workers) == summary.samples_applied
    assert {record.rank for record in cluster.metrics.steps} == {0, 1, 2}


def test_workers_that_hang_and_say_that_they_are_slow_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hung(Worker):
        def step(self, lease: Assigned) -> None:  # noqa: ARG002
            while True:  # its heartbeats come, until the run is over
                self.link.next_event(1.0)

    monkeypatch.setattr(link, "measure_speed", lambda *_: 1e-6)
    cluster = Cluster(local_settings("min_workers=3", "num_epochs=4"), tmp_path)
    hung = [cluster.worker(rank, make=Hung) for rank in (2, 3)]
    cluster.finish(cluster.worker(1), *hung)
    assert any("worker 1" in line and "is idle" in line for line in cluster.log_lines)


def test_a_push_says_how_long_its_batch_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The computing alone: neither the wait for the last answer nor that for weights."""
    pushes: list[Push] = []
    clock = Clock()
    monkeypatch.setattr(
        "smolcluster.algorithms.EDP.worker.time", SimpleNamespace(perf_counter=clock)
    )

    class Watched(Server):
        def apply(self, *args: object) -> None:
            super().apply(*args)  # type: ignore[arg-type]
            pushes.extend(arg.push for arg in args if isinstance(arg, Pushed))

    class Slow(Worker):
        """A batch takes a second of the clock, a wait a hundred."""

        def compute(self, lease: Assigned) -> BatchLoss:
            clock.now += 1.0
            return super().compute(lease)

        def wait_until(self, condition: Callable[[], bool]) -> None:
            clock.now += 100.0
            super().wait_until(condition)

    settings = local_settings("num_epochs=1", "batch_size=128", workers=1)
    cluster = Cluster(settings, tmp_path, Watched)
    cluster.worker(1, make=Slow)
    cluster.server.finish()
    assert len(pushes) >= 10
    assert {push.compute_s for push in pushes} == {1.0}


def test_stale_pushes_beyond_the_bound_are_dropped_counted_and_computed_again(
    tmp_path: Path,
) -> None:
    settings = local_settings("staleness.bound=1", "num_epochs=3", "worker_update_interval=5")
    cluster = Cluster(settings, tmp_path)
    summary = cluster.finish(*(cluster.worker(rank + 1) for rank in range(3)))
    assert all(record.values["staleness"] <= 1 for record in cluster.metrics.steps)
    stale = [event for event in cluster.happened(PushDropped) if event.outcome == "stale"]
    returned = cluster.happened(LeaseReturned)
    assert summary.pushes.stale == len(stale) > 0
    assert summary.leases_returned == len(returned)
    assert [event.reason for event in returned] == ["its push was too stale"] * len(returned)


def test_an_exploding_loss_stops_the_run_and_names_step_worker_and_layer(tmp_path: Path) -> None:
    settings = local_settings(
        "learning_rate=1e30", "gradient_clipping.enabled=false", "optimizer=sgd", workers=1
    )
    cluster = Cluster(settings, tmp_path)
    worker = cluster.worker(1, node="pi5")
    failure = cluster.server.failure()
    assert isinstance(failure, NonFiniteLoss)
    for part in ("worker 1 (pi5)", "step ", "layer ", "learning_rate"):
        assert part in str(failure)
    assert isinstance(worker.failure(), NonFiniteLoss)
    assert all(math.isfinite(loss) for loss in cluster.losses)


class Diverging(Worker):
    """Its own copy comes to NaN now and then; the server's weights are well."""

    def compute(self, lease: Assigned) -> BatchLoss:
        if self.steps % 7 == 3:
            raise NonFiniteLoss("loss is nan at layer fc1")
        return super().compute(lease)


class Huge(Worker):
    """Its gradient is finite, and now and then out of all proportion."""

    def compute(self, lease: Assigned) -> BatchLoss:
        loss = super().compute(lease)
        if self.steps % 7 == 3:
            self.replica.grads.mul_(1e30)
        return loss


@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "num_pushes"), [("gradient", 6), ("mixing", 12)])
def test_the_warm_up_counts_steps_of_who_has_the_optimizer(
    tmp_path: Path, rule: str, num_pushes: int
) -> None:
    """The server, which takes a step a push; or each of two workers, though but one of them has come."""
    own = f"update_rule={rule}", "lr_schedule.warmup_iters=6", "min_workers=1"
    settings = local_settings(*own, workers=2)
    cluster = Cluster(settings, tmp_path)
    cluster.finish(cluster.worker(1))
    rates = [record.values["lr"] for record in cluster.metrics.steps]
    assert rates.index(settings.train.learning_rate) == num_pushes


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm_of_one", [Diverging, Huge])
@pytest.mark.parametrize("override", ["update_rule=gradient", "update_rule=mixing"])
def test_a_worker_whose_own_copy_diverges_costs_its_pushes_and_nothing_else(
    tmp_path: Path, algorithm_of_one: type[Worker], override: str
) -> None:
    overrides = "gradient_clipping.enabled=false", "min_workers=2", "num_epochs=4", override
    cluster = Cluster(local_settings(*overrides, workers=2), tmp_path)
    summary = cluster.finish(cluster.worker(1), cluster.worker(2, make=algorithm_of_one))
    assert summary.pushes.non_finite > 0
    dropped = cluster.happened(PushDropped)
    assert {event.rank for event in dropped if event.outcome == "non_finite"} == {1}
    assert torch.isfinite(cluster.training.replica.params).all()


class Broken(Worker):
    """All that it computes is out of proportion, whatever the weights."""

    def compute(self, lease: Assigned) -> BatchLoss:
        loss = super().compute(lease)
        self.replica.grads.mul_(1e30)
        return loss


class Exploding(Worker):
    """From some step on its losses are NaN, whatever the weights."""

    def compute(self, lease: Assigned) -> BatchLoss:
        if self.steps >= 20:
            raise NonFiniteLoss("loss is nan at layer fc1")
        return super().compute(lease)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm_of_one", [Broken, Exploding])
def test_a_worker_that_fails_also_from_fresh_weights_leaves_and_the_others_go_on(
    tmp_path: Path, algorithm_of_one: type[Worker]
) -> None:
    overrides = "gradient_clipping.enabled=false", "min_workers=2", "num_epochs=4"
    cluster = Cluster(local_settings(*overrides, workers=2), tmp_path)
    has_failed = threading.Event()
    innocent = cluster.worker(1, make=computing_after(has_failed, Worker))
    assert isinstance(cluster.worker(2, make=algorithm_of_one).failure(), NonFiniteLoss)
    has_failed.set()
    summary = cluster.finish(innocent)
    assert summary.pushes.non_finite > 0
    left = cluster.happened(WorkerLeft)
    assert 1 in {event.rank for event in left}
    assert any("worker 2 (macbook) takes part no more" in line for line in cluster.log_lines)


def test_a_run_on_which_every_worker_fails_has_failed(tmp_path: Path) -> None:
    cluster = Cluster(local_settings("min_workers=2", workers=2), tmp_path)
    workers = [cluster.worker(number, make=Exploding) for number in (1, 2)]
    error = cluster.server.failure()
    assert isinstance(error, NonFiniteLoss)
    assert "fc1" in str(error)
    for worker in workers:
        assert isinstance(worker.failure(), NonFiniteLoss | RunFailed)


def test_final_weights_that_are_not_finite_are_no_result(tmp_path: Path) -> None:
    """A neuron of minus infinity is silent: neither the loss nor the accuracy shows it."""

    class Broken(Server):
        def apply(self, *args: object) -> None:
            super().apply(*args)  # type: ignore[arg-type]
            if self.dispatcher.done:
                place = dict(self.replica.layers)["fc1.bias"]
                self.replica.params[place.start] = -torch.inf

    cluster = Cluster(local_settings("num_epochs=1", workers=1), tmp_path, Broken)
    cluster.worker(1)
    failure = cluster.server.failure()
    assert isinstance(failure, NonFiniteLoss)
    assert "layer fc1.bias at the end of the run" in str(failure)
