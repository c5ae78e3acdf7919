"""A worker's change: what its codec owes, where steps overflow."""

from typing import cast

import pytest
import torch

from harness import local_settings
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.cluster.link import Link
from smolcluster.ps.assignment import Assigned, assignment_of
from smolcluster.training.build import build
from smolcluster.training.compute import BatchLoss
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import Collect, LeaseKey, Message, Welcome


class Wire:
    """In place of the session: takes all that is sent."""

    def send(self, message: Message) -> None: ...

    def send_frame(self, frame: Frame) -> None: ...


class Overflowing(Worker):
    """Its gradient overflows where `overflows` says so."""

    overflows = False

    def compute(self, lease: Assigned) -> BatchLoss:
        loss = super().compute(lease)
        if not self.overflows:
            return loss
        self.replica.grads.zero_()
        return BatchLoss(loss.mean, loss.num_terms, overflow=64.0)


def worker() -> Overflowing:
    settings = local_settings("optimizer=sgd", "local_steps=1", algorithm="diloco")
    train, cluster = settings.train, settings.cluster
    training = build(train, cluster.seed, settings.node.dataset, torch.device("cpu"))
    welcome = Welcome(
        run_id="test-run",
        incarnation="here",
        run=settings.run_config("test-run", "diloco"),
        model_fingerprint="m",
        bucket_bytes=training.replica.bucket_bytes,
        codec="int4",
        heartbeat_timeout_s=5.0,
    )
    made = Overflowing(welcome, training)
    made.link, made.is_void = cast(Link, Wire()), False
    return made


def assigned(number: int) -> Assigned:
    indices = torch.arange(32 * number, 32 * number + 32, dtype=torch.int32)
    key = LeaseKey(
        incarnation="here", epoch=0, start=32 * number, stop=32 * number + 32, grant=number
    )
    return Assigned(*assignment_of(key, indices, version=0, learning_rate=0.1))


@pytest.mark.parametrize("overflows", [True, False])
def test_a_change_without_a_step_pays_no_debts(overflows: bool) -> None:
    """The server weighs it by nothing: what it carried would be lost."""
    one = worker()
    (feedback,) = one.encoder.feedbacks
    owed = []
    for number in range(2):
        one.overflows = overflows and number == 1
        one.step(assigned(number))
        one.send_change(Collect(request=number, fragment=0, wait=False))
        one.encoder.settle(0, is_applied=True)
        one.sent.clear()
        one.anchor.copy_(one.replica.params)
        owed.append(feedback.residual())
    assert bool(owed[0].any())
    assert torch.equal(*owed) == overflows
