"""A pipeline's run: server and stages as threads, equal to one process, whatever the cut and the schedule."""

import math
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import own_workloads
import pipelines
from harness import DEADLINE_S, Cluster, Outcome, local_settings
from pipelines import measured_layer, share_generator
from pretrained_models import adapters, saved
from smolcluster.algorithms.PipelineParallel import coordinator, moving, worker
from smolcluster.algorithms.PipelineParallel.automatic import measure
from smolcluster.algorithms.PipelineParallel.crew import Peer
from smolcluster.algorithms.PipelineParallel.execution import StepOutcome
from smolcluster.algorithms.PipelineParallel.worker import Worker
from smolcluster.algorithms.planning.plan_file import PLAN
from smolcluster.configs.schema import Settings
from smolcluster.data.dataset import Batch
from smolcluster.errors import (
    ConfigError,
    ConnectTimeout,
    DataError,
    NonFiniteLoss,
    OutOfMemory,
    PeerLost,
    RunFailed,
)
from smolcluster.models.gpt import GPT
from smolcluster.observability.view.stages import StageView
from smolcluster.runs.events import LayersMoved
from smolcluster.server.assignment import Assigned
from smolcluster.server.link import Link, WorkerSetup
from smolcluster.training.build import TrainingContext
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.finetune import next_token_loss
from smolcluster.training.pretrained import Pretrained
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.training.schedules.simulation import Span
from smolcluster.training.workload import Metric, OfLoss, Terms, Workload
from smolcluster.utils.stopping import Interrupted
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import LayersMeasured, Planned
from smolcluster.wire.node import Node
from tiers import at_night

NUM_LAYERS = 8
OF_ITS_OWN = property(lambda peer: peer.instance)
"""The host of each worker, as if it were on a machine of its own."""


@pytest.fixture(autouse=True)
def one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    share_generator(monkeypatch)


class Died(Exception):
    """Ends a worker in the middle of a step."""


def text() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(each[:-1], each[1:]) for each in torch.randint(0, 11, (52, 9), generator=generator)]


def gpt(dtype: torch.dtype = torch.float32) -> Workload:
    """Its embedding is its head as well."""
    return pipelines.gpt(NUM_LAYERS, dtype=dtype, data=(text(), text()[:10]))


def fine_tuned(folder: Path) -> Workload:
    model = Pretrained(saved(folder), lora=adapters("q_proj", "down_proj"))
    return Workload(model, next_token_loss, text(), text()[:10])


def settings_for(workers: int, *overrides: str) -> Settings:
    own = (
        "shard_plan=even",
        "num_epochs=2",
        "batch_size=8",
        "microbatches=4",
        "eval_steps=4",
        f"min_workers={workers}",
    )
    return local_settings(*own, *overrides, workers=workers, algorithm="pipeline")


def run(settings: Settings, folder: Path, workload: Workload) -> Cluster:
    return own_workloads.run(settings, folder, "pipeline", workload)


def started(
    settings: Settings, folder: Path, *makes: type[Worker] | None, workload: Workload | None = None
) -> tuple[Cluster, list[Outcome]]:
    """A cluster with a worker of each of these classes; None: of the usual one."""
    cluster = Cluster(settings, folder, algorithm="pipeline", workload=workload or gpt())
    nodes = own_workloads.NODES
    return cluster, [
        cluster.worker(number + 1, node=nodes[number], make=make)
        for number, make in enumerate(makes)
    ]


def failure_of(
    settings: Settings, folder: Path, kind: type[BaseException], *makes: type[Worker] | None
) -> str:
    """What the server says as it ends with an error of this kind, and with it all workers."""
    cluster, workers = started(settings, folder, *makes)
    error = cluster.server.failure()
    assert isinstance(error, kind)
    for each in workers:
        each.failure()
    return str(error)


def assert_as_alone(
    cluster: Cluster,
    settings: Settings,
    workload: Workload | None = None,
    *,
    rel: float = 1e-5,
    may_repeat: bool = False,
) -> None:
    """Losses are those of one process; `may_repeat`: of steps that were done again the last ones."""
    expected, _ = own_workloads.alone(settings, workload or gpt(), "pipeline")
    found = cluster.losses
    if may_repeat:
        by_step = {record.step: record.values["loss"] for record in cluster.metrics.steps}
        found = [by_step[step] for step in sorted(by_step)]
    assert found == pytest.approx(expected, rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "schedule", "dtype"),
    [
        (2, "gpipe", torch.float32),
        *at_night(
            (3, "1f1b", torch.float64),
            (1, "1f1b", torch.float32),
            (4, "zero-bubble", torch.float32),
            (2, "zb-v", torch.float64),
            (3, "interleaved", torch.float32),
        ),
    ],
)
def test_losses_are_those_of_one_process(
    tmp_path: Path, workers: int, schedule: str, dtype: torch.dtype
) -> None:
    settings = settings_for(workers, f"schedule={schedule}")
    cluster = run(settings, tmp_path, gpt(dtype))
    rel = 1e-9 if dtype == torch.float64 else 1e-5
    assert_as_alone(cluster, settings, gpt(dtype), rel=rel)


@pytest.mark.nightly
def test_muon_steps_the_same_matrices_as_in_one_process(tmp_path: Path) -> None:
    """The last layer of the first stage is no output layer."""
    settings = settings_for(2, "optimizer=muon", "num_epochs=1", "weight_decay=0.1")
    cluster = run(settings, tmp_path, gpt())
    expected, alone = own_workloads.alone(settings, gpt(), "pipeline")
    assert cluster.losses == pytest.approx(expected, rel=1e-5)
    checkpoint = cluster.store.newest_good()
    assert checkpoint is not None
    for name, tensor in alone.replica.optimizer.state.items():
        torch.testing.assert_close(checkpoint.optimizer[name], tensor, rtol=1e-2, atol=1e-5)


@pytest.mark.nightly
def test_adapters_on_a_model_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    settings = settings_for(2)
    cluster = run(settings, tmp_path / "run", fine_tuned(tmp_path / "model"))
    assert_as_alone(cluster, settings, fine_tuned(tmp_path / "model"))


@pytest.mark.nightly
def test_it_goes_on_with_another_cut_on_another_number_of_machines(tmp_path: Path) -> None:
    """Weights and moments of its checkpoint have the model's names, as those of one process."""
    begun = settings_for(2, "num_epochs=1", "checkpoint_steps=4")
    run(begun, tmp_path, gpt())
    settings = settings_for(3, "schedule=zero-bubble")
    cluster = Cluster(settings, tmp_path, algorithm="pipeline", workload=gpt(), resume=True)
    workers = [cluster.worker(i + 1, node=own_workloads.NODES[i]) for i in range(3)]
    cluster.server.finish()
    for each in workers:
        each.finish()
    expected, alone = own_workloads.alone(settings, gpt(), "pipeline")
    assert cluster.losses == pytest.approx(expected[7:], rel=1e-5)
    checkpoint = cluster.store.newest_good()
    assert checkpoint is not None
    assert checkpoint.state.step == 14
    model = alone.replica.saved_parameters()
    assert checkpoint.model.keys() == model.keys()
    for name, tensor in checkpoint.model.items():
        torch.testing.assert_close(tensor, model[name].detach(), rtol=1e-4, atol=1e-5)
    for name, tensor in alone.replica.optimizer.state.items():
        torch.testing.assert_close(checkpoint.optimizer[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("checkpoint_steps", "lost"),
    [
        *((1, 1), (5, 2), (1, 3), (5, 1), (1, 2), (5, 3)),
    ],
)
def test_a_stage_that_is_lost_costs_its_layers_nothing(
    tmp_path: Path, lost: int, checkpoint_steps: int
) -> None:
    """First, middle and last: the others take its layers, and each sample counts once."""
    settings = settings_for(3, f"checkpoint_steps={checkpoint_steps}")

    class Mortal(Worker):
        def compute(self, step: Assigned) -> None:
            if step.lease.start >= 24 and step.lease.epoch == 1:
                raise Died
            super().compute(step)

    makes = [Mortal if number == lost else None for number in (1, 2, 3)]
    cluster, workers = started(settings, tmp_path, *makes)
    assert isinstance(workers.pop(lost - 1).failure(), Died)
    cluster.server.finish()
    for each in workers:
        each.finish()
    assert_as_alone(cluster, settings, may_repeat=True)
    assert cluster.server.summary is not None
    assert cluster.server.summary.samples_applied == 2 * len(text())


@pytest.mark.nightly
def test_a_worker_that_comes_later_takes_layers(tmp_path: Path) -> None:
    settings = settings_for(2, "checkpoint_steps=2", "num_epochs=3")
    cluster = Cluster(settings, tmp_path, algorithm="pipeline", workload=gpt())
    late: list[Outcome] = []
    may_go_on = threading.Event()

    class Welcoming(Worker):
        def compute(self, step: Assigned) -> None:
            if step.lease.epoch == 1 and not late:
                late.append(cluster.worker(3, node="mini1", make=Last))
                assert may_go_on.wait(DEADLINE_S)
            super().compute(step)

    class Last(Worker):
        def next_event(self) -> Event | None:
            may_go_on.set()  # the server has been told where it listens
            return super().next_event()

    workers = [cluster.worker(1, node="pi5", make=Welcoming), cluster.worker(2, node="win")]
    cluster.server.finish()
    for each in (*workers, *late):
        each.finish()
    assert cluster.core.report.counts.tally.workers[3].samples
    assert_as_alone(cluster, settings, may_repeat=True)


@pytest.mark.nightly
def test_the_layers_are_dealt_out_by_what_they_take(tmp_path: Path) -> None:
    settings = settings_for(2, "shard_plan=auto")
    cluster = run(settings, tmp_path, gpt())
    assert_as_alone(cluster, settings)
    [told] = [line for line in cluster.log_lines if "bottleneck: " in line]
    plan = PLAN.read(tmp_path / "plan.json")
    assert plan.step_s > 0
    assert all(each.machine in told and each.device for each in plan.stages)
    assert [plan.stages[0].start, plan.stages[-1].end] == [0, 8]


def costing(seconds: Sequence[float]) -> LayersMeasured:
    """Layers that cost the same anywhere, and take so long."""
    kinds = tuple(map(measured_layer, dict.fromkeys(seconds)))
    layers = tuple(list(dict.fromkeys(seconds)).index(each) for each in seconds)
    return LayersMeasured(kinds=kinds, layers=layers, memory_bytes=10**9, device="cpu")


@pytest.mark.nightly
def test_layers_move_from_a_machine_that_turns_out_to_be_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both say that a layer takes 3 s; one of them takes three times as long in steps."""
    monkeypatch.setattr(worker, "measure", lambda *_: costing([1.0] * NUM_LAYERS))
    settings = settings_for(2, "shard_plan=auto", "num_epochs=4", "batch_size=4")

    class Paced(Worker):
        """One whose stages say what its layers would take, so that no clock decides."""

        layer_s = 1.0

        def begin(self, plan: Planned, place: WorkerSetup) -> None:
            super().begin(plan, place)
            execution, own = self.execution, self.stages
            run = execution.run

            def paced(*args: Any) -> StepOutcome:
                outcome = run(*args)
                num = sum(len(each.module.own_layers()) for each in own.values())
                seconds = num * self.layer_s * self.config.microbatches
                spans = [
                    Span(Instruction(Op.FORWARD, 0, 0), 0.0, seconds),
                    Span(Instruction(Op.BACKWARD, 0, 0), seconds, 3 * seconds),
                ]
                return outcome._replace(spans=spans)

            monkeypatch.setattr(execution, "run", paced)

    class Slow(Paced):
        layer_s = 3.0

    monkeypatch.setattr(moving, "WINDOW_S", 0.0)
    cluster, workers = started(settings, tmp_path, Paced, Slow)
    cluster.finish(*workers)
    assert_as_alone(cluster, settings, may_repeat=True)
    cuts = [line for line in cluster.log_lines if "bottleneck: " in line]
    assert len(cuts) == 2, "and then they stay"
    plan = PLAN.read(tmp_path / "plan.json")
    sizes = {each.machine: each.end - each.start for each in plan.stages}
    assert sum(sizes.values()) == NUM_LAYERS
    assert 1 <= sizes["win"] <= 2, "4 before"
    [why] = [line for line in cluster.log_lines if "dealt out again" in line]
    assert "win takes 36 s a microbatch instead of 12 s" in why
    [event] = cluster.happened(LayersMoved)
    assert event.reason in why


class Narrow(Worker):
    """One whose device has room for a few layers."""

    room = 2

    def compute(self, step: Assigned) -> None:
        if sum(len(each.module.own_layers()) for each in self.stages.values()) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        super().compute(step)


@pytest.mark.nightly
def test_a_stage_that_is_out_of_memory_gets_fewer_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their weights are the same, though the other one computes while they are made."""
    is_computing, is_full, is_building, has_computed = (threading.Event() for _ in range(4))

    class Full(Narrow):
        room = 3

        def compute(self, step: Assigned) -> None:
            try:
                super().compute(step)
            except torch.OutOfMemoryError:
                is_full.set()
                raise

    class First(Worker):
        def compute(self, step: Assigned) -> None:
            is_computing.set()
            try:
                super().compute(step)
            finally:
                has_computed.set()

    def stages(model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, GPT)
        if is_full.is_set():  # the generator has been seeded, and no weight is drawn yet
            is_building.set()
            has_computed.wait(DEADLINE_S)
        return model.stages()

    def loss(model: nn.Module, batch: Batch) -> Terms:
        if is_computing.is_set():
            is_building.wait(DEADLINE_S)
        return cross_entropy(model, batch)

    monkeypatch.setattr(worker, "measure", lambda *_: costing([1.0] * NUM_LAYERS))
    settings = settings_for(2, "shard_plan=auto", "num_epochs=1")
    workload = Workload(gpt().maker, loss, text(), text()[:10], stages=stages)
    cluster, workers = started(settings, tmp_path, First, Full, workload=workload)
    cluster.finish(*workers)
    assert_as_alone(cluster, settings, may_repeat=True)
    plan = PLAN.read(tmp_path / "plan.json")
    assert {each.machine: each.end - each.start for each in plan.stages} == {"pi5": 5, "win": 3}


@pytest.mark.nightly
def test_a_worker_that_is_left_out_of_a_new_plan_shows_no_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shrinking(Worker):
        """One whose device has room for no layer any more, after the first step."""

        def compute(self, step: Assigned) -> None:
            if step.lease.start:
                raise MemoryError
            super().compute(step)

    monkeypatch.setattr(worker, "measure", lambda *_: costing([1.0] * NUM_LAYERS))
    settings = settings_for(2, "shard_plan=auto", "num_epochs=1", "checkpoint_steps=1")
    cluster, workers = started(settings, tmp_path, None, Shrinking)
    cluster.finish(*workers)
    stages = [StageView.of(each.process_stats) for each in cluster.core.report.board.workers()]
    assert [each and each.ranges for each in stages] == ["0-7", None]


@pytest.mark.nightly
def test_where_layers_were_not_measured_it_ends_with_a_cut_that_takes_less(tmp_path: Path) -> None:
    said = failure_of(settings_for(2), tmp_path, OutOfMemory, None, Narrow)
    assert said.startswith("out of memory: worker 2 (win), layers 4 to 7: CUDA out of memory.")
    assert "{pi5: [0, 6], win: [6, 8]}" in said


@pytest.mark.nightly
def test_workers_that_all_fail_to_build_their_layers_end_the_run_with_their_errors(
    tmp_path: Path,
) -> None:
    class Unable(Worker):
        def begin(self, _plan: Planned, place: WorkerSetup) -> None:
            raise DataError(f"{place.hello.node} has no weights")

    assert failure_of(settings_for(2), tmp_path, RunFailed, Unable, Unable) == (
        "no worker is left that can build its layers: worker 1 (pi5): it cannot go on: pi5 has no weights; "
        "worker 2 (win): it cannot go on: win has no weights"
    )


@pytest.mark.nightly
def test_where_one_of_two_cannot_build_its_layers_the_other_one_has_all(tmp_path: Path) -> None:
    class Unable(Worker):
        def begin(self, _plan: Planned, _place: WorkerSetup) -> None:
            raise DataError("no weights")

    cluster, (unable, able) = started(settings_for(2, "num_epochs=1"), tmp_path, Unable, None)
    assert isinstance(unable.failure(), DataError)
    cluster.server.finish()
    able.finish()


def full(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "shard_plan", "ends"),
    [
        ("stage_replica", "even", (OutOfMemory, "CUDA out of memory; less is {pi5: [0, ")),
        (
            "measure",
            "auto",
            (RunFailed, "worker 2 (win) can have no layers: a single layer does not fit: CUDA"),
        ),
    ],
)
def test_where_no_machine_has_memory_to_measure_or_build_layers_the_run_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    shard_plan: str,
    ends: tuple[type[BaseException], str],
) -> None:
    kind, words = ends
    monkeypatch.setattr(worker, what, full)
    settings = settings_for(2, f"shard_plan={shard_plan}")
    assert words in failure_of(settings, tmp_path, kind, None, None)


def test_a_first_plan_that_fits_nowhere_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where links were measured before it."""
    monkeypatch.setattr(Peer, "host", OF_ITS_OWN)
    too_large = costing([0.1] * NUM_LAYERS).model_copy(update={"memory_bytes": 1})
    monkeypatch.setattr(worker, "measure", lambda *_: too_large)
    settings = settings_for(2, "shard_plan=auto")
    said = failure_of(settings, tmp_path, ConfigError, None, None)
    assert said.startswith("layer 0 alone needs 0.00401 MB and pi5")


@pytest.mark.nightly
def test_a_machine_without_memory_for_a_single_layer_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it only measures its link to another one: that counts as slow."""

    small: list[TrainingContext] = []

    def measured(training: TrainingContext, *rest: Any) -> LayersMeasured | None:
        return full() if any(training is each for each in small) else measure(training, *rest)

    class Small(Worker):
        def tell_speed(self, link: Link, place: WorkerSetup) -> None:
            small.append(self.training)
            super().tell_speed(link, place)

    monkeypatch.setattr(worker, "measure", measured)
    monkeypatch.setattr(Peer, "host", OF_ITS_OWN)
    monkeypatch.setattr(worker, "measure_link", full)
    settings = settings_for(3, "shard_plan=auto", "num_epochs=1")
    cluster = Cluster(settings, tmp_path, algorithm="pipeline", workload=gpt())
    nodes = ((1, "pi5"), (2, "win"), (3, "mini1"))
    workers = [cluster.worker(i, node=node, make=Small if i == 1 else None) for i, node in nodes]
    cluster.finish(*workers)
    plan = PLAN.read(tmp_path / "plan.json")
    assert "pi5" not in {each.machine for each in plan.stages}
    assert any("worker 1 (pi5) can have no layers: a single" in each for each in cluster.log_lines)
    assert any("a link is slow: CUDA out of memory" in each for each in cluster.log_lines)


def flattened() -> Workload:
    """In float64, with a last layer that has no parameters."""
    rows = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
        return made.to(torch.float64)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert batch.dtype == torch.float64
        mean: torch.Tensor = (model(batch) - batch).square().mean()
        return mean

    return Workload(model, loss, rows.unbind(), rows[:8].unbind())


@pytest.mark.nightly
def test_samples_keep_their_type_in_a_last_stage_without_parameters(tmp_path: Path) -> None:
    settings = settings_for(3, "num_epochs=1")
    cluster = run(settings, tmp_path, flattened())
    assert_as_alone(cluster, settings, flattened(), rel=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("is_blocked", [False, True])
def test_links_between_machines_are_measured_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_blocked: bool
) -> None:
    """Where two cannot reach each other, what the server relays is measured."""

    def blocked(*_: Any, **__: Any) -> None:
        raise ConnectTimeout("a firewall is between them")

    if is_blocked:
        monkeypatch.setattr(Node, "dial_session", blocked)
    monkeypatch.setattr(Peer, "host", OF_ITS_OWN)
    monkeypatch.setattr(worker, "measure", lambda *_: costing([0.1] * NUM_LAYERS))
    settings = settings_for(3, "shard_plan=auto", "num_epochs=1")
    cluster = run(settings, tmp_path, gpt())
    assert_as_alone(cluster, settings)
    [told] = [line for line in cluster.log_lines if "links: " in line]
    assert told.count("/s and ") == 6, "three pairs, both ways"
    plan = PLAN.read(tmp_path / "plan.json")
    assert len(plan.stages) == 3
    assert all(each.forward_s > 0 and each.latency_s > 0 for each in plan.links)
    assert any("server relays" in line for line in cluster.log_lines) == is_blocked
    stages = [StageView.of(each.process_stats) for each in cluster.core.report.board.workers()]
    others = [{0, 1, 2} - {rank} for rank in range(3)]
    assert [each and each.capacities.keys() for each in stages] == others


@pytest.mark.nightly
def test_a_gradient_that_is_not_finite_ends_the_run_and_names_worker_and_layers(
    tmp_path: Path,
) -> None:
    class Broken(Worker):
        def compute(self, step: Assigned) -> None:
            for each in self.stages.values():
                each.replica.params.fill_(math.nan)
            super().compute(step)

    said = failure_of(settings_for(2), tmp_path, NonFiniteLoss, Broken, None)
    assert said.startswith("step 1: the gradient of worker 1 (pi5), layers 0 to 3, is not")


@pytest.mark.nightly
def test_a_stage_that_hangs_is_cut_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "LEAST_PATIENCE_S", 3.0)
    settings = settings_for(2, "checkpoint_steps=1", "reconnect_timeout_s=1")
    is_over = threading.Event()

    class Hanging(Worker):
        def compute(self, step: Assigned) -> None:
            if step.lease.epoch == 1:
                is_over.wait(DEADLINE_S)
            super().compute(step)

    cluster, workers = started(settings, tmp_path, None, Hanging)
    cluster.server.finish()
    is_over.set()
    workers[0].finish()
    workers[1].join(DEADLINE_S)  # it hears that the run is over, or that nobody answers
    assert_as_alone(cluster, settings, may_repeat=True)
    assert any("worker 2 (win) has not answered for" in line for line in cluster.log_lines)


@pytest.mark.nightly
def test_a_server_that_is_stopped_keeps_what_the_stages_have(tmp_path: Path) -> None:
    settings = settings_for(2, "reconnect_timeout_s=1")
    cluster = Cluster(settings, tmp_path, algorithm="pipeline", workload=gpt())

    class Stopping(Worker):
        def compute(self, step: Assigned) -> None:
            if step.lease.epoch == 1:
                cluster.stop.note(signal.SIGTERM)
            super().compute(step)

    workers = [cluster.worker(1, node="pi5"), cluster.worker(2, node="win", make=Stopping)]
    assert isinstance(cluster.server.failure(), Interrupted)
    for each in workers:  # they look for the server once more
        assert isinstance(each.failure(), PeerLost | ConnectTimeout)
    checkpoint = cluster.store.newest_good()
    assert checkpoint is not None
    assert checkpoint.state.step == len(cluster.metrics.steps) > 7


@pytest.mark.nightly
def test_samples_of_the_server_are_trained_on_and_those_held_out_are_evaluated(
    tmp_path: Path,
) -> None:
    """The digits, whose labels the first stage needs not, nor their pixels the last one."""
    own = "num_epochs=1", "batch_size=100", "eval_steps=7", "microbatches=2"
    evaluations = []
    for source in ("local", "server"):
        settings = settings_for(2, f"dataset.source={source}", *own)
        folder = tmp_path / source
        folder.mkdir()
        cluster = Cluster(settings, folder, algorithm="pipeline")
        cluster.finish(cluster.worker(1, node="pi5"), cluster.worker(2, node="win"))
        evaluations.append([record.values for record in cluster.metrics.evaluations])
        assert cluster.store.count()
    expected, found = evaluations
    assert len(found) > 1
    assert [*found[0]] == ["val_loss", "val_accuracy"]
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("workers", "schedule"), [(3, "1f1b"), (2, "zb-v")])
def test_what_is_held_out_is_sent_in_parts_to_the_stages_that_need_it(
    tmp_path: Path, workers: int, schedule: str
) -> None:
    """One stage needs nothing of it, or one machine has the first and the last; batches are of 3."""
    own = "num_epochs=1", "microbatches=2", f"schedule={schedule}", "dataset.source=server"
    settings = settings_for(workers, *own)
    held_out: Any = DataLoader(text()[:10], batch_size=3)  # type: ignore[arg-type]
    metrics: dict[str, Metric] = {
        "tokens": lambda _, batch: (batch[1].sum(), batch[1].numel()),
        "twice": OfLoss(twice),
    }
    workload = Workload(gpt().maker, cross_entropy, text(), held_out, metrics=metrics)
    cluster = run(settings, tmp_path, workload)
    _, training = own_workloads.alone(settings, workload, "pipeline")
    evaluation = training.evaluate()
    assert evaluation is not None
    assert cluster.metrics.evaluations[-1].values == pytest.approx(evaluation.values, rel=1e-5)


def twice(loss: float) -> float:
    return 2 * loss
