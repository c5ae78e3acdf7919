"""Runs, in this process, whose weights lie on several hosts: the server, and stores that have dialled it."""

from functools import partial
from pathlib import Path

import pytest

import harness
from harness import Cluster, Outcome
from smolcluster.configs.schema import Settings
from smolcluster.training.build import build

NODES = ("mini1", "worker1", "worker2", "worker3")


@pytest.fixture
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 2048 weights, so that a small model has several."""
    monkeypatch.setattr(harness, "build", partial(build, bucket_bytes=8192))


def on_hosts(number: int) -> str:
    """The override that spreads the weights over so many hosts."""
    return f"servers=[{', '.join(NODES[:number])}]"


def start(
    settings: Settings, folder: Path, algorithm: str, *, resume: bool = False, **options: object
) -> tuple[Cluster, list[Outcome]]:
    """A server and its stores."""
    cluster = Cluster(settings, folder, algorithm=algorithm, resume=resume, **options)  # type: ignore[arg-type]
    return cluster, [cluster.start_store(node) for node in settings.cluster.store_nodes[1:]]


def run(settings: Settings, folder: Path, algorithm: str, *, resume: bool = False) -> Cluster:
    """A run that ends well, for its stores too."""
    cluster, stores = start(settings, folder, algorithm, resume=resume)
    workers = [cluster.worker(number + 1) for number in range(settings.cluster.num_workers)]
    cluster.server.finish()
    for each in (*workers, *stores):
        each.finish()
    return cluster
