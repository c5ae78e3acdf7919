"""A lossy codec and encryption on a connection that breaks in mid-run; `tests/faults` has the other ways."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from harness import DEADLINE_S, Cluster, local_settings
from proxy import Proxy
from smolcluster.algorithms.EDP.server import Server
from smolcluster.runs.events import LeaseReturned, WorkerJoined, WorkerLost


@pytest.mark.slow
@pytest.mark.parametrize("override", ["use_quantization=true", "encryption=on"])
def test_a_worker_that_loses_its_connection_comes_back(tmp_path: Path, override: str) -> None:
    reached = {version: threading.Event() for version in (20, 40, 60)}

    class Milestones(Server):
        def apply(self, *args: object) -> None:
            super().apply(*args)  # type: ignore[arg-type]
            if self.version in reached:
                reached[self.version].set()

    settings = local_settings("num_epochs=4", override, workers=1)
    cluster = Cluster(settings, tmp_path, Milestones)
    with closing(Proxy(settings.cluster.port)) as proxy:
        worker = cluster.worker(1, port=proxy.port)
        for event in reached.values():
            assert event.wait(DEADLINE_S)
            proxy.cut()
        cluster.finish(worker)
    assert proxy.connections >= 3
    assert len(cluster.happened(WorkerLost)) >= 2
    assert sum(event.rejoined for event in cluster.happened(WorkerJoined)) >= 2
    assert cluster.happened(LeaseReturned)
