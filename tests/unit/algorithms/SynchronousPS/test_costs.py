"""What SyncPS predicts of itself, in closed form."""

import pytest

from smolcluster.algorithms.planning.costs import Job, Site, Worker
from smolcluster.algorithms.SynchronousPS.costs import predict, sizes_and_uploads, step_nbytes
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from unit.algorithms.planning.sites import site

JOB = Job(1_830_000)


def settings_of(*overrides: str, num_workers: int = 4) -> Settings:
    return load_settings(
        "syncps", "stdlib", None, overrides, {}, local=True, local_workers=num_workers
    )


def test_without_links_parts_are_as_large_as_machines_are_fast() -> None:
    own = Site((Worker("a", 0.4), Worker("b", 0.1)), {})
    settings = settings_of("batch_size=50", num_workers=2)
    sizes, uploads = sizes_and_uploads(own, 1000, settings)
    assert sizes == [20, 80]
    assert uploads == [0, 0]
    assert predict(own, JOB, settings).samples_per_s == pytest.approx(50 / 0.4 + 50 / 0.1, rel=0.02)


def test_a_worker_whose_way_is_longer_than_the_step_has_no_part() -> None:
    own = site(1e9, 1e4, limit=1e9, compute_s=0.1, latency_s=1e-3)
    sizes, _ = sizes_and_uploads(own, 10**6, settings_of("batch_size=4", num_workers=2))
    assert sizes == [8, 0]


def test_a_step_sends_a_gradient_and_brings_the_mean() -> None:
    assert step_nbytes(JOB, settings_of("codec=fp16")) == (2 * 1_830_000,) * 2


def test_a_round_trip_counts_once() -> None:
    far = Worker("far", 1.0, latency_s=0.5, via="eth0", up_bytes_s=1e12, down_bytes_s=1e12)
    settings = settings_of("batch_size=4", num_workers=1)
    assert 4 / predict(Site((far,), {}), JOB, settings).samples_per_s == pytest.approx(
        1.5, rel=0.01
    )
