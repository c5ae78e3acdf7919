"""A run's status and numbers for tests of what Prometheus reads."""

from typing import Any

from harness import free_port
from made_runs import worker_status
from reading import status_of
from smolcluster.runs.status import RunStatus, WorkerStatus, instant
from smolcluster.utils.gpu import Readings
from smolcluster.utils.meter import PHASES, Meter

NOW = instant(1_790_000_000.0)
GPU: Readings = {
    "utilization": 0.875,
    "memory_bytes": 12.5e9,
    "memory_size_bytes": 80e9,
    "temperature_c": 61.0,
    "power_w": 240.5,
}
METER = Meter(
    seconds=[0.5 + index for index, _ in enumerate(PHASES)],
    steps=100,
    samples=3200,
    gpu=lambda: GPU,
)


def free_ports(number: int) -> int:
    """The first of so many ports in a row that nobody listens on now."""
    ports = [free_port()]
    while len(ports) < number:
        port = free_port()
        ports = [*ports, port] if port == ports[-1] + 1 else [port]
    return ports[0]


def a_worker(rank: int, node: str, **changes: Any) -> WorkerStatus:
    """A worker of which everything is known."""
    known = {
        "node": node,
        "mean_staleness": 1.0,
        "staleness": [10, 20, 10, 0, 0, 0, 0, 0],
        "process_stats": {"rtt_s": 0.004, "queue": 1.0, "codec_ratio": 3.9},
        "address": "127.0.0.1",
        "sent_bytes": 1000,
        "received_bytes": 2000,
        "last_seen": instant(NOW.timestamp() - 0.5),
    }
    return worker_status(rank, **known | changes)


def a_status(**changes: Any) -> RunStatus:
    """A run of which everything is known, with two workers, of which the second is lost."""
    known = {
        "learning_rate": 0.001,
        "grad_norm": 1.25,
        "staleness_bound": 8,
        "pushes": {"applied": 117, "stale": 3, "late": 1, "duplicate": 0, "lost": 0},
        "leases_returned": 2,
        "workers": [a_worker(0, "pi5"), a_worker(1, "win", state="lost")],
    }
    written = status_of(now=NOW.timestamp(), age_s=0.0).model_dump()
    return RunStatus.model_validate(written | known | changes)
