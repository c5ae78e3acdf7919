"""The store's outer steps: who applies what it sends has its weights, bit for bit, however far behind."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from peers import opened
from smolcluster.algorithms.DiLoCo.exchange import Layout, step_assembler
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.algorithms.DiLoCo.outer_store import OuterStore
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import OuterStep
from unit.algorithms.SynchronousPS.actors import small_replica


class Follower:
    """A worker's copy of the weights, and the versions that it has of their fragments."""

    def __init__(self, layout: Layout, weights: Tensor, codec_name: str) -> None:
        self._layout, self._codec = layout, codec_name
        self.weights = weights.clone()
        self.versions = [0] * len(layout.fragments)
        self.num_whole = 0

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
            self.num_whole += is_whole


def store_of(
    replica: Replica, codec_down: str | None, num_fragments: int
) -> tuple[OuterStore, Layout]:
    layout = Layout.of(replica, cut(replica.layers, num_fragments))
    outer = OuterOptimizer(replica.num_params, 0.7, 0.5)
    return OuterStore(replica.params, layout, outer, codec_down), layout


def step(store: OuterStore, layout: Layout, number: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.fragments[number].numel, generator=generator) * 0.01
    store.step(number, [(1.0, values)], max(store.versions) + 1)


@pytest.mark.parametrize(
    ("codec_down", "num_fragments", "behind", "is_whole"),
    [
        (None, 2, 1, True),
        *(("int8", 2, 1, False), ("int8", 2, 3, False), ("int8", 1, 4, True)),
        ("int4", 1, 6, False),
    ],
)
def test_who_is_some_outer_steps_behind_comes_to_the_stores_weights(
    codec_down: str | None, num_fragments: int, behind: int, is_whole: bool
) -> None:
    replica = small_replica("sgd", torch.float32)
    store, layout = store_of(replica, codec_down, num_fragments)
    follower = Follower(layout, replica.params, codec_down or "fp32")
    for seed in range(2 * behind):
        for number in range(num_fragments):
            step(store, layout, number, seed)
        if (seed + 1) % behind == 0:
            for number in range(num_fragments):
                follower.take(store.frames_for("it", number, follower.versions[number]))
            assert torch.equal(follower.weights, replica.params)
    assert follower.num_whole == (2 * num_fragments if is_whole else 0)


@pytest.mark.parametrize("codec_down", [None, "int8", "int4"])
def test_what_a_followed_worker_is_sent_leads_to_the_weights(codec_down: str | None) -> None:
    """It is sent the way from what it has: what the codec loses of one way is in the next."""
    replica = small_replica()
    layout = Layout.of(replica, cut(replica.layers, 1))
    outer = DelayedNesterov(replica.num_params, 0.7, 0.5, momentum_delay=2)
    store = OuterStore(replica.params, layout, outer, codec_down, is_async=True)
    follower = Follower(layout, replica.params, codec_down or "fp32")
    store.follow("it")
    generator = torch.Generator().manual_seed(0)
    for version in (1, 2, 3):  # as often as others have brought changes meanwhile
        values = torch.randn(replica.num_params, generator=generator) * 0.01
        store.apply("another", values, 0.25, outer.count(0.25), version)
    for _ in range(8):
        follower.take(store.frames_for("it", 0, follower.versions[0]))
    assert follower.versions == [3]
    torch.testing.assert_close(follower.weights, replica.params, rtol=0, atol=1e-6)
    store.leave("it")


def test_changes_one_by_one_need_delayed_momentum() -> None:
    store, _ = store_of(replica := small_replica(), None, 1)
    with pytest.raises(TypeError, match="OuterOptimizer takes the changes of all workers at once"):
        store.apply("it", torch.zeros(replica.num_params), 1.0, None, 1)


@pytest.mark.parametrize("codec_down", [None, "int8"])
def test_a_change_is_counted_from_what_its_worker_has(codec_down: str | None) -> None:
    """Also with a codec that loses some of it, and after the worker has gone."""
    replica = small_replica()
    layout = Layout.of(replica, cut(replica.layers, 1))
    outer = DelayedNesterov(replica.num_params, 0.7, 0.5, momentum_delay=9)
    store = OuterStore(replica.params, layout, outer, codec_down, is_async=True)
    follower = Follower(layout, replica.params, codec_down or "fp32")
    store.follow("it")
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 7):
        worker = "another" if version % 2 else "it"
        values = torch.randn(replica.num_params, generator=generator) * 0.01
        expected, start = replica.params.clone(), None if version % 2 else follower.weights
        reference = DelayedNesterov(replica.num_params, 0.7, 0.5, momentum_delay=9)
        reference.apply(expected, values, 0.25, None, start=start)
        store.apply(worker, values, 0.25, outer.count(0.25), version)
        assert torch.equal(replica.params, expected)
        if version == 4:
            follower.take(store.frames_for("it", 0, follower.versions[0]))
            assert torch.equal(follower.weights, replica.params) == (codec_down is None)
    store.leave("it")
    values = torch.ones(replica.num_params)
    expected = replica.params - 0.7 * 0.25 * values
    store.apply("it", values, 0.25, outer.count(0.25), 7)
    torch.testing.assert_close(replica.params, expected)
