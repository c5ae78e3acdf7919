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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import WSGIApplication

import psutil
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from smolcluster.configs.schema import ClusterConfig
from smolcluster.runs.evaluated import metrics_in
from smolcluster.runs.launched import Process
from smolcluster.runs.status import STALENESS_EDGES, RunStatus, WorkerStatus
from smolcluster.utils.addresses import means_this_machine
from smolcluster.utils.gpu import GpuQuantity
from smolcluster.utils.meter import Meter
from smolcluster.utils.units import format_address

PREFIX = "smolcluster_"
LOOPBACK = "127.0.0.1"
STALENESS_BOUNDS = (*map(str, STALENESS_EDGES), "+Inf")
"""Upper bounds of `WorkerStatus.staleness`, in steps."""
MAX_CLIENTS = 16
"""That are answered at once: strangers must not take all file descriptors of the process."""
REQUEST_TIMEOUT_S = 10.0
"""How long a client may take from being let in to the end of its answer."""
OWN_NAMES = frozenset({"localhost", "host.docker.internal"})
"""By which this machine means itself, and containers mean it."""
OWN_DOMAINS = ("local", "lan", "home", "home.arpa", "internal", "localdomain")
"""Of networks at home: nobody can have a name below them on the internet."""
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
    "local_steps": ("worker_local_steps", "DiLoCo: of its newest change."),
    "drift": ("worker_drift", "DiLoCo: of its newest change, as a share of the weights' norm."),
}
"""The same, of what workers report of themselves, and the server measures of them."""


class Growth:
    """How far counts have grown since each was first seen here.

    Those of a run that was resumed begin at its checkpoint's, which Prometheus would take for work just done.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], int] = {}

    def __call__(self, count: int, *name: str) -> int:
        return max(0, count - self._first.setdefault(name, count))


class Scrape:
    """What one scrape is told: metric families by name, each made with its first value."""

    def __init__(self, run_id: str) -> None:
        """`run_id` is a label of every series; empty: of none."""
        self._of_run = {"run": run_id} if run_id else {}
        self.families: dict[str, Any] = {}

    def gauge(self, name: str, description: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, description, labels, _number(value))

    def counter(self, name: str, description: str, value: float, **labels: str) -> None:
        self._add(CounterMetricFamily, name, description, labels, _number(value))

    def histogram(
        self, name: str, description: str, counts: Sequence[int], total: int, **labels: str
    ) -> None:
        """`counts`: how many values were at most each of `STALENESS_BOUNDS`; `total`: their sum."""
        buckets = list(zip(STALENESS_BOUNDS, counts, strict=True))
        self._add(HistogramMetricFamily, name, description, labels, buckets, total)

    def _add(
        self,
        kind: Callable[..., Metric],
        name: str,
        description: str,
        labels: dict[str, str],
        *value: object,
    ) -> None:
        labels |= self._of_run
        family = self.families.setdefault(name, kind(PREFIX + name, description, labels=labels))
        family.add_metric(list(labels.values()), *value)


class RunCollector(Collector):
    """Makes the series of one process when somebody asks for them."""

    def __init__(
        self,
        who: Process,
        meter: Meter,
        runs_dir: Path,
        *,
        run_id: Callable[[], str] = lambda: "",
        status: Callable[[], RunStatus | None] = lambda: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """The threads that answer call all that can be called; `meter` counts the work of the process `who`.

        `status` is the owner's. `run_id` names the run that every series is labelled with; empty: none yet.
        """
        rank = "" if who.rank is None else str(who.rank)
        self._who = {"role": who.role, "rank": rank, "node": who.node}
        self._run_id = run_id
        self._meter = meter
        self._runs_dir = runs_dir
        self._status = status
        self._now = now
        self._process = psutil.Process(os.getpid())
        self._last_step = (-1, 0.0)
        self._growth = Growth()

    def collect(self) -> Iterable[Metric]:
        scrape = Scrape(self._run_id())
        add_process(scrape, self._who, self._meter, self._process)
        add_disk(scrape, self._who, self._runs_dir)
        if (status := self._status()) is not None:
            add_run(scrape, status, self._growth)
            for worker in status.workers:
                add_worker(scrape, worker, self._now(), self._growth)
            seen = self._moved(status)
            scrape.gauge("last_step_timestamp_seconds", "When the newest step was seen.", seen)
        return scrape.families.values()

    def _moved(self, status: RunStatus) -> float:
        """When the step that the status has was first seen here, seconds since 1970."""
        if status.step != self._last_step[0]:
            self._last_step = (status.step, status.updated_at.timestamp())
        return self._last_step[1]


def add_process(
    scrape: Scrape, who: Mapping[str, str], meter: Meter, process: psutil.Process
) -> None:
    scrape.counter("process_steps", "Steps of this process.", meter.steps, **who)
    scrape.counter("process_samples", "Samples of this process.", meter.samples, **who)
    for phase, seconds in meter.by_phase.items():
        scrape.counter("phase_seconds", "Wall time by phase.", seconds, **who, phase=phase)
    with process.oneshot():
        cpu, memory = process.cpu_times(), process.memory_info()
    cpu_s = cpu.user + cpu.system
    scrape.counter("process_cpu_seconds", "Processor time of this process.", cpu_s, **who)
    scrape.gauge("process_resident_memory_bytes", "Memory of this process.", memory.rss, **who)
    for phase, peak in meter.peaks.items():
        scrape.gauge("phase_peak_memory_bytes", "Most memory by phase.", peak, **who, phase=phase)
    for quantity, value in meter.gpu().items():
        scrape.gauge(*GPU_SERIES[quantity], value, **who)


def add_disk(scrape: Scrape, who: Mapping[str, str], folder: Path) -> None:
    """How full the disk of a folder is; nothing where there is no such folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return
    scrape.gauge("disk_free_bytes", "Free on the disk of the runs.", usage.free, **who)
    scrape.gauge("disk_size_bytes", "Size of the disk of the runs.", usage.total, **who)


def add_run(scrape: Scrape, status: RunStatus, growth: Growth) -> None:
    """How the whole run stands. What was not measured yet has no series, but the loss, which is NaN."""
    named = {"run": status.run_id, "algorithm": status.algorithm}
    scrape.gauge("run_info", "The run, always 1.", 1, **named)
    returned = growth(status.leases_returned, "leases_returned")
    scrape.counter("leases_returned", "Pieces of work taken back.", returned)
    loss = math.nan if status.loss is None else status.loss
    values = {
        "step": ("Optimizer steps of the run.", status.step),
        "samples_applied": ("Samples whose gradients count.", status.samples_applied),
        "epoch": ("Epoch, from 0.", status.epoch),
        "samples_target": ("Samples of the whole run.", status.total_samples),
        "samples_per_second": ("Applied samples.", status.samples_per_s),
        "loss": ("Of the newest step.", loss),
        "validation_loss": ("Of the newest evaluation.", status.val_loss),
        "validation_accuracy": ("Of the newest evaluation, 0..1.", status.val_accuracy),
        "validation_perplexity": ("Of the newest evaluation.", status.val_perplexity),
        "learning_rate": ("Of the newest step.", status.learning_rate),
        "gradient_norm": ("Of the newest step.", status.grad_norm),
        "staleness_bound_steps": ("A push that is older is dropped.", status.staleness_bound),
    }
    for name, (description, value) in values.items():
        if value is not None:
            scrape.gauge(name, description, value)
    for metric, value in metrics_in(status.model_dump()).items():
        if metric not in ("accuracy", "perplexity"):
            scrape.gauge("validation_metric", "Of the newest evaluation.", value, metric=metric)
    for reason, count in status.pushes.items():
        grown = growth(count, "pushes", reason)
        scrape.counter("pushes", "Pushes by outcome.", grown, reason=reason)


def add_worker(scrape: Scrape, worker: WorkerStatus, now: datetime, growth: Growth) -> None:
    """What the server knows of a worker."""
    who = {"rank": str(worker.rank), "node": worker.node}
    own = (who["rank"], who["node"])
    samples = growth(worker.samples, "samples", *own)
    scrape.counter("worker_samples", "Its applied samples.", samples, **who)
    values = {
        "worker_up": ("1 while it takes part.", worker.state == "joined"),
        "worker_samples_per_second": ("Its applied samples.", worker.samples_per_s),
        "worker_silent_seconds": ("Since its last byte.", worker.silent_s(now)),
    } | {
        name: (description, worker.process_stats[key])
        for key, (name, description) in WORKER_STATS.items()
        if key in worker.process_stats
    }
    for name, (description, value) in values.items():
        scrape.gauge(name, description, value, **who)
    for way, nbytes in (("sent", worker.sent_bytes), ("received", worker.received_bytes)):
        scrape.counter(
            "link_bytes", "Bytes that it sent and received.", nbytes, **who, direction=way
        )
    if len(worker.staleness) == len(STALENESS_BOUNDS):
        counts = [
            growth(count, "staleness", bound, *own)
            for bound, count in zip(STALENESS_BOUNDS, worker.staleness, strict=True)
        ]
        # Staleness is whole steps: the product alone would fall by the last bit now and then.
        total = growth(round(worker.mean_staleness * sum(worker.staleness)), "staleness_sum", *own)
        up_to = list(accumulate(counts))
        scrape.histogram("staleness_steps", "Staleness of applied pushes.", up_to, total, **who)


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
        if all(is_free(address, port) for port in range(start, start + count)):
            return start
    return None


def is_free(address: str, port: int) -> bool:
    """Whether a process of this machine can listen there; port 0: on any port of the address."""
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
    application = for_own_names(make_wsgi_app(registry), socket.gethostname())
    try:
        server = _listening(address, port, application)
    except OSError as error:
        where = format_address(address, port)
        reason = error.strerror or error
        warn(f"no metrics for Prometheus on {where}: {reason}; set metrics_port or metrics_bind")
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


def for_own_names(application: WSGIApplication, hostname: str) -> WSGIApplication:
    """The same for those who ask this machine by a name of its own, so that no page elsewhere reads it.

    A page whose name is made to mean this machine (DNS rebinding) asks by that name, which may begin like
    this machine's. Addresses cannot be made to mean something else. `hostname` is this machine's.
    """
    short = hostname.partition(".")[0].lower()
    within = (f"{short}.{domain}" for domain in OWN_DOMAINS)
    names = OWN_NAMES | {hostname.lower(), short, *within}

    def guarded(environ: Any, start_response: Any) -> Iterable[bytes]:
        if means_this_machine(environ.get("HTTP_HOST", ""), names):
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"ask by this machine's address, localhost, or its host name\n"]

    return guarded


def _listening(address: str, first: int, application: Any) -> WSGIServer:
    """A server on the first free port from `first` on.

    Raises:
        OSError: there is none, or the address is not this machine's.
    """
    last = min(first + MAX_FURTHER_PORTS, 65535)
    for port in range(first, last + 1):
        try:
            return make_server(address, port, application, _Server, _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise
    raise AssertionError("a range of at least one port")


class _Server(ThreadingWSGIServer):
    """Asks no name server for its own name, and prints nothing when a client hangs up."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], *args: Any) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self.places = threading.Semaphore(MAX_CLIENTS)
        super().__init__(address, *args)

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
        """Answer, and make room; who takes too long over it all is cut."""
        cut = threading.Timer(REQUEST_TIMEOUT_S, _cut, (request,))
        cut.daemon = True
        try:
            cut.start()
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self.places.release()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client's trouble is its own."""


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has gone
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.nan
