"""What checkpoints cost, and how soon a run goes on after a death.

A server and N local workers, a process each with one compute thread, train a model of so many megabytes on
the digits with a global batch of 128.

* `delay`: SyncPS. How much longer the step takes during which a checkpoint is copied, and what a checkpoint
  costs in all: the time by which the steps from one to the next exceed that of as many undisturbed ones, as a
  share of 100 steps. Undisturbed are those of the second half between two checkpoints.
* `recovery`: both algorithms. Seconds from SIGKILL of a worker to the samples that it had being applied by
  others, and from the start of a new server (SIGKILL of the old one, `--resume auto`) to the first step
  that it takes. The aims are 2 heartbeats and 3 s.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self, TypeVar

from common import report
from edp import free_port
from smolcluster.configs.spec import get_algorithm
from smolcluster.observability.sinks.jsonl import MetricLine, read_metrics
from smolcluster.runs.events import EventRecord, LeaseReturned, read_events
from smolcluster.runs.paths import RunPaths
from syncps import environ

NODES = ("pi5", "win", "macbook", "local4", "local5", "local6", "local7", "local8")
PARAMS_A_HIDDEN = 64 + 1 + 10
GLOBAL_BATCH = 128
DEADLINE_S = 600.0
HEARTBEAT_S = 2.5
T = TypeVar("T")


class Cluster:
    """A server that can be started again, and its workers; all end with the block."""

    def __init__(self, folder: Path, algorithm: str, num_workers: int, *overrides: str) -> None:
        self.run = RunPaths(folder / "runs" / "run")
        self._folder, self._algorithm = folder, get_algorithm(algorithm)
        self._local = ["--local", "--workers", str(num_workers)]
        place = [f"port={free_port()}", "threads=1"]
        self._server_overrides = ["--override", *place, *overrides]
        self._worker_overrides = ["--override", *place]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.server = self.start_server()
        self.workers = [self._start_worker(rank) for rank in range(num_workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start_server(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a server of the run."""
        named = [str(self._algorithm.server), *self._local, "--run-id", self.run.run_id, *arguments]
        self.server = self._start([*named, *self._server_overrides])
        return self.server

    def wait_until(self, look: Callable[[], T | None]) -> T:
        """Look until there is something to be seen; the run's files are a second late."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            found = look()
            if found is not None:
                return found
            if self.server.poll() is not None:
                log = (self._folder / "log").read_text()
                raise SystemExit(f"the server ended with {self.server.returncode}: {log}")
            time.sleep(0.2)
        raise SystemExit("what was waited for did not come")

    def steps(self, after_s: float = 0.0) -> list[MetricLine]:
        """The steps that were taken after that time."""
        lines = (line for line in read_metrics(self.run.metrics) if line.record.kind == "step")
        return [line for line in lines if seconds_of(line) > after_s]

    def _start_worker(self, rank: int) -> subprocess.Popen[bytes]:
        named = [str(self._algorithm.worker), str(rank + 1), NODES[rank], *self._local]
        return self._start([*named, *self._worker_overrides])

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ(self._folder),
            )
        self._processes.append(process)
        return process


def seconds_of(line: MetricLine | EventRecord) -> float:
    """When it was written, in seconds since 1970."""
    return datetime.fromisoformat(line.ts).timestamp()


def settings(megabytes: float, every: int | None, algorithm: str) -> list[str]:
    """Overrides for a model of that size, which trains until it is stopped."""
    hidden = round(megabytes * 1e6 / 4 / PARAMS_A_HIDDEN)
    batch = [f"global_batch_size={GLOBAL_BATCH}"] if algorithm == "syncps" else ["batch_size=32"]
    return [
        *(f"model.hidden={hidden}", "num_epochs=100000", "eval_steps=1000000"),
        *("track_gradients=false", f"checkpoint_steps={'null' if every is None else every}"),
        *batch,
    ]


def delay(folder: Path, options: argparse.Namespace) -> list[str]:
    """Time steps with and without a checkpoint, in one run."""
    every, num_workers = options.every, options.workers
    overrides = settings(options.megabytes, every, "syncps")
    with Cluster(folder, "syncps", num_workers, *overrides) as cluster:
        steps = cluster.wait_until(
            lambda: found if len(found := cluster.steps()) > every * options.checkpoints else None
        )
    times = [(line.record.step, seconds_of(line)) for line in steps]
    took = {step: after - before for (_, before), (step, after) in pairwise(times)}
    usual = statistics.median(
        s for step, s in took.items() if step > every and step % every > every / 2
    )
    struck = statistics.median(s for step, s in took.items() if step > every and step % every == 1)
    costs = [
        sum(took[step] - usual for step in range(start + 1, start + every // 2 + 1))
        for start in range(every, max(took) - every // 2, every)
    ]
    cost = statistics.fmean(costs)
    return [
        *(
            f"{options.megabytes:g} MB",
            str(num_workers),
            f"{1e3 * usual:.0f}",
            f"{1e3 * struck:.0f}",
        ),
        *(f"{struck / usual - 1:+.1%}", f"{1e3 * cost:+.0f}", f"{cost / (100 * usual):+.2%}"),
    ]


def recovery(folder: Path, algorithm: str, options: argparse.Namespace) -> list[str]:
    """Kill a worker, then the server."""
    overrides = settings(options.megabytes, options.every, algorithm)
    with Cluster(folder, algorithm, options.workers, *overrides) as cluster:
        cluster.wait_until(lambda: len(cluster.steps()) > 2 * options.every or None)
        killed_at = time.time()
        cluster.workers[0].send_signal(signal.SIGKILL)
        applied_at = cluster.wait_until(lambda: when_applied(cluster, killed_at))
        cluster.server.send_signal(signal.SIGKILL)
        cluster.server.wait()
        started_at = time.time()
        cluster.start_server("--resume", "auto")
        first = cluster.wait_until(lambda: next(iter(cluster.steps(started_at)), None))
    return [
        *(algorithm, f"{options.megabytes:g} MB", str(options.workers)),
        *(f"{applied_at - killed_at:.2f}", f"{2 * HEARTBEAT_S:g}"),
        *(f"{seconds_of(first) - started_at:.2f}", "3"),
    ]


def when_applied(cluster: Cluster, since_s: float) -> float | None:
    """When all samples that came back after that time had been applied."""
    back = [
        record
        for record in read_events(cluster.run.events)
        if isinstance(record.event, LeaseReturned) and seconds_of(record) > since_s
    ]
    if not back:
        return None
    times = [
        applied_after(cluster, seconds_of(record), record.event)
        for record in back
        if isinstance(record.event, LeaseReturned)
    ]
    return max(each for each in times if each) if all(times) else None


def applied_after(cluster: Cluster, back_s: float, lease: LeaseReturned) -> float | None:
    """When the step was taken that has the samples of a lease that came back; None: not yet."""
    for line in cluster.steps(back_s):
        start, stop = line.record.values["start"], line.record.values["stop"]
        if line.record.epoch == lease.epoch and start <= lease.start and lease.stop <= stop:
            return seconds_of(line)
    return None


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Cost of checkpoints, and time of recovery.")
    parser.add_argument("--part", choices=("all", "delay", "recovery"), default="all")
    parser.add_argument("--megabytes", type=float, default=70.0, help="parameters in fp32")
    parser.add_argument("--workers", type=int, default=4, choices=range(1, len(NODES) + 1))
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--checkpoints", type=int, default=6, help="delay: how many are timed")
    options = parser.parse_args()
    if options.part != "recovery":
        with TemporaryDirectory() as folder:
            measured = delay(Path(folder), options)
        heading = ["parameters", "workers", "step, ms", "with a copy", "longer by (<= 10%)"]
        heading += ["a checkpoint costs, ms", "of 100 steps (<= 1%)"]
        report("What a checkpoint costs (SyncPS, Adam)", [heading, measured], {}, as_json=False)
    if options.part != "delay":
        rows = []
        for algorithm in ("edp", "syncps"):
            with TemporaryDirectory() as folder:
                rows.append(recovery(Path(folder), algorithm, options))
        heading = ["algorithm", "parameters", "workers", "worker killed, s", "aim"]
        heading += ["server started again, s", "aim"]
        report("From a death to the samples applied", [heading, *rows], {}, as_json=False)


if __name__ == "__main__":
    main()
