"""EDP's rule against the formulas of its docstring, without a socket."""

import math

import pytest
import torch

from harness import local_settings
from smolcluster.algorithms.EDP import rule
from smolcluster.algorithms.EDP.config import StalenessConfig
from smolcluster.configs.schema import GradientClipping
from smolcluster.server.plausible import Norms, PushRefused
from smolcluster.server.store import Store
from smolcluster.training.build import build
from smolcluster.training.replica import Replica

UNCLIPPED = GradientClipping(enabled=False)


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


def replica(optimizer: str) -> Replica:
    settings = local_settings(f"optimizer={optimizer}")
    return build(settings.train, 42, settings.node.dataset, torch.device("cpu")).replica


def gradient_for(replica: Replica, norm: float) -> torch.Tensor:
    raw = torch.randn(replica.num_params, generator=torch.Generator().manual_seed(1))
    return raw.mul_(norm / raw.norm().item())


def test_a_push_is_one_step_of_plain_gradient_descent() -> None:
    ours = replica("sgd")
    before, gradient = ours.snapshot(), gradient_for(ours, 3.0)
    norm = rule.apply_gradient(Store.of(ours), gradient, 0.1, UNCLIPPED)
    assert norm == pytest.approx(3.0, rel=1e-5)
    torch.testing.assert_close(ours.params, before - 0.1 * gradient)


def test_a_long_gradient_is_clipped_and_its_length_before_is_told() -> None:
    ours = replica("sgd")
    before, gradient = ours.snapshot(), gradient_for(ours, 3.0)
    norm = rule.apply_gradient(
        Store.of(ours), gradient, 0.1, GradientClipping(enabled=True, max_norm=1.0)
    )
    assert norm == pytest.approx(3.0, rel=1e-5)
    torch.testing.assert_close(ours.params, before - 0.1 * gradient / 3.0, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.norm().item(), 3.0, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("norm", [2e6, 1e30, math.nan])
def test_a_push_out_of_all_proportion_is_refused_before_it_changes_anything(norm: float) -> None:
    ours, norms = replica("adam"), Norms()
    norms.add(2.0, "worker 1")
    rule.apply_gradient(Store.of(ours), gradient_for(ours, 1.0), 0.1, UNCLIPPED, norms.limit)
    before = ours.snapshot(), {name: each.clone() for name, each in ours.optimizer.state.items()}
    gradient = gradient_for(ours, 1.01) * norm
    with pytest.raises(PushRefused):
        rule.apply_gradient(Store.of(ours), gradient, 0.1, UNCLIPPED, norms.limit)
    with pytest.raises(PushRefused):
        rule.mix(Store.of(ours), gradient, 0.5, norms.limit)
    assert torch.equal(ours.params, before[0])
    assert all(torch.equal(each, before[1][name]) for name, each in ours.optimizer.state.items())


def test_what_is_clipped_may_be_of_any_length() -> None:
    ours = replica("sgd")
    before = ours.params.clone()
    rule.apply_gradient(
        Store.of(ours), gradient_for(ours, 1e12), 0.1, GradientClipping(), limit=1e6
    )
    assert 0 < (ours.params - before).norm() <= 0.1 * 1.0 * 1.001


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


def test_adam_moves_less_for_a_stale_push() -> None:
    """A factor on the gradient would be cancelled by Adam; one on the learning rate is not."""
    fresh, stale = replica("adam"), replica("adam")
    before, gradient = fresh.snapshot(), gradient_for(fresh, 1.0)
    rule.apply_gradient(Store.of(fresh), gradient, 1e-3 * rule.scale(0, 0.5), UNCLIPPED)
    rule.apply_gradient(Store.of(stale), gradient, 1e-3 * rule.scale(3, 0.5), UNCLIPPED)
    moved, moved_less = (fresh.params - before).norm(), (stale.params - before).norm()
    assert moved_less / moved == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.999])
def test_mixing_goes_so_much_of_the_way_to_a_workers_weights(alpha: float) -> None:
    ours = replica("sgd")
    before, theirs = ours.snapshot(), gradient_for(ours, 7.0)
    distance = rule.mix(Store.of(ours), theirs, alpha)
    torch.testing.assert_close(ours.params, (1 - alpha) * before + alpha * theirs)
    torch.testing.assert_close(ours.grads, theirs - before)
    assert distance == pytest.approx((theirs - before).norm().item(), rel=1e-5)
