"""DiLoCo's worker without a server: what it sends, waits for, and how it ends."""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from own_workloads import buffers_of, normed
from peers import small_replica
from smolcluster.algorithms.DiLoCo.exchange import Encoder, FragmentArrived, Layout
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.server.assignment import Assigned
from smolcluster.server.weights import WeightsArrived
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.inbox import MessageReceived
from smolcluster.wire.messages import Collect, Saved
from unit.algorithms.DiLoCo.actors import assigned, worker_of


def test_who_is_refused_twice_says_so_once() -> None:
    worker: Any = Worker.__new__(Worker)
    worker.is_fresh, worker.versions, worker.copy = True, [7], MagicMock(sent=set())
    worker.hosts = Mock()
    worker.wait_until = lambda _: worker.was_refused()
    with pytest.raises(NonFiniteLoss) as caught:
        worker.take_part(None)
    assert str(caught.value).count("again") == 1


@pytest.mark.parametrize(("base_version", "version"), [(5, 7), (None, 7), (None, 6), (8, 9)])
def test_an_outer_step_that_is_not_newer_or_leaves_one_out_is_refused(
    base_version: int | None, version: int
) -> None:
    """Taken twice it would count twice."""
    worker: Any = Worker.__new__(Worker)
    worker.versions, worker.layout = [7], SimpleNamespace(fragments=[None])
    arrived = FragmentArrived(0, base_version, version, torch.zeros(1), {})
    with pytest.raises(ProtocolError, match="does not follow on version 7"):
        worker.take_fragment(arrived)


def test_a_request_that_whole_weights_overtake_is_not_answered() -> None:
    """Its samples are others' by then: its worker would wait in vain for what becomes of its change."""
    worker: Any = Worker.__new__(Worker)
    worker.is_void, worker.hosts, worker.encoder = False, SimpleNamespace(is_several=True), Mock()
    worker.copy, worker.replica = MagicMock(sent={0}), MagicMock()
    worker.versions, worker.num_terms = [3], [32]
    worker.stream = deque([Collect(request=7, fragment=0, wait=True)])
    assert not worker.can_go_on, "a part of the fragment is still on its way"
    worker.begin_with(WeightsArrived(4, []))
    worker.copy.sent = ()
    assert not worker.can_go_on
    worker.stream.append(Collect(request=8, fragment=0, wait=True))
    assert worker.can_go_on


def test_a_gradient_waits_for_the_weights_of_all_fragments() -> None:
    """Other hosts may send theirs later. Step 6 has made versions 4, 5 and 6 of three fragments."""
    worker: Any = Worker.__new__(Worker)
    worker.is_void, worker.hosts = False, SimpleNamespace(is_several=True)
    worker.stream = deque([MagicMock(Assigned, assignment=Mock(is_gradient=True, version=6))])
    for versions, is_ready in (([4, 2, 6], False), ([4, 5, 3], False), ([4, 5, 6], True)):
        worker.versions = versions
        assert worker.can_go_on == is_ready
    worker.versions, worker.stream[0].assignment.is_gradient = [4, 2, 6], False
    assert worker.can_go_on, "a local step begins with what is there"


def test_whole_weights_end_what_a_change_of_unknown_fate_owes() -> None:
    replica = small_replica()
    layout = Layout.of(replica, cut(replica.layers, 1))
    worker: Any = Worker.__new__(Worker)
    worker.is_void, worker.encoder = False, Encoder("int4", layout)
    worker.copy, worker.replica = MagicMock(sent={0}), MagicMock()
    worker.versions, worker.num_terms = [3], [32.0]
    worker.stream = deque()
    change = torch.linspace(-1, 1, layout.fragments[0].numel)
    first = worker.encoder.encode(0, change)
    worker.encoder.settle(0, is_applied=True)
    assert not all(map(torch.equal, first, worker.encoder.encode(0, change))), "a residual is added"
    worker.begin_with(WeightsArrived(4, []))
    assert all(map(torch.equal, first, worker.encoder.encode(0, change)))


class Overflowing(Worker):
    """Its gradient overflows where `left` says what is left of it then."""

    left: float | None = None

    def compute(self, lease: Assigned) -> BatchLoss:
        loss = super().compute(lease)
        if self.left is None:
            return loss
        self.replica.grads.fill_(self.left)
        return BatchLoss(loss.mean, loss.num_terms, overflow=64.0)


@pytest.mark.parametrize("left", [None, 0.0, math.inf, math.nan])
def test_a_change_without_a_step_pays_no_debts(left: float | None) -> None:
    """The server weighs it by nothing: what it carried would be lost. Ranks leave the gradient as it is."""
    one = worker_of(Overflowing, "optimizer=sgd", "local_steps=1", codec="int4")
    (feedback,) = one.encoder.feedbacks
    owed = []
    for number in range(2):
        one.left = left if number else None
        one.step(assigned(number))
        one.send_change(Collect(request=number, fragment=0, wait=False))
        one.encoder.settle(0, is_applied=True)
        one.copy.load([one.replica.params.clone()])
        owed.append(feedback.residual())
    assert bool(owed[0].any())
    assert torch.equal(*owed) == (left is not None)


def test_what_is_kept_with_a_checkpoint_is_of_its_moment() -> None:
    """Not of the batches that wait: what their changes owe is of later versions."""
    one = worker_of(Worker, "mode=streaming", codec="int4")
    one.link.kept = kept = Mock()
    one.follow(assigned(0))
    one.follow(MessageReceived(0, Saved(step=7, keep_last=3)))
    step, tensors, keep_last = kept.save.call_args.args
    assert (step, keep_last, len(one.stream)) == (7, 3, 1)
    assert not any(each.any() for each in tensors.values())


def test_a_batch_that_is_repeated_for_some_fragments_leaves_the_others_and_the_buffers() -> None:
    what = "mode=streaming", "fragments=3"
    worker = worker_of(Worker, *what, codec="fp32", workload=normed())
    worker.step(assigned(0))
    model, params = worker.replica.model, worker.replica.params
    before = [worker.layout.gather(number, params) for number in range(3)]
    buffers = buffers_of(model)
    worker.step(assigned(1, [1]))
    same = [torch.equal(worker.layout.gather(n, params), before[n]) for n in range(3)]
    assert same == [True, False, True]
    assert all(torch.equal(each, buffers[name]) for name, each in buffers_of(model).items())
    assert worker.num_terms == [8, 16, 8]
