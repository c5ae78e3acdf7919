"""The weights that local steps change, those they began with, and those at the send of a change."""

import pytest
import torch
from torch import nn

from smolcluster.configs.schema import GradientClipping
from smolcluster.training.local_copy import Followed, OwnCopy
from smolcluster.training.replica import Replica

FRAGMENTS = (slice(0, 3),), (slice(3, 5),)


def copy_of_five() -> tuple[Replica, OwnCopy]:
    replica = Replica(nn.Linear(5, 1, bias=False), "sgd")
    copy = OwnCopy(replica, replica.optimizer, FRAGMENTS)
    copy.load([torch.arange(5.0)])
    return replica, copy


def step(replica: Replica, copy: OwnCopy, *gradient: float, held: tuple[int, ...] = ()) -> None:
    replica.grads.copy_(torch.tensor(gradient))
    copy.step(1.0, held)


def test_what_was_learnt_since_the_send_is_kept() -> None:
    """θ = θ' + (θ_now - θ_at_send)."""
    replica, copy = copy_of_five()
    step(replica, copy, 1, 1, 1, 1, 1)
    assert copy.change(0).tolist() == [1, 1, 1]
    copy.mark_sent(0)
    assert list(copy.sent) == [0]
    step(replica, copy, 2, 2, 2, 2, 2)
    copy.follow(0, torch.tensor([10.0, 20.0, 30.0]), is_difference=False)
    assert replica.params.tolist() == [8, 18, 28, 0, 1], "the other fragment is as it was"
    assert not copy.sent
    assert copy.start(0).tolist() == [10, 20, 30]
    assert copy.change(1).tolist() == [3, 3]


def test_a_difference_is_taken_from_the_weights_that_it_began_with() -> None:
    replica, copy = copy_of_five()
    step(replica, copy, 0, 0, 0, 1, 1)
    copy.follow(1, torch.tensor([0.5, 0.5]), is_difference=True)
    assert copy.start(1).tolist() == [2.5, 3.5]
    assert replica.params.tolist() == [0, 1, 2, 1.5, 2.5], "nothing was sent: all was learnt since"


def test_held_fragments_take_no_step_and_whole_weights_void_what_was_sent() -> None:
    replica, copy = copy_of_five()
    step(replica, copy, 1, 1, 1, 1, 1, held=(1,))
    assert replica.params.tolist() == [-1, 0, 1, 3, 4]
    copy.mark_sent(1)
    copy.load([torch.zeros(3), torch.ones(2)])
    assert replica.params.tolist() == [0, 0, 0, 1, 1]
    assert not copy.sent
    assert copy.change(0).tolist() == [0, 0, 0]


def test_weights_that_never_moved_are_held_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a DiLoCo run's synchronous beginning, where all are."""
    replica, copy = copy_of_five()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", None)
        for _ in range(2):
            step(replica, copy, 1, 1, 1, 1, 1, held=(0, 1))
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
    torch.testing.assert_close(replica.grads.norm(), torch.tensor(1.0))


def test_a_part_without_elements_follows_as_well() -> None:
    """A rank may have nothing of a fragment."""
    followed = Followed([[], [torch.zeros(2)]])
    followed.mark_sent(0)
    followed.follow(0, [], is_difference=True)
    assert not followed.sent
