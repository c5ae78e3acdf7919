"""SyncPS between real sessions over TCP: it trains as a single process does, whoever is there."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

import harness
from harness import Cluster, Outcome, local_settings
from own_workloads import NODES, alone
from proxy import Proxy
from several_hosts import on_hosts
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.algorithms.SynchronousPS.step_receiver import Committed, StateArrived
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.schema import Settings
from smolcluster.errors import NonFiniteLoss, RunFailed
from smolcluster.runs.events import (
    LeaseReturned,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import Assigned
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.loop import StepTaken
from smolcluster.wire.messages import Welcome
from smolcluster.wire.session import HEARTBEATS_PER_TIMEOUT
from tiers import at_night

BATCH = 128
STEPS_PER_EPOCH = 12
EPOCHS = 4
LAST = EPOCHS * STEPS_PER_EPOCH
DEADLINE_S = 90.0
SMALL_BUCKET = 8192
"""Bytes: five buckets."""


def settings_for(*overrides: str, workers: int) -> Settings:
    """The shipped digits, shortened; training starts when all workers are there.

    No part is overdue before the test is, unless a `timeout` is set.
    """
    short = (f"num_epochs={EPOCHS}", f"global_batch_size={BATCH}", f"min_workers={workers}")
    patience = f"heartbeat_timeout_s={HEARTBEATS_PER_TIMEOUT * DEADLINE_S}"
    return local_settings(*short, patience, *overrides, workers=workers, algorithm="syncps")


def shares(*values: float) -> tuple[str, ...]:
    """Everybody has a part of every step, whatever its speed."""
    return tuple(f"batch_share.{node}={value}" for node, value in zip(NODES, values, strict=False))


Replicas = dict[int, tuple[Tensor, ...]]
"""Weights and the optimizer's tensors, by version."""


class WatchedServer(Server):
    """Keeps what it had after every step, and tells when it has come to a version.

    It begins when as many workers as the test has have the whole state.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.replicas: Replicas = {}
        self._reached = {version: threading.Event() for version in range(1, 2 * LAST)}

    def commit(self, step: Step) -> StepTaken:
        taken = super().commit(step)
        self.replicas[self.version] = state_of(self.replica.params, self.replica.optimizer.state)
        self.reached(self.version).set()
        return taken

    def open_step(self, now: float) -> Step | None:
        may_open = self.version or len(self.members.free) >= self.cluster.min_workers
        return super().open_step(now) if may_open else None

    def reached(self, version: int) -> threading.Event:
        return self._reached[version]


def state_of(params: Tensor, optimizer: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in (params, *optimizer.values()))


class Watched(Worker):
    """Keeps what it had after every step that it took as a member."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        super().__init__(welcome, training)
        self.replicas: Replicas = {}
        self.pushed_at: list[int] = []

    def take_step(self, committed: Committed) -> None:
        super().take_step(committed)
        if self.joined:
            optimizer = self.replica.optimizer.state
            self.replicas[self.version] = state_of(self.replica.params, optimizer)

    def push(self, task: Assigned, loss: BatchLoss, compute_s: float) -> None:
        self.pushed_at.append(self.version)
        super().push(task, loss, compute_s)


class Scene:
    """A cluster whose server is watched."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        server: type[WatchedServer] = WatchedServer,
    ) -> None:
        self.cluster = Cluster(settings, folder, server, algorithm="syncps")
        assert isinstance(self.cluster.core, WatchedServer)
        self.core = self.cluster.core
        self.workers: dict[int, Outcome] = {}
        self.cast: list[Watched] = []

    def enter(
        self,
        number: int,
        role: Callable[[Welcome, TrainingContext], Watched] = Watched,
        *,
        port: int | None = None,
        node: str | None = None,
        settings: Settings | None = None,
    ) -> Outcome:
        """Start worker `number`, on the node of that number."""

        def make(welcome: Welcome, training: TrainingContext) -> Watched:
            made = role(welcome, training)
            self.cast.append(made)
            return made

        outcome = self.cluster.worker(
            number, make=make, port=port, node=node or NODES[number - 1], settings=settings
        )
        self.workers[number] = outcome
        return outcome

    def enter_all(self) -> None:
        for number in range(1, self.cluster.settings.cluster.num_workers + 1):
            self.enter(number)

    def finish(self) -> Summary:
        """The run ends well, for all who are still there, and every sample has been applied once."""
        return self.cluster.finish(*self.workers.values())

    def assert_trained_as_alone(self, rel: float = 1e-5) -> None:
        """Every loss is the single process's, and so are the weights at the end."""
        expected, single = alone(self.cluster.settings)
        weights = single.replica.params
        assert len(expected) == LAST
        assert self.cluster.losses == pytest.approx(expected, rel=rel)
        largest = float(weights.abs().max())
        error = float((self.core.replica.params - weights).abs().max())
        assert error <= 100 * rel * largest

    def assert_all_replicas_agree(self) -> None:
        """Bit for bit, after every step that anybody took."""
        for each in self.cast:
            assert each.replicas, "it took none"
            for version, mine in each.replicas.items():
                theirs = self.core.replicas[version]
                assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True)), version

    def lines(self, text: str) -> list[str]:
        return [line for line in self.cluster.log_lines if text in line]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server cuts the model into five buckets, and so do its workers."""
    monkeypatch.setattr(harness, "build", partial(build, bucket_bytes=SMALL_BUCKET))


@pytest.fixture
def float64() -> Iterator[None]:
    """Models are made in double precision, in all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# Who is there makes no difference.


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_any_number_of_workers_trains_as_a_single_process(tmp_path: Path, num_workers: int) -> None:
    scene = Scene(settings_for(workers=num_workers), tmp_path)
    scene.enter_all()
    summary = scene.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    assert (summary.steps, summary.samples_applied) == (LAST, EPOCHS * 1438)
    assert sum(worker.samples for worker in summary.workers) == summary.samples_applied
    assert len(summary.workers) == num_workers
    assert summary.pushes.stale == summary.pushes.late == summary.pushes.duplicate == 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer", ["adamw", *at_night("sgd", "adam")])
def test_in_double_precision_it_is_the_same_with_any_optimizer(
    tmp_path: Path, optimizer: str
) -> None:
    overrides = (f"optimizer={optimizer}", "weight_decay=0.01", "learning_rate=0.01")
    scene = Scene(settings_for(*overrides, workers=2), tmp_path)
    scene.enter_all()
    assert scene.finish().codec == "fp64"
    scene.assert_trained_as_alone(rel=1e-9)
    scene.assert_all_replicas_agree()


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("num_hosts", [3, *at_night(1, 2)])
def test_neither_shares_nor_buckets_nor_stores_nor_encryption_make_a_difference(
    tmp_path: Path, num_hosts: int
) -> None:
    others = on_hosts(num_hosts), "encryption=on"
    settings = settings_for(*shares(0.7, 0.2, 0.1), *others, workers=3)
    scene = Scene(settings, tmp_path)
    assert len(scene.core.replica.buckets) == 5
    stores = [scene.cluster.start_store(node) for node in settings.cluster.store_nodes[1:]]
    assert len(stores) == num_hosts - 1
    scene.enter_all()
    summary = scene.finish()
    for store in stores:
        store.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    stated = [pytest.approx(share, abs=0.03) for share in (0.7, 0.2, 0.1)]
    assert [worker.share for worker in summary.workers] == stated


@pytest.mark.usefixtures("small_buckets")
def test_a_timeout_that_makes_everybody_late_makes_no_difference(tmp_path: Path) -> None:
    scene = Scene(settings_for("timeout=0.000001", workers=3), tmp_path)
    scene.enter_all()
    scene.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()


def test_a_batch_in_pieces_on_one_worker_makes_no_difference(tmp_path: Path) -> None:
    scene = Scene(settings_for(workers=2), tmp_path)
    scene.enter(1)
    scene.enter(2, settings=local_settings("microbatch=5", workers=2, algorithm="syncps"))
    scene.finish()
    assert sorted(each.training.microbatch.size or 0 for each in scene.cast) == [0, 5]
    scene.assert_trained_as_alone()


def test_the_servers_own_machine_may_be_a_worker(tmp_path: Path) -> None:
    scene = Scene(settings_for("workers=[mini1,pi5]", workers=2), tmp_path)
    assert scene.cluster.settings.cluster.server == "mini1"
    scene.enter(1, node="mini1")
    scene.enter(2, node="pi5")
    summary = scene.finish()
    scene.assert_trained_as_alone()
    assert {worker.node for worker in summary.workers} == {"mini1", "pi5"}


# Who comes and goes makes no difference.


class Gate:
    """What the members of a cast wait for."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def open(self) -> None:
        self.event.set()

    def wait(self) -> None:
        assert self.event.wait(DEADLINE_S), "nobody opened it"


def waiting_at(version: int, gate: Gate) -> type[Watched]:
    """A worker that computes no part of the step after `version` before the gate is open."""

    class Waiting(Watched):
        def work_on(self, task: Assigned) -> None:
            if task.assignment.version == version:
                gate.wait()
            super().work_on(task)

    return Waiting


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("codec", ["int8", *at_night("fp32")])
def test_a_worker_that_is_cut_off_in_mid_push_comes_back(tmp_path: Path, codec: str) -> None:
    scene = Scene(settings_for(f"codec={codec}", *shares(0.5, 0.5), workers=2), tmp_path)
    proxy = Proxy(scene.cluster.settings.cluster.port)
    back = Gate()

    class CutOff(Watched):
        def push(self, task: Assigned, loss: BatchLoss, compute_s: float) -> None:
            if self.version != 10 or task.assignment.backup:
                super().push(task, loss, compute_s)
                return
            self.unacknowledged = task.lease
            for frame in islice(self.sender.frames(task.lease, 10, loss, compute_s), 2):
                self.link.send_frame(frame)
            self.link.flush()
            proxy.cut()

        def join(self, arrived: StateArrived) -> None:
            super().join(arrived)
            if self.joined and self.replicas:
                back.open()

    try:
        scene.enter(1, waiting_at(12, back))
        scene.enter(2, CutOff, port=proxy.port)
        summary = scene.finish()
    finally:
        proxy.close()
    if codec == "fp32":
        scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    assert proxy.connections == 2
    assert len(scene.cluster.happened(WorkerLost)) == 1
    assert [event.rejoined for event in scene.cluster.happened(WorkerJoined)] == [
        False,
        False,
        True,
    ]
    (returned,) = scene.cluster.happened(LeaseReturned)
    assert returned.rank == 1
    assert summary.leases_returned == 1


class Leaver(Watched):
    def work_on(self, task: Assigned) -> None:
        if self.version == 10:
            raise KeyboardInterrupt
        super().work_on(task)


@pytest.mark.usefixtures("small_buckets")
def test_a_worker_that_leaves_in_mid_step_makes_no_difference(tmp_path: Path) -> None:
    scene = Scene(settings_for(*shares(0.4, 0.3, 0.3), workers=3), tmp_path)
    scene.enter(1)
    scene.enter(2)
    leaver = scene.enter(3, Leaver)
    assert isinstance(leaver.failure(), KeyboardInterrupt)
    del scene.workers[3]
    scene.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    assert len(scene.cluster.happened(WorkerLeft)) == 1
    (returned,) = scene.cluster.happened(LeaseReturned)
    assert (returned.rank, returned.epoch) == (2, 0)
    assert returned.stop - returned.start in (38, 39)
    assert len(scene.lines("samples of step 11")) == 1


@pytest.mark.usefixtures("small_buckets")
def test_a_worker_that_joins_late_makes_no_difference(tmp_path: Path) -> None:
    settings = settings_for("min_workers=1", *shares(0.5, 0.5), workers=2)
    scene = Scene(settings, tmp_path)
    there = Gate()

    class Late(Watched):
        def join(self, arrived: StateArrived) -> None:
            super().join(arrived)
            if self.joined:
                there.open()

    scene.enter(1, waiting_at(20, there))
    assert scene.core.reached(20).wait(DEADLINE_S)
    scene.enter(2, Late)
    summary = scene.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    late = scene.cast[1]
    assert min(late.replicas) == 21, "it followed the step that was open when it came"
    assert min(late.pushed_at) == 21, "and took part in the next one"
    assert summary.workers[1].samples > 1000


@pytest.mark.usefixtures("small_buckets")
def test_a_worker_that_hangs_is_waited_for_once_and_then_works_again(tmp_path: Path) -> None:
    """It hangs for five steps; afterwards nobody is late, and it is waited for near the end."""
    again = Gate()
    hung_at: list[int] = []

    class Lenient(WatchedServer):
        def is_late(self, now: float) -> bool:
            return super().is_late(now) and not again.event.is_set()

        def open_step(self, now: float) -> Step | None:
            all_free = len(self.members.free) == 3 and again.event.is_set()
            may_open = self.version != LAST - 10 or all_free
            return super().open_step(now) if may_open else None

    class Hanging(Watched):
        def work_on(self, task: Assigned) -> None:
            if task.assignment.version >= 10 and not hung_at:
                hung_at.append(task.assignment.version)
                five_on = scene.core.reached(min(hung_at[0] + 5, LAST - 10))
                assert five_on.wait(DEADLINE_S), "the others did not go on without it"
                again.open()
            super().work_on(task)

    settings = settings_for("timeout=0.01", *shares(0.4, 0.3, 0.3), workers=3)
    scene = Scene(settings, tmp_path, Lenient)
    for number, role in ((1, Watched), (2, Watched), (3, Hanging)):
        scene.enter(number, role)
    scene.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    hanging = next(each for each in scene.cast if isinstance(each, Hanging))
    (version,) = hung_at
    assert not [each for each in hanging.pushed_at if version <= each < min(version + 5, LAST - 10)]
    assert LAST - 10 in hanging.pushed_at
    assert scene.cluster.happened(WorkerLost) == []


def test_who_comes_before_the_server_gives_up_goes_on_with_the_open_step(tmp_path: Path) -> None:
    scene = Scene(settings_for("min_workers=1", workers=1), tmp_path)
    first = scene.enter(1, Leaver)
    assert isinstance(first.failure(), KeyboardInterrupt)
    scene.enter(1)
    scene.finish()
    scene.assert_trained_as_alone()
    scene.assert_all_replicas_agree()
    assert scene.lines("all workers have gone; waiting up to")


def test_an_exploding_loss_stops_the_run_and_names_step_worker_and_layer(tmp_path: Path) -> None:
    exploding = ("learning_rate=1e30", "gradient_clipping.enabled=false", "optimizer=sgd")
    scene = Scene(settings_for(*exploding, workers=2), tmp_path)
    workers = [scene.enter(number) for number in (1, 2)]
    failure = scene.cluster.server.failure()
    assert isinstance(failure, NonFiniteLoss)
    for part in ("step ", "layer ", "learning_rate"):
        assert part in str(failure)
    assert all(isinstance(each.failure(), NonFiniteLoss | RunFailed) for each in workers)
    assert all(torch.isfinite(torch.tensor(loss)) for loss in scene.cluster.losses)


# With a lossy codec, and with replicas that drift.


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("codec", "most"),
    [
        ("codec=int4", 0.1),
        *at_night(("use_quantization=true", 0.02), ("codec=bf16", 0.02), ("codec=fp16", 0.02)),
    ],
)
def test_with_a_lossy_codec_it_learns_as_well_and_all_replicas_agree(
    tmp_path: Path, codec: str, most: float
) -> None:
    scene = Scene(settings_for(codec, "num_epochs=6", *shares(0.5, 0.5), workers=2), tmp_path)
    scene.enter_all()
    summary = scene.finish()
    scene.assert_all_replicas_agree()
    assert all(set(range(1, 6 * STEPS_PER_EPOCH)) <= set(each.replicas) for each in scene.cast)
    expected, single = alone(scene.cluster.settings)
    assert len(scene.cluster.losses) == len(expected)
    difference = torch.tensor(scene.cluster.losses) - torch.tensor(expected)
    assert 0 < float(difference.abs().max()) < most, "lossy, but little is lost"
    best = single.evaluate()
    assert best is not None
    assert best.metrics["accuracy"] > 0.85
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy >= best.metrics["accuracy"] - 0.01
    assert scene.lines("differ") == []


def drifting(scene: Scene, alpha: float) -> dict[int, float]:
    """How far a worker is from the server after each step, after one weight of it was changed."""

    class Nudged(Watched):
        is_asking = False

        def take_step(self, committed: Committed) -> None:
            super().take_step(committed)
            if self.version == 9:
                self.replica.params[5000] += 0.01

        def compare(self, digests: Sequence[bytes]) -> None:
            self.is_asking = self.store.digests() != list(digests)
            super().compare(digests)

        def blend(self, bucket: int, weights: Tensor) -> None:
            super().blend(bucket, weights)
            self.is_asking = False

        def work_on(self, task: Assigned) -> None:
            while self.is_asking:  # else the step may be whole before the server reads the question
                if (event := self.link.next_event(1.0)) is not None:
                    self.handle(event)
            super().work_on(task)

    scene.enter(1)
    scene.enter(2, Nudged)
    scene.finish()
    honest, nudged = sorted(scene.cast, key=lambda each: isinstance(each, Nudged))
    assert honest.polyak_alpha == alpha
    theirs = scene.core.replicas
    assert all(
        torch.equal(mine[0], theirs[version][0]) for version, mine in honest.replicas.items()
    )
    return {
        version: float((mine[0] - theirs[version][0]).abs().max())
        for version, mine in nudged.replicas.items()
    }


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("alpha", [0.5, *at_night(0.0, 1.0)])
def test_a_replica_that_drifted_is_blended_and_the_run_goes_on(
    tmp_path: Path, alpha: float
) -> None:
    """The digests come with steps 12, 16, 20 ...; who asks waits here, so that the next step waits for it."""
    rule = ("worker_update_interval=4", f"polyak_alpha={alpha}")
    settings = settings_for(*rule, *shares(0.5, 0.5), workers=2)
    scene = Scene(settings, tmp_path)
    distance = drifting(scene, alpha)
    lines = scene.lines("differ")
    assert all(line.startswith("WARNING worker 2 (win): 1 of 5 buckets") for line in lines)
    assert all(f"polyak_alpha = {alpha:g}" in line for line in lines)
    assert distance[9] == 0
    for version in range(10, LAST):
        num_blended = max(0, (version - 9) // 4)  # one that came with 12 shows after 13
        expected = 0.01 * (1 - alpha) ** num_blended
        assert distance[version] == pytest.approx(expected, rel=0.02, abs=1e-6), version
    if alpha == 1.0:
        assert len(lines) == 1
        assert all(distance[version] == 0 for version in range(13, LAST)), "bit for bit"
    else:
        assert len(lines) == 4, "the 1st, 2nd, 4th and 8th time"
    assert scene.cluster.happened(WorkerLost) == []
