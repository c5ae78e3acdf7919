"""What checkpoints cost, and how soon a run goes on after a death.

A server and N local workers, a process each with one compute thread, train a model of so many megabytes on
the digits with a global batch of 128.

* `delay`: SyncPS. How much longer the step takes during which a checkpoint is copied, and what a checkpoint
  costs in all: the time by which the steps from one to the next exceed that of as many undisturbed ones, as a
  share of 100 steps. Undisturbed are those of the second half between two checkpoints.
* `recovery`: EDP and SyncPS. Seconds from SIGKILL of a worker to the samples that it had being applied by
  others, and from the start of a new server (SIGKILL of the old one, `--resume auto`) to the first step
  that it takes. The aims are 2 heartbeats and 3 s.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from common import NODES, Cluster, report, seconds_of, steps_of
from processes import Child
from smolcluster.runs.events import LeaseReturned, read_events

PARAMS_A_HIDDEN = 64 + 1 + 10
GLOBAL_BATCH = 128
HEARTBEAT_S = 2.5
LOOK_EVERY_S = 0.2


def settings(megabytes: float, every: int | None, algorithm: str) -> list[str]:
    """Overrides for a model of that size, which trains until it is stopped."""
    hidden = round(megabytes * 1e6 / 4 / PARAMS_A_HIDDEN)
    batch = [f"global_batch_size={GLOBAL_BATCH}"] if algorithm == "syncps" else ["batch_size=32"]
    return [
        *(f"model.hidden={hidden}", "num_epochs=100000", "eval_steps=1000000"),
        *("track_gradients=false", f"checkpoint_steps={'null' if every is None else every}"),
        *batch,
    ]


def begin(cluster: Cluster, num_workers: int, overrides: list[str]) -> list[Child]:
    """Start server and workers; returns the workers."""
    cluster.serve(*overrides)
    return [cluster.work(rank + 1) for rank in range(num_workers)]


def delay(folder: Path, options: argparse.Namespace) -> list[str]:
    """Time steps with and without a checkpoint, in one run."""
    every, num_workers = options.every, options.workers
    overrides = settings(options.megabytes, every, "syncps")
    with Cluster(folder, "syncps", num_workers) as cluster:
        begin(cluster, num_workers, overrides)
        num_steps = every * options.checkpoints
        steps = cluster.wait_until(
            lambda: found if len(found := steps_of(cluster.run)) > num_steps else None,
            every_s=LOOK_EVERY_S,
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
    with Cluster(folder, algorithm, options.workers) as cluster:
        worker, *_ = begin(cluster, options.workers, overrides)
        cluster.wait_until(
            lambda: len(steps_of(cluster.run)) > 2 * options.every, every_s=LOOK_EVERY_S
        )
        killed_at = time.time()
        worker.kill()
        applied_at = cluster.wait_until(
            lambda: when_applied(cluster, killed_at), every_s=LOOK_EVERY_S
        )
        cluster.owner.kill()
        cluster.owner.wait()
        started_at = time.time()
        cluster.serve(*overrides, flags=("--resume", "auto"))
        first, *_ = cluster.wait_until(
            lambda: steps_of(cluster.run, started_at), every_s=LOOK_EVERY_S
        )
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
    for line in steps_of(cluster.run, back_s):
        start, stop = line.record.values["start"], line.record.values["stop"]
        if line.record.epoch == lease.epoch and start <= lease.start and lease.stop <= stop:
            return seconds_of(line)
    return None


def main() -> None:
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
        report("What a checkpoint costs (SyncPS, Adam)", [heading, measured])
    if options.part != "delay":
        rows = []
        for algorithm in ("edp", "syncps"):
            with TemporaryDirectory() as folder:
                rows.append(recovery(Path(folder), algorithm, options))
        heading = ["algorithm", "parameters", "workers", "worker killed, s", "aim"]
        heading += ["server started again, s", "aim"]
        report("From a death to the samples applied", [heading, *rows])


if __name__ == "__main__":
    main()
