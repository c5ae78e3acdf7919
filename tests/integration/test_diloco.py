"""DiLoCo between real sessions over TCP, in one process: what is trained, and what goes wrong."""

import signal
import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

import own_workloads
from harness import DEADLINE_S, Cluster, computing_after, local_settings
from own_workloads import assert_same, buffers_of, normed
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo.ledger import Applied
from smolcluster.algorithms.DiLoCo.rounds import Timing
from smolcluster.algorithms.DiLoCo.server import Server
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.schema import Settings
from smolcluster.errors import (
    ConfigError,
    ConnectTimeout,
    NonFiniteLoss,
    PeerLost,
    ProtocolError,
)
from smolcluster.runs.events import LeaseReturned, PushDropped
from smolcluster.server.assignment import Assigned
from smolcluster.server.weights import WeightsArrived
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.local_copy import InProcess
from smolcluster.training.schedule import learning_rate
from smolcluster.training.workload import Workload
from smolcluster.utils.stopping import Interrupted
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import Collect, Welcome
from tiers import at_night

PLAIN = "outer_lr=1", "outer_momentum=0", "codec_up=null", "codec_down=null"
"""With one worker this is training in one process."""
STREAMING = "mode=streaming", "fragments=3"
ASYNC = ("mode=async",)
IN_EACH_MODE = pytest.mark.parametrize(
    "mode", [(), *at_night((STREAMING,), (ASYNC,))], ids=["sync", "streaming", "async"]
)


def settings_for(*overrides: str, workers: int = 1) -> Settings:
    return local_settings(
        *("num_epochs=2", "mode=sync", f"min_workers={workers}", *overrides),
        workers=workers,
        algorithm="diloco",
    )


def cluster_for(
    settings: Settings, folder: Path, workload: Workload | None = None, resume: bool = False
) -> Cluster:
    folder.mkdir(exist_ok=True)
    return Cluster(settings, folder, algorithm="diloco", workload=workload, resume=resume)


@pytest.mark.slow
@IN_EACH_MODE
@pytest.mark.parametrize(
    ("local_steps", "double", "overrides"),
    [
        (1, False, ()),
        (7, False, ("optimizer=sgd", "learning_rate=0.1", "lr_schedule.warmup_iters=3")),
        (7, True, ("dataset.source=server",)),
        (1000, False, ()),
    ],
    ids=["1 step", "sgd with a schedule", "float64, served", "more than an epoch"],
)
def test_one_worker_without_momentum_is_sequential_training(
    tmp_path: Path,
    local_steps: int,
    double: bool,
    overrides: tuple[str, ...],
    mode: tuple[str, ...],
) -> None:
    """Losses, weights and the statistics of batch norms are those of one process."""
    own = "batch_size=16", "num_epochs=3", f"local_steps={local_steps}", *overrides, *mode
    settings, rel = settings_for(*PLAIN, *own), 1e-9 if double else 1e-6
    cluster = cluster_for(settings, tmp_path, normed(double=double))
    cluster.finish(cluster.worker(1))
    told = [line for line in cluster.log_lines if "a round has 1000 batches, an epoch 10" in line]
    assert len(told) == (local_steps == 1000)
    expected, alone = own_workloads.alone(settings, normed(double=double))
    assert cluster.losses == pytest.approx(expected, rel=rel)
    ours, theirs = cluster.training.replica, alone.replica
    torch.testing.assert_close(ours.params, theirs.params, rtol=10 * rel, atol=rel)
    for name, buffer in buffers_of(theirs.model).items():
        torch.testing.assert_close(buffers_of(ours.model)[name], buffer, rtol=10 * rel, atol=rel)


@pytest.mark.slow
@IN_EACH_MODE
def test_a_worker_warms_up_in_as_many_steps_as_one_process_with_the_whole_batch(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    own = "batch_size=8", "num_epochs=3", "local_steps=2", "lr_schedule.warmup_iters=6"
    settings = settings_for("sync_fraction=0", *own, *mode, workers=2)
    cluster = cluster_for(settings, tmp_path, normed())
    cluster.finish(cluster.worker(1), cluster.worker(2))
    rates = sorted(record.values["lr"] for record in cluster.metrics.steps[:12])
    train = settings.train.model_copy(update={"batch_size": 16})
    alone = [learning_rate(train, 16 * step, 3 * own_workloads.NUM_SAMPLES) for step in range(7)]
    assert rates[::2] == pytest.approx(alone[:6])
    assert max(rates) < alone[6] == settings.train.learning_rate
    assert cluster.metrics.steps[12].values["lr"] == pytest.approx(alone[6])


def test_the_average_of_the_weights_decays_by_steps_of_all_workers(tmp_path: Path) -> None:
    settings = settings_for("ema_decay=0.9", "batch_size=16", "local_steps=2", workers=2)
    cluster = cluster_for(settings, tmp_path, normed())
    replica, steps = cluster.training.replica, list[float]()
    update = replica.update_average

    def counted(num_steps: float = 1) -> None:
        steps.append(num_steps)
        update(num_steps)

    replica.update_average = counted  # type: ignore[method-assign]
    cluster.finish(cluster.worker(1), cluster.worker(2))
    assert sum(steps) == 2 * own_workloads.NUM_SAMPLES / 32
    assert replica.average is not None


def test_rounds_that_the_server_chooses_are_never_said_to_be_too_long(tmp_path: Path) -> None:
    settings = settings_for("batch_size=2000", "num_epochs=1", "local_steps=null", workers=2)
    cluster = cluster_for(settings, tmp_path, normed())
    cluster.finish(cluster.worker(1), cluster.worker(2))
    assert not [line for line in cluster.log_lines if "local_steps" in line]


@pytest.mark.parametrize(
    ("codec", "down", "mode"),
    [
        ("fp32", "fp32", ()),
        ("int8", "int8", STREAMING),
        *at_night(
            ("int8", "int8", ()),
            ("int4", "int4", ()),
            ("topk", "int8", ()),
            ("int8", "int8", ASYNC),
        ),
    ],
    ids=["fp32", "int8, streaming", "int8", "int4", "topk", "int8, async"],
)
def test_three_workers_learn_and_apply_every_sample_once(
    tmp_path: Path, codec: str, down: str, mode: tuple[str, ...]
) -> None:
    own = f"codec_up={codec}", f"codec_down={down}", "num_epochs=8", "local_steps=5", *mode
    settings = settings_for(*own, workers=3)
    held: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    """The weights that changes of a fragment are counted from, by version."""

    class Watched(Worker):
        def send_change(self, collect: Collect) -> None:
            number = collect.fragment
            assert isinstance(self.copy.executor, InProcess)
            weights = torch.cat(list(self.copy.executor.start[number].values()))
            held[number, self.versions[number]].append(weights)
            super().send_change(collect)

    cluster = cluster_for(settings, tmp_path)
    workers = [cluster.worker(rank + 1, make=Watched) for rank in range(3)]
    summary = cluster.finish(*workers)
    assert summary.samples_applied == 8 * summary.train_samples
    assert summary.leases_returned == 0, "nobody was cut off"
    assert summary.codec == codec
    assert summary.steps == summary.pushes.applied == len(cluster.metrics.steps)
    epochs = {each.step: each.epoch for each in cluster.metrics.steps}
    evaluations = [each for each in cluster.metrics.records if each.kind == "eval"]
    assert {each.step: each.epoch for each in evaluations}.items() <= epochs.items()
    assert evaluations
    assert summary.final.val_accuracy is not None
    least = 0.6 if codec == "topk" or mode == ASYNC else 0.8
    assert summary.final.val_accuracy > least, "few rounds for topk, and for delayed momentum"
    assert isinstance(cluster.core, Server)
    if mode != ASYNC:  # else a change holds what was handed out while the last was on its way
        assert cluster.core.pacing.num_rounds(cluster.core.stores.version) > 20
    for weights in held.values() if mode != ASYNC else []:  # bit for bit, also by steps in 8 bits
        assert all(torch.equal(each, weights[0]) for each in weights)


@pytest.mark.parametrize("has_same", [True, False])
def test_the_first_weights_are_sent_to_who_has_not_made_the_same_itself(
    tmp_path: Path, has_same: bool
) -> None:
    arrived: list[WeightsArrived] = []

    class Watched(Worker):
        def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
            super().__init__(welcome, training)
            if not has_same:
                training.replica.params.add_(1.0)

        def handle(self, event: Event) -> None:
            if isinstance(event, WeightsArrived):
                arrived.append(event)
            super().handle(event)

    settings = settings_for("local_steps=2", "num_epochs=1")
    cluster = cluster_for(settings, tmp_path)
    summary = cluster.finish(cluster.worker(1, make=Watched))
    assert len(arrived) == (0 if has_same else 1)
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy > 0.5


@pytest.mark.parametrize(
    ("mode", "measured", "expected"),
    [((), 6, [1, 2, 4, 6, 6]), (ASYNC, 24, [1, 2, 4, 8, 16, 16, 24])],
    ids=["sync", "async"],
)
def test_local_steps_are_at_first_few_and_then_chosen_by_measured_times(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: tuple[str, ...],
    measured: int,
    expected: list[int],
) -> None:
    """Once more when workers no longer wait: then a round is a change of each."""
    chosen: list[int] = []
    choose_steps = rounds.Pacing.choose_steps

    def watched(pacing: rounds.Pacing, workers: Collection[Timing], num_outer_steps: int) -> None:
        choose_steps(pacing, workers, num_outer_steps)
        chosen.append(pacing.round.local_steps)

    monkeypatch.setattr(rounds, "measured_steps", lambda *_: measured)
    monkeypatch.setattr(rounds.Pacing, "choose_steps", watched)
    cluster = cluster_for(
        settings_for("num_epochs=4", "sync_fraction=0", *mode, workers=2), tmp_path
    )
    cluster.finish(cluster.worker(1), cluster.worker(2))
    assert chosen[: len(expected)] == expected
    assert set(chosen[len(expected) :]) <= {measured}


class Dying(Worker):
    """Loses its connection in the middle of a round, once."""

    has_died = False

    def compute(self, lease: Assigned) -> BatchLoss:
        if not self.has_died and self.versions[0] >= 2:
            self.has_died = True
            raise PeerLost("the test cuts it off")
        return super().compute(lease)


class Diverging(Worker):
    """Its own copy comes to NaN now and then; the server's weights are well."""

    num_computed = 0

    def compute(self, lease: Assigned) -> BatchLoss:
        self.num_computed += 1
        if self.num_computed % 11 == 5 and not self.is_fresh:
            raise NonFiniteLoss("loss is nan at layer fc1")
        return super().compute(lease)


class Huge(Worker):
    """What it has changed is finite, and now and then out of all proportion."""

    num_changes = 0

    def send_change(self, collect: Collect) -> None:
        if not self.is_fresh:
            self.num_changes += 1
            if self.num_changes % 4 == 1:  # the first one, too: a worker that is late has few
                self.spoil(collect)
        super().send_change(collect)

    def spoil(self, _: Collect) -> None:
        self.replica.params.mul_(1e25)


class Spoilt(Huge):
    """One of its values is NaN then."""

    def spoil(self, collect: Collect) -> None:
        first = self.layout.fragments[collect.fragment].places[0].start
        self.replica.params[first] = torch.nan


@pytest.mark.slow
@IN_EACH_MODE
@pytest.mark.parametrize("make", [Dying, Diverging, Huge, Spoilt])
def test_a_worker_that_fails_costs_its_own_steps_and_nothing_else(
    tmp_path: Path, make: type[Worker], mode: tuple[str, ...]
) -> None:
    settings = settings_for("local_steps=4", "num_epochs=4", "codec_up=int8", *mode, workers=2)
    cluster = cluster_for(settings, tmp_path)
    summary = cluster.finish(cluster.worker(1), cluster.worker(2, make=make))
    returned = cluster.happened(LeaseReturned)
    assert isinstance(cluster.core, Server)
    kept = [each for each in cluster.core.workers.values() if each.session is not None]
    assert len(kept) <= 2, "a session that has ended is not kept with its worker's name"
    assert summary.leases_returned == len(returned) > 0
    assert {event.rank for event in returned} == {1}
    dropped = [event.outcome for event in cluster.happened(PushDropped)]
    assert summary.pushes.non_finite == dropped.count("non_finite")
    assert (summary.pushes.non_finite > 0) == (make is not Dying)
    assert torch.isfinite(cluster.training.replica.params).all()


def test_one_worker_ends_a_run_that_all_others_have_left(tmp_path: Path) -> None:
    class Leaving(Worker):
        def compute(self, lease: Assigned) -> BatchLoss:
            if self.versions[0] >= 2:
                raise ConfigError("the test sends it away")
            return super().compute(lease)

    settings = settings_for("local_steps=4", "num_epochs=3", *STREAMING, workers=3)
    cluster = cluster_for(settings, tmp_path)
    leaving = [cluster.worker(number, make=Leaving) for number in (2, 3)]
    cluster.finish(cluster.worker(1))
    assert all(isinstance(each.failure(), ConfigError) for each in leaving)


def test_a_worker_without_the_run_s_codec_leaves_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(welcome: Welcome, training: TrainingContext) -> Worker:
        return Worker(welcome.model_copy(update={"codec": "int2"}), training)

    cluster = cluster_for(settings_for("codec_up=int4", "min_workers=1"), tmp_path)
    told = cluster.worker(2, make=older).failure()
    assert isinstance(told, ProtocolError)
    assert "run the same version of smolcluster on all nodes" in str(told)
    cluster.finish(cluster.worker(1))


class Exploding(Worker):
    """All its losses are NaN, whatever the weights."""

    def compute(self, lease: Assigned) -> BatchLoss:  # noqa: ARG002
        raise NonFiniteLoss("loss is nan at layer fc1")


@pytest.mark.nightly
def test_a_worker_that_fails_also_from_fresh_weights_leaves_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    settings = settings_for("local_steps=4", workers=2)
    cluster = cluster_for(settings, tmp_path)
    has_failed = threading.Event()
    innocent = cluster.worker(1, make=computing_after(has_failed, Worker))
    assert isinstance(cluster.worker(2, make=Exploding).failure(), NonFiniteLoss)
    has_failed.set()
    cluster.finish(innocent)


def test_a_run_on_which_every_worker_fails_has_failed(tmp_path: Path) -> None:
    cluster = cluster_for(settings_for("local_steps=4"), tmp_path)
    cluster.worker(1, make=Exploding)
    assert "fc1" in str(cluster.server.failure())


@pytest.mark.slow
def test_who_is_late_loses_its_samples_and_begins_again(tmp_path: Path) -> None:
    """A round does not wait longer than its grace; the laggard is heard of again and goes on."""
    begun, over = threading.Event(), threading.Event()

    class Late(Worker):
        is_late = True

        def compute(self, lease: Assigned) -> BatchLoss:
            begun.set()
            return super().compute(lease)

        def send_change(self, collect: Collect) -> None:
            if self.is_late and self.versions[0] >= 2:
                self.is_late = False
                assert over.wait(DEADLINE_S)
            super().send_change(collect)

    class Watched(Server):
        def leave_late(self, now: float) -> None:
            super().leave_late(now)
            if len(self.active) < len(self.peers):
                over.set()

    settings = settings_for("local_steps=3", "num_epochs=6", "grace=0.5", workers=2)
    cluster = Cluster(settings, tmp_path, Watched, algorithm="diloco")
    other = cluster.worker(1, make=computing_after(begun, Worker))
    summary = cluster.finish(other, cluster.worker(2, make=Late))
    assert summary.leases_returned > 0
    assert any("answers again" in line for line in cluster.log_lines)


def test_who_freezes_before_it_is_asked_does_not_hold_the_round(tmp_path: Path) -> None:
    """Its heartbeats come, and it never takes a step."""
    hangs = threading.Event()

    class Hung(Worker):
        def step(self, lease: Assigned) -> None:  # noqa: ARG002
            hangs.set()
            while True:
                self.link.next_event(1.0)

    settings = settings_for("local_steps=4", "grace=0.5", workers=2)
    cluster = cluster_for(settings, tmp_path)
    other = cluster.worker(1, make=computing_after(hangs, Worker))
    summary = cluster.finish(other, cluster.worker(2, make=Hung))
    assert summary.leases_returned > 0


@pytest.mark.slow
@IN_EACH_MODE
def test_a_server_goes_on_from_its_last_round(tmp_path: Path, mode: tuple[str, ...]) -> None:
    """Momentum, what the codec owes, rounds and samples are those of the checkpoint."""
    epochs = 8 if mode == ASYNC else 3  # a change may hold some hundred steps on a busy machine
    own = "local_steps=5", "codec_up=int8", "codec_down=int8", "checkpoint_steps=1"
    settings = settings_for(*own, *mode, f"num_epochs={epochs}", "reconnect_timeout_s=1")
    cluster = cluster_for(settings, tmp_path)
    stopped = cluster.core
    assert isinstance(stopped, Server)
    count = stopped.count
    saved: list[tuple[int, int, object, dict[str, torch.Tensor]]] = []

    def watched(applied: Sequence[Applied]) -> None:
        count(applied)
        partly, store = stopped.ledger.partly_applied, stopped.stores
        if not saved and applied and store.version >= 5 and bool(partly) == (mode == STREAMING):
            tensors = {name: each.clone() for name, each in store.tensors.items()}
            saved.append((stopped.version, store.version, partly, tensors))
            cluster.stop.note(signal.SIGTERM)

    stopped.count = watched  # type: ignore[method-assign]
    worker = cluster.worker(1)
    assert isinstance(cluster.server.failure(), Interrupted)
    # else it goes on with the next server
    assert isinstance(worker.failure(), PeerLost | ConnectTimeout)
    [(version, outer_version, partly, before)] = saved
    again = cluster_for(settings, tmp_path, resume=True)
    core = again.core
    assert isinstance(core, Server)
    assert (core.version, core.stores.version) == (version, outer_version)
    assert core.ledger.partly_applied == partly
    assert_same(core.stores.tensors, before)
    worker = again.worker(1)
    again.server.finish()
    worker.finish()
    assert again.server.summary is not None
    assert again.server.summary.samples_applied == epochs * again.training.num_samples


def test_streaming_workers_compute_while_fragments_travel(tmp_path: Path) -> None:
    """Between asking for a fragment and its new weights a worker takes steps, and loses none of them."""
    steps_behind: list[int] = []

    class Watched(Worker):
        def compute(self, lease: Assigned) -> BatchLoss:
            steps_behind.append(len(self.copy.sent))
            return super().compute(lease)

    cluster = cluster_for(settings_for("local_steps=6", "num_epochs=4", *STREAMING), tmp_path)
    cluster.finish(cluster.worker(1, make=Watched))
    assert any(steps_behind)


def test_fragments_of_the_whole_are_refused() -> None:
    with pytest.raises(ConfigError, match="fragments is 3, but mode is sync"):
        check_algorithm(settings_for("fragments=3"), "diloco")
