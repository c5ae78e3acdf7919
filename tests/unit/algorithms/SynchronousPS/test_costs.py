"""What SyncPS predicts of itself: in closed form, and as it was measured."""

import pytest

from smolcluster.algorithms.planning.costs import Interface, Job, Site, Worker
from smolcluster.algorithms.SynchronousPS.costs import predict, sizes_and_uploads, step_nbytes
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings

FAST_BYTES_S = 50e6 / 8 * 1448 / 1514
"""A link of 50 Mbit/s, without the headers of its packets."""
JOB = Job(1_830_000)


def settings_of(*overrides: str, num_workers: int = 4) -> Settings:
    return load_settings(
        "syncps", "stdlib", None, overrides, {}, local=True, local_workers=num_workers
    )


def worker(name: str, step_s: float, bytes_s: float = FAST_BYTES_S) -> Worker:
    return Worker(name, step_s, 0.0, bytes_s, bytes_s, 1e-3, "eth0")


def site_of(*workers: Worker, limit: float = FAST_BYTES_S) -> Site:
    return Site(workers, {"eth0": Interface(limit, limit)})


FIVE_HOSTS = site_of(*(worker(name, 0.35) for name in "abc"), worker("slow", 0.9, FAST_BYTES_S / 5))


def test_the_five_hosts_that_were_measured() -> None:
    """A GPT of 1.83 M parameters, batches of 4 x 64 tokens: 479 tokens a second with int8."""
    forecast = predict(FIVE_HOSTS, JOB, settings_of("batch_size=4", "codec=int8"))
    assert 64 * forecast.samples_per_s == pytest.approx(479, rel=0.2)
    assert forecast.is_exact


def test_without_links_parts_are_as_large_as_machines_are_fast() -> None:
    site = Site((Worker("a", 0.4), Worker("b", 0.1)), {})
    settings = settings_of("batch_size=50", num_workers=2)
    sizes, uploads = sizes_and_uploads(site, 1000, settings)
    assert sizes == [20, 80]
    assert uploads == [0, 0]
    assert predict(site, JOB, settings).samples_per_s == pytest.approx(
        50 / 0.4 + 50 / 0.1, rel=0.02
    )


def test_a_worker_whose_way_is_longer_than_the_step_has_no_part() -> None:
    site = site_of(worker("near", 0.1, 1e9), worker("far", 0.1, 1e4), limit=1e9)
    sizes, _ = sizes_and_uploads(site, 10**6, settings_of("batch_size=4", num_workers=2))
    assert sizes == [8, 0]


def test_a_step_sends_a_gradient_and_brings_the_mean() -> None:
    assert step_nbytes(JOB, settings_of("codec=fp16")) == (2 * 1_830_000,) * 2


def test_a_slower_link_never_makes_it_faster() -> None:
    settings = settings_of("batch_size=4", "codec=int8", num_workers=3)
    rates = [
        predict(
            site_of(*(worker(name, 0.35, mbit * 125e3) for name in "abc"), limit=mbit * 125e3),
            JOB,
            settings,
        ).samples_per_s
        for mbit in (1, 2, 5, 20, 50, 100, 1000)
    ]
    assert rates == sorted(rates)


def test_a_round_trip_counts_once() -> None:
    far = Worker("far", 1.0, latency_s=0.5, via="eth0", up_bytes_s=1e12, down_bytes_s=1e12)
    settings = settings_of("batch_size=4", num_workers=1)
    assert 4 / predict(Site((far,), {}), JOB, settings).samples_per_s == pytest.approx(
        1.5, rel=0.01
    )
