"""The weights that local steps change, those they began with, and those at the send of a change."""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from smolcluster.configs.schema import GradientClipping
from smolcluster.training.local_copy import InProcess, LocalCopy
from smolcluster.training.replica import Replica

FRAGMENTS = (slice(0, 3),), (slice(3, 5),)


class ThreeAndTwo(nn.Module):
    """Two parameters, of which each is a fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.two = nn.Linear(3, 1, bias=False), nn.Linear(2, 1, bias=False)


def copy_of_five() -> tuple[Replica, LocalCopy]:
    replica = Replica(ThreeAndTwo(), "sgd")
    copy = LocalCopy(InProcess(replica, replica.optimizer), FRAGMENTS)
    copy.load([torch.arange(5.0)])
    return replica, copy


def step(replica: Replica, copy: LocalCopy, *gradient: float, held: tuple[int, ...] = ()) -> None:
    replica.grads.copy_(torch.tensor(gradient))
    copy.step(1.0, held)


def changed(copy: LocalCopy, fragment: int, *, is_gradient: bool = False) -> list[float]:
    [place] = FRAGMENTS[fragment]
    values = copy.change(fragment, is_gradient=is_gradient)[slice(0, place.stop - place.start)]
    return list(values.tolist())


def test_what_was_learnt_since_the_send_is_kept() -> None:
    """θ = θ' + (θ_now - θ_at_send)."""
    replica, copy = copy_of_five()
    step(replica, copy, 1, 1, 1, 1, 1)
    assert changed(copy, 0) == [1, 1, 1]
    copy.mark_sent(0)
    assert list(copy.sent) == [0]
    step(replica, copy, 2, 2, 2, 2, 2)
    copy.follow(0, torch.tensor([10.0, 20.0, 30.0]), is_difference=False)
    assert replica.params.tolist() == [8, 18, 28, 0, 1], "the other fragment is as it was"
    assert not copy.sent
    assert changed(copy, 0) == [2, 2, 2], "from the new weights"
    assert changed(copy, 1) == [3, 3]


def test_a_difference_is_taken_from_the_weights_that_it_began_with() -> None:
    replica, copy = copy_of_five()
    step(replica, copy, 0, 0, 0, 1, 1)
    copy.follow(1, torch.tensor([0.5, 0.5]), is_difference=True)
    assert changed(copy, 1) == [1, 1]
    assert replica.params.tolist() == [0, 1, 2, 1.5, 2.5], "nothing was sent: all was learnt since"


def test_held_fragments_take_no_step_and_whole_weights_void_what_was_sent() -> None:
    replica, copy = copy_of_five()
    step(replica, copy, 1, 1, 1, 1, 1, held=(1,))
    assert replica.params.tolist() == [-1, 0, 1, 3, 4]
    copy.mark_sent(1)
    copy.load([torch.zeros(3), torch.ones(2)])
    assert replica.params.tolist() == [0, 0, 0, 1, 1]
    assert not copy.sent
    assert changed(copy, 0) == [0, 0, 0]


def test_weights_that_never_moved_are_held_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a DiLoCo run's synchronous beginning, where all are."""
    replica, copy = copy_of_five()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", None)
        for _ in range(2):
            step(replica, copy, 1, 1, 1, 1, 1, held=(0, 1))
        copy.mark_sent(0)
    assert replica.params.tolist() == [0, 1, 2, 3, 4]
    copy.follow(0, torch.tensor([1.0, 1.0, 1.0]), is_difference=False)
    copy.follow(0, torch.tensor([1.0, 0.0, -1.0]), is_difference=True)
    assert replica.params.tolist() == [0, 1, 2, 3, 4]
    step(replica, copy, 1, 1, 1, 1, 1, held=(0,))
    copy.mark_sent(1)
    copy.follow(1, torch.tensor([5.0, 5.0]), is_difference=False)
    step(replica, copy, 1, 1, 1, 1, 1, held=(0, 1))
    assert replica.params.tolist() == [0, 1, 2, 5, 5]
    step(replica, copy, 1, 1, 1, 1, 1)
    step(replica, copy, 1, 1, 1, 1, 1, held=(0, 1))
    assert replica.params.tolist() == [-1, 0, 1, 4, 4]


def test_the_clip_says_the_norm_before() -> None:
    replica, copy = copy_of_five()
    replica.grads.copy_(torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0]))
    assert copy.clip(GradientClipping(max_norm=1.0)) == 5
    copy.step(1.0)
    moved = torch.arange(5.0) - replica.params
    torch.testing.assert_close(moved, torch.tensor([0.6, 0.8, 0.0, 0.0, 0.0]))
    replica.grads.copy_(torch.tensor([3.0, -4.0, 0.0, 0.0, 1.0]))
    copy.clip(GradientClipping(max_value=2.0))
    copy.load([torch.arange(5.0)])
    copy.step(1.0)
    assert replica.params.tolist() == [-2, 3, 2, 3, 3]


def test_what_is_sent_of_gradients_is_their_mean_over_loss_terms_fragment_by_fragment() -> None:
    replica, copy = copy_of_five()
    first, second = torch.arange(5.0), torch.full((5,), 10.0)
    replica.grads.copy_(first)
    copy.add_gradient(1.0)
    replica.grads.copy_(second)
    copy.add_gradient(3.0, held=(1,))  # of that fragment these samples have been applied
    assert changed(copy, 0, is_gradient=True) == [30 / 4, 31 / 4, 32 / 4]
    assert changed(copy, 1, is_gradient=True) == [3.0, 4.0]
    assert torch.equal(replica.grads, second)
    copy.mark_sent(0)
    assert changed(copy, 0, is_gradient=True) == [0.0, 0.0, 0.0]
    copy.add_gradient(0.0, held=(1,))
    assert changed(copy, 0, is_gradient=True) == [0.0, 0.0, 0.0]
    copy.load([first])
    assert changed(copy, 1, is_gradient=True) == [0.0, 0.0]


def test_a_part_without_elements_follows_as_well() -> None:
    """A rank may have nothing of a fragment."""

    replica = Replica(nn.Linear(2, 1, bias=False), "sgd")

    class AtTheEnd(InProcess):
        def of(self, places: Sequence[slice]) -> list[int]:
            return [0] if any(place.start == 3 for place in places) else []

    part = AtTheEnd(replica, replica.optimizer)
    part.begin([[(0, 3)], [(3, 5)]])
    part.mark_sent(0)
    part.take([(slice(2, 3), torch.ones(1))], 0, is_difference=True)
    assert part.read(0, [(2, 3)], is_gradient=False).tolist() == [0]


def test_a_sum_of_gradients_is_clipped_as_the_mean_that_it_is_taken_for() -> None:
    executor = Mock(grad_norm=2.0, divisor=8.0)
    copy = LocalCopy(executor, FRAGMENTS)
    assert copy.clip(GradientClipping(max_norm=1.0)) == 2.0
    copy.step(0.1)
    assert executor.order.call_args.kwargs["clip"] == pytest.approx(0.5 / 8)
