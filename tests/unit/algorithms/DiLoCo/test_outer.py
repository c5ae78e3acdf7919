"""The outer optimizer against torch's SGD and against the papers' formulas in plain numbers."""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peers import opened, small_replica
from smolcluster.algorithms.DiLoCo.exchange import Layout, step_assembler
from smolcluster.algorithms.DiLoCo.fragments import Fragment, cut
from smolcluster.algorithms.DiLoCo.outer import (
    DelayedNesterov,
    OuterOptimizer,
    outer_defaults,
    refreshed,
    turn,
)
from smolcluster.algorithms.DiLoCo.outer_links import OuterSlice
from smolcluster.errors import ProtocolError
from smolcluster.server.store import Part, PartArrived
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import CountedPart, OuterStep, PartKey, SendWeights, TakeStep

REPEATABLE = settings(derandomize=True, database=None, max_examples=40)
NUMBERS = st.floats(-10, 10, width=32)
IT, ANOTHER = "a" * 8, "b" * 8
"""Workers."""


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


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 49, 10_000])
def test_momentum_is_that_of_the_papers_and_a_single_round_takes_the_mean(num_rounds: int) -> None:
    is_single = num_rounds <= 1
    assert outer_defaults(num_rounds) == ((1.0, 0.0) if is_single else (0.7, 0.5))
    assert outer_defaults(num_rounds, has_muon=True) == ((1.0, 0.0) if is_single else (0.7, 0.6))


def test_one_by_one_agreeing_changes_add_up_to_about_as_much_as_together() -> None:
    for has_muon in (False, True):
        gamma, beta = outer_defaults(49, has_muon=has_muon)
        own_gamma, own_beta = outer_defaults(49, has_muon=has_muon, is_async=True)
        together = gamma / (1 - beta)
        one_by_one = own_gamma * (1 + own_beta / (1 - own_beta) / 2)  # a delay of 2 rounds
        assert one_by_one == pytest.approx(together, rel=0.11)


@REPEATABLE
@given(
    st.lists(
        st.tuples(NUMBERS, NUMBERS, st.one_of(st.just(0.0), st.floats(0.01, 1))),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_delayed_momentum_is_that_of_the_formulas(
    pushes: list[tuple[float, float, float]], delay: int, beta: float
) -> None:
    gamma, theta, momentum = 0.7, 1.0, 0.0
    buffered: list[tuple[float, float]] = []
    values = torch.ones(1, dtype=torch.float64)
    outer = DelayedNesterov(1, gamma, beta, delay, dtype=torch.float64)
    for change, start, share in pushes:
        given, begun = (torch.tensor([each], dtype=torch.float64) for each in (change, start))
        outer.apply(values, given, share, outer.count(share), start=begun)
        assert given.item() == change, "it stays as it is"
        delta = (change - 0.5 * (start - theta)) / (1 - 0.5 * (1 - share))
        if beta and delta * momentum < 0:  # of one value the cosine is 1 or -1
            delta -= delta * abs(delta) / (abs(delta) + abs(momentum))
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
        delta = torch.arange(3.0) + number
        synchronous.step(together, delta)
        for _ in range(4):
            delayed.apply(one_by_one, delta, 0.25, delayed.count(0.25))
        torch.testing.assert_close(one_by_one, together)


def test_a_worker_that_is_alone_has_nothing_stale() -> None:
    delta = torch.arange(3.0)
    assert torch.equal(refreshed(delta, torch.zeros(3), share=1.0), delta)


@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_a_steady_movement_keeps_its_speed(num_workers: int) -> None:
    """All change by 1 a round, in which the others have moved the weights by their part of that."""
    share = 1 / num_workers
    assert refreshed(torch.ones(1), torch.tensor([1 - share]), share).item() == pytest.approx(1)


def test_stale_changes_do_not_go_far_beyond_where_each_of_them_led() -> None:
    """Four workers come to 0 whatever they begin with, and bring their changes in turn."""
    passed = {}
    for is_known in (True, False):
        outer = DelayedNesterov(1, 1.0, 0.0, momentum_delay=8)
        theta, starts, way = torch.ones(1), [torch.ones(1)] * 4, list[float]()
        for number in range(40):
            start = starts[number % 4]
            moves_by = outer.count(0.25)
            outer.apply(theta, start, 0.25, moves_by, start=start if is_known else None)
            starts[number % 4] = theta.clone()
            way.append(theta.item())
        passed[is_known] = way
    assert min(passed[True]) > 0.8 * min(passed[False])
    late = {is_known: max(map(abs, way[-4:])) for is_known, way in passed.items()}
    assert late[True] < 0.2 * late[False]


def test_a_change_is_turned_towards_momentum_block_by_block() -> None:
    """Of blocks of two values: aligned, against momentum, weakly aligned, and of a momentum of 0."""
    momentum = torch.tensor([2.0, 0.0] * 3 + [0.0, 0.0], dtype=torch.float64)
    weak = 3 * math.cos(1.4), 3 * math.sin(1.4)
    delta = torch.tensor([3.0, 4.0, -3.0, 4.0, *weak, -1.0, 1.0], dtype=torch.float64)
    turned = delta.clone()
    turn(turned, momentum, [slice(start, start + 2) for start in range(0, 8, 2)])
    assert torch.equal(turned[:2], delta[:2]), "a cosine of 0.6"
    assert torch.equal(turned[6:], delta[6:])
    # cosine -0.6, |Δ| = 5, |m| = 2: of the -3 against momentum a part 0.6 · 5 / 7 is taken off
    assert turned[2:4].tolist() == pytest.approx([-3 * (1 - 0.6 * 5 / 7), 4])
    weight = 0.5 * (1 - math.cos(1.4)) * 3 / 5
    along = (1 - weight) * math.cos(1.4) + weight, (1 - weight) * math.sin(1.4)
    assert turned[4:6].tolist() == pytest.approx([3 * each / math.hypot(*along) for each in along])


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


class Follower:
    """A worker's copy of the weights, and the versions that it has of their fragments."""

    def __init__(self, layout: Layout, weights: Tensor, codec_name: str) -> None:
        self._layout, self._codec = layout, codec_name
        self.weights = weights.clone()
        self.versions = [0] * len(layout.fragments)

    def take(self, frames: Sequence[Frame]) -> None:
        assembler = step_assembler(self._codec, self._layout)
        for frame in frames:
            message, payload = opened(frame)
            assert isinstance(message, OuterStep)
            is_whole = message.base_version is None
            _, values = assembler.take(message, payload)
            if values is None:
                continue
            number = message.fragment
            assert message.base_version in (None, self.versions[number])
            new = values if is_whole else self._layout.gather(number, self.weights) - values
            self._layout.fragments[number].scatter(new, self.weights)
            self.versions[number] = message.version


def slice_of(replica: Replica, outer: OuterOptimizer, codec_down: str | None) -> OuterSlice:
    """All weights of a replica, as a slice."""
    return OuterSlice(
        replica.params,
        Layout.of(replica, cut(replica.layers, 1)),
        outer,
        codec_down,
        buckets=replica.buckets,
        span=range(len(replica.buckets)),
        incarnation="here",
        is_async=isinstance(outer, DelayedNesterov),
    )


def step(held: OuterSlice, worker: str, number: int, values: Tensor, **how: Any) -> None:
    """A worker brings a change of a fragment, and the slice steps along it."""
    key = PartKey(instance=worker, of=0)
    came = PartArrived(
        session_id=1,
        of=0,
        fragment=number,
        bucket=0,
        values=values,
        part=Part(number, values, Mock()),
    )
    held.take(key, came)
    part = CountedPart(key=key, weight=how.pop("weight", 1.0))
    held.take_step(TakeStep(version=max(held.versions) + 1, parts=(part,), **how))


def apply(held: OuterSlice, outer: DelayedNesterov, worker: str, values: Tensor) -> None:
    """The same, with a weight of its own."""
    step(held, worker, 0, values, weight=0.25, one_by_one=True, moves_by=outer.count(0.25))


def frames_for(held: OuterSlice, number: int, base_version: int) -> Sequence[Frame]:
    return held.frames_for(
        SendWeights(
            instance=IT,
            version=held.versions[number],
            fragment=number,
            base_version=base_version,
        )
    )


def test_changes_one_by_one_need_delayed_momentum() -> None:
    replica = small_replica()
    store = slice_of(replica, OuterOptimizer(replica.num_params, 0.7, 0.5), None)
    with pytest.raises(ProtocolError, match="one by one that are taken together"):
        step(store, IT, 0, torch.zeros(replica.num_params), one_by_one=True)


@pytest.mark.parametrize("codec_down", [None, "int8"])
def test_a_change_is_counted_from_what_its_worker_has(codec_down: str | None) -> None:
    """Also with a codec that loses some of it, and after the worker has gone."""
    replica = small_replica()
    outer = DelayedNesterov(replica.num_params, 0.7, 0.5, momentum_delay=9)
    store = slice_of(replica, outer, codec_down)
    follower = Follower(store.layout, replica.params, codec_down or "fp32")
    store.follow(IT)
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 7):
        worker = ANOTHER if version % 2 else IT
        values = torch.randn(replica.num_params, generator=generator) * 0.01
        expected, start = replica.params.clone(), None if version % 2 else follower.weights
        reference = DelayedNesterov(replica.num_params, 0.7, 0.5, momentum_delay=9)
        reference.apply(expected, values, 0.25, None, start=start)
        apply(store, outer, worker, values)
        assert torch.equal(replica.params, expected)
        if version == 4:
            follower.take(frames_for(store, 0, follower.versions[0]))
            assert torch.equal(follower.weights, replica.params) == (codec_down is None)
    store.leave(IT)
    values = torch.ones(replica.num_params)
    expected = replica.params - 0.7 * 0.25 * values
    apply(store, outer, IT, values)
    torch.testing.assert_close(replica.params, expected)
