"""Connections that break or lie in mid-run: the worker comes back, and no sample is lost or applied twice."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from harness import DEADLINE_S, Cluster, Outcome, local_settings
from proxy import Proxy
from smolcluster.algorithms.EDP.server import Server
from smolcluster.algorithms.EDP.worker import Worker
from smolcluster.runs.events import LeaseReturned, WorkerJoined, WorkerLost
from smolcluster.server.assignment import Assigned
from smolcluster.training.compute import BatchLoss

pytestmark = pytest.mark.slow


class Milestones(Server):
    """An EDP server that tells when it has come to a version."""

    reached: ClassVar[dict[int, threading.Event]]

    def apply(self, *args: object) -> None:
        super().apply(*args)  # type: ignore[arg-type]
        if self.version in self.reached:
            self.reached[self.version].set()


@pytest.fixture
def milestones() -> type[Milestones]:
    class Fresh(Milestones):
        reached: ClassVar = {version: threading.Event() for version in (20, 40, 60)}

    return Fresh


@pytest.fixture
def cluster(
    tmp_path: Path, milestones: type[Milestones], request: pytest.FixtureRequest
) -> Cluster:
    overrides = getattr(request, "param", ())
    return Cluster(local_settings("num_epochs=4", *overrides, workers=1), tmp_path, milestones)


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    proxy = Proxy(cluster.settings.cluster.port)
    yield proxy
    proxy.close()


def finish(cluster: Cluster, worker: Outcome) -> list[object]:
    cluster.server.finish()
    worker.finish()
    cluster.assert_every_sample_applied_once()
    return [record.event for record in cluster.events()]


@pytest.mark.parametrize(
    "cluster", [(), ("use_quantization=true",), ("encryption=on",)], indirect=True
)
def test_a_worker_that_loses_its_connection_comes_back(
    cluster: Cluster, proxy: Proxy, milestones: type[Milestones]
) -> None:
    worker = cluster.worker(1, port=proxy.port)
    for event in milestones.reached.values():
        assert event.wait(DEADLINE_S)
        proxy.cut()
    events = finish(cluster, worker)
    assert proxy.connections >= 3
    assert sum(isinstance(event, WorkerLost) for event in events) >= 2
    assert sum(isinstance(event, WorkerJoined) and event.rejoined for event in events) >= 2
    assert any(isinstance(event, LeaseReturned) for event in events)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cluster", "after_nbytes"),
    [
        *(((), after_nbytes) for after_nbytes in (1, 13, 400, 20_000)),
        *((("encryption=on",), after_nbytes) for after_nbytes in (1, 20_000)),
    ],
    indirect=["cluster"],
)
def test_a_flipped_bit_costs_the_connection_and_nothing_else(
    cluster: Cluster, proxy: Proxy, milestones: type[Milestones], after_nbytes: int
) -> None:
    """Wherever it hits: in a prefix, a header, a payload or a sum."""
    worker = cluster.worker(1, port=proxy.port)
    assert milestones.reached[20].wait(DEADLINE_S)
    proxy.corrupt(after_nbytes)
    events = finish(cluster, worker)
    lost = [event for event in events if isinstance(event, WorkerLost)]
    assert len(lost) == 1
    assert proxy.connections == 2


RUBBISH = (b"GET / HTTP/1.1\r\n\r\n", b"SMOL" + b"\xff" * 64, b"\x00" * 5000)


@pytest.mark.nightly
def test_strangers_who_send_rubbish_or_nothing_do_not_disturb(cluster: Cluster) -> None:
    in_the_middle, go_on = threading.Event(), threading.Event()

    class NodeChecks(Worker):
        def compute(self, lease: Assigned) -> BatchLoss:
            if self.steps == 20:
                in_the_middle.set()
                assert go_on.wait(DEADLINE_S)
            return super().compute(lease)

    address = ("127.0.0.1", cluster.settings.cluster.port)
    with ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(address))
        worker = cluster.worker(1, make=NodeChecks)
        assert in_the_middle.wait(DEADLINE_S)
        for rubbish in RUBBISH:
            assert len(_reply_to(rubbish, address)) < 4096, "little is said to a stranger"
        go_on.set()
        finish(cluster, worker)


def _reply_to(rubbish: bytes, address: tuple[str, int]) -> bytes:
    """What the server says before it closes the connection."""
    reply = b""
    with socket.create_connection(address, timeout=20) as stranger, suppress(ConnectionResetError):
        stranger.sendall(rubbish)
        while data := stranger.recv(4096):
            reply += data
    return reply
