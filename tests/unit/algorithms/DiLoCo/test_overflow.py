"""A worker's change: what its codec owes, where steps overflow."""

import pytest
import torch

from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.messages import Collect, LeaseKey
from unit.algorithms.DiLoCo.actors import worker_of


class Overflowing(Worker):
    """Its gradient overflows where `overflows` says so."""

    overflows = False

    def compute(self, lease: Assigned) -> BatchLoss:
        loss = super().compute(lease)
        if not self.overflows:
            return loss
        self.replica.grads.zero_()
        return BatchLoss(loss.mean, loss.num_terms, overflow=64.0)


def assigned(number: int) -> Assigned:
    indices = torch.arange(32 * number, 32 * number + 32, dtype=torch.int32)
    key = LeaseKey(
        incarnation="here", epoch=0, start=32 * number, stop=32 * number + 32, grant=number
    )
    return Assigned(*assignment_of(key, indices, version=0, learning_rate=0.1))


@pytest.mark.parametrize("overflows", [True, False])
def test_a_change_without_a_step_pays_no_debts(overflows: bool) -> None:
    """The server weighs it by nothing: what it carried would be lost."""
    one = worker_of(Overflowing, "optimizer=sgd", "local_steps=1", codec="int4")
    (feedback,) = one.encoder.feedbacks
    owed = []
    for number in range(2):
        one.overflows = overflows and number == 1
        one.step(assigned(number))
        one.send_change(Collect(request=number, fragment=0, wait=False))
        one.encoder.settle(0, is_applied=True)
        one.copy.load([one.replica.params.clone()])
        owed.append(feedback.residual())
    assert bool(owed[0].any())
    assert torch.equal(*owed) == overflows
