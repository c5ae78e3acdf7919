"""`/metrics`: what Prometheus reads of a run and of each of its processes.

A process that serves it computes nothing for it: a scrape, on a thread of its own, turns the newest
`RunStatus` (of the server's process) and the process's own numbers into series. Names are in base units and
begin with `smolcluster_`; what is no finite number is NaN.
"""

import errno
import math
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import psutil
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from smolcluster.configs.schema import ClusterConfig
from smolcluster.runs.status import STALENESS_EDGES, RunStatus, WorkerStatus
from smolcluster.utils.gpu import GpuQuantity, Readings, no_gpu
from smolcluster.utils.meter import Phase
from smolcluster.utils.units import format_address

PREFIX = "smolcluster_"
LOOPBACK = "127.0.0.1"
STALENESS_BOUNDS = (*map(str, STALENESS_EDGES), "+Inf")
"""Upper bounds of `WorkerStatus.staleness`, in steps."""
WORKER_LABELS = ("rank", "node")
PROCESS_LABELS = ("role", "rank", "node")
MAX_CLIENTS = 16
"""That are answered at once: strangers must not take all file descriptors of the process."""
REQUEST_TIMEOUT_S = 10.0
"""How long a client may take to say what it wants."""
MAX_FURTHER_PORTS = 64
"""That are tried where the own one is taken: enough for the processes of a few more runs on a machine."""
POLL_S, CLOSE_TIMEOUT_S = 0.1, 2.0
"""How soon the thread hears that it is to end, and how long that is waited for."""

GPU_SERIES: Mapping[GpuQuantity, tuple[str, str]] = {
    "utilization": ("gpu_utilization_ratio", "How busy this process's GPU is, 0..1."),
    "memory_bytes": ("gpu_memory_used_bytes", "Used on this process's GPU, by anybody."),
    "memory_size_bytes": ("gpu_memory_size_bytes", "Memory of this process's GPU."),
    "temperature_c": ("gpu_temperature_celsius", "Temperature of this process's GPU."),
    "power_w": ("gpu_power_watts", "What this process's GPU takes."),
}
"""Name and description of each."""
WORKER_STATS = {
    "rtt_s": ("link_round_trip_seconds", "To it and back."),
    "queue": ("link_queue_frames", "Waiting there to be sent."),
    "codec_ratio": ("codec_ratio", "fp32 bytes by sent bytes."),
}
"""The same, of what workers report of themselves."""

Family = TypeVar("Family", bound=Metric)


@dataclass(frozen=True)
class ProcessNumbers:
    """What a process counted of itself since it started.

    Attributes:
        steps: local optimizer steps, or the server's applied ones.
        samples: samples that went through it.
        phase_seconds: wall time by phase.
        gpu: what its GPU does now.
    """

    steps: int
    samples: int
    phase_seconds: Mapping[Phase, float]
    gpu: Readings = field(default_factory=no_gpu)


@dataclass(frozen=True)
class ProcessLabels:
    """Whose numbers they are: `role` is server or worker; the server has no rank."""

    role: str
    node: str
    rank: int | None = None

    @property
    def values(self) -> tuple[str, str, str]:
        return self.role, "" if self.rank is None else str(self.rank), self.node


class Growth:
    """How far counts have grown since each was first seen here.

    Those of a run that was resumed begin at its checkpoint's, which Prometheus would take for work just done.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], int] = {}

    def __call__(self, count: int, *name: str) -> int:
        return max(0, count - self._first.setdefault(name, count))


class RunCollector(Collector):
    """Makes the series of one process when somebody asks for them."""

    def __init__(
        self,
        who: ProcessLabels,
        numbers: Callable[[], ProcessNumbers],
        runs_dir: Path,
        *,
        run_id: Callable[[], str] = lambda: "",
        status: Callable[[], RunStatus | None] = lambda: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """All that can be called is so by the threads that answer; `status` is the server's.

        `run_id` names the run that every series is labelled with; empty: none yet.
        """
        self._who = who
        self._run_id = run_id
        self._numbers = numbers
        self._runs_dir = runs_dir
        self._status = status
        self._now = now
        self._process = psutil.Process(os.getpid())
        self._last_step = (-1, 0.0)
        self._growth = Growth()

    def collect(self) -> Iterator[Metric]:
        run_id = self._run_id()
        for metric in self._series():
            yield of_run(metric, run_id) if run_id else metric

    def _series(self) -> Iterator[Metric]:
        yield from process_series(self._who, self._numbers(), self._process)
        yield from disk_series(self._who, self._runs_dir)
        status = self._status()
        if status is not None:
            yield from run_series(status, self._growth)
            for series in worker_series(status.workers, self._now(), self._growth):
                if series.samples:
                    yield series
            yield _gauge(
                "last_step_timestamp_seconds", "When the newest step was seen.", self._moved(status)
            )

    def _moved(self, status: RunStatus) -> float:
        """When the step that the status has was first seen here, seconds since 1970."""
        if status.step != self._last_step[0]:
            self._last_step = (status.step, status.updated_at.timestamp())
        return self._last_step[1]


def of_run(metric: Metric, run_id: str) -> Metric:
    metric.samples = [
        sample._replace(labels={**sample.labels, "run": run_id}) for sample in metric.samples
    ]
    return metric


def process_series(
    who: ProcessLabels, numbers: ProcessNumbers, process: psutil.Process
) -> Iterator[Metric]:
    labels = who.values
    yield _counter("process_steps", "Steps of this process.", numbers.steps, labels)
    yield _counter("process_samples", "Samples of this process.", numbers.samples, labels)
    phases = _labelled(Counter, "phase_seconds", "Wall time by phase.", (*PROCESS_LABELS, "phase"))
    for phase, seconds in numbers.phase_seconds.items():
        phases.add_metric((*labels, phase), _number(seconds))
    yield phases
    with process.oneshot():
        cpu, memory = process.cpu_times(), process.memory_info()
    yield _counter(
        "process_cpu_seconds", "Processor time of this process.", cpu.user + cpu.system, labels
    )
    yield _gauge("process_resident_memory_bytes", "Memory of this process.", memory.rss, labels)
    for quantity, value in numbers.gpu.items():
        yield _gauge(*GPU_SERIES[quantity], value, labels)


def disk_series(who: ProcessLabels, folder: Path) -> Iterator[Metric]:
    """How full the disk of a folder is; nothing where there is no such folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return
    yield _gauge("disk_free_bytes", "Free on the disk of the runs.", usage.free, who.values)
    yield _gauge("disk_size_bytes", "Size of the disk of the runs.", usage.total, who.values)


def run_series(status: RunStatus, growth: Growth) -> Iterator[Metric]:
    """How the whole run stands. What was not measured yet has no series, but the loss, which is NaN."""
    info = _labelled(Gauge, "run_info", "The run, always 1.", ("run", "algorithm"))
    info.add_metric((status.run_id, status.algorithm), 1)
    yield info
    yield _gauge("step", "Optimizer steps of the run.", status.step)
    yield _gauge("samples_applied", "Samples whose gradients count.", status.samples_applied)
    returned = growth(status.leases_returned, "leases_returned")
    yield _counter("leases_returned", "Pieces of work taken back.", returned)
    yield _gauge("epoch", "Epoch, from 0.", status.epoch)
    yield _gauge("samples_target", "Samples of the whole run.", status.total_samples)
    yield _gauge("samples_per_second", "Applied samples.", status.samples_per_s)
    yield _gauge("loss", "Of the newest step.", math.nan if status.loss is None else status.loss)
    measured = {
        "validation_loss": ("Of the newest evaluation.", status.val_loss),
        "validation_accuracy": ("Of the newest evaluation, 0..1.", status.val_accuracy),
        "validation_perplexity": ("Of the newest evaluation.", status.val_perplexity),
        "learning_rate": ("Of the newest step.", status.learning_rate),
        "gradient_norm": ("Of the newest step.", status.grad_norm),
        "staleness_bound_steps": ("A push that is older is dropped.", status.staleness_bound),
    }
    for name, (description, value) in measured.items():
        if value is not None:
            yield _gauge(name, description, value)
    pushes = _labelled(Counter, "pushes", "Pushes by outcome.", ("reason",))
    for reason, count in status.pushes.items():
        pushes.add_metric((reason,), growth(count, "pushes", reason))
    yield pushes


def worker_series(workers: Sequence[WorkerStatus], now: datetime, growth: Growth) -> list[Metric]:
    """What the server knows of its workers; a family without samples is one that nothing is known of."""
    up = _labelled(Gauge, "worker_up", "1 while it takes part.", WORKER_LABELS)
    samples = _labelled(Counter, "worker_samples", "Its applied samples.", WORKER_LABELS)
    speed = _labelled(Gauge, "worker_samples_per_second", "Its applied samples.", WORKER_LABELS)
    silent = _labelled(Gauge, "worker_silent_seconds", "Since its last byte.", WORKER_LABELS)
    ways = (*WORKER_LABELS, "direction")
    traffic = _labelled(Counter, "link_bytes", "Bytes that it sent and received.", ways)
    of_pushes = "Staleness of applied pushes."
    staleness = _labelled(HistogramMetricFamily, "staleness_steps", of_pushes, WORKER_LABELS)
    process_stats = {
        key: _labelled(Gauge, name, description, WORKER_LABELS)
        for key, (name, description) in WORKER_STATS.items()
    }
    for worker in workers:
        labels = (str(worker.rank), worker.node)
        up.add_metric(labels, worker.state == "joined")
        samples.add_metric(labels, growth(worker.samples, "samples", *labels))
        speed.add_metric(labels, worker.samples_per_s)
        silent.add_metric(labels, worker.silent_s(now))
        traffic.add_metric((*labels, "sent"), worker.sent_bytes)
        traffic.add_metric((*labels, "received"), worker.received_bytes)
        for name, family in process_stats.items():
            if name in worker.process_stats:
                family.add_metric(labels, _number(worker.process_stats[name]))
        if len(worker.staleness) == len(STALENESS_BOUNDS):
            counts = [
                growth(count, "staleness", bound, *labels)
                for bound, count in zip(STALENESS_BOUNDS, worker.staleness, strict=True)
            ]
            buckets = list(zip(STALENESS_BOUNDS, accumulate(counts), strict=True))
            # Staleness is whole steps: the product alone would fall by the last bit now and then.
            total = round(worker.mean_staleness * sum(worker.staleness))
            staleness.add_metric(labels, buckets, growth(total, "staleness_sum", *labels))
    return [up, samples, speed, silent, traffic, staleness, *process_stats.values()]


def metrics_address(cluster: ClusterConfig, worker_id: int | None) -> tuple[str, int] | None:
    """Where a process serves `/metrics`: address and port; None: nowhere.

    `worker_id` is None for the server. Workers have the ports behind the server's, by their id; one whose
    port would be above 65535 serves nothing.
    """
    if cluster.metrics_port is None:
        return None
    port = cluster.metrics_port + (worker_id or 0)
    return (cluster.metrics_bind or LOOPBACK, port) if port <= 65535 else None


def free_ports(address: str, first: int, count: int) -> int | None:
    """The first of `count` free ports in a row at or soon after `first`, in steps of `count`.

    None: there are none, or the address is not this machine's.
    """
    last = min(first + MAX_FURTHER_PORTS, 65536 - count)
    for start in range(first, last + 1, count):
        if all(_is_free(address, port) for port in range(start, start + count)):
            return start
    return None


def _is_free(address: str, port: int) -> bool:
    family = AF_INET6 if ":" in address else AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError:
        return False
    return True


@contextmanager
def serve_metrics(
    collector: Collector, address: str, port: int, *, warn: Callable[[str], None]
) -> Iterator[int | None]:
    """Serve `/metrics` on this address while the body runs; yields the port, or None where there is none.

    Where the port is taken, as by another run, the next free one of `MAX_FURTHER_PORTS` is. Where that is not
    possible either, or the address is not this machine's, `warn` gets one sentence, and the body runs all the
    same.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server = _listening(address, port, make_wsgi_app(registry))
    except OSError as error:
        where = format_address(address, port)
        warn(f"no /metrics on {where}: {error.strerror or error}; set metrics_port or metrics_bind")
        yield None
        return
    thread = threading.Thread(
        target=server.serve_forever, args=(POLL_S,), name="metrics", daemon=True
    )
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(CLOSE_TIMEOUT_S)


def _listening(address: str, first: int, application: Any) -> WSGIServer:
    """A server on the first free port from `first` on.

    Raises:
        OSError: there is none, or the address is not this machine's.
    """
    server_class = _Server6 if ":" in address else _Server
    last = min(first + MAX_FURTHER_PORTS, 65535)
    for port in range(first, last + 1):
        try:
            return make_server(address, port, application, server_class, _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise
    raise AssertionError("a range of at least one port")


class _Server(ThreadingWSGIServer):
    """Asks no name server for its own name, and prints nothing when a client hangs up."""

    address_family = AF_INET
    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self.places = threading.Semaphore(MAX_CLIENTS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; who comes when there are too many is turned away."""
        if self.places.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # there is no thread that would make room
                self.places.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client's trouble is its own."""


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _labelled(
    family: Callable[..., Family], name: str, description: str, labels: Sequence[str]
) -> Family:
    return family(PREFIX + name, description, labels=labels)


def _counter(name: str, description: str, value: float, labels: Sequence[str] = ()) -> Metric:
    family = _labelled(Counter, name, description, PROCESS_LABELS[: len(labels)])
    family.add_metric(labels, value)
    return family


def _gauge(name: str, description: str, value: float, labels: Sequence[str] = ()) -> Metric:
    family = _labelled(Gauge, name, description, PROCESS_LABELS[: len(labels)])
    family.add_metric(labels, _number(value))
    return family
