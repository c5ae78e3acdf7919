"""Shares of the weights by what links carry: against brute force, and where the answer is known."""

from math import inf
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.DiLoCo import costs as diloco
from smolcluster.algorithms.planning.costs import Interface, Job, Site, Worker
from smolcluster.algorithms.planning.stores import (
    Host,
    Traffic,
    as_spread,
    best_shares,
    exchange_s,
    least_time,
)
from smolcluster.algorithms.SynchronousPS import costs as syncps
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import AlgorithmName

STEPS = 10


def hosts(*rates: float, on_server: int = 0) -> list[Host]:
    """A server and workers, each with a link of the same rate both ways."""
    server, *others = rates
    return [
        Host("server", server, server, on_server, is_server=True),
        *(Host(f"w{number}", rate, rate, 1) for number, rate in enumerate(others)),
    ]


def cuts(num_hosts: int, steps: int = STEPS) -> list[list[float]]:
    """All ways to share out so many equal pieces."""
    if num_hosts == 1:
        return [[steps / STEPS]]
    return [
        [first / STEPS, *rest]
        for first in range(steps + 1)
        for rest in cuts(num_hosts - 1, steps - first)
    ]


rates = st.floats(1, 100)
nbytes = st.floats(1, 50)


@settings(max_examples=20)
@given(st.lists(rates, min_size=1, max_size=3), rates, nbytes, nbytes, st.integers(0, 1))
def test_no_other_shares_are_faster(
    others: list[float], server: float, sent: float, received: float, on_server: int
) -> None:
    all_hosts, traffic = hosts(server, *others, on_server=on_server), Traffic(sent, received, 0.5)
    shares = least_time(all_hosts, all_hosts, traffic)
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(1.0)
    own = exchange_s(all_hosts, list(shares.values()), traffic)
    best = min(exchange_s(all_hosts, cut, traffic) for cut in cuts(len(all_hosts)))
    assert own <= best * (1 + 1e-6)


def test_equal_links_share_equally_and_move_what_a_ring_moves() -> None:
    all_hosts = hosts(10.0, 10.0, 10.0, 10.0, on_server=1)
    shares = best_shares(all_hosts, Traffic(8.0, 8.0))
    assert shares == pytest.approx(dict.fromkeys(("server", "w0", "w1", "w2"), 0.25))
    ring_nbytes = 2 * 3 / 4 * 8.0
    assert exchange_s(all_hosts, [0.25] * 4, Traffic(8.0, 8.0)) == pytest.approx(ring_nbytes / 10.0)


def test_a_slow_machine_hosts_none() -> None:
    shares = best_shares(hosts(10.0, 10.0, 10.0, 0.5), Traffic(1.0, 1.0))
    assert next(iter(shares)) == "server"
    assert set(shares) == {"server", "w0", "w1"}


@pytest.mark.parametrize("server", [inf, 1e6])
def test_a_server_that_nobody_can_fill_holds_all(server: float) -> None:
    assert best_shares(hosts(server, 1.0, 1.0), Traffic(1.0, 1.0)) == {"server": 1.0}


LINK = 1e6
MODES = "sync", "streaming"


def site_of(num_workers: int) -> Site:
    workers = (Worker(f"w{n}", 0.1, 0.0, LINK, LINK, 1e-3, "eth0") for n in range(num_workers))
    return Site(tuple(workers), {"eth0": Interface(LINK, LINK)})


@pytest.mark.parametrize(
    ("algorithm", "costs", "more"),
    [
        ("syncps", syncps, ()),
        *(("diloco", diloco, (f"mode={mode}", "local_steps=2")) for mode in MODES),
    ],
)
def test_stores_that_are_tried_first_are_predicted_to_be_faster(
    algorithm: AlgorithmName, costs: ModuleType, more: tuple[str, ...]
) -> None:
    names = ", ".join(f"w{number}" for number in range(4))
    overrides = (
        f"workers=[{names}]",
        "num_workers=4",
        "server=mini1",
        f"host_ip={{mini1: 10.0.0.1, {', '.join(f'w{n}: 10.0.0.1' for n in range(4))}}}",
        *more,
    )
    site, job = site_of(4), Job(1_000_000)
    own = load_settings(algorithm, "stdlib", None, overrides, {})
    first = next(costs.candidates(site, job, own))
    assert next(iter(first["servers"])) == "mini1"
    keys = tuple(f"{name}={value}" for name, value in first.items())
    spread = load_settings(algorithm, "stdlib", None, (*overrides, *keys), {})
    slow, fast = (costs.predict(site, job, each) for each in (own, spread))
    assert fast.samples_per_s > 1.5 * slow.samples_per_s
    assert as_spread(site, own, Traffic(1.0, 1.0)) is site
