"""DiLoCo with weights that lie on several hosts: the server, and stores that have dialled it."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import harness
from harness import Cluster, Outcome, local_settings
from smolcluster.algorithms.DiLoCo.ledger import Applied
from smolcluster.algorithms.DiLoCo.server import Server
from smolcluster.configs.resolve import Settings
from smolcluster.errors import ConfigError
from smolcluster.training.build import build
from smolcluster.utils.stopping import Interrupted

NODES = ("mini1", "win", "pi5")
STREAMING = "mode=streaming", "fragments=3"


@pytest.fixture(autouse=True)
def _many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 2048 weights, so that a small model has several."""
    monkeypatch.setattr(harness, "build", partial(build, bucket_bytes=8192))


def settings_for(num_hosts: int, *overrides: str, workers: int = 1) -> Settings:
    servers = f"servers=[{', '.join(NODES[:num_hosts])}]"
    common = (f"min_workers={workers}", "num_epochs=2", "local_steps=4", "reconnect_timeout_s=20")
    return local_settings(
        servers, *common, "outer_lr=0.7", *overrides, workers=workers, algorithm="diloco"
    )


def start(
    settings: Settings, folder: Path, *, resume: bool = False
) -> tuple[Cluster, list[Outcome]]:
    """A server and its stores."""
    cluster = Cluster(settings, folder, algorithm="diloco", resume=resume)
    return cluster, [cluster.start_store(node) for node in settings.cluster.store_nodes[1:]]


def run(settings: Settings, folder: Path, *, resume: bool = False) -> Cluster:
    """A run that ends well, for its stores too, and has applied every sample once."""
    cluster, stores = start(settings, folder, resume=resume)
    workers = [cluster.worker(number + 1) for number in range(settings.cluster.num_workers)]
    cluster.server.finish()
    for each in (*workers, *stores):
        each.finish()
    return cluster


def after_outer_step(cluster: Cluster, step: int, act: Callable[[], None]) -> None:
    """Do something when the server has counted the batches of that outer step."""
    core = cluster.core
    assert isinstance(core, Server)
    count = core.count
    has_acted: list[int] = []

    def watched(applied: list[Applied]) -> None:
        count(applied)
        if core.stores.version >= step and not has_acted:
            has_acted.append(step)
            act()

    core.count = watched  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    "overrides",
    [("mode=sync",), ("mode=sync", "codec_up=int8", "codec_down=int4")],
    ids=["lossless", "int8 and int4"],
)
def test_any_number_of_hosts_gives_the_same_bits(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    own = (*overrides, "outer_momentum=0.5", "checkpoint_steps=30", "eval_steps=20")
    whole, *others = (run(settings_for(hosts, *own), tmp_path / str(hosts)) for hosts in (1, 2, 3))
    losses = [record.values["loss"] for record in whole.metrics.steps]
    for other in others:
        other.assert_every_sample_applied_once()
        assert [record.values["loss"] for record in other.metrics.steps] == losses
        assert torch.equal(other.training.replica.params, whole.training.replica.params)
        assert isinstance(other.core, Server) and isinstance(whole.core, Server)
        for name, tensor in whole.core.stores.tensors.items():
            assert torch.equal(other.core.stores.tensors[name], tensor), name


@pytest.mark.parametrize("mode", [STREAMING, ("mode=async",)], ids=["streaming", "async"])
@pytest.mark.parametrize("codecs", [(), ("codec_up=int4", "codec_down=int8")])
def test_several_workers_apply_every_sample_once(
    tmp_path: Path, mode: tuple[str, ...], codecs: tuple[str, ...]
) -> None:
    settings = settings_for(3, *mode, *codecs, "num_epochs=4", "eval_steps=50", workers=2)
    cluster = run(settings, tmp_path)
    cluster.assert_every_sample_applied_once()
    assert cluster.server.summary is not None
    assert (cluster.server.summary.final.val_accuracy or 0) > 0.7


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_a_run_goes_on_with_more_hosts_or_fewer(tmp_path: Path, before: int, after: int) -> None:
    sgd = "optimizer=sgd", "learning_rate=0.1"  # whose workers have no state of their own
    own = "mode=sync", "codec_down=int8", "outer_momentum=0.5", "checkpoint_steps=20", *sgd
    whole = run(settings_for(1, *own), tmp_path / "whole")
    cluster, _ = start(settings_for(before, *own), tmp_path / "run")
    after_outer_step(cluster, 12, lambda: cluster.stop.note(signal.SIGTERM))
    cluster.worker(1)
    assert isinstance(cluster.server.failure(), Interrupted)
    resumed = run(settings_for(after, *own), tmp_path / "run", resume=True)
    assert 0 < len(resumed.metrics.steps) < len(whole.metrics.steps)
    assert resumed.server.summary is not None
    assert resumed.server.summary.samples_applied == 2 * resumed.training.num_samples
    assert torch.equal(resumed.training.replica.params, whole.training.replica.params)


def test_a_store_that_is_lost_costs_no_sample(tmp_path: Path) -> None:
    settings = settings_for(3, *STREAMING, "num_epochs=4", "eval_steps=20", workers=2)
    cluster, stores = start(settings, tmp_path)

    def cut() -> None:
        assert isinstance(cluster.core, Server)
        session = cluster.core.stores.session_of("win")
        assert session is not None
        session.cut("its power is gone")

    after_outer_step(cluster, 20, cut)
    workers = cluster.worker(1), cluster.worker(2)
    summary = cluster.finish(*workers, *stores)
    assert summary.train_samples == 4 * cluster.training.num_samples
    told = [line for line in cluster.log_lines if "the store win" in line]
    assert "as they were at step 0" in told[0]
    assert "is lost: its power is gone; training pauses" in told[1]
    assert "holds buckets" in told[2]


def test_an_average_of_weights_needs_them_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ema_decay is 0\.9 and servers lists several"):
        Cluster(settings_for(2, "ema_decay=0.9"), tmp_path, algorithm="diloco")
