"""SyncPS as real processes, started by hand: one worker is killed, one is stopped for a while."""

import re
import signal
import sys
from collections import Counter, defaultdict

import pytest
import torch

from harness import free_port, local_settings
from processes import Child, Processes
from smolcluster.configs.spec import get_algorithm
from smolcluster.data.permutation import epoch_permutation
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.events import LeaseReturned, WorkerLost, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from smolcluster.training.build import build
from smolcluster.training.loop import training_steps
from waiting import eventually

pytestmark = pytest.mark.nightly

NODES = ("pi5", "win", "macbook")
NUM_SAMPLES = 1438
EPOCHS = 25
BATCH = 128
EARLY = 48
"""Steps until which rounding alone stays far below 1e-5; later a ReLU may fall on its other side."""
SHARES = ("batch_share.pi5=0.4", "batch_share.win=0.3", "batch_share.macbook=0.3")
TRAINING = (
    *(f"global_batch_size={BATCH}", f"num_epochs={EPOCHS}", "eval_steps=5"),
    *("min_workers=3", *SHARES),
)


class Machines:
    """A server and three workers on this machine."""

    def __init__(self, processes: Processes, *overrides: str) -> None:
        self._processes = processes
        common = ["--local", "--override", f"port={free_port()}", "threads=1"]
        algorithm = get_algorithm("syncps")
        self.server = processes.start(
            sys.executable, str(algorithm.server), *common, *TRAINING, *overrides
        )
        self.workers: list[Child] = [
            processes.start(sys.executable, str(algorithm.worker), str(rank + 1), node, *common)
            for rank, node in enumerate(NODES)
        ]

    @property
    def steps(self) -> list[MetricRecord]:
        """What the run's file holds of its steps."""
        metrics = find_run(self._processes.runs).metrics
        return [
            line.record for line in follow_metrics(metrics).poll() if line.record.kind == "step"
        ]

    @property
    def evaluated(self) -> int:
        """The newest step that the server has evaluated, as it says on the console."""
        return max(map(int, re.findall(r"step (\d+): validation", self.server.output)), default=0)

    def assert_trained_as_alone(self) -> None:
        """Every loss is that of a single process, and every sample of every epoch was applied once."""
        settings = local_settings(*TRAINING, algorithm="syncps")
        train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
        training = build(train, seed, settings.node.dataset, torch.device("cpu"))
        expected = [step.loss for step in training_steps(training, train)]
        losses = [step.values["loss"] for step in self.steps]
        assert losses[:EARLY] == pytest.approx(expected[:EARLY], rel=1e-5)
        assert losses == pytest.approx(expected, rel=1e-2)
        applied: dict[int, Counter[int]] = defaultdict(Counter)
        for step in self.steps:
            order = epoch_permutation(seed, step.epoch, NUM_SAMPLES)
            positions = slice(int(step.values["start"]), int(step.values["stop"]))
            applied[step.epoch].update(order[positions].tolist())
        once = Counter(range(NUM_SAMPLES))
        assert applied == dict.fromkeys(range(EPOCHS), once)


def test_a_killed_worker_makes_no_difference(processes: Processes) -> None:
    machines = Machines(processes)
    eventually(lambda: machines.evaluated >= 10)
    victim = machines.workers[1]
    victim.kill(signal.SIGSTOP)  # it has a part of every step, so that the run cannot end before
    victim.kill(signal.SIGKILL)
    assert machines.server.wait() == 0, machines.server.output
    for worker in (machines.workers[0], machines.workers[2]):
        assert worker.wait() == 0, worker.output
    machines.assert_trained_as_alone()
    run = find_run(processes.runs)
    events = [record.event for record in read_events(run.events)]
    (lost,) = [event for event in events if isinstance(event, WorkerLost)]
    assert (lost.rank, lost.node) == (1, "win")
    assert all(event.rank == 1 for event in events if isinstance(event, LeaseReturned))
    summary = read_summary(run.summary)
    assert summary.samples_applied == EPOCHS * NUM_SAMPLES
    assert 0 < summary.workers[1].samples < 0.3 * summary.samples_applied
    assert "Traceback" not in machines.server.output


def test_a_stopped_worker_holds_nobody_up_and_works_again_afterwards(processes: Processes) -> None:
    machines = Machines(processes, "timeout=0.1", "heartbeat_timeout_s=60")
    eventually(lambda: machines.evaluated >= 10)
    sleeper = machines.workers[2]
    sleeper.kill(signal.SIGSTOP)
    stopped_at = machines.evaluated
    eventually(lambda: machines.evaluated >= stopped_at + 40)
    last_given_up = max(map(int, re.findall(r"samples of step (\d+)", machines.server.output)))
    sleeper.kill(signal.SIGCONT)
    assert machines.server.wait() == 0, machines.server.output
    for worker in machines.workers:
        assert worker.wait() == 0, worker.output
    machines.assert_trained_as_alone()
    run = find_run(processes.runs)
    events = [record.event for record in read_events(run.events)]
    assert not [event for event in events if isinstance(event, WorkerLost)]
    summary = read_summary(run.summary)
    its_part = 0.3 * BATCH
    # Before, it had a part of each step up to the one that was taken over, and then of none.
    assert summary.workers[2].samples > (its_part + 1) * last_given_up
    assert summary.workers[2].samples < 0.3 * summary.samples_applied - its_part * 10
