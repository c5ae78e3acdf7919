"""What EDP predicts of itself, where it can be counted by hand."""

import pytest

from smolcluster.algorithms.EDP.costs import predict
from smolcluster.algorithms.planning.costs import Job, Site, Worker
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from unit.algorithms.planning.sites import FAST_BYTES_S, site


def settings_of(*overrides: str, num_workers: int = 4) -> Settings:
    return load_settings(
        "edp", "stdlib", None, overrides, {}, local=True, local_workers=num_workers
    )


@pytest.mark.parametrize("interval", [1, 10])
def test_one_worker_that_computes_longer_than_it_pushes(interval: int) -> None:
    settings = settings_of("batch_size=4", f"worker_update_interval={interval}", num_workers=1)
    job, step_s = Job(1_000_000), 2.0
    pull_s = push_s = job.model_nbytes / FAST_BYTES_S
    expected_s = step_s + (push_s + pull_s if interval == 1 else 0.0)
    forecast = predict(site(FAST_BYTES_S, compute_s=step_s), job, settings)
    assert forecast.samples_per_s == pytest.approx(4 / expected_s, rel=0.02)


def test_one_worker_that_pushes_longer_than_it_computes() -> None:
    settings = settings_of("batch_size=4", "worker_update_interval=10", num_workers=1)
    job = Job(1_000_000)
    push_s = job.model_nbytes / FAST_BYTES_S
    forecast = predict(site(FAST_BYTES_S, compute_s=0.1), job, settings)
    assert 10 * push_s < 10 * 4 / forecast.samples_per_s < 11.5 * push_s


def test_a_crowd_fills_the_servers_link() -> None:
    settings = settings_of("batch_size=4", "worker_update_interval=50", num_workers=8)
    job = Job(1_000_000)
    forecast = predict(site(*[FAST_BYTES_S] * 8, compute_s=0.1), job, settings)
    assert forecast.received_bytes_s == pytest.approx(FAST_BYTES_S, rel=0.02)


def test_without_links_all_compute_all_the_time() -> None:
    own = Site((Worker("a", 0.5), Worker("b", 0.25)), {})
    forecast = predict(own, Job(1_000_000), settings_of("batch_size=4", num_workers=2))
    assert forecast.samples_per_s == pytest.approx(4 / 0.5 + 4 / 0.25, rel=0.02)
    assert forecast.lost == pytest.approx(0, abs=0.02)


def test_a_server_takes_one_push_after_the_other() -> None:
    own = Site((Worker("a", 0.01), Worker("b", 0.01)), {}, apply_s=0.02)
    forecast = predict(own, Job(1_000_000), settings_of("batch_size=4", num_workers=2))
    assert forecast.samples_per_s == pytest.approx(4 / 0.02, rel=0.02)
