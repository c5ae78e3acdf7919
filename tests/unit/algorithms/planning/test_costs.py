"""How flows share what they share, and what is known of sizes."""

from dataclasses import replace
from functools import partial
from math import inf

import pytest

from smolcluster.algorithms.planning.costs import (
    STEP_HANDLING_S,
    VALUE_NBYTES,
    Forecast,
    Interface,
    Job,
    Site,
    Worker,
    costs_of,
    lost_share,
    seconds_of,
    up_rates,
)
from smolcluster.codec.registry import get_codec
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import AlgorithmName
from smolcluster.configs.spec import get_algorithm
from unit.algorithms.planning.sites import FAST_BYTES_S, site

slow = partial(site, limit=100.0)


def always(_place: int, rate: float) -> float:
    return rate


APART = Site(
    (Worker("a", 1.0, up_bytes_s=80, via="eth0"), Worker("b", 1.0, up_bytes_s=80, via="wlan0")),
    {"eth0": Interface(50, 50), "wlan0": Interface(20, 20)},
)
BESIDE = Site((Worker("a", 1.0), *slow(80, 80).workers), {"eth0": Interface(100, 100)})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (up_rates(slow(30, 40), always), [30, 40]),
        (up_rates(slow(10, 80, 90), always), [10, 45, 45]),
        (up_rates(slow(100, 100), lambda n, rate: rate * (0.2, 1.0)[n]), [100 / 1.2, 100 / 1.2]),
        (up_rates(APART, always), [50, 20]),
        (up_rates(BESIDE, always), [inf, 50, 50]),
    ],
    ids=[
        "flows that fit have what their own links give",
        "flows that do not fit share evenly, and slow links leave the rest",
        "who is mostly silent leaves the link to others",
        "workers of different interfaces do not share",
        "the server's own machine shares no link",
    ],
)
def test_links_are_shared(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected)


def test_nothing_passes_a_link_that_is_down() -> None:
    assert seconds_of(1, 0) == float("inf")
    assert seconds_of(0, 0) == 0


def test_what_is_lost_is_a_share() -> None:
    assert lost_share(5, [4, 6]) == pytest.approx(0.5)
    assert lost_share(11, [4, 6]) == 0


@pytest.mark.parametrize("numel", [300_000, 1_000_001, 50_000_000])
@pytest.mark.parametrize("name", VALUE_NBYTES)
def test_an_encoded_value_takes_what_its_codec_makes(name: str, numel: int) -> None:
    made = get_codec(name).encoded_nbytes(numel)
    assert Job(numel).encoded_nbytes(name) == pytest.approx(made, rel=5e-3)


@pytest.mark.parametrize("algorithm", ["edp", "syncps", "diloco"])
@pytest.mark.parametrize(
    ("num_cores", "expected"), [(inf, 1 / STEP_HANDLING_S), (2, 2 / (1e-4 + STEP_HANDLING_S))]
)
def test_of_a_small_model_there_are_as_many_steps_as_can_be_handled(
    algorithm: str, num_cores: float, expected: float
) -> None:
    """By the server one after the other, and on one machine by its cores with all else."""
    small = Site(tuple(Worker(name, 1e-4) for name in "abcd"), {}, num_cores=num_cores)
    settings = load_settings(algorithm, "digits", None, (), {}, local=True, local_workers=4)
    costs = costs_of(get_algorithm(algorithm))
    assert costs is not None
    forecast = costs.predict(small, Job(10_000, 1_438), settings)
    steps_s = forecast.samples_per_s / settings.train.samples_per_push
    assert steps_s == pytest.approx(min(expected, 1 / STEP_HANDLING_S))


def gpt_forecast(algorithm: AlgorithmName, found: Site) -> Forecast:
    """Of a GPT of 1.83 M parameters, with batches of 4 x 64 tokens and int8."""
    settings = load_settings(
        *(algorithm, "stdlib", None, ("batch_size=4", "codec=int8"), {}),
        local=True,
        local_workers=len(found.workers),
    )
    costs = costs_of(get_algorithm(algorithm))
    assert costs is not None
    return costs.predict(found, Job(1_830_000), settings)


@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_a_slower_link_never_makes_it_faster(algorithm: AlgorithmName) -> None:
    rates = [
        gpt_forecast(algorithm, site(*[each] * 3, limit=each, compute_s=0.35, latency_s=1e-3))
        for each in (1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7, 1e8)
    ]
    assert rates == sorted(rates, key=lambda each: each.samples_per_s)


@pytest.mark.parametrize(
    ("algorithm", "tokens_s", "is_exact"), [("edp", 693, False), ("syncps", 479, True)]
)
def test_the_five_hosts_that_were_measured(
    algorithm: AlgorithmName, tokens_s: float, is_exact: bool
) -> None:
    links = *[FAST_BYTES_S] * 3, FAST_BYTES_S / 5
    *fast, last = site(*links, compute_s=0.35, latency_s=1e-3).workers
    hosts = replace(site(*links), workers=(*fast, replace(last, compute_s=0.9)))
    forecast = gpt_forecast(algorithm, hosts)
    assert 64 * forecast.samples_per_s == pytest.approx(tokens_s, rel=0.2)
    assert forecast.received_bytes_s <= FAST_BYTES_S * 1.01
    assert forecast.is_exact is is_exact
