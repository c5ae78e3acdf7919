"""What the benchmarks share: runs of real processes, timing two things side by side, and reporting them.

Importing it makes the tests' helper modules importable.
"""

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from processes import Child, Processes
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import SmolclusterError
from smolcluster.observability.sinks.jsonl import MetricLine, follow_metrics
from smolcluster.runs.events import EventRecord
from smolcluster.runs.paths import RunPaths, find_run

PROJECT = Path(__file__).resolve().parents[1]
DEFAULT_DATA = PROJECT.parent / "shared" / "data"
FILE_WIDTH = 132
"""Columns of a table that does not go to a terminal."""
DEADLINE_S = 1800.0
NODES = tuple(f"worker{number}" for number in range(1, 9))
"""The workers of `--local --workers 8`."""
NEVER = 1_000_000_000
T = TypeVar("T")


class Cluster(Processes):
    """A run's server and workers, with one compute thread each, in a folder of their own.

    They end with the block. If they may be `forked`, they begin sooner.
    """

    def __init__(
        self, folder: Path, algorithm: str, num_workers: int = 1, *, forked: bool = False
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder)
        self.port = free_port()
        self.owner: Child
        """The server, or the one process that trains alone."""
        self._spec, self._num_workers, self._forked = get_algorithm(algorithm), num_workers, forked

    def serve(self, *overrides: str, flags: Sequence[str] = ()) -> Child:
        """Start the server."""
        local = ("--local", "--workers", str(self._num_workers))
        self.owner = self._start([str(self._spec.server), *local, *flags], self.port, overrides)
        return self.owner

    def work(
        self,
        worker_id: int,
        *overrides: str,
        program: Sequence[str] = (),
        port: int | None = None,
    ) -> Child:
        me = (str(worker_id), NODES[worker_id - 1], "--local", "--workers", str(len(NODES)))
        argv = [*(program or (str(self._spec.worker),)), *me]
        return self._start(argv, port or self.port, overrides)

    def _start(self, argv: Sequence[str], port: int, overrides: Sequence[str]) -> Child:
        settings = ("--override", f"port={port}", "threads=1", *overrides)
        return self.start(sys.executable, *argv, *settings, forked=self._forked)

    @property
    def run(self) -> RunPaths:
        return find_run(self.runs)

    def wait_until(
        self, look: Callable[[], T | None], *, every_s: float = 0.1, limit_s: float = DEADLINE_S
    ) -> T:
        """What is to be seen, once there is something; the run's files are a second late.

        Raises:
            TimeoutError: there is nothing within `limit_s` seconds.
        """
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with suppress(OSError, SmolclusterError):
                if found := look():
                    return found
            if code := self.owner.process.poll():
                raise SystemExit(f"the server ended with {code}: {self.owner.output}")
            time.sleep(every_s)
        raise TimeoutError(f"what was waited for did not come within {limit_s:g} s")

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has come so far."""
        self.wait_until(lambda: any(each.record.step >= step for each in steps_of(self.run)))

    def finish(self) -> RunPaths:
        """Wait for the end of the run, which must be good."""
        if code := self.owner.process.wait(DEADLINE_S):
            raise SystemExit(f"the server ended with {code}: {self.owner.output}")
        return self.run


def steps_of(run: RunPaths, after_s: float = 0.0) -> list[MetricLine]:
    """The metric lines of all steps that were taken after that time."""
    lines = (line for line in follow_metrics(run.metrics).poll() if line.record.kind == "step")
    return [line for line in lines if seconds_of(line) > after_s]


def seconds_of(line: MetricLine | EventRecord) -> float:
    """When it was written, in seconds since 1970."""
    return datetime.fromisoformat(line.ts).timestamp()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, all threads, user and system.

    Raises:
        psutil.Error: there is no such process any more.
    """
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Paired:
    """Medians over the rounds of a comparison: seconds of each side, and reference / candidate."""

    reference_s: float
    candidate_s: float
    ratio: float


def paired_ratios(
    reference: Callable[[], object], candidate: Callable[[], object], rounds: int
) -> Paired:
    """Time both in each of `rounds` rounds, in alternating order, after one warm-up of each.

    The ratio is the median of the rounds' ratios: a slow moment of the machine hits both sides of a
    round.
    """
    reference(), candidate()
    pairs = []
    for number in range(rounds):
        if number % 2:
            candidate_s, reference_s = seconds(candidate), seconds(reference)
        else:
            reference_s, candidate_s = seconds(reference), seconds(candidate)
        pairs.append((reference_s, candidate_s))
    return Paired(
        reference_s=statistics.median(pair[0] for pair in pairs),
        candidate_s=statistics.median(pair[1] for pair in pairs),
        ratio=statistics.median(pair[0] / pair[1] for pair in pairs),
    )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(
    title: str,
    rows: Sequence[Sequence[str]],
    results: Mapping[str, object] | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Print `rows`, the first one the heading, as a table; or `results` as one JSON object."""
    if as_json:
        print(json.dumps(results))
        return
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)
