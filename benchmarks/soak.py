"""A soak: an algorithm trains for many minutes while a seeded monkey spoils processes and connections.

A server and workers run as real processes, each worker behind a TCP proxy of its own. The monkey kills,
stops (SIGSTOP, later SIGCONT), cuts (RST, or in order), throttles and corrupts a byte; what was killed is
started again, the server with `--resume auto`. Whoever ends without having been killed is a failure.

One run lasts the whole time, so that processes grow old: worker 1 is never killed, and the server only in the
first half. How many epochs fit into the time is not known before, and no estimate is good under faults; so
`num_epochs` is out of reach at first. When the time is over the server is killed once more, and goes on with
`num_epochs` a little above where it stands. Then everybody has to end with exit code 0, and every sample of
every epoch must have been applied exactly once.

Memory, threads and open files of each process are sampled every second. A life is flat when, after a warm-up,
the medians of its first and its last third are close.
"""

import argparse
import json
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import psutil
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common import free_port, report, say
from processes import Processes
from proxy import Proxy
from smolcluster.configs.spec import AlgorithmSpec, get_algorithm
from smolcluster.observability.sinks.jsonl import MetricLine, follow_metrics
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary, read_summary

Kind = Literal[
    "kill worker",
    "kill server",
    "stop worker",
    "stop server",
    "reset",
    "close",
    "throttle",
    "corrupt",
]
SERVER_KINDS = ("kill server", "stop server")
OLDEST_RANK = 0
"""This worker is never killed, so that one lives as long as the soak."""
WEIGHTS: dict[Kind, float] = {
    "kill worker": 3,
    "kill server": 2,
    "stop worker": 3,
    "stop server": 1,
    "reset": 3,
    "close": 2,
    "throttle": 2,
    "corrupt": 3,
}
LASTS_S: dict[Kind, tuple[float, float]] = {
    "kill worker": (0.2, 3.0),
    "kill server": (0.2, 3.0),
    "stop worker": (0.5, 8.0),
    "stop server": (0.5, 6.0),
    "throttle": (2.0, 8.0),
}
"""Shortest and longest time until it is undone; some are longer than HEARTBEAT_TIMEOUT_S."""
HEARTBEAT_TIMEOUT_S = 5.0
THROTTLED_BYTES_PER_S = 250_000.0
CORRUPT_WITHIN = 500_000
BATCH_SIZE, HIDDEN = 128, 2048
"""Samples of a worker's step, and the model's width: so many that a step takes some milliseconds."""
OUT_OF_REACH_EPOCHS = 10_000_000
PROGRESS_STEPS = 5
"""So many steps after a fault of the server it is ready for the next one."""
PATIENCE_S = 60.0
"""How long processes wait for each other; a restart takes a tenth of that."""
STALL_S = 120.0
SETTLE_S = 30.0
GOODBYE_S = 90.0
LAST_STRETCH_S = 4.0
MAX_FAILURES = 10
TICK_S = 0.05
SAMPLE_EVERY_S = 1.0
READ_EVERY_S = 0.5
WARM_UP_S = 30.0
STEPWISE = frozenset({"edp", "diloco"})
"""Whose steps are of one batch, of one worker."""
MIN_LIFE_S = 60.0
"""A life that is shorter after its warm-up says nothing about growth."""
GROWTH = 0.1
GROWTH_BYTES = 8e6
COUNT_SLACK = 2
TAIL = 2000


@dataclass(frozen=True)
class Fault:
    """What the monkey does.

    Attributes:
        at_s: seconds from the beginning of the faults.
        rank: the worker that is meant; None: the server.
        lasts_s: seconds until it is undone; 0 where there is nothing to undo.
        where: 0 to 1: which byte is corrupted; below 0.5 on the way to the server, else from it.
    """

    at_s: float
    kind: Kind
    rank: int | None
    lasts_s: float = 0.0
    where: float = 0.0


def plan(seed: int, seconds: float, per_minute: float, num_workers: int) -> list[Fault]:
    """What the monkey will do, in order; the same for the same arguments.

    The server is killed in the first half only, and the worker OLDEST_RANK never.
    """
    rng = random.Random(seed)  # noqa: S311 - it hides nothing
    number = max(1, round(per_minute * seconds / 60))
    faults = []
    for index in range(number):
        at_s = (index + rng.random()) * seconds / number
        kinds = [kind for kind in WEIGHTS if kind != "kill server" or at_s < seconds / 2]
        kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        lowest = OLDEST_RANK + 1 if kind == "kill worker" else OLDEST_RANK
        rank = None if kind in SERVER_KINDS else rng.randrange(lowest, num_workers)
        shortest, longest = LASTS_S.get(kind, (0.0, 0.0))
        faults.append(Fault(at_s, kind, rank, rng.uniform(shortest, longest), rng.random()))
    return faults


def is_possible(fault: Fault, healthy: frozenset[int], *, server_ready: bool) -> bool:
    """Whether a fault may happen now; otherwise it waits.

    Args:
        fault: what is to happen.
        healthy: ranks of the workers that run and have a connection.
        server_ready: the server runs, and has taken steps since its last fault.
    """
    if fault.rank is None:
        return server_ready
    if fault.rank not in healthy:
        return False
    return fault.kind not in ("kill worker", "stop worker") or len(healthy) > 1


@dataclass(frozen=True)
class Sample:
    """A process at one moment.

    Attributes:
        at_s: seconds since the soak began.
        rss: resident bytes.
        own: resident bytes that are not those of a file or shared.
    """

    at_s: float
    rss: int
    own: int
    threads: int
    fds: int


def look(pid: int, at_s: float) -> Sample | None:
    """Sample a process, or None when it is gone."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_info()
            own = memory.rss - getattr(memory, "shared", 0)
            if memory.rss:
                return Sample(at_s, memory.rss, own, process.num_threads(), process.num_fds())
    return None


@dataclass(frozen=True)
class Change:
    """A median over the first and over the last third of a life."""

    first: float
    last: float


@dataclass(frozen=True)
class Trend:
    """How a process changed in its life, after the warm-up."""

    name: str
    seconds: float
    rss: Change
    own: Change
    threads: Change
    fds: Change

    @property
    def is_flat(self) -> bool:
        """Whether memory grew at most by a tenth or 8 MB, and threads and open files hardly."""
        return all(
            change.last - change.first <= max(GROWTH * change.first, GROWTH_BYTES)
            for change in (self.rss, self.own)
        ) and all(
            abs(change.last - change.first) <= COUNT_SLACK for change in (self.threads, self.fds)
        )


def trend(name: str, samples: Sequence[Sample], warm_up_s: float = WARM_UP_S) -> Trend | None:
    """Compare the thirds of a life; None when it was too short."""
    if not samples:
        return None
    begin, end = samples[0].at_s + warm_up_s, samples[-1].at_s
    life_s = end - begin
    first = [sample for sample in samples if begin <= sample.at_s < begin + life_s / 3]
    last = [sample for sample in samples if sample.at_s > end - life_s / 3]
    if life_s < MIN_LIFE_S or not first or not last:
        return None
    thirds = [astuple(sample) for sample in first], [astuple(sample) for sample in last]
    medians = ([statistics.median(each) for each in zip(*third, strict=True)] for third in thirds)
    _, *changes = (Change(*pair) for pair in zip(*medians, strict=True))
    return Trend(name, life_s, *changes)


def problems_of(summary: Summary, samples_per_step: int, num_epochs: int) -> list[str]:
    """What does not fit together in a run's summary; nothing if it is exact."""
    found = []
    wanted = num_epochs * summary.train_samples
    if summary.samples_applied != wanted:
        found.append(f"{summary.samples_applied} samples were applied, expected {wanted}")
    by_worker = sum(worker.samples for worker in summary.workers)
    if by_worker != wanted:
        found.append(f"the workers' samples add up to {by_worker}, expected {wanted}")
    is_stepwise = summary.algorithm in STEPWISE
    steps = num_epochs * math.ceil(summary.train_samples / samples_per_step)
    if summary.steps < steps or (summary.algorithm != "edp" and summary.steps > steps):
        found.append(f"{summary.steps} steps were taken, expected {steps}")
    pushes = summary.pushes.applied
    if pushes < summary.steps or (is_stepwise and pushes > summary.steps):
        found.append(f"{pushes} pushes were applied in {summary.steps} steps")
    return found


class Applied:
    """Which samples a run's steps were made of, on the time line that has survived.

    A server that was killed takes its last second of metrics with it, so that steps may be missing here.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self._ranges: dict[int, tuple[int, int, int]] = {}

    def add(self, line: MetricLine) -> None:
        """Note a step; one of a new incarnation undoes what earlier ones did from there on."""
        record = line.record
        if line.incarnation != self._incarnation:
            self._incarnation = line.incarnation
            kept = {step: found for step, found in self._ranges.items() if step < record.step}
            self._ranges = kept
        start, stop = int(record.values["start"]), int(record.values["stop"])
        self._ranges[record.step] = (record.epoch, start, stop)

    @property
    def num_twice(self) -> int:
        """How many ranges overlap with another one of their epoch."""
        ordered = sorted(self._ranges.values())
        return sum(
            before[0] == after[0] and after[1] < before[2] for before, after in pairwise(ordered)
        )


@dataclass(frozen=True)
class Failure:
    """A process that ended without having been killed, or another thing that must not be."""

    at_s: float
    what: str
    output: str = ""


@dataclass
class Child:
    """A process, its life in samples, and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    samples: list[Sample] = field(default_factory=list)
    stopped: bool = False

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)
        self.stopped = signum == signal.SIGSTOP

    def tail(self) -> str:
        """What it has said last."""
        return self.output.read_text(errors="replace")[-TAIL:]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()


@dataclass(frozen=True)
class Settings:
    """What all soaks of this call have in common; `mnist` is the folder of MNIST, None: digits."""

    seconds: float
    per_minute: float
    num_workers: int
    seed: int
    mnist: Path | None

    @property
    def nodes(self) -> list[str]:
        """Names of the workers' nodes, as `--local` has them."""
        return [f"worker{number}" for number in range(1, self.num_workers + 1)]


@dataclass(frozen=True)
class Injected:
    """A fault that has happened: when, in seconds since the soak began, and to whom."""

    at_s: float
    kind: Kind
    target: str
    lasts_s: float


@dataclass(frozen=True)
class Gap:
    """A time without a step, in seconds since the soak began."""

    begin_s: float
    end_s: float

    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def meets(self, fault: Injected) -> bool:
        """Whether it is the fault's doing. A killed server's last second of metrics is lost."""
        return self.begin_s <= fault.at_s + fault.lasts_s and fault.at_s <= self.end_s


def gaps_between(times_s: Sequence[float]) -> list[Gap]:
    """The times between steps."""
    ordered = (round(at_s, 3) for at_s in sorted(times_s))
    return [Gap(before, after) for before, after in pairwise(ordered)]


@dataclass(frozen=True)
class Outcome:
    """What came of one soak."""

    algorithm: str
    minutes: float
    faults: list[Injected]
    left_out: int
    corrupted: int
    restarts: dict[str, int]
    exit_codes: dict[str, int | None]
    num_epochs: int
    summary: dict[str, object] | None
    failures: list[Failure]
    longest_gap: Gap
    longest_gap_with_server: Gap
    trends: list[Trend]
    lives: list[tuple[str, list[Sample]]]

    @property
    def ended_well(self) -> bool:
        """Whether nobody failed, everybody ended with 0, and the samples are exact."""
        return not self.failures and not any(self.exit_codes.values())

    @property
    def is_flat(self) -> bool:
        """Whether no life that was long enough grew."""
        return all(life.is_flat for life in self.trends)


class Soak:
    """One algorithm's processes, the monkey, and what is seen of both."""

    def __init__(self, algorithm: AlgorithmSpec, settings: Settings, folder: Path) -> None:
        self.algorithm, self.settings, self.folder = algorithm, settings, folder
        self.port = free_port()
        self._environ = Processes(folder).environ
        self.proxies = [Proxy(self.port) for _ in range(settings.num_workers)]
        self.paths = RunPaths(folder / "runs" / "soak")
        self.children: dict[int | None, Child] = {}
        """Who runs now: workers by rank, the server as None."""
        self.lives: list[Child] = []
        self.injected: list[Injected] = []
        self.failures: list[Failure] = []
        self.num_epochs = OUT_OF_REACH_EPOCHS
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._began, self._began_at = time.monotonic(), time.time()
        self._follower = follow_metrics(self.paths.metrics)
        self._step_times: list[float] = []
        self._applied = Applied()
        self._epoch = 0
        self._server_since = 0.0
        self._next_sample_s = self._next_read_s = 0.0

    @property
    def now(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self._began

    def run(self) -> Outcome:
        left_out = 0
        codes: dict[str, int | None] = {}
        try:
            self._start_server()
            for rank in range(self.settings.num_workers):
                self._start_worker(rank)
            if self._wait(lambda: bool(self._step_times) and self._is_whole(), PATIENCE_S):
                left_out = self._let_monkey_loose()
                codes = self._finish()
            else:
                self._fail("the run did not begin", "\n".join(c.tail() for c in self.lives))
        finally:
            for child in self.lives:
                child.kill()
            for proxy in self.proxies:
                proxy.close()
        return self._outcome(left_out, codes)

    def _let_monkey_loose(self) -> int:
        """Inject faults until the time is over; returns how many found no moment."""
        settings, begin = self.settings, self.now
        faults = plan(settings.seed, settings.seconds, settings.per_minute, settings.num_workers)
        while self.now < begin + settings.seconds and not self._is_hopeless():
            for fault in [fault for fault in faults if begin + fault.at_s <= self.now]:
                if is_possible(fault, self._healthy(), server_ready=self._is_server_ready()):
                    faults.remove(fault)
                    self._inject(fault)
            self._tick()
        return len(faults)

    def _finish(self) -> dict[str, int | None]:
        """Undo all faults, set an end to the run, and wait for everybody's; returns exit codes."""
        if not self._wait(lambda: not self._due and self._is_whole(), SETTLE_S):
            self._fail(f"after the last fault the cluster was not whole within {SETTLE_S:g} s")
        rate = self._epoch / (self._step_times[-1] - self._step_times[0])
        self.num_epochs = self._epoch + 2 + math.ceil(LAST_STRETCH_S * rate)
        if server := self.children.pop(None, None):
            self.injected.append(Injected(round(self.now, 3), "kill server", server.name, 0.0))
            server.kill()
        self._start_server()
        finishing = list(self.children.values())
        end = self.now + GOODBYE_S
        while any(c.process.poll() is None for c in finishing) and self.now < end:
            self._observe()
            time.sleep(TICK_S)
        codes = {child.name: child.process.poll() for child in finishing}
        for child in finishing:
            if code := codes[child.name]:
                self._fail(f"{child.name} ended with {code}", child.tail())
            elif code is None:
                self._fail(f"{child.name} did not end within {GOODBYE_S:g} s", child.tail())
        return codes

    def _outcome(self, left_out: int, codes: dict[str, int | None]) -> Outcome:
        summary = None
        if codes and not codes.get("server", 1):
            summary = read_summary(self.paths.summary)
            at_once = 1 if self.algorithm.name in STEPWISE else self.settings.num_workers
            for problem in problems_of(summary, at_once * BATCH_SIZE, self.num_epochs):
                self._fail(problem)
        self._read_metrics()
        if twice := self._applied.num_twice:
            self._fail(f"{twice} ranges of samples were applied twice")
        gaps = gaps_between(self._step_times)
        longest = max(gaps, key=Gap.seconds, default=Gap(0.0, 0.0))
        faults = [fault for fault in self.injected if fault.kind in SERVER_KINDS]
        others = [gap for gap in gaps if not any(gap.meets(fault) for fault in faults)]
        lives = [(child.name, child.samples) for child in self.lives]
        restarts = Counter("server" if c.name == "server" else "workers" for c in self.lives)
        return Outcome(
            algorithm=self.algorithm.name,
            minutes=round(self.settings.seconds / 60, 2),
            faults=self.injected,
            left_out=left_out,
            corrupted=sum(proxy.corrupted for proxy in self.proxies),
            restarts={
                "server": restarts["server"] - 1,
                "workers": restarts["workers"] - self.settings.num_workers,
            },
            exit_codes=codes,
            num_epochs=self.num_epochs,
            summary=summary.model_dump() if summary else None,
            failures=self.failures,
            longest_gap=longest,
            longest_gap_with_server=max(others, key=Gap.seconds, default=Gap(0.0, 0.0)),
            trends=[found for name, samples in lives if (found := trend(name, samples))],
            lives=lives,
        )

    def _inject(self, fault: Fault) -> None:
        """Do what the monkey has planned, and plan to undo it."""
        child = self.children[fault.rank]
        lasts_s = round(fault.lasts_s, 3)
        self.injected.append(Injected(round(self.now, 3), fault.kind, child.name, lasts_s))
        undo: Callable[[], None] | None = None
        if fault.kind in ("kill worker", "kill server"):
            del self.children[fault.rank]
            child.kill()
            undo = self._starter(fault.rank)
        elif fault.kind in ("stop worker", "stop server"):
            child.signal(signal.SIGSTOP)
            undo = lambda: self._let_go_on(child)  # noqa: E731
        elif fault.rank is not None:
            undo = spoil(self.proxies[fault.rank], fault)
        if undo:
            self._due.append((self.now + fault.lasts_s, undo))

    def _starter(self, rank: int | None) -> Callable[[], None]:
        """What starts that process again."""
        return self._start_server if rank is None else lambda: self._start_worker(rank)

    def _let_go_on(self, child: Child) -> None:
        child.signal(signal.SIGCONT)
        if child.name == "server":
            self._server_since = self.now

    def _tick(self) -> None:
        """Do what is due by now."""
        for item in [item for item in self._due if item[0] <= self.now]:
            self._due.remove(item)
            item[1]()
        for rank, child in list(self.children.items()):
            if (code := child.process.poll()) is not None:
                self._fail(f"{child.name} ended with {code} in mid-run", child.tail())
                del self.children[rank]
                self._due.append((self.now + 1.0, self._starter(rank)))
        self._observe()
        time.sleep(TICK_S)

    def _observe(self) -> None:
        """Sample the processes, and read what the run has written, from time to time."""
        if self.now >= self._next_read_s:
            self._read_metrics()
            self._next_read_s = self.now + READ_EVERY_S
        if self.now >= self._next_sample_s:
            for child in self.children.values():
                sample = look(child.process.pid, round(self.now, 2))
                if sample and child.process.poll() is None:
                    child.samples.append(sample)
            self._next_sample_s += SAMPLE_EVERY_S

    def _read_metrics(self) -> None:
        for line in self._follower.poll():
            if line.record.kind == "step":
                self._step_times.append(
                    datetime.fromisoformat(line.ts).timestamp() - self._began_at
                )
                self._epoch = line.record.epoch
                self._applied.add(line)

    def _healthy(self) -> frozenset[int]:
        return frozenset(
            rank
            for rank, child in self.children.items()
            if rank is not None and not child.stopped and self.proxies[rank].is_connected
        )

    def _is_server_ready(self) -> bool:
        server = self.children.get(None)
        recent = self._step_times[-PROGRESS_STEPS:]
        is_far = len(recent) == PROGRESS_STEPS and min(recent) > self._server_since
        return server is not None and not server.stopped and is_far

    def _is_whole(self) -> bool:
        """Whether everybody is there and the run goes on."""
        return len(self._healthy()) == self.settings.num_workers and self._is_server_ready()

    def _is_hopeless(self) -> bool:
        if self.now - self._step_times[-1] > STALL_S:
            tails = "\n".join(f"{c.name}: {c.tail()}" for c in self.children.values())
            self._fail(f"no step for {STALL_S:g} s", tails)
            return True
        return len(self.failures) > MAX_FAILURES

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Go on until the condition holds; False when it did not come."""
        end = self.now + limit_s
        while not condition():
            if self.now > end:
                return False
            self._tick()
        return True

    def _fail(self, what: str, output: str = "") -> None:
        say(f"{self.algorithm.name}: {what}")
        self.failures.append(Failure(round(self.now, 3), what, output))

    def _start_server(self) -> None:
        overrides = [
            f"port={self.port}",
            "threads=1",
            "checkpoint_steps=50",
            f"num_epochs={self.num_epochs}",
            f"batch_size={BATCH_SIZE}",
            f"model.hidden={HIDDEN}",
            "track_gradients=false",
            f"heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
            f"reconnect_timeout_s={PATIENCE_S}",
            f"empty_cluster_timeout_s={PATIENCE_S}",
            f"start_timeout_s={PATIENCE_S}",
            *self._dataset(),
        ]
        if self.algorithm.name == "syncps":
            overrides.append("timeout=0.5")
        if self.algorithm.name == "diloco":
            overrides += ["local_steps=8", f"grace={HEARTBEAT_TIMEOUT_S}"]
        if self.settings.mnist:
            overrides.append("dataset.name=MNIST")
        flags = ["--run-id", "soak", "--resume", "auto", "--no-progress"]
        self._start(None, "server", [str(self.algorithm.server), *flags], overrides)
        self._server_since = self.now

    def _start_worker(self, rank: int) -> None:
        overrides = ["threads=1", f"start_timeout_s={PATIENCE_S}", *self._dataset()]
        address = f"127.0.0.1:{self.proxies[rank].port}"
        me = [str(rank + 1), self.settings.nodes[rank], "--server", address]
        name = f"worker {rank + 1}"
        self._start(rank, name, [str(self.algorithm.worker), *me], overrides)

    def _dataset(self) -> list[str]:
        root = self.settings.mnist
        return [f"dataset.root={root}", "dataset.download=false"] if root else []

    def _start(
        self, rank: int | None, name: str, argv: Sequence[str], overrides: Sequence[str]
    ) -> None:
        output = self.folder / f"{len(self.lives):04}-{name.replace(' ', '-')}.txt"
        # Its standard input ends with this process, however that goes, and so does it.
        flags = ["--local", "--workers", str(self.settings.num_workers), "--stop-on-stdin-eof"]
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, *argv, *flags, "--override", *overrides],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        self.children[rank] = Child(name, process, output)
        self.lives.append(self.children[rank])


def spoil(proxy: Proxy, fault: Fault) -> Callable[[], None] | None:
    """Do to a connection what is planned; returns what undoes it, if anything does."""
    match fault.kind:
        case "reset" | "close":
            proxy.cut(fault.kind)
        case "corrupt":
            upward = fault.where < 0.5
            proxy.corrupt(1 + int(2 * fault.where % 1 * CORRUPT_WITHIN), upward=upward)
        case "throttle":
            proxy.throttle(THROTTLED_BYTES_PER_S)
            return lambda: proxy.throttle(None)
    return None


def facts(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Rows of the first table, the first one the heading."""
    rows = [["", *(outcome.algorithm for outcome in outcomes)]]

    def add(name: str, value: Callable[[Outcome], object]) -> None:
        rows.append([name, *(str(value(outcome)) for outcome in outcomes)])

    add("minutes", lambda outcome: outcome.minutes)
    add("faults", lambda outcome: len(outcome.faults))
    counts = [Counter(fault.kind for fault in outcome.faults) for outcome in outcomes]
    for kind in get_args(Kind):
        rows.append([f"  {kind}", *(str(count[kind]) for count in counts)])
    add("planned, but left out", lambda outcome: outcome.left_out)
    add("restarts", lambda o: f"server {o.restarts['server']}, workers {o.restarts['workers']}")
    add("exit codes", lambda outcome: sorted(Counter(outcome.exit_codes.values()).items(), key=str))
    add("epochs", lambda outcome: outcome.num_epochs)
    add("samples", lambda o: o.summary["samples_applied"] if o.summary else "unknown")
    add("longest time without a step", lambda o: f"{o.longest_gap.seconds():.1f} s")
    name = "  with an untouched server"
    add(name, lambda o: f"{o.longest_gap_with_server.seconds():.1f} s")
    add("failures", lambda outcome: len(outcome.failures))
    add("ended well, samples exact", lambda outcome: "yes" if outcome.ended_well else "NO")
    return rows


def trend_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    rows = [["", "process", "life", "RSS MB", "own MB", "threads", "open files", "flat"]]
    for outcome in outcomes:
        for name in sorted({life.name for life in outcome.trends}):
            life = max((t for t in outcome.trends if t.name == name), key=lambda t: t.seconds)
            shown = [_change(life.rss, 1e6), _change(life.own, 1e6)]
            counts = [_change(change) for change in (life.threads, life.fds)]
            flat = "yes" if life.is_flat else "NO"
            rows.append([outcome.algorithm, name, f"{life.seconds:.0f} s", *shown, *counts, flat])
    return rows


def _change(change: Change, unit: float = 1.0) -> str:
    digits = 0 if unit == 1.0 else 1
    return f"{change.first / unit:.{digits}f} → {change.last / unit:.{digits}f}"


def chart(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draw for each soak the processes' own memory over time, and below it a lane of each fault."""
    kinds = get_args(Kind)
    figure = Figure(figsize=(11, 5 * len(outcomes)), layout="constrained")
    ratios = [3, 1] * len(outcomes)
    panels = figure.subplots(len(ratios), height_ratios=ratios, squeeze=False)[:, 0]
    for outcome, memory, lanes in zip(outcomes, panels[::2], panels[1::2], strict=True):
        names = sorted({name for name, _ in outcome.lives})
        colors = {name: f"C{index}" for index, name in enumerate(names)}
        memory.set_title(f"{outcome.algorithm}: memory of each process without shared files, MB")
        for name, life in outcome.lives:
            minutes = [sample.at_s / 60 for sample in life]
            memory.plot(minutes, [sample.own / 1e6 for sample in life], color=colors[name], lw=1)
        memory.legend(handles=[Line2D([], [], color=colors[name], label=name) for name in names])
        lanes.set_yticks(range(len(kinds)), kinds)
        lanes.set_xlim(memory.get_xlim())
        lanes.set_xlabel("minutes")
        for fault in outcome.faults:
            place = (fault.at_s / 60, kinds.index(fault.kind))
            lanes.plot(*place, "o", ms=4, color=colors.get(fault.target, "black"), gid="fault")
    figure.savefig(file)


def as_results(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, object]:
    """Everything, for the JSON file; a life's samples are rows of seconds, bytes and counts."""
    soaks = []
    for outcome in outcomes:
        found = asdict(outcome)
        found["ended_well"], found["is_flat"] = outcome.ended_well, outcome.is_flat
        found["trends"] = [asdict(t) | {"is_flat": t.is_flat} for t in outcome.trends]
        found["lives"] = [
            {"name": name, "samples": [list(asdict(sample).values()) for sample in samples]}
            for name, samples in outcome.lives
        ]
        soaks.append(found)
    return {"seed": settings.seed, "workers": settings.num_workers, "soaks": soaks}


@contextmanager
def working_folder(kept: Path | None) -> Iterator[Path]:
    """A folder for the processes' files, removed afterwards unless one is named."""
    if kept is None:
        with TemporaryDirectory(prefix="smolcluster-soak-") as folder:
            yield Path(folder)
    else:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        yield kept.absolute()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training under constant faults.")
    names = ("edp", "syncps", "diloco")
    parser.add_argument("--algorithm", nargs="+", choices=names, default=names)
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults, each algorithm")
    parser.add_argument("--faults-per-minute", type=float, default=12.0)
    parser.add_argument("--workers", type=int, default=4, help="2 or more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw memory and faults")
    parser.add_argument("--data", type=Path, metavar="DIR", help="MNIST's folder; default: digits")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep all files there, anew")
    arguments = parser.parse_args()
    if arguments.workers < OLDEST_RANK + 2:
        parser.error(f"--workers is {arguments.workers}, must be at least {OLDEST_RANK + 2}")
    if arguments.chart and arguments.chart.suffix != ".svg":
        parser.error(f"--chart is {arguments.chart}, must end in .svg")
    return arguments


def main() -> int:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    arguments = parse_arguments()
    settings = Settings(
        seconds=60 * arguments.minutes,
        per_minute=arguments.faults_per_minute,
        num_workers=arguments.workers,
        seed=arguments.seed,
        mnist=arguments.data and arguments.data.absolute(),
    )
    outcomes = []
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder(arguments.folder))
        for name in arguments.algorithm:
            say(f"{name}: {arguments.minutes:g} minutes")
            (folder / name).mkdir()
            outcomes.append(Soak(get_algorithm(name), settings, folder / name).run())
    report("Training under faults", facts(outcomes))
    if any(outcome.trends for outcome in outcomes):
        title = "Medians of the first and the last third of a life"
        report(title, trend_rows(outcomes))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_results(outcomes, settings)) + "\n")
    if arguments.chart:
        chart(outcomes, arguments.chart)
    return 0 if all(outcome.ended_well and outcome.is_flat for outcome in outcomes) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
