"""The outer optimizer against torch's SGD and against the papers' formulas in plain numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.DiLoCo.fragments import Fragment
from smolcluster.algorithms.DiLoCo.outer import (
    DelayedNesterov,
    OuterOptimizer,
    outer_defaults,
)

REPEATABLE = settings(derandomize=True, deadline=None, database=None)
NUMBERS = st.floats(-10, 10, width=32)


@pytest.mark.parametrize(("learning_rate", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.4, 0.3)])
def test_it_is_torchs_nesterov(learning_rate: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(20, generator=generator, dtype=torch.float64)
    reference = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([reference], lr=learning_rate, momentum=momentum, nesterov=True)
    outer = OuterOptimizer(20, learning_rate, momentum, dtype=torch.float64)
    for _ in range(10):
        delta = torch.randn(20, generator=generator, dtype=torch.float64)
        reference.grad = delta.clone()
        sgd.step()
        outer.step(theta, delta)
        torch.testing.assert_close(theta, reference.data, rtol=1e-13, atol=1e-13)


def test_part_by_part_is_the_whole() -> None:
    whole, parts = (OuterOptimizer(10, 0.7, 0.9) for _ in range(2))
    expected, theta = torch.zeros(10), torch.zeros(10)
    for number in range(3):
        delta = torch.arange(10.0) + number
        whole.step(expected, delta)
        for fragment in (Fragment((slice(0, 2), slice(7, 10))), Fragment((slice(2, 7),))):
            values = fragment.view(theta).clone()
            parts.step(values, fragment.view(delta), fragment)
            fragment.scatter(values, theta)
    assert torch.equal(theta, expected)


@REPEATABLE
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_without_momentum_the_workers_mean_replaces_the_weights(
    values: list[tuple[float, float]],
) -> None:
    start = torch.tensor([first for first, _ in values], dtype=torch.float64)
    come_to = torch.tensor([second for _, second in values], dtype=torch.float64)
    theta = start.clone()
    OuterOptimizer(len(values), 1.0, 0.0, dtype=torch.float64).step(theta, start - come_to)
    torch.testing.assert_close(theta, come_to, rtol=1e-12, atol=1e-12)


def test_a_single_round_takes_the_mean_of_the_workers() -> None:
    for has_muon in (False, True):
        assert (
            outer_defaults(1, has_muon=has_muon) == outer_defaults(0, has_muon=has_muon) == (1, 0)
        )


@pytest.mark.parametrize("num_rounds", [2, 49, 149, 150, 10_000])
def test_momentum_does_not_jump_with_the_number_of_rounds(num_rounds: int) -> None:
    assert outer_defaults(num_rounds) == (0.7, 0.5)


@pytest.mark.parametrize("num_rounds", [2, 49, 150, 10_000])
def test_with_muon_inside_momentum_is_that_of_its_paper(num_rounds: int) -> None:
    assert outer_defaults(num_rounds, has_muon=True) == (0.7, 0.6)


@REPEATABLE
@given(
    st.lists(
        st.tuples(NUMBERS, st.one_of(st.just(0.0), st.floats(0.01, 1))), min_size=1, max_size=20
    ),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_delayed_momentum_is_that_of_the_formulas(
    pushes: list[tuple[float, float]], delay: int, beta: float
) -> None:
    gamma, theta, momentum = 0.7, 1.0, 0.0
    buffered: list[tuple[float, float]] = []
    values = torch.ones(1, dtype=torch.float64)
    outer = DelayedNesterov(1, gamma, beta, delay, dtype=torch.float64)
    for delta, share in pushes:
        values_of = torch.tensor([delta], dtype=torch.float64)
        outer.apply(values, values_of, share, outer.count(share))
        theta -= gamma * share * delta
        buffered.append((delta, share))
        if len(buffered) == delay:
            total = sum(share for _, share in buffered)
            mean = sum(delta * share for delta, share in buffered) / total if total else 0.0
            momentum = beta * momentum + mean
            theta -= gamma * beta * momentum
            buffered.clear()
        assert values.item() == pytest.approx(theta, rel=1e-9, abs=1e-9)


def test_equal_changes_of_n_workers_with_a_delay_of_n_are_synchronous_steps() -> None:
    together, one_by_one = torch.zeros(3), torch.zeros(3)
    synchronous = OuterOptimizer(3, 0.7, 0.9)
    delayed = DelayedNesterov(3, 0.7, 0.9, momentum_delay=4)
    for number in range(5):
        delta = torch.arange(3.0) - number
        synchronous.step(together, delta)
        for _ in range(4):
            delayed.apply(one_by_one, delta, 0.25, delayed.count(0.25))
        torch.testing.assert_close(one_by_one, together)


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_it_goes_on_from_its_state(num_before: int) -> None:
    deltas = torch.randn(8, 5, generator=torch.Generator().manual_seed(3))
    theta = torch.zeros(5)
    first, second = (DelayedNesterov(5, 0.7, 0.9, momentum_delay=3) for _ in range(2))
    for delta in deltas[:num_before]:
        first.apply(theta, delta, 0.5, first.count(0.5))
    for name, values in first.state.items():
        second.state[name].copy_(values)
    copy = theta.clone()
    for delta in deltas[num_before:]:
        first.apply(theta, delta, 0.5, first.count(0.5))
        second.apply(copy, delta, 0.5, second.count(0.5))
    assert torch.equal(copy, theta)
