"""What EDP predicts of itself: where it can be counted by hand, and as it was measured."""

import pytest

from smolcluster.algorithms.EDP.costs import predict
from smolcluster.algorithms.planning.costs import Interface, Job, Site, Worker
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings

FAST_MB_S = 50 / 8 * 1448 / 1514
"""A link of 50 Mbit/s, without the headers of its packets."""


def settings_of(*overrides: str, num_workers: int = 4) -> Settings:
    return load_settings(
        "edp", "stdlib", None, overrides, {}, local=True, local_workers=num_workers
    )


def site_of(*machines: tuple[float, float], limit_mb_s: float = FAST_MB_S) -> Site:
    """Machines by seconds a step, and MB a second of their links."""
    workers = tuple(
        Worker(f"w{place}", step_s, 0.0, 1e6 * mb_s, 1e6 * mb_s, 1e-3, "eth0")
        for place, (step_s, mb_s) in enumerate(machines)
    )
    return Site(workers, {"eth0": Interface(1e6 * limit_mb_s, 1e6 * limit_mb_s)})


@pytest.mark.parametrize("interval", [1, 10])
def test_one_worker_that_computes_longer_than_it_pushes(interval: int) -> None:
    settings = settings_of("batch_size=4", f"worker_update_interval={interval}", num_workers=1)
    job, step_s = Job(1_000_000), 2.0
    pull_s = push_s = job.model_nbytes / (1e6 * FAST_MB_S)
    expected_s = step_s + (push_s + pull_s if interval == 1 else 0.0)
    forecast = predict(site_of((step_s, FAST_MB_S)), job, settings)
    assert forecast.samples_per_s == pytest.approx(4 / expected_s, rel=0.02)


def test_one_worker_that_pushes_longer_than_it_computes() -> None:
    settings = settings_of("batch_size=4", "worker_update_interval=10", num_workers=1)
    job = Job(1_000_000)
    push_s = job.model_nbytes / (1e6 * FAST_MB_S)
    forecast = predict(site_of((0.1, FAST_MB_S)), job, settings)
    assert 10 * push_s < 10 * 4 / forecast.samples_per_s < 11.5 * push_s


def test_a_crowd_fills_the_servers_link() -> None:
    settings = settings_of("batch_size=4", "worker_update_interval=50", num_workers=8)
    job = Job(1_000_000)
    forecast = predict(site_of(*[(0.1, FAST_MB_S)] * 8), job, settings)
    assert forecast.received_bytes_s == pytest.approx(1e6 * FAST_MB_S, rel=0.02)


def test_a_slower_link_never_makes_it_faster() -> None:
    settings = settings_of("batch_size=4", "codec=int8", num_workers=3)
    rates = [
        predict(site_of(*[(0.35, mb_s)] * 3, limit_mb_s=mb_s), Job(1_830_000), settings)
        for mb_s in (0.1, 0.5, 1, 5, 10, 100)
    ]
    assert rates == sorted(rates, key=lambda each: each.samples_per_s)


def test_the_five_hosts_that_were_measured() -> None:
    """A GPT of 1.83 M parameters, batches of 4 x 64 tokens: 693 tokens a second with int8."""
    settings = settings_of("batch_size=4", "codec=int8")
    site = site_of(*[(0.35, FAST_MB_S)] * 3, (0.9, FAST_MB_S / 5))
    forecast = predict(site, Job(1_830_000), settings)
    assert 64 * forecast.samples_per_s == pytest.approx(693, rel=0.2)
    assert forecast.received_bytes_s <= 1e6 * FAST_MB_S * 1.01
    assert not forecast.is_exact


def test_without_links_all_compute_all_the_time() -> None:
    site = Site((Worker("a", 0.5), Worker("b", 0.25)), {})
    forecast = predict(site, Job(1_000_000), settings_of("batch_size=4", num_workers=2))
    assert forecast.samples_per_s == pytest.approx(4 / 0.5 + 4 / 0.25, rel=0.02)
    assert forecast.lost == pytest.approx(0, abs=0.02)


def test_a_server_takes_one_push_after_the_other() -> None:
    site = Site((Worker("a", 0.01), Worker("b", 0.01)), {}, apply_s=0.02)
    forecast = predict(site, Job(1_000_000), settings_of("batch_size=4", num_workers=2))
    assert forecast.samples_per_s == pytest.approx(4 / 0.02, rel=0.02)
