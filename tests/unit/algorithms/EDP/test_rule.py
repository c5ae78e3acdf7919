"""EDP's rule against the formulas of its docstring, without a socket."""

import math

import pytest

from smolcluster.algorithms.EDP import rule
from smolcluster.algorithms.EDP.config import StalenessConfig
from smolcluster.server.plausible import Norms, PushRefused, check_norm


@pytest.mark.parametrize(
    ("version", "base_version", "own_versions", "tau"),
    [
        (0, 0, [], 0),
        (10, 10, [], 0),
        (10, 4, [], 6),
        (10, 4, [5, 7], 4),
        (10, 4, [5, 6, 7, 8, 9, 10], 0),
        (10, 4, [1, 2, 3, 4], 6),
    ],
    ids=[
        "the first push",
        "fresh weights",
        "all by others",
        "two by itself",
        "alone",
        "own pushes of before the pull do not count",
    ],
)
def test_staleness_counts_the_pushes_of_others_since_the_pull(
    version: int, base_version: int, own_versions: list[int], tau: int
) -> None:
    assert rule.staleness(version, base_version, own_versions) == tau


@pytest.mark.parametrize(
    ("tau", "exponent", "factor"),
    [(0, 0.5, 1.0), (0, 2.0, 1.0), (3, 0.5, 0.5), (9, 1.0, 0.1), (100, 0.0, 1.0)],
)
def test_the_factor_is_the_polynomial_of_fedasync(tau: int, exponent: float, factor: float) -> None:
    assert rule.scale(tau, exponent) == pytest.approx(factor)
    assert rule.mixing_weight(tau, 0.6, exponent) == pytest.approx(0.6 * factor)


@pytest.mark.parametrize(
    ("tau", "bound", "dropped"), [(4, 4, False), (5, 4, True), (10**6, None, False)]
)
def test_the_bound_is_the_oldest_push_that_is_taken(
    tau: int, bound: int | None, dropped: bool
) -> None:
    assert rule.too_stale(tau, StalenessConfig(bound=bound)) is dropped


@pytest.mark.parametrize("norm", [2.01e6, 1e30, math.inf, math.nan])
def test_a_norm_out_of_all_proportion_is_refused(norm: float) -> None:
    norms = Norms()
    norms.add(2.0, "worker 1")
    assert check_norm(1.99e6, norms.limit) == 1.99e6
    with pytest.raises(PushRefused):
        check_norm(norm, norms.limit)


def test_what_is_plausible_follows_the_largest_of_the_newest_norms() -> None:
    norms = Norms()
    assert norms.limit == 1e18, "squares must not overflow"
    norms.add(1e-9, "a")
    assert norms.limit == 1e6, "a model that has converged may meet a sample that is new to it"
    norms.add(50.0, "b")
    assert norms.limit == 5e7
    for _ in range(64):
        norms.add(2.0, "c")
    assert norms.limit == 2e6


def test_only_a_push_that_stands_out_is_suspected() -> None:
    norms = Norms()
    assert norms.suspect == ""
    for number in range(10):
        norms.add(1.0 + number, "worker 1")
    assert norms.suspect == ""
    norms.add(1e5, "worker 2 (pi5) in step 11")
    assert "worker 2 (pi5) in step 11" in norms.suspect
