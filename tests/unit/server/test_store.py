"""Stores of slices: whatever their number, they take the same steps as one."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from peers import small_replica
from smolcluster.configs.schema import GradientClipping
from smolcluster.server.slices import spans
from smolcluster.server.store import Store, mean_of
from smolcluster.training.optimizer import CLASSES, clip_factor
from smolcluster.training.replica import Replica

CLIPPING = GradientClipping(enabled=True, max_norm=0.5)
DECAY = 0.1


def new_replica(optimizer: str = "adamw", dtype: torch.dtype = torch.float32) -> Replica:
    """610 weights in ten buckets, the last one shorter; the weight decay ends within one."""
    return small_replica(optimizer, dtype, bucket_values=64, weight_decay=DECAY)


def gradients(replica: Replica, count: int = 5) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for scale in range(count):
        raw = torch.randn(replica.num_params, generator=generator, dtype=replica.params.dtype)
        yield raw * 0.1 * scale


class Stores:
    """A replica's weights in so many slices, as if these were on as many hosts."""

    def __init__(self, replica: Replica, num_stores: int = 1) -> None:
        cut = spans(len(replica.buckets), [1] * num_stores)
        self.stores = [Store.of(replica, span) for span in cut]

    def take(self, gradient: Tensor) -> None:
        for store in self.stores:
            store.take(gradient[store.place])

    def take_difference(self, weights: Tensor) -> None:
        for store in self.stores:
            store.take_difference(weights[store.place])

    def norm(self) -> float:
        return math.hypot(*(norm for store in self.stores for norm in store.norms()))

    def step(self, clip: float, learning_rate: float) -> None:
        for store in self.stores:
            store.step(clip, learning_rate)

    def mix(self, share: float) -> None:
        for store in self.stores:
            store.mix(share)


def train(stores: Stores, gradient: Tensor) -> float:
    stores.take(gradient)
    norm = stores.norm()
    stores.step(clip_factor(norm, CLIPPING), 0.01)
    return norm


def test_each_part_of_a_mean_counts_as_often_as_is_said() -> None:
    parts = [
        (float(count), torch.full((2,), value)) for count, value in ((1, 2.0), (3, 6.0), (4, 1.0))
    ]
    assert mean_of(parts).tolist() == [3.0, 3.0]
    assert mean_of([(0.0, torch.ones(2)), (0.0, torch.ones(2))]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("clip", [1.0, 0.5])
def test_no_element_of_what_is_stepped_along_is_above_the_bound(clip: float) -> None:
    bounded, plain = new_replica(), new_replica()
    *_, gradient = gradients(bounded)
    kept = gradient.clone()
    for replica, taken, how in (
        (bounded, gradient, (clip, 0.01, 0.05)),
        (plain, gradient.mul(clip).clamp(-0.05, 0.05), (1.0, 0.01)),
    ):
        store = Store.of(replica)
        store.take(taken)
        store.step(*how)
    assert torch.equal(bounded.params, plain.params)
    assert torch.equal(gradient, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_stores", [2, 3, 10])
@pytest.mark.parametrize("optimizer", CLASSES)
def test_several_take_the_steps_of_one_bit_for_bit(
    optimizer: str, num_stores: int, dtype: torch.dtype
) -> None:
    one, cut = new_replica(optimizer, dtype), new_replica(optimizer, dtype)
    alone, several = Stores(one), Stores(cut, num_stores)
    assert len(several.stores) == num_stores
    for gradient in gradients(one):
        before = gradient.clone()
        assert train(alone, gradient) == train(several, gradient), "the same norm"
        assert torch.equal(gradient, before), "what was taken is not changed"
        assert torch.equal(one.params, cut.params)
    for name, tensor in one.optimizer.state.items():
        assert torch.equal(tensor, cut.optimizer.state[name]), name
    [whole] = alone.stores
    assert whole.digests() == [each for store in several.stores for each in store.digests()]


@pytest.mark.parametrize("clipped", [False, True])
def test_they_take_the_steps_of_a_single_process(clipped: bool) -> None:
    clipping = GradientClipping(enabled=clipped, max_norm=0.5)
    ours, reference = new_replica(), new_replica()
    stores = Stores(ours, 3)
    for gradient in gradients(ours):
        stores.take(gradient)
        norm = stores.norm()
        stores.step(clip_factor(norm, clipping), 0.01)
        reference.grads.copy_(gradient)
        assert reference.clip(clipping) == norm
        reference.step(0.01)
    torch.testing.assert_close(ours.params, reference.params, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("num_stores", [1, 2, 3])
def test_they_move_towards_a_workers_weights(num_stores: int) -> None:
    replica = new_replica()
    before, theirs = replica.snapshot(), torch.randn(replica.num_params)
    stores = Stores(replica, num_stores)
    stores.take_difference(theirs)
    assert stores.norm() == pytest.approx((theirs - before).norm().item(), rel=1e-5)
    assert torch.equal(replica.params, before), "taking alone changes nothing"
    stores.mix(0.25)
    torch.testing.assert_close(replica.params, 0.75 * before + 0.25 * theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_has_such_a_norm(value: float) -> None:
    replica = new_replica()
    gradient = torch.ones(replica.num_params)
    gradient[300] = value
    stores = Stores(replica, 2)
    stores.take(gradient)
    assert not math.isfinite(stores.norm())


def test_squares_that_overflow_have_a_finite_norm() -> None:
    replica = new_replica()
    stores = Stores(replica, 2)
    stores.take(torch.full((610,), 1e30))
    assert stores.norm() == pytest.approx(1e30 * math.sqrt(610))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [0, 4, 9])
def test_the_least_difference_changes_the_digest_of_its_bucket_only(
    number: int, dtype: torch.dtype
) -> None:
    replica, other = new_replica("sgd", dtype), new_replica("sgd", dtype)
    assert Store.of(replica).digests() == Store.of(other).digests()
    last = other.params[other.buckets[number].stop - 1]
    last.copy_(torch.nextafter(last, torch.ones_like(last)))
    pairs = zip(Store.of(replica).digests(), Store.of(other).digests(), strict=True)
    assert [one != changed for one, changed in pairs] == [each == number for each in range(10)]
