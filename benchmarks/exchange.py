"""One SyncPS step without its computing (push, reduce, broadcast, apply), beside Gloo's all-reduce.

A server and N workers, a process each with one compute thread, take real steps over real sessions; only the
gradient is there from the beginning, and the optimizer is plain SGD. Gloo reduces a tensor of the same size
between N processes, in rounds that alternate with SyncPS's; whoever has no turn waits. A step lasts from
commit to commit; the first ones of each round are left out, and those in which not everybody took part. Times
are medians over the rounds of a round's mean, so that digests are paid for, which come with every fourth
commit; ratios are medians of the rounds' ratios.

* `--network loopback`: all processes share this machine's cores and memory, which is what is measured.
* `--network namespaces` (Linux, root): a network namespace a host, at `--mbit` in both directions through a
  bridge, with cubic as congestion control, as on most systems. `wire` is what the busiest link needs for what
  comes to it (with one server N pushes), at the speed at which a plain socket fills it, while it sends.

`--stores server`: gradients are added up by the server alone. `--stores workers`: each worker's host adds up
its share in a process of its own, as in a ring, and the server a smaller one, because it receives the others'
means as well: shares are such that no host's link carries more than another's.

`CPU` is what all processes of a side take of it in a step. `copies` is the server's memory for the exchange
in copies of the parameters: all tensors that the reduction holds, without error feedback, whose residual is
the codec's. `grown` is by how much its process grew in all beyond weights and gradient: with error feedback,
the copy that is evaluated, the sessions' buffers, and what the allocator keeps.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import NEVER, cpu_seconds, free_port, report, say
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import SWITCH_INTERVAL_S
from smolcluster.algorithms.owner import bucket_bytes_for
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.algorithms.SynchronousPS.store import Held
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.codec.registry import get_codec
from smolcluster.configs.resolve import resolve
from smolcluster.configs.schema import Settings
from smolcluster.data.dataset import Split
from smolcluster.observability.metrics import Metrics
from smolcluster.runs.events import EventLog
from smolcluster.server.link import WorkerSetup, follow
from smolcluster.server.records import Records
from smolcluster.server.store_host import StoreSetup, hold
from smolcluster.training.build import TrainingContext
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.compute import BatchLoss
from smolcluster.training.loop import StepTaken
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.training.workload import Workload
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import SESSION, STORE, Welcome
from smolcluster.wire.security import Secret

DIGESTS_EVERY = {"on": 4, "off": NEVER}
BATCH_SIZE = 32
NUM_CLASSES = 10
PATIENCE_S = 300.0
CLONE_NEWNET = 0x40000000
MBIT = 100.0
SHAPER = "tbf rate {mbit:g}mbit burst 64kb latency 50ms"
WIRE_PORT = 7000
WIRE_TARGET = 1.1
COPIES_TARGET = 2
PRELOAD = ["torch", "torch.distributed", "smolcluster.algorithms.SynchronousPS.server"]

Stamps = list[tuple[float, int]]
"""When each step ended, in seconds, and how many took part in it."""


@dataclass(frozen=True)
class Network:
    """What is measured on a network, unless the command line says otherwise.

    `targets`, by stores and number of workers: for time over Gloo's on loopback, else for Gloo's over int8's.
    """

    megabytes: float
    workers: tuple[int, ...]
    digests: tuple[str, ...]
    steps: int
    rounds: int
    warm_up: int
    targets: Mapping[str, Mapping[int, float]]


NETWORKS = {
    "loopback": Network(
        70,
        (2, 4, 8),
        ("on", "off"),
        8,
        8,
        2,
        {"server": {2: 1.6, 4: 1.6, 8: 1.8}, "workers": {4: 1.4, 8: 1.4}},
    ),
    "namespaces": Network(
        40, (2, 4), ("on",), 4, 1, 2, {"server": {2: 1.8, 4: 1.35}, "workers": {4: 3.5}}
    ),
}


@dataclass(frozen=True)
class Host:
    """Where a process runs: this machine, or a network namespace of it."""

    address: str
    interface: str
    namespace: str | None = None

    def enter(self) -> None:
        """Be a process of this host. Only the parent hears of Ctrl-C, and ends its children."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.namespace is not None:
            with Path("/run/netns", self.namespace).open() as place:
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logging.basicConfig(format="%(processName)s: %(message)s")


@dataclass(frozen=True)
class Case:
    """What is exchanged, and between whom; the first host is the server's."""

    hosts: tuple[Host, ...]
    folder: Path
    codec: str
    megabytes: float
    digests: str = "off"
    warm_up: int = 0
    stores: str = "server"
    port: int = field(default_factory=free_port)
    secret: Secret = field(default_factory=lambda: Secret(Path(), secrets.token_bytes(32)))

    @property
    def numel(self) -> int:
        """Parameters, in fp32."""
        return round(self.megabytes * 1e6 / 4)

    @property
    def num_workers(self) -> int:
        return len(self.hosts) - 1

    @property
    def is_spread(self) -> bool:
        """Whether workers' hosts add gradients up."""
        return self.stores == "workers"

    @property
    def shares(self) -> list[int]:
        """Of the server and of each worker's host, of the gradient."""
        num_others = self.num_workers - 1
        return [max(1, num_others - 1), *[num_others] * self.num_workers]

    @property
    def wire_shares(self) -> float:
        """Gradients that must come over the busiest link in a step."""
        if not self.is_spread:
            return self.num_workers
        of_server, of_worker = (share / sum(self.shares) for share in self.shares[:2])
        to_server = 1 + (self.num_workers - 1) * of_server
        return max(to_server, 1 + (self.num_workers - 2) * of_worker)

    @property
    def settings(self) -> Settings:
        """A cluster that does nothing but exchange, and all workers take part in every step."""
        names = [f"worker{number}" for number in range(1, len(self.hosts))]
        address = self.hosts[0].address
        cluster = {
            "host_ip": dict.fromkeys(("server", *names), address),
            "servers": dict(zip(("server", *names), self.shares, strict=True))
            if self.is_spread
            else None,
            "bind": [address],
            "port": self.port,
            "server": "server",
            "workers": names,
            "num_workers": len(names),
            "min_workers": len(names),
            "batch_share": dict.fromkeys(names, 1 / len(names)),
            "codec": self.codec,
            "timeout": None,
            "worker_update_interval": DIGESTS_EVERY[self.digests],
            "heartbeat_timeout_s": 60.0,
        }
        train = {
            "dataset": {"name": "none"},
            "batch_size": BATCH_SIZE,
            "num_epochs": NEVER,
            "eval_steps": NEVER,
            "optimizer": "sgd",
            "learning_rate": 1e-6,
            "track_gradients": False,
            "gradient_clipping": {"enabled": False},
        }
        return resolve(cluster=cluster, train=train)


class Ballast(nn.Module):
    """Parameters to exchange; only the evaluation at the end computes with a few of them."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel).mul_(1e-2))

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, NUM_CLASSES) -> the same shape."""
        return inputs * self.weight[:NUM_CLASSES]


class Prefilled(TrainingContext):
    """A workbench whose gradient is there already."""

    def compute(
        self,
        indices: Tensor,
        epoch: int = 0,  # noqa: ARG002 - nothing is computed
        start: int = 0,  # noqa: ARG002
    ) -> BatchLoss:
        """A mean loss, at once."""
        return BatchLoss(1.0, len(indices))


def make_bench(case: Case, seed: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Prefilled:
    """Data for one step an epoch, a model of the case's size, and a gradient of random numbers."""
    torch.manual_seed(seed)
    num_samples = BATCH_SIZE * case.num_workers
    split = Split(torch.zeros(num_samples, NUM_CLASSES), torch.zeros(num_samples, dtype=torch.long))
    model = Ballast(case.numel)
    replica = Replica(model, "sgd", bucket_bytes=bucket_bytes)
    replica.grads.normal_(0.0, 1e-3)
    workload = Workload(model, cross_entropy, split, split, name="none")
    return Prefilled(workload, replica, seed)


class OnDemand(Server):
    """Takes as many steps as it is asked for through a pipe, and then sends `Stamps`; 0 ends the run."""

    def __init__(self, context: ServerContext, pipe: Pipe) -> None:
        super().__init__(context)
        self.pipe = pipe
        self.wanted = 0
        self.stamps: Stamps = []
        self.resident = 0
        """Bytes, after the last of the steps."""

    def open_step(self, now: float) -> Step | None:
        """Open a step if one is wanted; the first of several when all workers are there."""
        complete = len(self.members.free) == self.cluster.num_workers
        if self.wanted == 0 and complete and self.pipe.poll():
            self.wanted = self.pipe.recv()
            if self.wanted == 0:
                self.report.counts.samples_applied = self.total_samples  # as if there were no more
        return super().open_step(now) if self.wanted else None

    def commit(self, step: Step) -> StepTaken:
        self.stamps.append((time.monotonic(), len(step.parts)))
        self.wanted -= 1
        taken = super().commit(step)
        if self.wanted == 0:
            self.resident = psutil.Process().memory_info().rss
            self.pipe.send(self.stamps)
            self.stamps = []
        return taken


def context_of(case: Case, training: TrainingContext, algorithm: str = "syncps") -> ServerContext:
    """What an algorithm's server works with."""
    log = logging.getLogger()
    incarnation = secrets.token_hex(4)
    return ServerContext(
        settings=case.settings,
        run=case.settings.run_config("exchange", algorithm),
        training=training,
        node=case.settings.cluster.server,
        secret=case.secret,
        incarnation=incarnation,
        records=Records(
            Metrics(),
            EventLog(case.folder / "events.jsonl", "benchmark", warn=log.warning),
            incarnation,
        ),
        log=log,
    )


def serve(pipe: Pipe, case: Case) -> None:
    """The server's process; its last answer are the bytes for `copies` and `grown`."""
    case.hosts[0].enter()
    training = make_bench(case, 0, bucket_bytes_for(case.settings.cluster))
    before = psutil.Process().memory_info().rss
    server = OnDemand(context_of(case, training), pipe)
    server.run()
    held = held_nbytes(list(vars(server.reduction).values()), server.replica.grads)
    pipe.send((held, server.resident - before))


def work(_pipe: Pipe, case: Case, worker_id: int) -> None:
    case.hosts[worker_id].enter()
    setup = setup_of(
        case, worker_id, lambda welcome: make_bench(case, worker_id, welcome.bucket_bytes)
    )
    follow(setup, Worker)


def add_up(_pipe: Pipe, case: Case, worker_id: int) -> None:
    """A store on a worker's host."""
    host, cluster = case.hosts[worker_id], case.settings.cluster
    host.enter()
    setup = StoreSetup(
        hello=introduce(f"worker{worker_id}", sets=(SESSION, STORE)),
        address=Address(case.hosts[0].address, case.port),
        secret=case.secret,
        start_timeout_s=cluster.start_timeout_s,
        encryption=cluster.encryption,
        log=logging.getLogger(),
        held=Held,
        addresses=(host.address,),
    )
    hold(setup)


def setup_of(
    case: Case, worker_id: int, build: Callable[[Welcome], TrainingContext]
) -> WorkerSetup:
    """A worker that trains what `build` makes."""
    settings = case.settings
    return WorkerSetup(
        node=settings.node,
        hello=introduce(f"worker{worker_id}", worker_id),
        address=Address(case.hosts[0].address, case.port),
        secret=case.secret,
        start_timeout_s=settings.cluster.start_timeout_s,
        encryption=settings.cluster.encryption,
        log=logging.getLogger(),
        build=build,
    )


def reduce_with_gloo(pipe: Pipe, case: Case, rank: int) -> None:
    """One of Gloo's processes: as many all-reduces as it is asked for, then `Stamps`; 0 ends it."""
    host, size = case.hosts[rank + 1], case.num_workers
    host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    rendezvous = f"file://{case.folder}/gloo"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    values = torch.empty(case.numel)
    while wanted := pipe.recv():
        values.normal_(0.0, 1e-3)
        stamps: Stamps = []
        for _ in range(wanted):
            dist.all_reduce(values)
            stamps.append((time.monotonic(), size))
        pipe.send(stamps)
    dist.destroy_process_group()


def held_nbytes(values: list[object], besides: Tensor) -> int:
    """Bytes of all tensors in lists of lists, without `besides`; memory that several share counts once."""
    sizes: dict[int, int] = {}
    while values:
        match values.pop():
            case Tensor() as tensor:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            case list() as more:
                values.extend(more)
    sizes.pop(besides.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


class Children:
    """Processes that end with the block, and a pipe to each."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload`: what their modules import beside what all do; it takes each process seconds."""
        method = "forkserver" if sys.platform == "linux" else "spawn"
        self._context = multiprocessing.get_context(method)
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self.processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def start(self, target: Callable[..., None], *arguments: object) -> Pipe:
        """Start a process; `target` gets its end of the pipe and the arguments."""
        ours, theirs = self._context.Pipe()
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            name=target.__name__, target=target, args=(theirs, *arguments), daemon=True
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        return ours

    def ask(self, pipes: Sequence[Pipe], order: int) -> Any:
        """Give all the same order; returns the first one's answer, when all have answered."""
        for pipe in pipes:
            pipe.send(order)
        first, *_ = [self.hear(pipe) for pipe in pipes]
        return first

    def hear(self, pipe: Pipe) -> Any:
        """The next answer of a process."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            alive = [process.sentinel for process in self.processes if process.exitcode is None]
            if pipe in connection.wait([pipe, *alive], PATIENCE_S):
                with suppress(EOFError):
                    return pipe.recv()
            for process in self.processes:
                if process.exitcode:
                    raise SystemExit(f"{process.name} ended with {process.exitcode}")
        raise SystemExit(f"no answer within {PATIENCE_S:g} s")


@dataclass(frozen=True)
class Side:
    """The processes of SyncPS or of Gloo, and the pipes to those that take orders."""

    pipes: Sequence[Pipe]
    processes: Sequence[BaseProcess]

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far, of those that live."""
        return sum(
            cpu_seconds(each.pid) for each in self.processes if each.pid and each.exitcode is None
        )


@dataclass(frozen=True)
class Round:
    """Seconds of a step, and CPU seconds; `num_partial` steps were left out because somebody was missing."""

    step_s: float
    cpu_s: float
    num_partial: int


def take_round(children: Children, side: Side, case: Case, steps: int) -> Round:
    """Let a side take so many steps after the warm-up."""
    num_taken = case.warm_up + steps
    before = side.cpu_s
    stamps = children.ask(side.pipes, num_taken)
    cpu_s = side.cpu_s - before
    timed = list(itertools.pairwise(stamps))[case.warm_up - 1 :]
    whole = [now - then for (then, _), (now, number) in timed if number == case.num_workers]
    if not whole:
        raise SystemExit("there was no step in a round in which all workers took part")
    return Round(statistics.fmean(whole), cpu_s / num_taken, len(timed) - len(whole))


@dataclass(frozen=True)
class Measured:
    """What came of a case; times are medians over the rounds, in ms."""

    workers: int
    codec: str
    digests: str
    stores: str
    ms: float
    gloo_ms: float
    cpu_ms: float
    gloo_cpu_ms: float
    ratio: float
    ratios: tuple[float, ...]
    partial_steps: int
    copies: float
    grown: float
    wire_ms: float


def measure(case: Case, steps: int, rounds: int, wire_bytes_per_s: float) -> Measured:
    """Take `rounds` rounds of so many timed steps of each side."""
    with Children() as children:
        server = children.start(serve, case)
        for worker_id in range(1, len(case.hosts) if case.is_spread else 0):
            children.start(add_up, case, worker_id)
        for worker_id in range(1, len(case.hosts)):
            children.start(work, case, worker_id)
        syncps = Side([server], tuple(children.processes))
        ranks = [children.start(reduce_with_gloo, case, rank) for rank in range(case.num_workers)]
        gloo = Side(ranks, children.processes[len(syncps.processes) :])
        pairs = [
            (take_round(children, syncps, case, steps), take_round(children, gloo, case, steps))
            for _ in range(rounds)
        ]
        held_nbytes, grown_nbytes = children.ask([server], 0)
    wire_nbytes = case.wire_shares * get_codec(case.codec).encoded_nbytes(case.numel)
    ratios = [ours.step_s / gloos.step_s for ours, gloos in pairs]
    return Measured(
        workers=case.num_workers,
        codec=case.codec,
        digests=case.digests,
        stores=case.stores,
        ms=1e3 * statistics.median(ours.step_s for ours, _ in pairs),
        gloo_ms=1e3 * statistics.median(gloos.step_s for _, gloos in pairs),
        cpu_ms=1e3 * statistics.median(ours.cpu_s for ours, _ in pairs),
        gloo_cpu_ms=1e3 * statistics.median(gloos.cpu_s for _, gloos in pairs),
        ratio=statistics.median(ratios),
        ratios=tuple(ratios),
        partial_steps=sum(ours.num_partial for ours, _ in pairs),
        copies=held_nbytes / (4 * case.numel),
        grown=grown_nbytes / (4 * case.numel),
        wire_ms=1e3 * wire_nbytes / wire_bytes_per_s,
    )


@contextmanager
def hosts_of(network: str, num_workers: int, mbit: float = MBIT) -> Iterator[tuple[Host, ...]]:
    """The server's host and the workers', for as long as the block lasts; links carry `mbit` Mbit/s."""
    if network == "loopback":
        yield (Host("127.0.0.1", "lo"),) * (num_workers + 1)
        return
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--network namespaces needs Linux, root, and ip and tc (package iproute2)")
    bridge = bridge_name()
    spaces = [f"exchange-{os.getpid()}-{place}" for place in range(1, num_workers + 2)]
    try:
        for space in (bridge, *spaces):
            run(f"ip netns add {space}")
        run(f"ip -n {bridge} link add bridge0 type bridge")
        run(f"ip -n {bridge} link set bridge0 up")
        yield tuple(attach(space, place, bridge, mbit) for place, space in enumerate(spaces, 1))
    finally:
        for space in (bridge, *spaces):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def attach(space: str, place: int, bridge: str, mbit: float) -> Host:
    """Plug a namespace into the bridge's, through a link that is as slow in both directions."""
    address, port = f"10.99.0.{place}", f"port{place}"
    run(f"ip -n {bridge} link add {port} type veth peer name eth0 netns {space}")
    run(f"ip -n {bridge} link set {port} master bridge0 up")
    run(f"ip -n {space} addr add {address}/24 dev eth0")
    run(f"ip -n {space} link set eth0 up")
    route = f"10.99.0.0/24 dev eth0 proto kernel scope link src {address} congctl cubic"
    run(f"ip -n {space} route replace {route}")
    host = Host(address, "eth0", space)
    shape(host, place, mbit)
    return host


def shape(host: Host, place: int, mbit: float) -> None:
    """Give host number `place`, counted from 1, a link of so many Mbit/s in both directions."""
    shaper = SHAPER.format(mbit=mbit)
    run(f"tc -n {bridge_name()} qdisc replace dev port{place} root {shaper}")
    run(f"tc -n {host.namespace} qdisc replace dev eth0 root {shaper}")


def bridge_name() -> str:
    """The namespace of the bridge that this process's hosts are plugged into."""
    return f"exchange-{os.getpid()}-0"


def run(command: str) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
    return done.stdout


def wire_speed(hosts: Sequence[Host], nbytes: int) -> float:
    """Bytes a second that a plain socket gets through from a worker's host to the server's."""
    with Children() as children:
        receiver = children.start(receive_bare, hosts[0], nbytes)
        children.hear(receiver)
        children.start(send_bare, hosts[1], hosts[0].address, nbytes)
        return nbytes / float(children.hear(receiver))


def receive_bare(pipe: Pipe, host: Host, nbytes: int) -> None:
    """Accept a connection, and tell how long it took to bring so many bytes."""
    host.enter()
    scratch = bytearray(1 << 20)
    with socket.create_server((host.address, WIRE_PORT)) as listener:
        pipe.send(None)
        accepted, _ = listener.accept()
    started = time.monotonic()
    while nbytes > 0:
        nbytes -= accepted.recv_into(scratch)
    pipe.send(time.monotonic() - started)


def send_bare(_pipe: Pipe, host: Host, address: str, nbytes: int) -> None:
    """Send so many bytes."""
    host.enter()
    with socket.create_connection((address, WIRE_PORT)) as sender:
        sender.sendall(bytes(nbytes))


def row(found: Measured, target: float, *, shaped: bool) -> dict[str, str]:
    shown = {"N": str(found.workers), "stores": found.stores, "codec": found.codec}
    shown |= {"digests": found.digests}
    shown |= {"ms": f"{found.ms:.1f}", "Gloo": f"{found.gloo_ms:.1f}"}
    if shaped:
        to_wire = found.ms / found.wire_ms
        shown |= {"wire": f"{found.wire_ms:.1f}", f"to wire <= {WIRE_TARGET}": f"{to_wire:.3f}"}
        shown |= {"faster than Gloo": f"{1 / found.ratio:.2f}", "int8's target": f">= {target:g}"}
    else:
        shown |= {"ratio": f"{found.ratio:.2f}", "target": f"<= {target:g}"}
        shown |= {"min-max": f"{min(found.ratios):.2f}-{max(found.ratios):.2f}"}
    shown |= {"CPU": f"{found.cpu_ms:.0f}", "Gloo's": f"{found.gloo_cpu_ms:.0f}"}
    return shown | {
        f"copies <= {COPIES_TARGET}": f"{found.copies:.2f}",
        "grown": f"{found.grown:.2f}",
    }


def cases(arguments: argparse.Namespace, hosts: Sequence[Host]) -> Iterator[Case]:
    """Everything that is to be measured, each with a folder of its own."""
    chosen = itertools.product(
        arguments.workers, arguments.stores, arguments.codec, arguments.digests
    )
    for num_workers, stores, codec, digests in chosen:
        with TemporaryDirectory() as folder:
            yield Case(
                hosts=tuple(hosts[: num_workers + 1]),
                folder=Path(folder),
                codec=codec,
                megabytes=arguments.megabytes,
                digests=digests,
                warm_up=arguments.warm_up,
                stores=stores,
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A SyncPS step's exchange against Gloo.")
    parser.add_argument("--network", choices=list(NETWORKS), default="loopback")
    parser.add_argument("--mbit", type=float, default=MBIT, help="of a host's link in namespaces")
    parser.add_argument("--workers", type=int, nargs="+", metavar="N")
    parser.add_argument("--megabytes", type=float, help="size of the gradient in fp32")
    parser.add_argument("--codec", nargs="+", choices=("fp32", "int8"), default=("fp32", "int8"))
    parser.add_argument("--stores", nargs="+", choices=("server", "workers"), default=("server",))
    parser.add_argument("--digests", nargs="+", choices=list(DIGESTS_EVERY))
    parser.add_argument("--steps", type=int, help="timed steps of each side in a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    network, _ = parser.parse_known_args()
    parser.set_defaults(**vars(NETWORKS[network.network]))
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = parse_arguments()
    shaped = arguments.network == "namespaces"
    measured = []
    with hosts_of(arguments.network, max(arguments.workers), arguments.mbit) as hosts:
        wire = wire_speed(hosts, round(1e6 * arguments.megabytes)) if shaped else math.inf
        for case in cases(arguments, hosts):
            measured.append(measure(case, arguments.steps, arguments.rounds, wire))
            say(str(measured[-1]))
    title = f"Exchange of {arguments.megabytes:g} MB, {arguments.network}"
    title += f", where a plain socket carries {8e-6 * wire:.1f} Mbit/s" if shaped else ""
    targets = NETWORKS[arguments.network].targets
    shown = [
        row(each, targets[each.stores].get(each.workers, math.nan), shaped=shaped)
        for each in measured
    ]
    report(title, [list(shown[0]), *(list(each.values()) for each in shown)])
    if arguments.json:
        options = {"steps": arguments.steps, "rounds": arguments.rounds}
        results = {"title": title, **options, "cases": [asdict(each) for each in measured]}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
