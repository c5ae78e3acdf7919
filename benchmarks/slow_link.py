"""SyncPS where one link is ten times slower than the others: who does how much, and what becomes of it.

A server and workers, a process and a network namespace each (Linux, root), take steps for a while. To compute
is to sleep, equally long for all: `--compute` seconds for a whole batch. Every worker but the last has a link
of `--mbit` Mbit/s in both directions, the last one a tenth of that; the server's is as fast as all together.

    python benchmarks/slow_link.py --workers 2 --megabytes 7 --compute 2
    python benchmarks/slow_link.py --workers 4 --megabytes 7.2 --compute 0.2 --timeout 0.1 --seconds 120

`alone` is what a step of one worker with a fast link needs: a push of its gradient, and all of the computing.
"""

import argparse
import statistics
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

import exchange
from common import report
from exchange import BATCH_SIZE, Case, Children, Prefilled, context_of, make_bench
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.configs.schema import Settings
from smolcluster.runs.events import kind_of, read_events
from smolcluster.training.compute import BatchLoss
from smolcluster.training.loop import StepTaken

COUNTED = ("worker_joined", "worker_lost", "worker_parked", "step_overdue")


@dataclass(frozen=True)
class Slowed(Case):
    """`compute_s` of sleeping for a whole batch; parts by measured cost."""

    compute_s: float = 0.0
    timeout: float | None = None

    @property
    def settings(self) -> Settings:
        """The same cluster, whose server decides who gets how much."""
        settings = super().settings
        cluster = settings.cluster.model_copy(
            update={"batch_share": None, "timeout": self.timeout, "heartbeat_timeout_s": 10.0}
        )
        train = settings.train.model_copy(update={"optimizer": "adam"})
        return replace(settings, cluster=cluster, train=train)


class Sleeper(Prefilled):
    """Computes by sleeping."""

    per_sample_s = 0.0

    def compute(self, indices: torch.Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        """A mean loss, after a while."""
        time.sleep(Sleeper.per_sample_s * len(indices))
        return super().compute(indices, epoch, start)


class Timed(Server):
    """Takes steps until its time is over, and keeps when each ended and how many samples each worker had."""

    def __init__(self, context: ServerContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds = seconds
        self.taken: list[tuple[float, dict[str, int]]] = []

    def commit(self, step: Step) -> StepTaken:
        done = [(part.finished_by, part.num_samples) for part in step.parts]
        sizes = Counter({each.holder.name: size for each, size in done if each})
        self.taken.append((time.monotonic(), dict(sizes)))
        taken = super().commit(step)
        if self.taken[-1][0] - self.taken[0][0] > self.seconds:
            self.report.counts.samples_applied = self.total_samples
        return taken


def serve(pipe: Pipe, case: Slowed, seconds: float) -> None:
    """The server's process; it answers with its steps."""
    case.hosts[0].enter()
    context = context_of(case, make_bench(case, 0))
    server = Timed(context, seconds)
    server.run()
    context.records.events.close()
    pipe.send(server.taken)


def work(pipe: Pipe, case: Slowed, worker_id: int) -> None:
    Sleeper.per_sample_s = case.compute_s / (BATCH_SIZE * case.num_workers)
    with patch("exchange.Prefilled", Sleeper):
        exchange.work(pipe, case, worker_id)


def shape(case: Slowed, mbit: float) -> None:
    """Give each host the link that it shall have."""
    rates = [case.num_workers * mbit, *[mbit] * (case.num_workers - 1), mbit / 10]
    for place, (host, rate) in enumerate(zip(case.hosts, rates, strict=True), 1):
        exchange.shape(host, place, rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SyncPS with one slow link.")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--megabytes", type=float, default=7.0, help="size of the gradient in fp32")
    parser.add_argument("--compute", type=float, default=2.0, help="seconds for a whole batch")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the fast links")
    parser.add_argument("--timeout", type=float, help="the run's timeout, in seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long steps are taken")
    return parser.parse_args()


def table(taken: list[tuple[float, dict[str, int]]], alone_s: float) -> list[list[Any]]:
    names = sorted({name for _, sizes in taken for name in sizes})
    rows: list[list[Any]] = [["half", "steps", "median s", "alone s", *names]]
    middle = (taken[0][0] + taken[-1][0]) / 2
    for half, steps in (
        ("first", [each for each in taken if each[0] <= middle]),
        ("second", [each for each in taken if each[0] > middle]),
    ):
        lengths = [now - then for (then, _), (now, _) in pairwise(steps)]
        total = sum(sum(sizes.values()) for _, sizes in steps)
        shares = [sum(sizes.get(name, 0) for _, sizes in steps) / total for name in names]
        typical = f"{statistics.median(lengths):.2f}" if lengths else ""
        shown = [f"{share:.0%}" for share in shares]
        rows.append([half, str(len(steps)), typical, f"{alone_s:.2f}", *shown])
    return rows


def main() -> None:
    arguments = parse_arguments()
    with exchange.hosts_of("namespaces", arguments.workers) as hosts, TemporaryDirectory() as name:
        case = Slowed(
            hosts=hosts,
            folder=Path(name),
            codec="fp32",
            megabytes=arguments.megabytes,
            compute_s=arguments.compute,
            timeout=arguments.timeout,
        )
        shape(case, arguments.mbit)
        with Children() as children:
            server = children.start(serve, case, arguments.seconds)
            for worker_id in range(1, len(hosts)):
                children.start(work, case, worker_id)
            taken = children.hear(server)
        events = Counter(
            kind_of(type(each.event)) for each in read_events(case.folder / "events.jsonl")
        )
    alone_s = arguments.compute + 8 * arguments.megabytes / arguments.mbit
    title = (
        f"{arguments.megabytes:g} MB, {arguments.mbit:g} Mbit/s, the last worker a tenth of it; "
    )
    title += ", ".join(f"{kind} {events[kind]}" for kind in COUNTED)
    report(title, table(taken, alone_s))


if __name__ == "__main__":
    main()
