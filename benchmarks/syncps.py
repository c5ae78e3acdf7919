"""SyncPS on this machine: the same losses whoever is present, and steps that no straggler sets the pace of.

Every cluster is a server and workers as real processes, with one compute thread each; runs and secret lie
in a folder of their own. So that two cores can play several machines, a worker's computing is stretched by a
sleep for each sample.

* `equality`: the losses of all steps against `smolcluster train` with the same global batch, as the largest
  relative difference: with 1, 2 and 4 workers; with one of 4 killed half-way; with one stopped (SIGSTOP) for
  20 seconds; with one that joins late.
* `timeout`: with `timeout: 0.1` one of 4 workers is stopped for 5 seconds: step times before, while it was
  stopped and afterwards, and what became of it.
* `straggler`: one of 4 workers takes 4 times as long for a sample. The time of a step against the ideal one,
  in which all work at their speed without a pause, with measured shares and with equal ones.
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

import common
from common import DEFAULT_DATA, NODES, PROJECT, report, seconds_of, steps_of
from processes import Child
from smolcluster.algorithms import process
from smolcluster.algorithms.entry import guarded, worker_parser
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.spec import get_algorithm
from smolcluster.runs.events import WorkerJoined, read_events
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import read_summary
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.messages import Welcome

GLOBAL_BATCH = 128
NUM_WORKERS = 4
SAMPLE_S = {"digits": 1e-3, "MNIST": 8e-3}
STEPS = {"digits": 720, "MNIST": 126}
SLOWER = 4.0


class SlowBench(TrainingContext):
    """A workbench on a machine that takes `sample_s` seconds longer for each sample."""

    sample_s: float = 0.0

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        """Sleep as long as this machine would compute, then compute."""
        time.sleep(self.sample_s * len(indices))
        return super().compute(indices, epoch, start)


def be_worker(sample_s: float, arguments: Sequence[str]) -> int:
    """Be a worker process with the usual command line, on a slow machine."""

    class Slow(SlowBench):
        pass

    Slow.sample_s = sample_s

    def make(welcome: Welcome, training: TrainingContext) -> Worker:
        return Worker(
            welcome, Slow(training.workload, training.replica, training.seed, training.microbatch)
        )

    args = worker_parser(get_algorithm("syncps")).parse_args(arguments)
    return guarded(lambda: process.work("syncps", args, make))


class Cluster(common.Cluster):
    """A cluster that trains on `data` with the global batch, and workers that are slow."""

    def __init__(self, folder: Path, data: str, mnist: Path, *overrides: str) -> None:
        super().__init__(folder, "syncps", NUM_WORKERS)
        self._place = place_of(data, mnist)
        batch = (f"global_batch_size={GLOBAL_BATCH}", f"eval_steps={common.NEVER}")
        train = ("--train-config", config_of(data))
        self.serve(*batch, *self._place, *overrides, flags=train)

    def slow_worker(self, rank: int, sample_s: float) -> Child:
        """Start a worker that takes so many seconds longer for a sample."""
        return self.work(rank + 1, *self._place, program=(__file__, "--be-worker", str(sample_s)))


def config_of(data: str) -> str:
    """The training file."""
    return "digits" if data == "digits" else "nn"


def place_of(data: str, mnist: Path) -> tuple[str, ...]:
    """Where the data lie."""
    return (f"dataset.root={mnist}", "dataset.download=false") if data == "MNIST" else ()


def losses(run: RunPaths) -> dict[int, float]:
    return {line.record.step: line.record.values["loss"] for line in steps_of(run)}


def single(folder: Path, data: str, mnist: Path) -> dict[int, float]:
    with common.Cluster(folder, "syncps") as cluster:
        train = str(PROJECT / "src" / "smolcluster" / "train.py")
        overrides = (f"global_batch_size={GLOBAL_BATCH}", "threads=1", *place_of(data, mnist))
        config = ("--config", config_of(data), "--override", *overrides)
        cluster.owner = cluster.start(sys.executable, train, *config, forked=False)
        return losses(cluster.finish())


def kill_one(cluster: Cluster, workers: list[Child], half: int) -> None:
    """Kill a worker half-way."""
    cluster.wait_for_step(half)
    workers[1].kill()


def stop_one(cluster: Cluster, workers: list[Child], half: int) -> None:
    """Stop a worker for 20 seconds."""
    cluster.wait_for_step(half // 2)
    workers[1].kill(signal.SIGSTOP)
    time.sleep(20.0)
    workers[1].kill(signal.SIGCONT)


@dataclass(frozen=True)
class Case:
    """A cluster, and what is done to it."""

    name: str
    num_workers: int
    meddle: Callable[[Cluster, list[Child], int], None] | None = None
    late: bool = False


CASES = (
    Case("1 worker", 1),
    Case("2 workers", 2),
    Case("4 workers", 4),
    Case("4, one killed half-way", 4, kill_one),
    Case("4, one stopped for 20 s", 4, stop_one),
    Case("4, one joins late", 4, late=True),
)


def equality(folder: Path, mnist: Path, data: str) -> list[list[str]]:
    """A row for each case: steps, and the largest relative difference of a loss."""
    expected = single(folder / f"{data}-single", data, mnist)
    rows = []
    for number, case in enumerate(CASES):
        at_first = case.num_workers - case.late
        place = folder / f"{data}-{number}"
        with Cluster(place, data, mnist, f"min_workers={at_first}") as cluster:
            sample_s = SAMPLE_S[data]
            workers = [cluster.slow_worker(rank, sample_s) for rank in range(at_first)]
            if case.meddle:
                case.meddle(cluster, workers, STEPS[data] // 2)
            if case.late:
                cluster.wait_for_step(STEPS[data] // 3)
                workers.append(cluster.slow_worker(at_first, sample_s))
            run = cluster.finish()
        found, summary = losses(run), read_summary(run.summary)
        if found.keys() != expected.keys():
            raise SystemExit(f"{case.name}: {len(found)} steps, expected {len(expected)}")
        worst = max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())
        shares = " ".join(f"{worker.share:.0%}" for worker in summary.workers)
        rows.append(
            [data, case.name, str(len(found)), f"{worst:.1e}", shares, str(summary.leases_returned)]
        )
    return rows


def step_times(run: RunPaths) -> list[tuple[float, float]]:
    """When each step was taken, seconds since 1970, and how long after the one before."""
    times = map(seconds_of, steps_of(run))
    return [(after, after - before) for before, after in pairwise(times)]


def timeout(folder: Path, mnist: Path) -> list[list[str]]:
    """A row for each phase: before a worker is stopped, while it is, and afterwards."""
    folder = folder / "timeout"
    with Cluster(folder, "digits", mnist, "timeout=0.1", "min_workers=4") as cluster:
        workers = [cluster.slow_worker(rank, SAMPLE_S["digits"]) for rank in range(4)]
        cluster.wait_for_step(STEPS["digits"] // 4)
        stopped = time.time()
        workers[1].kill(signal.SIGSTOP)
        time.sleep(5.0)
        workers[1].kill(signal.SIGCONT)
        continued = time.time()
        run = cluster.finish()
    phases = {
        "before": (0.0, stopped),
        "stopped": (stopped, continued),
        "afterwards": (continued, time.time()),
    }
    rows = []
    for name, (first, last) in phases.items():
        taken = [seconds for at, seconds in step_times(run) if first <= at < last]
        rows.append([name, str(len(taken)), _ms(statistics.median(taken)), _ms(max(taken))])
    joined = [record.event for record in read_events(run.events)]
    back = sum(isinstance(event, WorkerJoined) and event.rejoined for event in joined)
    share = next(worker.share for worker in read_summary(run.summary).workers if worker.rank == 1)
    rows.append(["its share of all samples", "", f"{share:.1%}", f"rejoined {back} times"])
    return rows


def straggler(folder: Path, mnist: Path) -> list[list[str]]:
    """A row for measured shares and one for equal ones."""
    sample_s = 2e-3
    ideal_s = GLOBAL_BATCH * sample_s / (3 + 1 / SLOWER)
    equal = "batch_share={" + ", ".join(f"{node}: 0.25" for node in NODES[:NUM_WORKERS]) + "}"
    rows = []
    for name, overrides in (("measured", []), ("equal", [equal])):
        settings = ("min_workers=4", "num_epochs=20", *overrides)
        with Cluster(folder / name, "digits", mnist, *settings) as cluster:
            for rank in range(NUM_WORKERS):
                cluster.slow_worker(rank, sample_s * (SLOWER if rank == 0 else 1))
            run = cluster.finish()
        taken = [seconds for _, seconds in step_times(run)][20:]
        step_s = statistics.median(taken)
        shares = " ".join(f"{worker.share:.0%}" for worker in read_summary(run.summary).workers)
        rows.append([name, shares, _ms(step_s), _ms(ideal_s), f"{step_s / ideal_s:.2f}"])
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def main() -> None:
    if sys.argv[1:2] == ["--be-worker"]:
        raise SystemExit(be_worker(float(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", choices=["all", "equality", "timeout", "straggler"], default="all"
    )
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="where MNIST lies")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts: dict[str, tuple[str, list[str], Callable[[Path], list[list[str]]]]] = {
        "equality": (
            f"losses against a single process, global batch {GLOBAL_BATCH}",
            ["data", "cluster", "steps", "largest difference", "shares", "parts returned"],
            lambda folder: [
                row
                for data in ("digits", "MNIST")
                if data == "digits" or (args.data / "MNIST" / "raw").is_dir()
                for row in equality(folder, args.data, data)
            ],
        ),
        "timeout": (
            "timeout: 0.1, one of 4 stopped for 5 s",
            ["phase", "steps", "median step", "longest step"],
            lambda folder: timeout(folder, args.data),
        ),
        "straggler": (
            "one of 4 workers 4x slower",
            ["shares", "of each worker", "step", "ideal", "ratio"],
            lambda folder: straggler(folder, args.data),
        ),
    }
    for name, (title, heading, measure) in parts.items():
        if args.part in ("all", name):
            with TemporaryDirectory() as folder:
                rows = measure(Path(folder))
            report(title, [heading, *rows], {name: rows}, as_json=args.json)


if __name__ == "__main__":
    main()
