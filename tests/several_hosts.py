"""Runs, in this process, whose weights lie on several hosts: the server, and stores that have dialled it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import harness
from harness import Cluster, Outcome, local_settings
from smolcluster.algorithms.DiLoCo import server as diloco
from smolcluster.algorithms.EDP import server as edp
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.server.store_links import StoreLinks
from smolcluster.training.build import build

NODES = ("mini1", "worker1", "worker2", "worker3")
COMMON: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "edp": ("num_epochs=2",),
        "syncps": ("num_epochs=1",),
        "diloco": ("num_epochs=2", "local_steps=4", "outer_lr=0.7", "sync_fraction=0"),
    }
)


@pytest.fixture
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 2048 weights, so that a small model has several."""
    monkeypatch.setattr(harness, "build", partial(build, bucket_bytes=8192))


def on_hosts(number: int) -> str:
    """The override that spreads the weights over so many hosts."""
    return f"servers=[{', '.join(NODES[:number])}]"


def settings_for(
    algorithm: AlgorithmName, num_hosts: int, *overrides: str, workers: int = 1
) -> Settings:
    """A short run whose workers all come, and have time to come back."""
    common = (f"min_workers={workers}", "reconnect_timeout_s=20", *COMMON[algorithm])
    return local_settings(
        *(on_hosts(num_hosts), *common, *overrides), workers=workers, algorithm=algorithm
    )


def start(
    settings: Settings, folder: Path, algorithm: AlgorithmName, **options: Any
) -> tuple[Cluster, list[Outcome]]:
    """A server and its stores."""
    cluster = Cluster(settings, folder, algorithm=algorithm, **options)
    return cluster, [cluster.start_store(node) for node in settings.cluster.store_nodes[1:]]


def links_of(cluster: Cluster) -> StoreLinks[Any]:
    """What the server has of its stores."""
    core = cluster.core
    assert isinstance(core, edp.Server | syncps.Server | diloco.Server)
    return core.links if isinstance(core, syncps.Server) else core.stores


def after_step(cluster: Cluster, step: int, act: Callable[[], None]) -> None:
    """Do something once: when the server has just taken that step.

    In DiLoCo: when after so many outer steps a change has come and is not applied yet.
    """
    core: Any = cluster.core
    method = {"edp": "apply", "syncps": "commit", "diloco": "on_change"}[cluster.algorithm]
    original, todo = getattr(core, method), [act]

    def watched(*args: Any) -> Any:
        result = original(*args)
        if todo and has_come(*args):
            todo.pop()()
        return result

    def has_come(*args: Any) -> bool:
        if not isinstance(core, diloco.Server):
            return bool(core.version == step)
        return core.stores.version >= step and bool(core.changes[args[1].request.fragment])

    setattr(core, method, watched)


def cut_store(cluster: Cluster, node: str) -> None:
    """Break the server's connection to a store."""
    session = next(each.session for each in links_of(cluster)._stores if each.node == node)
    assert session is not None
    session.cut("its power is gone")
