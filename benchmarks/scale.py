"""What each further worker costs a coordinator: CPU a push, memory a worker, and how long a push waits.

A server of EDP in a process of its own serves 8 to 64 simulated workers: threads of
four other processes, which push ready-made bytes, in turns, at `--rate` pushes a second in all, however many
workers there are. Nobody computes gradients and nobody pulls.

* `CPU a push`: the server process's CPU seconds while pushes are applied, by their number. Wanted: with 64
  workers at most 1.10 of what it is with 8.
* `memory a worker`: by how much the server's process grows from 8 to 64 workers, for each of the 56, in
  copies of the parameters. Wanted: at most 2%.
* `p99`: of the time from a push's first byte to its acknowledgement, seen by the workers.
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from common import cpu_seconds, report, say
from exchange import BATCH_SIZE, Case, Children, Host, context_of, make_bench, setup_of
from smolcluster.configs.spec import get_algorithm
from smolcluster.server.link import Link, follow
from smolcluster.server.push import GradientSender
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import Ack, Assignment, LeaseKey, Message, Push, frame_of
from smolcluster.wire.session import Receiver

PROCESSES = 4
SETTLE_S = 3.0
WAIT_S = 1.0
SERVED = ("edp",)
CPU_GROWTH, MEMORY_SHARE = 1.10, 0.02


@dataclass(frozen=True)
class Measured:
    """What came of so many workers."""

    algorithm: str
    workers: int
    pushes: int
    cpu_ms: float
    """A push."""
    resident_copies: float
    """Of the parameters: all memory of the server's process."""
    p50_ms: float
    p99_ms: float


def serve(pipe: Pipe, case: Case, algorithm: str) -> None:
    """The server's process; it answers each question with its CPU seconds, bytes and applied pushes."""
    case.hosts[0].enter()
    context = context_of(case, make_bench(case, 0), algorithm)
    server = get_algorithm(algorithm).module("server").Server(context)

    def answer() -> None:
        while pipe.recv():
            resident = psutil.Process().memory_info().rss
            pipe.send((cpu_seconds(os.getpid()), resident, server.version))

    threading.Thread(target=answer, daemon=True).start()
    server.run()


class News(Receiver):
    """Passes on what a pusher must know, and forgets the rest, such as weights."""

    def __call__(self, message: Message, payload: memoryview) -> Event | None:  # noqa: ARG002
        return MessageReceived(0, message) if isinstance(message, Ack | Assignment) else None


class Pusher:
    """Answers each lease with the same push, every `every_s` seconds."""

    unacknowledged = None

    def __init__(
        self, pushes: Sequence[tuple[Push, memoryview]], every_s: float, first_s: float
    ) -> None:
        """`first_s`: seconds until the first push."""
        self.pushes, self.every_s, self.first_s = pushes, every_s, first_s
        self.times: list[tuple[float, float]] = []
        """When a push began, and how many seconds later it was acknowledged."""
        self.leases: deque[LeaseKey] = deque()

    def new_receiver(self) -> News:
        return News()

    def take_part(self, link: Link) -> None:
        """Push until the link raises."""
        due = time.monotonic() + self.first_s
        while True:
            while not self.leases:
                self.hear(link)
            time.sleep(max(0.0, due - time.monotonic()))
            started = time.monotonic()
            for frame in self.frames(self.leases.popleft()):
                link.send_frame(frame)
            while not self.hear(link):
                pass
            self.times.append((started, time.monotonic() - started))
            due = max(due + self.every_s, time.monotonic())

    def frames(self, lease: LeaseKey) -> Iterator[Frame]:
        for push, payload in self.pushes:
            yield frame_of(push.model_copy(update={"lease": lease}), payload)

    def hear(self, link: Link) -> bool:
        """Whether an acknowledgement has come; leases are kept."""
        match link.next_event(WAIT_S):
            case MessageReceived(message=Assignment() as assignment):
                self.leases.append(assignment.lease)
            case MessageReceived(message=Ack()):
                return True
        return False


def push(pipe: Pipe, case: Case, worker_ids: range, every_s: float) -> None:
    """Be these workers; answers each time with how long their pushes took that began after it."""
    case.hosts[0].enter()
    bench = make_bench(case, 1)
    lease = LeaseKey(incarnation="x", epoch=0, start=0, stop=BATCH_SIZE, grant=1)
    sender = GradientSender(case.codec, bench.replica)
    pushes = list(sender.pushes(lease, 0, BatchLoss(1.0, BATCH_SIZE), 0.1))
    pushers = []
    for worker_id in worker_ids:
        pusher = Pusher(pushes, every_s, every_s * worker_id / case.num_workers)
        pushers.append(pusher)
        threading.Thread(target=join, args=(case, worker_id, bench, pusher), daemon=True).start()
    while after := pipe.recv():
        pipe.send([lasted for each in pushers for began, lasted in each.times if began > after])


def join(case: Case, worker_id: int, bench: TrainingContext, pusher: Pusher) -> None:
    follow(setup_of(case, worker_id, lambda _: bench), lambda _welcome, _training: pusher)


def measure(case: Case, algorithm: str, rate: float, seconds: float) -> Measured:
    """Let all workers join, and count what happens in so many seconds."""
    with Children() as children:
        server = children.start(serve, case, algorithm)
        every_s = case.num_workers / rate
        pipes = [
            children.start(push, case, range(first, case.num_workers + 1, PROCESSES), every_s)
            for first in range(1, PROCESSES + 1)
        ]
        while children.ask([server], 1)[2] < case.num_workers:  # each has pushed
            time.sleep(WAIT_S)
        time.sleep(SETTLE_S)
        began, (cpu_before, _, before) = time.monotonic(), children.ask([server], 1)
        time.sleep(seconds)
        cpu_s, resident, after = children.ask([server], 1)
        for pipe in pipes:
            pipe.send(began)
        times = sorted(each for pipe in pipes for each in children.hear(pipe))
    return Measured(
        algorithm=algorithm,
        workers=case.num_workers,
        pushes=after - before,
        cpu_ms=1e3 * (cpu_s - cpu_before) / (after - before),
        resident_copies=resident / (4 * case.numel),
        p50_ms=1e3 * statistics.median(times),
        p99_ms=1e3 * times[math.ceil(0.99 * len(times)) - 1],
    )


def rows(measured: Sequence[Measured]) -> list[list[str]]:
    """A row each, with what it costs beyond the fewest workers of the same kind."""
    heading = ["algorithm", "workers", "pushes", "CPU a push", f"growth <= {CPU_GROWTH}"]
    heading += [f"memory a worker <= {MEMORY_SHARE:.0%}", "p50", "p99"]
    found = [heading]
    for each in measured:
        same = [one for one in measured if one.algorithm == each.algorithm]
        least = min(same, key=lambda one: one.workers)
        more = each.workers - least.workers
        memory = (each.resident_copies - least.resident_copies) / more if more else math.nan
        shown = [each.algorithm, str(each.workers), str(each.pushes)]
        shown += [f"{each.cpu_ms:.1f} ms", f"{each.cpu_ms / least.cpu_ms:.2f}" if more else ""]
        shown += [f"{memory:.1%}" if more else "", f"{each.p50_ms:.0f} ms", f"{each.p99_ms:.0f} ms"]
        found.append(shown)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Many workers on one coordinator.")
    parser.add_argument("--algorithm", nargs="+", choices=SERVED, default=SERVED)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N")
    parser.add_argument("--megabytes", type=float, default=20.0, help="size of the model in fp32")
    parser.add_argument("--codec", choices=("fp32", "int8"), default="int8")
    parser.add_argument("--rate", type=float, default=6.0, help="pushes a second, of all together")
    parser.add_argument("--seconds", type=float, default=30.0, help="that are counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = parse_arguments()
    measured = []
    for algorithm, workers in itertools.product(arguments.algorithm, arguments.workers):
        with TemporaryDirectory() as folder:
            hosts = (Host("127.0.0.1", "lo"),) * (workers + 1)
            case = Case(hosts, Path(folder), arguments.codec, arguments.megabytes)
            measured.append(measure(case, algorithm, arguments.rate, arguments.seconds))
            say(str(measured[-1]))
    title = f"{arguments.megabytes:g} MB, {arguments.codec}, {arguments.rate:g} pushes/s in all"
    title += f", {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    report(title, rows(measured))
    if arguments.json:
        results = {"title": title, "cases": [asdict(each) for each in measured]}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
