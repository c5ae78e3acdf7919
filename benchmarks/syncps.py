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
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from torch import Tensor

from common import report
from smolcluster.algorithms import process
from smolcluster.algorithms.entry import guarded, worker_parser
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.spec import get_algorithm
from smolcluster.observability.sinks.jsonl import read_metrics
from smolcluster.runs.events import WorkerJoined, read_events
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.summary import read_summary
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.transport.messages import Welcome

PROJECT = Path(__file__).resolve().parents[1]
DEFAULT_DATA = PROJECT.parent / "shared" / "data"
NODES = ("pi5", "win", "macbook", "mini1")
GLOBAL_BATCH = 128
DEADLINE_S = 300.0
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


class Cluster:
    """A server and workers as processes, whose files lie in `folder`."""

    def __init__(self, folder: Path, data: str, mnist: Path, overrides: Sequence[str] = ()) -> None:
        self.folder = folder
        self._data = data
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._common = [f"port={port}", "threads=1"]
        train = ["--train-config", "digits" if data == "digits" else "nn"]
        place = [f"dataset.root={mnist}", "dataset.download=false"] if data == "MNIST" else []
        self._place = place
        server = str(get_algorithm("syncps").server)
        settings = [f"global_batch_size={GLOBAL_BATCH}", "eval_steps=1000000", *place, *overrides]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.server = self._start([server, "--local", *train], settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for child in self._processes:
            if child.poll() is None:
                child.kill()
            child.wait()

    def worker(self, rank: int, sample_s: float = 0.0) -> subprocess.Popen[bytes]:
        """Start a worker that takes so many seconds longer for a sample."""
        me = [str(Path(__file__)), "--be-worker", str(sample_s)]
        return self._start([*me, str(rank + 1), NODES[rank], "--local"], self._place)

    def finish(self) -> RunPaths:
        """Wait for the end of the run, which must be good."""
        code = self.server.wait(DEADLINE_S)
        if code:
            raise SystemExit(f"the server ended with {code}: {(self.folder / 'log').read_text()}")
        return find_run(self.folder / "runs")

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has come so far; its files are a second late."""
        end = time.monotonic() + DEADLINE_S
        metrics = self.folder / "runs" / "latest" / "metrics.jsonl"
        while time.monotonic() < end:
            if any(line.record.step >= step for line in read_metrics(metrics)):
                return
            time.sleep(0.1)
        raise SystemExit(f"step {step} did not come")

    def _start(self, arguments: Sequence[str], overrides: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *arguments, "--override", *self._common, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ(self.folder),
            )
        self._processes.append(child)
        return child


def environ(folder: Path) -> dict[str, str]:
    """The environment of a benchmark's processes: nothing of the user's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOL")}
    return kept | {
        "XDG_CONFIG_HOME": str(folder),
        "SMOLCLUSTER_RUNS_DIR": str(folder / "runs"),
        "WANDB_MODE": "disabled",
    }


def losses(run: RunPaths) -> dict[int, float]:
    """The loss of each step."""
    lines = read_metrics(run.metrics)
    return {r.step: r.values["loss"] for r in (line.record for line in lines) if r.kind == "step"}


def single(folder: Path, data: str, mnist: Path) -> dict[int, float]:
    """The losses of the same training in a single process."""
    folder.mkdir()
    config = "digits" if data == "digits" else "nn"
    place = [f"dataset.root={mnist}", "dataset.download=false"] if data == "MNIST" else []
    command = [
        *(sys.executable, str(PROJECT / "src" / "smolcluster" / "train.py"), "--config", config),
        *("--override", f"global_batch_size={GLOBAL_BATCH}", "threads=1", *place),
    ]
    subprocess.run(
        command, env=environ(folder), check=True, capture_output=True, timeout=DEADLINE_S
    )
    return losses(find_run(folder / "runs"))


def kill_one(cluster: Cluster, workers: list[subprocess.Popen[bytes]], half: int) -> None:
    """Kill a worker half-way."""
    cluster.wait_for_step(half)
    workers[1].kill()


def stop_one(cluster: Cluster, workers: list[subprocess.Popen[bytes]], half: int) -> None:
    """Stop a worker for 20 seconds."""
    cluster.wait_for_step(half // 2)
    workers[1].send_signal(signal.SIGSTOP)
    time.sleep(20.0)
    workers[1].send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Case:
    """A cluster, and what is done to it."""

    name: str
    num_workers: int
    meddle: Callable[[Cluster, list[subprocess.Popen[bytes]], int], None] | None = None
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
        place = folder / f"{data}-{number}"
        place.mkdir()
        at_first = case.num_workers - case.late
        with Cluster(place, data, mnist, [f"min_workers={at_first}"]) as cluster:
            sample_s = SAMPLE_S[data]
            workers = [cluster.worker(rank, sample_s) for rank in range(at_first)]
            if case.meddle:
                case.meddle(cluster, workers, STEPS[data] // 2)
            if case.late:
                cluster.wait_for_step(STEPS[data] // 3)
                workers.append(cluster.worker(at_first, sample_s))
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
    lines = [line for line in read_metrics(run.metrics) if line.record.kind == "step"]
    times = [datetime.fromisoformat(line.ts).timestamp() for line in lines]
    return [(after, after - before) for before, after in pairwise(times)]


def timeout(folder: Path, mnist: Path) -> list[list[str]]:
    """A row for each phase: before a worker is stopped, while it is, and afterwards."""
    folder = folder / "timeout"
    folder.mkdir()
    with Cluster(folder, "digits", mnist, ["timeout=0.1", "min_workers=4"]) as cluster:
        workers = [cluster.worker(rank, SAMPLE_S["digits"]) for rank in range(4)]
        cluster.wait_for_step(STEPS["digits"] // 4)
        stopped = time.time()
        workers[1].send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        workers[1].send_signal(signal.SIGCONT)
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
    equal = "batch_share={" + ", ".join(f"{node}: 0.25" for node in NODES) + "}"
    rows = []
    for name, overrides in (("measured", []), ("equal", [equal])):
        place = folder / name
        place.mkdir()
        settings = ["min_workers=4", "num_epochs=20", "workers=[pi5, win, macbook, mini1]"]
        with Cluster(place, "digits", mnist, [*settings, "num_workers=4", *overrides]) as cluster:
            for rank in range(4):
                cluster.worker(rank, sample_s * (SLOWER if rank == 0 else 1))
            run = cluster.finish()
        taken = [seconds for _, seconds in step_times(run)][20:]
        step_s = statistics.median(taken)
        shares = " ".join(f"{worker.share:.0%}" for worker in read_summary(run.summary).workers)
        rows.append([name, shares, _ms(step_s), _ms(ideal_s), f"{step_s / ideal_s:.2f}"])
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def main() -> None:
    """Run the parts that are asked for."""
    if sys.argv[1:2] == ["--be-worker"]:
        raise SystemExit(be_worker(float(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", choices=["all", "equality", "timeout", "straggler"], default="all"
    )
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="where MNIST lies")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts = ["equality", "timeout", "straggler"] if args.part == "all" else [args.part]
    with TemporaryDirectory() as name:
        folder = Path(name)
        if "equality" in parts:
            rows = equality(folder, args.data, "digits")
            if (args.data / "MNIST" / "raw").is_dir():
                rows += equality(folder, args.data, "MNIST")
            heading = ["data", "cluster", "steps", "largest difference", "shares", "parts returned"]
            report(
                f"losses against a single process, global batch {GLOBAL_BATCH}",
                [heading, *rows],
                {"equality": rows},
                as_json=args.json,
            )
        if "timeout" in parts:
            rows = timeout(folder, args.data)
            heading = ["phase", "steps", "median step", "longest step"]
            report(
                "timeout: 0.1, one of 4 stopped for 5 s",
                [heading, *rows],
                {"timeout": rows},
                as_json=args.json,
            )
        if "straggler" in parts:
            rows = straggler(folder, args.data)
            heading = ["shares", "of each worker", "step", "ideal", "ratio"]
            report(
                "one of 4 workers 4x slower",
                [heading, *rows],
                {"straggler": rows},
                as_json=args.json,
            )


if __name__ == "__main__":
    main()
