"""Servers and workers that are killed, stopped and started again, as real processes.

What was trained in the end is what an undisturbed run trains: with one worker bit for bit.
"""

import ast
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

import smolcluster
from faults.proxy import Fault, FaultProxy, Point, mid_payload
from harness import Cluster, assert_applied_once, free_port, local_settings, steps_in
from own_workloads import NODES, run
from processes import Child, Processes
from smolcluster.configs.schema import AlgorithmName
from smolcluster.configs.spec import get_algorithm
from smolcluster.observability.sinks.jsonl import MetricLine
from smolcluster.runs.events import Event, RunResumed, WorkerJoined, WorkerLost, read_events
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.checkpoint import MODEL_FILE, OPTIMIZER_FILE
from smolcluster.wire.messages import Delta
from tiers import at_night
from trees import nodes_of
from waiting import DEADLINE_S, eventually

DRIVER = Path(__file__).with_name("processes_under_fire.py")
RUN_ID = "under-fire"
NUM_SAMPLES = 1438
EPOCHS = 4
STEPS = 180
"""Of 32 samples."""
EVERY = 30
TRAINING = (
    *(f"num_epochs={EPOCHS}", f"checkpoint_steps={EVERY}", "keep_last=100", "eval_steps=1000"),
    *("worker_update_interval=1", "batch_size=32", "lr_schedule.warmup_iters=20"),
    *("reconnect_timeout_s=90", "empty_cluster_timeout_s=90"),
)

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
        """Start the server; under `fire`, which is signal, point and count."""
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
        return steps_in(self.run.metrics)

    def events(self, kind: type[E]) -> list[E]:
        events = [record.event for record in read_events(self.run.events)]
        return [event for event in events if isinstance(event, kind)]


def assert_ends_well(*children: Child) -> None:
    for child in children:
        assert child.wait() == 0, child.output
        assert "Traceback" not in child.output


def assert_killed(child: Child) -> None:
    assert child.wait() == -signal.SIGKILL, child.output


Undisturbed = Callable[..., Cluster]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same run in this process, made once."""

    @cache
    def made(algorithm: AlgorithmName, *overrides: str, workers: int = 1) -> Cluster:
        training = (*TRAINING, f"min_workers={workers}", *overrides)
        settings = local_settings(*training, workers=workers, algorithm=algorithm)
        return run(settings, tmp_path_factory.mktemp(algorithm), algorithm)

    return made


def assert_counted(site: Site) -> None:
    """Each sample of each epoch was applied once, over all starts of the server."""
    records = [line.record for line in site.steps]
    assert_applied_once(records, NUM_SAMPLES, EPOCHS)
    summary = site.summary
    assert summary.run_id == RUN_ID
    assert summary.samples_applied == EPOCHS * NUM_SAMPLES
    assert summary.steps == STEPS == len({record.step for record in records})
    assert sum(worker.samples for worker in summary.workers) == EPOCHS * NUM_SAMPLES
    if site.algorithm == "edp":
        assert summary.pushes.applied == STEPS


def assert_as_undisturbed(site: Site, whole: Cluster) -> None:
    """Bit for bit: weights, optimizer, and each loss."""
    for file in (MODEL_FILE, OPTIMIZER_FILE):
        mine, theirs = (
            (folder / "checkpoints" / f"step-{STEPS:08d}" / file).read_bytes()
            for folder in (site.run.root, whole.folder)
        )
        assert mine == theirs, file
    losses = {line.record.step: line.record.values["loss"] for line in site.steps}
    assert losses == {record.step: record.values["loss"] for record in whole.metrics.steps}
    assert_counted(site)


# The server is killed, or asked to stop.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "fire", "resumed_at"),
    [
        ("syncps", ("KILL", "after a step", "100"), {90}),
        *at_night(
            ("edp", ("KILL", "before an answer", "100"), {90}),
            ("syncps", ("KILL", "after a commit", "100"), {90}),
            ("edp", ("KILL", "in the middle of a file", "1"), {0}),
            ("syncps", ("KILL", "before the rename", "2"), {EVERY}),
            ("edp", ("TERM", "after a step", "100"), {100, 101}),
        ),
    ],
)
def test_a_server_that_is_started_again_goes_on_bit_for_bit(
    processes: Processes,
    undisturbed: Undisturbed,
    algorithm: AlgorithmName,
    fire: tuple[str, ...],
    resumed_at: set[int],
) -> None:
    """Between a step and its answer, its worker knows of a step that is taken again, or the server alone.

    `resumed_at`: the steps of which one was the last that it had saved; 0: it begins again.
    """
    site = Site(processes, algorithm)
    worker = site.worker()
    server = site.server(fire=fire)
    assert server.wait() == (143 if fire[0] == "TERM" else -signal.SIGKILL), server.output
    worker.wait_for("trying to reconnect")
    assert_ends_well(site.server("--resume", "auto"), worker)
    [stood] = [event.step for event in site.events(RunResumed)] or [0]
    assert stood in resumed_at
    last = site.steps[-1].incarnation
    taken = [line.record.step for line in site.steps if line.incarnation == last]
    assert taken == list(range(stood + 1, STEPS + 1))
    assert_as_undisturbed(site, undisturbed(algorithm))
    assert not [*site.run.checkpoints.glob(".*")], "nothing is left half-way"


@pytest.mark.nightly
def test_three_workers_of_edp_wait_for_a_killed_server(processes: Processes) -> None:
    site = Site(processes, "edp", workers=3)
    workers = [site.worker(number) for number in (1, 2, 3)]
    assert_killed(site.server(fire=("KILL", "after a step", "100")))
    assert_ends_well(site.server("--resume", RUN_ID), *workers)
    assert [event.step for event in site.events(RunResumed)] == [90]
    assert_counted(site)
    assert {worker.rank for worker in site.summary.workers} == {0, 1, 2}


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sync", "streaming", "async"])
def test_diloco_through_a_kill_a_stop_a_late_joiner_and_a_cut_link(
    processes: Processes, undisturbed: Undisturbed, mode: str
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
    quiet = undisturbed("diloco", *own, workers=3).server.summary
    assert quiet is not None
    assert quiet.final.val_loss is not None
    assert summary.final.val_loss is not None
    assert summary.final.val_loss < quiet.final.val_loss + 0.1


# A worker is killed, or somebody is stopped for a while.


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "point", "count"),
    [
        ("edp", "in the middle of a push", 50),
        ("edp", "when EDP's weights come", 1),
        ("syncps", "after a push", 50),
        ("syncps", "when SyncPS's state comes", 1),
    ],
)
def test_a_killed_worker_is_replaced_under_its_number(
    processes: Processes,
    undisturbed: Undisturbed,
    algorithm: AlgorithmName,
    point: str,
    count: int,
) -> None:
    site = Site(processes, algorithm)
    server = site.server()
    assert_killed(site.worker(fire=("KILL", point, str(count))))
    assert_ends_well(site.worker(), server)
    assert_as_undisturbed(site, undisturbed(algorithm))
    assert len(site.events(WorkerLost)) == 1
    assert [event.rejoined for event in site.events(WorkerJoined)] == [False, False]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "role", "point"),
    [("edp", "server", "after a step"), ("syncps", "worker", "before a SyncPS push")],
)
def test_who_stands_still_is_given_up_and_found_again(
    processes: Processes, undisturbed: Undisturbed, algorithm: AlgorithmName, role: str, point: str
) -> None:
    site = Site(processes, algorithm, "heartbeat_timeout_s=2")
    fire = ("STOP", point, "50")
    server = site.server(fire=fire if role == "server" else ())
    worker = site.worker(fire=fire if role == "worker" else ())
    stopped = server if role == "server" else worker
    wait_until_stopped(stopped)
    if role == "server":
        worker.wait_for("trying to reconnect")
    else:
        server.wait_for("all workers have gone")
    stopped.kill(signal.SIGCONT)
    assert_ends_well(server, worker)
    assert site.events(RunResumed) == []
    assert_as_undisturbed(site, undisturbed(algorithm))
    assert [event.rejoined for event in site.events(WorkerJoined)][:2] == [False, True]


@pytest.mark.nightly
def test_syncps_goes_on_past_a_killed_worker_and_one_that_stands_still(
    processes: Processes, undisturbed: Undisturbed
) -> None:
    """The third takes their parts over. Who stands still is not lost, and has parts again afterwards."""
    epochs, still = 25, 40
    shares = (
        f"batch_share.{node}={share}" for node, share in zip(NODES, (0.4, 0.3, 0.3), strict=False)
    )
    own = (*shares, "global_batch_size=128", f"num_epochs={epochs}", "timeout=0.1")
    site = Site(processes, "syncps", *own, "heartbeat_timeout_s=60", workers=3)
    server, first = site.server(), site.worker(1)
    killed = site.worker(2, fire=("KILL", "before a SyncPS push", "20"))
    stopped = site.worker(3, fire=("STOP", "before a SyncPS push", "30"))
    assert_killed(killed)
    wait_until_stopped(stopped)
    reached = len(site.steps)
    eventually(lambda: len(site.steps) >= reached + still)
    stopped.kill(signal.SIGCONT)
    assert_ends_well(server, first, stopped)
    records = [line.record for line in site.steps]
    assert_applied_once(records, NUM_SAMPLES, epochs)
    losses = [record.values["loss"] for record in records]
    expected = undisturbed("syncps", *own, workers=3).losses
    assert losses[:48] == pytest.approx(expected[:48], rel=1e-5)
    assert losses == pytest.approx(expected, rel=1e-2), "later a ReLU may fall on its other side"
    assert [event.rank for event in site.events(WorkerLost)] == [1]
    of_three, of_two = 0.3 * 128, 3 / 7 * 128
    samples = [worker.samples for worker in site.summary.workers]
    assert samples[1] < 22 * of_three
    assert 40 * of_three < samples[2] < (len(losses) - still // 2) * of_two


def wait_until_stopped(child: Child) -> None:
    end = time.monotonic() + DEADLINE_S
    process = psutil.Process(child.process.pid)
    while process.status() != psutil.STATUS_STOPPED:
        assert child.process.poll() is None, child.output
        assert time.monotonic() < end, f"it was not stopped:\n{child.output}"
        time.sleep(0.05)


# Others who want its run, and what nobody can go on from.


@pytest.mark.nightly
def test_who_may_not_go_on_with_a_run_is_sent_away_and_changes_nothing(
    processes: Processes, undisturbed: Undisturbed
) -> None:
    site = Site(processes, "edp")
    first = site.server()
    first.wait_for("listening on")
    other = Site(processes, "edp")
    for way in ((), ("--resume", "auto"), ("--resume", RUN_ID)):
        second = other.server(*way)
        assert second.wait() == os.EX_TEMPFAIL, second.output
        (line,) = second.output.strip().splitlines()
        assert RUN_ID in line
        assert f"process {first.process.pid}" in line
    assert_ends_well(site.worker(), first)
    assert_as_undisturbed(site, undisturbed("edp"))
    training = [*site.training, "num_epochs=6"]
    for override in ("model.hidden=64", "optimizer=sgd"):
        site.training = [*training, override]
        assert_refused(site, "of run under-fire")
    site.training = training
    for folder in site.run.checkpoints.glob("step-*"):
        data = bytearray((folder / MODEL_FILE).read_bytes())
        data[-100] ^= 1
        (folder / MODEL_FILE).write_bytes(data)
    assert_refused(site, "none of the 6 checkpoints")


def assert_refused(site: Site, sentence: str) -> None:
    """In one line; the run's files are as before, but for its logs and events."""
    files = [each for each in site.run.root.rglob("*") if each.is_file()]
    before = {each: each.read_bytes() for each in files if each.suffix not in {".log", ".jsonl"}}
    refused = site.server("--resume", "auto")
    assert refused.wait() == 1, refused.output
    assert "Traceback" not in refused.output
    lines = refused.output.splitlines()
    (error,) = [line for line in lines if "ERROR" in line or line.startswith("error")]
    assert sentence in error
    assert {each: each.read_bytes() for each in before} == before


# The clock on the wall.


STAMPS = {
    *("training/checkpoint.py", "runs/events.py"),
    *("server/board.py", "server/report.py", "observability/spans.py"),
    *("launch/doctor/table.py", "launch/host.py", "launch/watch/probe.py"),  # compare clocks
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
        if any(reads_the_wall_clock(node) for node in nodes_of(path))
    }
    assert readers == STAMPS


def reads_the_wall_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(each.name == "time" for each in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time"
