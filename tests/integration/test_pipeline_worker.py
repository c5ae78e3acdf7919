"""Pipelines as workers of DiLoCo: alone as one process, beside others, and when a stage is lost."""

import json
import math
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mesh_group
import own_workloads
import pipelines
from harness import SECRET, START_TIMEOUT_S, Cluster, Outcome, free_port, local_settings
from own_workloads import first_saved, killed_after
from pipelines import share_generator
from processes import Processes
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.algorithms.PipelineParallel.head import Head, spread
from smolcluster.algorithms.PipelineParallel.worker import Worker as StageWorker
from smolcluster.configs.schema import NodeConfig, Settings, StagesConfig
from smolcluster.errors import ConfigError
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from smolcluster.server.assignment import Assigned
from smolcluster.server.link import WorkerSetup, follow
from smolcluster.training.build import TrainingContext
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import Planned, Welcome, sets_of
from tiers import at_night
from waiting import eventually

pytestmark = pytest.mark.slow

PLAIN = "outer_lr=1", "outer_momentum=0", "codec_up=null", "codec_down=null"
"""With one worker this is training in one process."""
NODES = "pi5", "win"
"""Of the stages."""


@pytest.fixture(autouse=True)
def one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    share_generator(monkeypatch)


def gpt(dtype: torch.dtype = torch.float32, num_samples: int = 52) -> Workload:
    """Its embedding is its head as well."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 11, (num_samples, 9), generator=generator)
    text = [(each[:-1], each[1:]) for each in rows]
    return pipelines.gpt(4, dtype=dtype, data=(text, text[:10]))


class Pipeline:
    """A worker of a cluster in this process: its head and its stages."""

    def __init__(self, cluster: Cluster, workload: Callable[[], Workload], **told: Any) -> None:
        """`told`: further keys of `stages`."""
        self._cluster, self._workload = cluster, workload
        self.port = free_port()
        self.contexts: list[TrainingContext] = []
        """What it trains with, once its stages are there."""
        places = dict.fromkeys(NODES, "127.0.0.1")
        stages = StagesConfig(host_ip=places, port=self.port, **{"shard_plan": "even"} | told)
        node = NodeConfig(stages=stages)
        settings = cluster.settings
        self.settings = Settings(settings.cluster, settings.train, node)

    @property
    def head_of_stages(self) -> Head:
        executor = self.contexts[0].executor
        assert isinstance(executor, Head)
        return executor

    def head(self, worker_id: int, make: type[Worker] = Worker) -> Outcome:
        def spread_here(welcome: Welcome, training: TrainingContext) -> TrainingContext:
            context = spread(
                welcome,
                training,
                settings=self.settings,
                name="mini1",
                secret=SECRET,
                log=self._cluster.log,
            )
            self.contexts.append(context)
            return context

        place = self._place("mini1", worker_id, "diloco", self._cluster.settings.cluster.port)
        return Outcome(
            f"head {worker_id}", lambda: follow(replace(place, spread=spread_here), make)
        )

    def stage(self, number: int, make: type[StageWorker] = StageWorker) -> Outcome:
        place = self._place(NODES[number - 1], number, "pipeline", self.port)
        return Outcome(f"stage {number}", lambda: follow(place, make))

    def _place(self, node: str, worker_id: int, algorithm: str, port: int) -> WorkerSetup:
        return WorkerSetup(
            node=self.settings.node,
            hello=introduce(node, worker_id, sets_of(algorithm)),
            address=Address("127.0.0.1", port),
            secret=SECRET,
            start_timeout_s=START_TIMEOUT_S,
            log=self._cluster.log,
            own_folder=lambda run: self._cluster.folder / run / f"{algorithm}-{worker_id}",
            workload=self._workload(),
        )


def settings_for(*overrides: str, workers: int = 1) -> Settings:
    own = "num_epochs=2", "batch_size=8", "mode=sync"
    least = f"min_workers={workers}"
    return local_settings(*own, least, *overrides, workers=workers, algorithm="diloco")


@pytest.mark.parametrize(
    "mode",
    [("mode=streaming", "fragments=3"), *at_night(((),), (("mode=async",),))],
    ids=["streaming", "sync", "async"],
)
def test_a_pipeline_alone_trains_as_one_process_does(tmp_path: Path, mode: tuple[str, ...]) -> None:
    settings = settings_for(*PLAIN, "local_steps=4", *mode)
    made = partial(gpt, torch.float64)
    cluster = Cluster(settings, tmp_path, algorithm="diloco", workload=made())
    pipeline = Pipeline(cluster, made)
    stages = [pipeline.stage(1), pipeline.stage(2)]
    cluster.finish(pipeline.head(1), *stages)
    expected, alone = own_workloads.alone(settings, made())
    assert cluster.losses == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(
        cluster.training.replica.params, alone.replica.params, rtol=1e-8, atol=1e-9
    )


@pytest.mark.nightly
def test_a_pipeline_takes_part_in_the_synchronous_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches and a single machine's, of 8 each, are one process's of 16, whoever computes them."""
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)
    own = "sync_fraction=1", "mode=streaming", "fragments=3", "gradient_clipping.max_norm=0.5"
    settings = settings_for(*PLAIN, *own, workers=2)
    made = partial(gpt, torch.float64, 48)
    cluster = Cluster(settings, tmp_path, algorithm="diloco", workload=made())
    pipeline = Pipeline(cluster, made)
    single = cluster.worker(2, node="macbook")
    cluster.finish(pipeline.head(1), single, pipeline.stage(1), pipeline.stage(2))
    whole = settings_for("gradient_clipping.max_norm=0.5", "batch_size=16")
    _, alone = own_workloads.alone(whole, made())
    ours, theirs = cluster.training.replica.params, alone.replica.params
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.nightly
def test_a_pipeline_and_a_single_machine_apply_every_sample_once(tmp_path: Path) -> None:
    settings = settings_for("local_steps=2", "num_epochs=10", workers=2)
    cluster = Cluster(settings, tmp_path, algorithm="diloco", workload=gpt())
    pipeline = Pipeline(cluster, gpt)
    single = cluster.worker(2, node="macbook")
    stages = [pipeline.stage(1), pipeline.stage(2)]
    summary = cluster.finish(pipeline.head(1), single, *stages)
    assert summary.samples_applied == 10 * 52
    assert [each.node for each in summary.workers if each.samples] == ["mini1", "macbook"]
    assert [each.prefetch for each in pipeline.contexts] == [None]
    assert summary.final.val_loss is not None


class Died(Exception):
    """Ends a stage in the middle of a step."""


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [1, 2])
def test_a_stage_that_is_lost_costs_no_sample(tmp_path: Path, lost: int) -> None:
    """The other one takes its layers, and what had not been sent is computed again, alone as one process."""
    settings = settings_for(*PLAIN, "local_steps=3")
    cluster = Cluster(settings, tmp_path, algorithm="diloco", workload=gpt())
    pipeline = Pipeline(cluster, gpt)

    class Mortal(StageWorker):
        def compute(self, step: Assigned) -> None:
            if step.lease.epoch == 1 and step.lease.start >= 16:
                raise Died
            super().compute(step)

    head = pipeline.head(1)
    stages = [pipeline.stage(i, Mortal if i == lost else StageWorker) for i in (1, 2)]
    assert isinstance(stages[lost - 1].failure(), Died)
    summary = cluster.finish(head, stages[2 - lost])
    assert summary.leases_returned > 0
    assert any("layers are dealt out again" in line for line in cluster.log_lines)


@pytest.mark.nightly
def test_a_stage_that_is_back_takes_layers_again(tmp_path: Path) -> None:
    settings = settings_for(*PLAIN, "local_steps=3", "num_epochs=4")
    cluster = Cluster(settings, tmp_path, algorithm="diloco", workload=gpt())
    pipeline = Pipeline(cluster, gpt)
    cuts: list[int] = []
    layers: list[weakref.ref[Replica]] = []
    again: list[Outcome] = []

    class Mortal(StageWorker):
        def compute(self, step: Assigned) -> None:
            if step.lease.epoch == 1:
                raise Died
            super().compute(step)

    class Patient(StageWorker):
        """Has the layers alone until the head knows that the other one is back."""

        def begin(self, plan: Planned, place: WorkerSetup) -> None:
            if not cuts or cuts[-1] != len(plan.ranks):
                cuts.append(len(plan.ranks))
            super().begin(plan, place)
            assert not any(each() for each in layers), "the memory of layers of before is free"
            layers.extend(weakref.ref(each.replica) for each in self.stages.values())

        def compute(self, step: Assigned) -> None:
            if len(self.plan.ranks) == 1 and not again:
                again.append(pipeline.stage(2))
                eventually(lambda: len(pipeline.head_of_stages.dealer.ready) == 2)
            super().compute(step)

    head, first = pipeline.head(1), pipeline.stage(1, Patient)
    assert isinstance(pipeline.stage(2, Mortal).failure(), Died)
    cluster.server.finish()
    cluster.finish(head, first, *again)
    assert cuts == [2, 1, 2]


@pytest.mark.nightly
def test_a_resumed_run_goes_on_with_the_moments_that_stages_have_kept(tmp_path: Path) -> None:
    """As it is when all are killed soon after a checkpoint: it has the losses of one process."""
    made = partial(gpt, torch.float64)
    settings = settings_for(*PLAIN, "local_steps=4", "checkpoint_steps=8", "keep_last=100")

    def run(folder: Path, *, resume: bool = False) -> Cluster:
        folder.mkdir(exist_ok=True)
        cluster = Cluster(settings, folder, algorithm="diloco", workload=made(), resume=resume)
        pipeline = Pipeline(cluster, made)
        others = [pipeline.head(1), pipeline.stage(1), pipeline.stage(2)]
        cluster.server.finish()
        for each in others:
            each.finish()
        return cluster

    whole = run(tmp_path / "whole")
    step = first_saved(whole)
    expected, _ = own_workloads.alone(settings, made())
    resumed = run(killed_after(whole.folder, tmp_path / "killed", step), resume=True)
    assert resumed.losses == pytest.approx(expected[step:], rel=1e-9)


def frozen() -> Workload:
    workload = gpt()
    make = workload.new_model

    def model() -> nn.Module:
        made = make()
        next(made.parameters()).requires_grad_(False)
        return made

    return Workload(model, cross_entropy, [(torch.ones(8), torch.ones(8))], name="frozen")


@pytest.mark.parametrize(
    ("overrides", "stages", "made", "says"),
    [
        (("dataset.source=server",), {}, gpt, "the server sends the samples, but mini1 has stages"),
        ((), {}, frozen, "the model has frozen weights"),
        ((), {"schedule": "1f1f"}, gpt, "nodes.mini1.stages: schedule is '1f1f'"),
        ((), {"microbatches": 3}, gpt, "nodes.mini1.stages: microbatches is 3, which does not"),
        (("precision=fp16",), {}, gpt, "nodes.mini1.stages: precision is fp16"),
    ],
)
def test_what_a_pipeline_cannot_train_is_refused_in_one_line(
    tmp_path: Path,
    overrides: tuple[str, ...],
    stages: dict[str, Any],
    made: Callable[[], Workload],
    says: str,
) -> None:
    cluster = Cluster(settings_for(*overrides), tmp_path, algorithm="diloco", workload=made())
    error = Pipeline(cluster, made, **stages).head(1).failure()
    assert isinstance(error, ConfigError)
    assert says in str(error)
    cluster.stop.note(signal.SIGTERM)
    cluster.server.failure()


@pytest.mark.nightly  # the parts: threads above, and how processes begin in test_process and test_plan
def test_processes_of_a_pipeline_that_loses_a_stage_beside_a_single_machine(
    processes: Processes,
) -> None:
    """As people start them: a killed stage is started again, the worker is back, each sample counts once."""
    hurry = processes.folder / "hurry"
    stages = (
        f"{{host_ip: {{macbook: 127.0.0.1, win: 127.0.0.1}}, port: {free_port()}, microbatches: 2, "
        "shard_plan: {macbook: [0, 1], win: [1, 3]}}"
    )
    port = f"port={free_port()}"
    told = "--local", "--workers", "2", "--workload", f"{mesh_group.__file__}:paced"
    run = "num_epochs=6", "batch_size=8", "mode=sync", "local_steps=1", "min_workers=2"
    args = f"workload_args.hurry={hurry}"
    server = processes.server(*told, "--override", port, *run, args, algorithm="diloco")
    own = *told, "--override", port, f"nodes.pi5.stages={stages}"
    head = processes.worker(1, "pi5", *own, algorithm="diloco")
    single = processes.worker(2, "win", *told, "--override", port, algorithm="diloco")
    first, last = (processes.stage(node, *own, algorithm="diloco") for node in ("macbook", "win"))
    server.wait_for("training starts")
    eventually(lambda: "pi5" in nodes_of_steps(processes))
    last.kill()
    head.wait_for("this worker's layers are dealt out again")
    again = processes.stage("win", *own, algorithm="diloco")
    head.wait_for("back in run")
    hurry.touch()
    assert server.wait() == 0, server.output
    for process in (head, single, first, again):
        assert process.wait() == 0, process.output
    summary = read_summary(find_run(processes.runs).summary)
    assert summary.samples_applied == 6 * mesh_group.NUM_SAMPLES
    assert [each.node for each in summary.workers if each.samples] == ["pi5", "win"]


def nodes_of_steps(processes: Processes) -> set[str]:
    """Those whose batches have been applied, as far as that is written down."""
    lines = find_run(processes.runs).metrics.read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each.get("kind") == "step"]
    return {each["node"] for each in steps if "node" in each}
