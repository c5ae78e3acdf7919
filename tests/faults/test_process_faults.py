"""Servers and workers that are killed, stopped and started again, as real processes.

What was trained in the end is what an undisturbed run trains: with one worker bit for bit. Some cases are run
always; the others are marked `faults`.
"""

import ast
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import psutil
import pytest
import torch

import smolcluster
from faults.proxy import Fault, FaultProxy, Point, mid_payload
from harness import Cluster, free_port, local_settings
from processes import Child, Processes, small_disk
from smolcluster.algorithms import context
from smolcluster.configs.schema import AlgorithmName
from smolcluster.configs.spec import get_algorithm
from smolcluster.data.permutation import epoch_permutation
from smolcluster.observability.sinks.jsonl import MetricLine, follow_metrics
from smolcluster.runs.events import Event, RunResumed, WorkerJoined, WorkerLost, read_events
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Checkpoint,
    CheckpointWriter,
    Snapshot,
    restore,
)
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import Delta
from tiers import at_night
from waiting import DEADLINE_S

DRIVER = Path(__file__).with_name("processes_under_fire.py")
RUN_ID = "under-fire"
NODES = ("pi5", "win", "macbook", "mini1")
NUM_SAMPLES = 1438
SEED = 42
EPOCHS = 4
STEPS = 180
"""Of 32 samples."""
EVERY = 30
TRAINING = (
    *(f"num_epochs={EPOCHS}", f"checkpoint_steps={EVERY}", "keep_last=100", "eval_steps=1000"),
    *("worker_update_interval=1", "batch_size=32", "lr_schedule.warmup_iters=20"),
    *("reconnect_timeout_s=90", "empty_cluster_timeout_s=90"),
)
KILLED_AT = 100
RESUMED_AT = 90

E = TypeVar("E", bound=Event)


class Site:
    """One run's processes on this machine."""

    def __init__(
        self,
        processes: Processes,
        algorithm: AlgorithmName,
        *overrides: str,
        workers: int = 1,
    ) -> None:
        self.processes = processes
        self.algorithm = algorithm
        self.port = free_port()
        self.common = ["--local", "--workers", str(workers), "--override", f"port={self.port}"]
        self.common += ["threads=1", "start_timeout_s=90"]
        self.training = [*TRAINING, f"min_workers={workers}", *overrides]

    def server(self, *extra: str, fire: Sequence[str] = ()) -> Child:
        """Start the server; under `fire`, which is signals, point and count."""
        arguments = [*self.common, *self.training, "--run-id", RUN_ID, *extra]
        return self._start("server", fire, arguments)

    def worker(
        self, number: int = 1, *, fire: Sequence[str] = (), port: int | None = None
    ) -> Child:
        """Start a worker, which finds the server at `port`."""
        arguments = [str(number), NODES[number - 1], *self.common]
        arguments += ["--override", f"port={port}"] if port else []
        return self._start("worker", fire, arguments)

    def _start(self, role: str, fire: Sequence[str], arguments: list[str]) -> Child:
        algorithm = get_algorithm(self.algorithm)
        file = str(algorithm.server if role == "server" else algorithm.worker)
        how = [str(DRIVER), *fire, self.algorithm, role] if fire else [file]
        return self.processes.start(sys.executable, *how, *arguments)

    @property
    def run(self) -> RunPaths:
        return find_run(self.processes.runs, RUN_ID)

    @property
    def summary(self) -> Summary:
        return read_summary(self.run.summary)

    @property
    def steps(self) -> list[MetricLine]:
        return [
            line for line in follow_metrics(self.run.metrics).poll() if line.record.kind == "step"
        ]

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.run.checkpoints.glob("step-*"))

    def place(self, step: int) -> Path:
        return self.run.checkpoints / f"step-{step:08d}"

    def events(self, kind: type[E]) -> list[E]:
        events = [record.event for record in read_events(self.run.events)]
        return [event for event in events if isinstance(event, kind)]

    def resumed_at(self) -> list[int]:
        return [event.step for event in self.events(RunResumed)]


def assert_ends_well(*children: Child) -> None:
    for child in children:
        assert child.wait() == 0, child.output
        assert "Traceback" not in child.output


def assert_killed(child: Child) -> None:
    assert child.wait() == -9, child.output


@cache
def undisturbed(algorithm: AlgorithmName, folder: Path, workers: int, *overrides: str) -> Cluster:
    """The same run in this process; its files are in `folder`."""
    training = (*TRAINING, f"min_workers={workers}", *overrides)
    settings = local_settings(*training, workers=workers, algorithm=algorithm)
    with patch.object(CheckpointWriter, "submit", submit_in_turn):
        cluster = Cluster(settings, folder, algorithm=algorithm)
        outcomes = [cluster.worker(number + 1, node=NODES[number]) for number in range(workers)]
        for outcome in (cluster.server, *outcomes):
            outcome.finish()
    return cluster


_submit = CheckpointWriter.submit


def submit_in_turn(writer: CheckpointWriter, snapshot: Snapshot) -> None:
    """So that none is dropped because the disk is busy with the one before."""
    assert writer.flush(DEADLINE_S)
    _submit(writer, snapshot)


Undisturbed = Callable[..., tuple[Cluster, Path]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """An undisturbed run of an algorithm, made once, and its folder."""
    root = tmp_path_factory.mktemp("undisturbed")

    def find(algorithm: AlgorithmName, *overrides: str, workers: int = 1) -> tuple[Cluster, Path]:
        folder = root / "-".join([algorithm, str(workers), *overrides])
        folder.mkdir(exist_ok=True)
        return undisturbed(algorithm, folder, workers, *overrides), folder

    return find


def losses_by_step(lines: Sequence[MetricLine]) -> dict[int, float]:
    """Of a step that several starts of the server took, the last one's counts."""
    return {line.record.step: line.record.values["loss"] for line in lines}


def assert_last_life_is_whole(site: Site, resumed_at: int, num_steps: int = STEPS) -> None:
    """The file of metrics holds each step of the last start of the server, and no later ones."""
    last = site.steps[-1].incarnation
    steps = [line.record.step for line in site.steps if line.incarnation == last]
    assert steps == list(range(resumed_at + 1, num_steps + 1))


def assert_counted(site: Site, num_steps: int = STEPS) -> None:
    summary = site.summary
    assert summary.run_id == RUN_ID
    assert summary.samples_applied == EPOCHS * NUM_SAMPLES
    assert summary.steps == num_steps
    assert sum(worker.samples for worker in summary.workers) == EPOCHS * NUM_SAMPLES
    if site.algorithm == "edp":
        assert summary.pushes.applied == num_steps


def assert_as_undisturbed(site: Site, whole: tuple[Cluster, Path]) -> None:
    """Bit for bit: weights, optimizer, and each loss."""
    cluster, folder = whole
    name = f"step-{STEPS:08d}"
    for file in (MODEL_FILE, OPTIMIZER_FILE):
        mine, theirs = site.place(STEPS) / file, folder / "checkpoints" / name / file
        assert mine.read_bytes() == theirs.read_bytes(), file
    expected = {record.step: record.values["loss"] for record in cluster.metrics.steps}
    losses = losses_by_step(site.steps)
    assert losses == {step: expected[step] for step in losses}
    assert_counted(site)


def applied_before(state: dict[str, Any]) -> dict[int, Counter[int]]:
    """What a checkpoint says has been applied: all up to its cursor, but for what waits."""
    if state["algorithm"] == "edp":
        standing = state["progress"]["dispatcher"]
        epoch, _, stop = standing["cursor"]
    else:
        standing = {"waiting": []}
        epoch, stop = divmod(state["samples_applied"], NUM_SAMPLES)
    applied: dict[int, Counter[int]] = defaultdict(Counter)
    for each in range(epoch + 1):
        upto = NUM_SAMPLES if each < epoch else stop
        applied[each].update(epoch_permutation(SEED, each, NUM_SAMPLES)[:upto].tolist())
    for each, start, end in standing["waiting"]:
        applied[each].subtract(epoch_permutation(SEED, each, NUM_SAMPLES)[start:end].tolist())
    return applied


def assert_each_sample_applied_once(site: Site) -> None:
    """Of every epoch: before the checkpoint that the last start went on from, and since."""
    step = site.resumed_at()[-1]
    applied = applied_before(json.loads((site.place(step) / STATE_FILE).read_text()))
    last = site.steps[-1].incarnation
    for line in site.steps:
        if line.incarnation == last:
            epoch, values = line.record.epoch, line.record.values
            positions = slice(int(values["start"]), int(values["stop"]))
            order = epoch_permutation(SEED, epoch, NUM_SAMPLES)
            applied.setdefault(epoch, Counter()).update(order[positions].tolist())
    once = Counter(range(NUM_SAMPLES))
    assert {epoch: +counts for epoch, counts in applied.items()} == dict.fromkeys(
        range(EPOCHS), once
    )


# The server is killed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "point"),
    [
        ("syncps", "after a step"),
        *at_night(
            ("edp", "after a step"), ("edp", "before an answer"), ("syncps", "after a commit")
        ),
    ],
)
def test_a_killed_server_goes_on_bit_for_bit(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName, point: str
) -> None:
    """Between a step and its answer, its worker knows of a step that is taken again, or the server alone."""
    site = Site(processes, algorithm)
    worker = site.worker()
    assert_killed(site.server(fire=("KILL", point, str(KILLED_AT))))
    worker.wait_for("trying to reconnect")
    assert_ends_well(site.server("--resume", "auto"), worker)
    assert site.resumed_at() == [RESUMED_AT]
    assert_last_life_is_whole(site, RESUMED_AT)
    measured = {line.record.step for line in site.steps}
    assert measured == set(range(1, STEPS + 1)), "what was before the checkpoint is there"
    assert_as_undisturbed(site, reference(algorithm))


@pytest.mark.nightly
def test_three_workers_of_edp_wait_for_a_killed_server(processes: Processes) -> None:
    site = Site(processes, "edp", workers=3)
    workers = [site.worker(number) for number in (1, 2, 3)]
    assert_killed(site.server(fire=("KILL", "after a step", str(KILLED_AT))))
    assert_ends_well(site.server("--resume", RUN_ID), *workers)
    assert site.resumed_at() == [RESUMED_AT]
    assert_last_life_is_whole(site, RESUMED_AT)
    assert_each_sample_applied_once(site)
    assert_counted(site)
    assert {worker.rank for worker in site.summary.workers} == {0, 1, 2}
    lines = site.run.metrics.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"kind":"step"' in line)
    for times in (0, 2):  # a step that was never taken, or twice, would be noticed
        site.run.metrics.write_text("".join([*lines[:last], *times * [lines[last]]]))
        with pytest.raises(AssertionError):
            assert_each_sample_applied_once(site)


@pytest.mark.nightly
def test_four_workers_of_syncps_wait_for_a_killed_server(
    processes: Processes, reference: Undisturbed
) -> None:
    workers = 4
    large = ("global_batch_size=128", "checkpoint_steps=10")
    site = Site(processes, "syncps", *large, workers=workers)
    crew = [site.worker(number + 1) for number in range(workers)]
    assert_killed(site.server(fire=("KILL", "after a step", "25")))
    assert_ends_well(site.server("--resume", "auto"), *crew)
    assert site.resumed_at() == [20]
    assert_last_life_is_whole(site, 20, 48)
    assert_counted(site, 48)
    cluster, _ = reference("syncps", *large, workers=workers)
    expected = {record.step: record.values["loss"] for record in cluster.metrics.steps}
    for step, loss in losses_by_step(site.steps).items():
        assert loss == pytest.approx(expected[step], rel=1e-6), step


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sync", "streaming", "async"])
def test_diloco_through_a_kill_a_stop_a_late_joiner_and_a_cut_link(
    processes: Processes, reference: Undisturbed, mode: str
) -> None:
    """The first two are gone before the third joins; its link is cut; the second wakes up meanwhile.

    Three workers that nothing befalls share a round, so that there are the fewest of them.
    """
    epochs = 20
    rounds = ("local_steps=6", f"num_epochs={epochs}", "outer_lr=0.7", "outer_momentum=0.5")
    own = (*rounds, f"mode={mode}")
    site = Site(processes, "diloco", *own, "heartbeat_timeout_s=2", workers=2)
    server = site.server()
    killed = site.worker(1, fire=("KILL", "before a DiLoCo change", "2"))
    stopped = site.worker(2, fire=("STOP", "before a DiLoCo change", "3"))
    assert_killed(killed)
    server.wait_for("worker 2 (win) is lost")
    cut = Point("cut", Delta, mid_payload, nth=3)
    with closing(FaultProxy(site.port, cut, Fault.RESET)) as proxy:
        joiner = site.worker(3, port=proxy.port)
        assert proxy.struck.wait(DEADLINE_S)
        stopped.kill(signal.SIGCONT)
        assert_ends_well(server, joiner)
    summary = site.summary
    assert summary.samples_applied == epochs * NUM_SAMPLES
    assert sum(worker.samples for worker in summary.workers) == epochs * NUM_SAMPLES
    ranges = Counter(
        (line.record.epoch, line.record.values["start"], line.record.values["stop"])
        for line in site.steps
    )
    assert len(ranges) == ranges.total() == summary.steps == epochs * STEPS // EPOCHS
    assert {event.rank for event in site.events(WorkerLost)} == {0, 1, 2}
    quiet = reference("diloco", *own, workers=3)[0].server.summary
    assert quiet is not None
    assert quiet.final.val_loss is not None
    assert summary.final.val_loss is not None
    assert summary.final.val_loss < quiet.final.val_loss + 0.1


SAVING = {
    "in the middle of a file": EVERY,
    "after the model's file": EVERY,
    "after the optimizer's file": EVERY,
    "before the rename": EVERY,
    "before the link": EVERY,
    "while tidying": 2 * EVERY,
}
"""Where a server is killed that saves its second checkpoint, and which one it goes on from."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "point"),
    [
        ("syncps", "before the link"),
        *(("edp", point) for point in SAVING),
        *(("syncps", point) for point in SAVING if point != "before the link"),
    ],
)
def test_killed_while_it_saves_it_goes_on_from_the_last_whole_checkpoint(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName, point: str
) -> None:
    site = Site(processes, algorithm, "keep_last=1")
    worker = site.worker()
    assert_killed(site.server(fire=("KILL", point, "1" if point == "while tidying" else "2")))
    hidden = list(site.run.checkpoints.glob(".*"))
    whole = [EVERY, 2 * EVERY] if point == "before the link" else [SAVING[point]]
    assert (len(hidden), site.saved) == (point != "before the link", whole), "killed half-way"
    assert_ends_well(site.server("--resume", "auto"), worker)
    assert site.resumed_at() == [SAVING[point]]
    assert_as_undisturbed(site, reference(algorithm))
    left = sorted(path.name for path in site.run.checkpoints.iterdir())
    assert left == ["best", "latest", f"step-{STEPS:08d}"]


@pytest.mark.nightly
def test_killed_before_its_first_checkpoint_it_begins_again(
    processes: Processes, reference: Undisturbed
) -> None:
    site = Site(processes, "edp")
    worker = site.worker()
    assert_killed(site.server(fire=("KILL", "in the middle of a file", "1")))
    assert site.saved == []
    assert_ends_well(site.server("--resume", "auto"), worker)
    assert site.resumed_at() == []
    assert_last_life_is_whole(site, 0)
    assert_as_undisturbed(site, reference("edp"))


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_killed_again_and_again(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName
) -> None:
    site = Site(processes, algorithm)
    worker = site.worker()
    stood = []
    for _ in range(4):  # the step is counted from where it goes on
        server = site.server("--resume", "auto", fire=("KILL", "after a step", str(EVERY + 10)))
        assert_killed(server)
        stood += re.findall(r"resuming run \S+ at step (\d+)", server.output)
    assert_ends_well(site.server("--resume", "auto"), worker)
    assert [*map(int, stood), site.resumed_at()[-1]] == [30, 60, 90, 120]
    assert_as_undisturbed(site, reference(algorithm))


# A worker is killed.


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "point", "count"),
    [
        ("edp", "after a push", 50),
        ("syncps", "in the middle of a push", 50),
        ("edp", "before an EDP push", 50),
        ("edp", "in the middle of a push", 50),
        ("edp", "when EDP's weights come", 50),
        ("edp", "when EDP's weights come", 1),
        ("syncps", "before a SyncPS push", 50),
        ("syncps", "after a push", 50),
        ("syncps", "when SyncPS's state comes", 1),
        ("syncps", "when SyncPS's state comes", 2),
    ],
)
def test_a_killed_worker_is_replaced_under_its_number(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName, point: str, count: int
) -> None:
    site = Site(processes, algorithm)
    server = site.server()
    assert_killed(site.worker(fire=("KILL", point, str(count))))
    assert_ends_well(site.worker(), server)
    assert_as_undisturbed(site, reference(algorithm))
    assert len(site.events(WorkerLost)) == 1
    assert [event.rejoined for event in site.events(WorkerJoined)] == [False, False]


# Somebody is stopped for a while.


def wait_until_stopped(child: Child) -> None:
    end = time.monotonic() + DEADLINE_S
    process = psutil.Process(child.process.pid)
    while process.status() != psutil.STATUS_STOPPED:
        assert child.process.poll() is None, child.output
        assert time.monotonic() < end, f"it was not stopped:\n{child.output}"
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_a_server_that_stands_still_is_left_and_found_again(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName
) -> None:
    site = Site(processes, algorithm, "heartbeat_timeout_s=2")
    server = site.server(fire=("STOP", "after a step", "50"))
    worker = site.worker()
    wait_until_stopped(server)
    worker.wait_for("trying to reconnect")
    server.kill(signal.SIGCONT)
    assert_ends_well(server, worker)
    assert site.resumed_at() == []
    assert_as_undisturbed(site, reference(algorithm))
    assert True in [event.rejoined for event in site.events(WorkerJoined)]


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["syncps", "edp"])
def test_a_worker_that_stands_still_is_given_up_and_comes_back(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName
) -> None:
    site = Site(processes, algorithm, "heartbeat_timeout_s=2")
    server = site.server()
    point = "before an EDP push" if algorithm == "edp" else "before a SyncPS push"
    worker = site.worker(fire=("STOP", point, "50"))
    wait_until_stopped(worker)
    server.wait_for("all workers have gone")
    worker.kill(signal.SIGCONT)
    assert_ends_well(server, worker)
    assert_as_undisturbed(site, reference(algorithm))
    assert [event.rejoined for event in site.events(WorkerJoined)] == [False, True]


# The server is asked to stop.


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_a_server_that_is_asked_to_stop_saves_its_last_step(
    processes: Processes, reference: Undisturbed, algorithm: AlgorithmName
) -> None:
    site = Site(processes, algorithm)
    first = site.worker()
    server = site.server(fire=("TERM", "after a step", str(KILLED_AT)))
    assert server.wait() == 143, server.output
    assert "Traceback" not in server.output
    last = site.steps[-1].record.step
    assert last in (KILLED_AT, KILLED_AT + 1), "it ends the step that it is in"
    assert site.saved == [30, 60, 90, last]
    assert [line.record.step for line in site.steps] == list(range(1, last + 1))
    assert_ends_well(site.server("--resume", "auto"), first)
    assert site.resumed_at() == [last]
    losses = losses_by_step(site.steps)
    assert list(losses) == list(range(1, STEPS + 1))
    assert_as_undisturbed(site, reference(algorithm))
    assert len(site.summary.workers) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["syncps", "edp"])
def test_two_signals_end_it_at_once(processes: Processes, algorithm: AlgorithmName) -> None:
    site = Site(processes, algorithm)
    worker = site.worker()
    server = site.server(fire=("TERM,TERM", "after a step", str(KILLED_AT)))
    assert server.wait() == 143, server.output
    assert "Traceback" not in server.output
    worker.kill()
    assert site.saved == [30, 60, 90], "nothing is saved between two steps"


# The server's disk, its checkpoints, and others who want its run.


def run_in_process(
    algorithm: AlgorithmName, folder: Path, *, resume: bool = False
) -> tuple[Cluster, list[str]]:
    """A run with one worker as threads of this process; returns its warnings too."""
    settings = local_settings(*TRAINING, "heartbeat_timeout_s=60", workers=1, algorithm=algorithm)
    cluster = Cluster(settings, folder, algorithm=algorithm, resume=resume)
    worker = cluster.worker(1, node=NODES[0])
    for outcome in (cluster.server, worker):
        outcome.finish()
    return cluster, [line for line in cluster.log_lines if line.startswith("WARNING")]


def assert_trained(cluster: Cluster, whole: tuple[Cluster, Path]) -> None:
    assert cluster.server.summary is not None
    assert cluster.server.summary.samples_applied == EPOCHS * NUM_SAMPLES
    mine, theirs = cluster.training.replica.params, whole[0].training.replica.params
    assert torch.equal(mine, theirs)


@pytest.mark.nightly
def test_a_file_where_checkpoints_belong_costs_one_warning(
    tmp_path: Path, reference: Undisturbed
) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    cluster, warnings = run_in_process("edp", tmp_path)
    assert_trained(cluster, reference("edp"))
    warning, at_the_end = warnings
    assert "the last step, 180, is not saved" in at_the_end
    assert "training goes on" in warning
    assert str(tmp_path / "checkpoints") in warning
    assert "\n" not in warning


@pytest.mark.nightly
def test_a_full_disk_costs_one_warning_and_no_checkpoint_that_is_there(
    full_soon: Path, reference: Undisturbed
) -> None:
    """There is room for one checkpoint: 39 kB of weights, and twice as much of Adam's."""
    cluster, warnings = run_in_process("syncps", full_soon)
    assert_trained(cluster, reference("syncps"))
    (warning,) = [line for line in warnings if "training goes on" in line]
    assert "free some space" in warning
    kept = cluster.store.newest_good()
    assert kept is not None
    assert kept.state.step == EVERY
    assert sorted(path.name for path in cluster.store.folder.iterdir()) == [
        "latest",
        f"step-{EVERY:08d}",
    ]


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    """A disk that is full with the second checkpoint."""
    with small_disk(tmp_path / "disk", "180k"):
        yield tmp_path / "disk"


def cut_short(place: Path) -> None:
    path = place / OPTIMIZER_FILE
    os.truncate(path, path.stat().st_size // 2)


def change_a_bit(place: Path) -> None:
    data = bytearray((place / MODEL_FILE).read_bytes())
    data[-100] ^= 1
    (place / MODEL_FILE).write_bytes(data)


def remove_a_file(place: Path) -> None:
    (place / MODEL_FILE).unlink()


def edit_the_state(place: Path) -> None:
    path = place / STATE_FILE
    path.write_text(path.read_text().replace('"epoch": 1', '"epoch": 2'))


def write_a_newer_format(place: Path) -> None:
    path = place / STATE_FILE
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


DAMAGES = (cut_short, change_a_bit, remove_a_file, edit_the_state, write_a_newer_format)


def abandoned(folder: Path, whole: Path, *steps: int) -> list[Path]:
    """The checkpoints of a server that was killed soon after the last of these steps."""
    places = []
    for step in steps:
        name = f"step-{step:08d}"
        places.append(folder / "checkpoints" / name)
        shutil.copytree(whole / "checkpoints" / name, places[-1])
    (folder / "checkpoints" / "latest").symlink_to(places[-1].name)
    return places


@pytest.mark.nightly
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_costs_one_warning_and_the_one_before_is_used(
    tmp_path: Path, reference: Undisturbed, damage: Callable[[Path], None]
) -> None:
    whole = reference("syncps")
    _, newest = abandoned(tmp_path, whole[1], 30, 60)
    damage(newest)
    cluster, warnings = run_in_process("syncps", tmp_path, resume=True)
    assert_trained(cluster, whole)
    assert cluster.metrics.steps[0].step == 31
    (warning,) = warnings
    assert str(newest) in warning
    assert ("update" in warning) == (damage is write_a_newer_format)


@pytest.mark.nightly
def test_when_all_are_damaged_the_server_says_so_and_begins_nothing(
    processes: Processes, reference: Undisturbed
) -> None:
    site = Site(processes, "syncps")
    folder = processes.runs / RUN_ID
    for place in abandoned(folder, reference("syncps")[1], 30, 60):
        change_a_bit(place)
    server = site.server("--resume", "auto")
    assert server.wait() == 1, server.output
    assert "Traceback" not in server.output
    lines = server.output.splitlines()
    (error,) = [line for line in lines if "ERROR" in line or line.startswith("error")]
    assert "none of the 2 checkpoints" in error
    assert site.saved == [30, 60]
    assert not site.run.metrics.exists()


@pytest.mark.nightly
def test_a_second_server_is_sent_away_and_the_first_does_not_notice(
    processes: Processes, reference: Undisturbed
) -> None:
    site = Site(processes, "edp")
    first = site.server()
    first.wait_for("listening on")
    other = Site(processes, "edp")
    ways = ((), ("--resume", "auto"), ("--resume", RUN_ID))
    for second in [other.server(*way) for way in ways]:
        assert second.wait() == 75, second.output
        (line,) = second.output.strip().splitlines()
        assert RUN_ID in line
        assert f"process {first.process.pid}" in line
    assert_ends_well(site.worker(), first)
    assert_as_undisturbed(site, reference("edp"))
    assert_last_life_is_whole(site, 0)


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prlimit")
def test_a_server_that_may_open_no_more_files_trains_on(
    processes: Processes, reference: Undisturbed
) -> None:
    site = Site(processes, "edp")
    server = site.server()
    server.wait_for("listening on")
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    limit = len(list(descriptors.iterdir())) + 12
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with ExitStack() as crowd:
        for _ in range(20):
            address = ("127.0.0.1", site.port)
            crowd.enter_context(socket.create_connection(address, DEADLINE_S))
        server.wait_for("cannot accept a connection")
    assert_ends_well(site.worker(), server)
    assert server.output.count("cannot accept a connection") == 1
    assert_as_undisturbed(site, reference("edp"))


# The clock on the wall.


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_a_clock_that_jumps_by_hours_changes_nothing(
    tmp_path: Path,
    reference: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: AlgorithmName,
) -> None:
    whole = reference(algorithm)
    began, jumps = time.time(), itertools.cycle((0, 36_000, -36_000, 7_200))
    monkeypatch.setattr(time, "time", lambda: began + next(jumps))
    cluster, warnings = run_in_process(algorithm, tmp_path)
    assert_trained(cluster, whole)
    assert warnings == []
    assert [line for line in cluster.log_lines if "reconnect" in line or "left" in line] == []


STAMPS = {
    *("training/checkpoint.py", "runs/events.py"),
    *("server/board.py", "server/report.py", "observability/spans.py"),
    *("launch/doctor/table.py", "launch/watch/probe.py"),  # which compare clocks of machines
    *("wire/clocks.py", "server/process_stats.py", "utils/meter.py"),  # and these
    *(f"observability/report/{name}.py" for name in ("comparison", "page")),
    *(f"observability/view/{name}.py" for name in ("snapshot", "view", "workers")),
    "observability/sinks/tensorboard.py",  # events carry it
    *("launch/observe/targets.py", "launch/watch/listing.py"),  # compare with a file's time
    *("launch/clean.py", "runs/status.py"),  # and these
    "algorithms/instruction_log.py",  # ranks stand on one axis by it
    "runs/files.py",  # says from when to when lines were lost
}
"""Where the clock on the wall is read, mostly as the default of `now`, for time stamps."""


def test_no_deadline_is_taken_from_the_clock_on_the_wall() -> None:
    root = Path(smolcluster.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(reads_the_wall_clock(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert readers == STAMPS


def reads_the_wall_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(each.name == "time" for each in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "time"
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
    )


# These tests can fail.


@pytest.mark.nightly
def test_a_weight_that_differs_in_its_last_bit_would_be_noticed(
    tmp_path: Path, reference: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sloppy(replica: Replica, checkpoint: Checkpoint, extra: Any = None) -> None:
        restore(replica, checkpoint, extra)
        replica.params[1234] = torch.nextafter(replica.params[1234], torch.tensor(9.0))

    whole = reference("edp")
    abandoned(tmp_path, whole[1], 90)
    monkeypatch.setattr(context, "restore", sloppy)
    cluster, _ = run_in_process("edp", tmp_path, resume=True)
    with pytest.raises(AssertionError):
        assert_trained(cluster, whole)


@pytest.mark.nightly
def test_a_refused_resume_changes_nothing(processes: Processes) -> None:
    site = Site(processes, "edp")
    assert_ends_well(site.server(), site.worker())
    told = {".log", ".jsonl"}
    files = [each for each in site.run.root.rglob("*") if each.is_file()]
    files = [each for each in files if each.suffix not in told]
    before = {each: each.read_bytes() for each in files}
    training = [*site.training, "num_epochs=6"]
    for override in ("model.hidden=64", "optimizer=sgd"):
        site.training = [*training, override]
        refused = site.server("--resume", "auto")
        assert refused.wait() == 1, refused.output
        assert {each: each.read_bytes() for each in files if each.exists()} == before
