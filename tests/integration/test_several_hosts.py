"""Weights on several hosts, the server and stores that have dialled it: one table for all algorithms.

What one algorithm alone does with stores is in `test_edp_hosts`, `test_syncps_hosts` and `test_diloco_hosts`.
"""

import math
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from harness import Cluster
from own_workloads import run
from several_hosts import (
    after_step,
    cut_store,
    many_buckets,  # noqa: F401 - a fixture
    settings_for,
    start,
)
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo import server as diloco
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.configs.schema import AlgorithmName
from smolcluster.errors import ClusterEmpty, RunFailed
from smolcluster.utils.stopping import Interrupted
from tiers import at_night

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("many_buckets")]
EDP = "worker_update_interval=1", "optimizer=adamw", "weight_decay=0.1", "eval_steps=20"
SYNCPS = "optimizer=adamw", "weight_decay=0.1", "gradient_clipping.max_norm=0.5"
DILOCO = "mode=sync", "outer_momentum=0.5", "checkpoint_steps=30", "eval_steps=20"
STREAMING = "mode=streaming", "fragments=3"
LOSSY = "codec_up=int4", "codec_down=int8"
AT_ONCE = "edp", "syncps int8", "diloco int8 and int4"
AGREES: Mapping[str, tuple[AlgorithmName, tuple[str, ...]]] = MappingProxyType(
    {
        "edp": ("edp", (*EDP, "checkpoint_steps=30")),
        "syncps": ("syncps", (*SYNCPS, "codec=fp32")),
        "syncps int8": ("syncps", (*SYNCPS, "codec=int8")),
        "diloco": ("diloco", DILOCO),
        "diloco int8 and int4": ("diloco", (*DILOCO, "codec_up=int8", "codec_down=int4")),
        "diloco muon": ("diloco", (*DILOCO, "optimizer=muon")),
        "diloco beginning": ("diloco", (*DILOCO, "sync_fraction=0.5")),
        "diloco topk in fragments": (
            "diloco",
            (
                *(*DILOCO, *STREAMING, "sync_fraction=1"),
                *("codec_up=topk", "codec_down=int4", "outer_momentum=0"),
            ),
        ),
        "diloco sgd in fragments": (
            "diloco",
            (
                *(*DILOCO, *STREAMING, "sync_fraction=1"),
                *("optimizer=sgd", "optimizer_args.momentum=0.9"),
            ),
        ),
    }
)


def kept_by(cluster: Cluster) -> Mapping[str, Tensor]:
    """What a checkpoint would have besides the weights."""
    if isinstance(cluster.core, diloco.Server):
        return cluster.core.stores.tensors
    return cluster.training.replica.optimizer.state


@pytest.mark.parametrize(
    "name", [*AT_ONCE, *at_night(*(each for each in AGREES if each not in AT_ONCE))]
)
def test_any_number_of_hosts_gives_the_same_bits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)
    algorithm, overrides = AGREES[name]
    whole, *others = (
        run(settings_for(algorithm, hosts, *overrides), tmp_path / str(hosts), algorithm)
        for hosts in (1, 2, 3)
    )
    measured = [
        [(record.values["loss"], record.values.get("grad_norm")) for record in each.metrics.steps]
        for each in (whole, *others)
    ]
    assert len(measured[0]) == {"edp": 90, "syncps": 45, "diloco": 90}[algorithm]
    if algorithm == "syncps":
        assert any(norm > 0.5 for _, norm in measured[0] if norm is not None), "none is clipped"
    for other, its in zip(others, measured[1:], strict=True):
        assert its == measured[0]
        assert torch.equal(other.training.replica.params, whole.training.replica.params)
        for key, tensor in kept_by(whole).items():
            assert torch.equal(kept_by(other)[key], tensor), key
        if isinstance(whole.core, diloco.Server) and isinstance(other.core, diloco.Server):
            assert other.core.beginning.num_steps == whole.core.beginning.num_steps


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("edp", 1, 3), ("edp", 3, 1), ("edp", 3, 2), ("syncps", 1, 3), ("syncps int8", 3, 2)],
)
def test_a_run_goes_on_with_more_hosts_or_fewer(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    """DiLoCo's workers keep something of a run, too: `test_diloco_hosts` has it."""
    algorithm, overrides = AGREES[name]
    own = *overrides, "checkpoint_steps=5"
    whole = run(settings_for(algorithm, 1, *own), tmp_path / "whole", algorithm)
    cluster, _ = start(settings_for(algorithm, before, *own), tmp_path / "run", algorithm)
    after_step(cluster, 8, lambda: cluster.stop.note(signal.SIGTERM))
    cluster.worker(1)
    assert isinstance(cluster.server.failure(), Interrupted)
    stopped_at = cluster.core.version
    if isinstance(cluster.core, syncps.Server) and "int8" in name:
        assert cluster.core.links._copied_version == stopped_at, "what stores owe is saved"
    resumed = run(settings_for(algorithm, after, *own), tmp_path / "run", algorithm, resume=True)
    assert len(resumed.metrics.steps) == len(whole.metrics.steps) - stopped_at
    if "int8" not in name:  # a worker's own residual begins at zero
        assert torch.equal(resumed.training.replica.params, whole.training.replica.params)


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        *(("diloco", (*mode, *LOSSY)) for mode in (STREAMING, ("mode=async",))),
        *at_night(("edp", ("codec=int8",)), ("diloco", STREAMING), ("diloco", ("mode=async",))),
    ],
)
def test_several_workers_learn_and_apply_every_sample_once(
    tmp_path: Path, algorithm: AlgorithmName, overrides: tuple[str, ...]
) -> None:
    settings = settings_for(algorithm, 3, *overrides, "num_epochs=4", "eval_steps=50", workers=2)
    cluster = run(settings, tmp_path, algorithm)
    assert cluster.server.summary is not None
    assert (cluster.server.summary.final.val_accuracy or 0) > 0.7


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "step", "overrides"),
    [
        ("edp", 30, ("num_epochs=4", "eval_steps=20")),
        ("diloco", 5, ("mode=sync",)),
        ("diloco", 5, STREAMING),
        ("diloco", 5, ("mode=async",)),
        ("diloco", 5, (*STREAMING, "sync_fraction=0.5")),
    ],
)
def test_a_store_that_is_lost_gets_its_slice_back_as_it_was_gathered_last(
    tmp_path: Path,
    algorithm: AlgorithmName,
    step: int,
    overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)
    if algorithm == "diloco":
        overrides += "codec_up=int8", "codec_down=int8", "num_epochs=8", "eval_steps=20"
    cluster, stores = start(settings_for(algorithm, 3, *overrides, workers=2), tmp_path, algorithm)
    after_step(cluster, step, lambda: cut_store(cluster, "worker1"))
    summary = cluster.finish(cluster.worker(1), cluster.worker(2), *stores)
    told = [line for line in cluster.log_lines if "the store worker1" in line]
    assert "as they were at step 0" in told[0]
    assert "is lost: its power is gone; training pauses" in told[1]
    if algorithm == "edp":
        assert "as they were at step 20" in told[2]
        assert summary.steps_undone > 0
        assert cluster.core.version == 180
    else:
        assert "holds buckets" in told[2]
        assert summary.samples_applied == 8 * cluster.training.num_samples


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["edp", "syncps", "diloco"])
def test_a_store_that_stays_away_ends_the_run(tmp_path: Path, algorithm: AlgorithmName) -> None:
    settings = settings_for(algorithm, 2, "start_timeout_s=1")
    cluster = Cluster(settings, tmp_path, algorithm=algorithm)
    worker = cluster.worker(1)
    error = cluster.server.failure()
    assert isinstance(error, ClusterEmpty)
    assert "the store worker1 did not come within 1 s (start_timeout_s)" in str(error)
    assert isinstance(worker.failure(), RunFailed)
