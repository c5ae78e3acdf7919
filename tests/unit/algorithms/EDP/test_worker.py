"""EDP's worker without a server: what it makes of what it is told."""

import math
from collections import deque
from typing import cast

import pytest
import torch

from harness import local_settings
from smolcluster.algorithms.EDP.worker import Worker
from smolcluster.cluster.link import Link
from smolcluster.errors import NonFiniteLoss, PeerLost
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.ps.assignment import Assigned, work_payload
from smolcluster.ps.weights import WeightsArrived
from smolcluster.training.build import build
from smolcluster.training.compute import BatchLoss
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    Ack,
    Assignment,
    LeaseKey,
    Message,
    Outcome,
    Pull,
    Skip,
    Welcome,
)

RATE = 0.1


class Wire:
    """A link whose events the test has laid down; when they are over the server is lost."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.said: list[Message] = []
        self.pushes: list[bytes] = []

    def flush(self) -> None:
        """All has been sent."""

    def send(self, message: Message) -> None:
        self.said.append(message)

    def send_frame(self, frame: Frame) -> None:
        self.pushes.append(bytes(frame.payload))

    def next_event(self, timeout_s: float) -> Event | None:
        if not self.events and timeout_s > 0:
            raise PeerLost("the server is lost")
        return self.events.popleft() if self.events else None


class Desk:
    """A worker, and what lies before it."""

    def __init__(self, *overrides: str, codec: str = "fp32") -> None:
        settings = local_settings("optimizer=sgd", *overrides)
        self.training = build(
            settings.train, settings.cluster.seed, settings.node.dataset, torch.device("cpu")
        )
        welcome = Welcome(
            run_id="test-run",
            incarnation="here",
            run=settings.run_config("test-run", "edp"),
            model_fingerprint="m",
            bucket_bytes=self.training.replica.bucket_bytes,
            codec=codec,
            heartbeat_timeout_s=5.0,
        )
        self.wire = Wire()
        self.worker = Worker(welcome, self.training)
        self.worker.link = cast(Link, self.wire)
        self.worker.pulling = False

    def assigned(self, number: int, learning_rate: float = RATE) -> Assigned:
        """The samples 32 at a time, as they lie in the dataset."""
        indices = torch.arange(32 * number, 32 * number + 32, dtype=torch.int32)
        spec, _, payload = work_payload(indices)
        key = LeaseKey(
            incarnation="here", epoch=0, start=32 * number, stop=32 * number + 32, grant=number
        )
        message = Assignment(lease=key, version=0, learning_rate=learning_rate, tensor=spec)
        return Assigned(message, payload)

    def answer(self, task: Assigned, outcome: Outcome) -> None:
        self.wire.events.append(
            MessageReceived(0, Ack(lease=task.lease, outcome=outcome, version=1))
        )


def third_push(second_outcome: Outcome | None) -> bytes:
    """What a worker pushes last on the weights that it began with, after one applied push.

    Before that, one more push had this outcome; None: there was none.
    """
    desk = Desk("staleness.bound=1", codec="int8")
    start = desk.training.replica.snapshot()
    outcomes: list[tuple[int, Outcome]] = [(0, "applied")]
    if second_outcome is not None:
        outcomes.append((1, second_outcome))
    for number, outcome in outcomes:
        task = desk.assigned(number)
        desk.worker.step(task)
        desk.answer(task, outcome)
        desk.wire.events.append(WeightsArrived(0, [start]))
        desk.worker.wait_until(lambda: not desk.wire.events)
    desk.worker.step(desk.assigned(2))
    assert desk.wire.said == [Pull()] * (second_outcome == "stale")
    return desk.wire.pushes[-1]


@pytest.mark.parametrize("outcome", ["stale", "late", "duplicate"])
def test_a_push_that_was_not_applied_leaves_no_trace_in_the_next_one(outcome: Outcome) -> None:
    assert third_push(outcome) == third_push(None)


def test_what_an_applied_push_lost_is_in_the_next_one() -> None:
    assert third_push("applied") != third_push(None)


def test_an_answer_for_another_lease_is_not_taken_for_ones_own() -> None:
    desk = Desk()
    desk.worker.step(desk.assigned(0))
    desk.answer(desk.assigned(5), "applied")
    with pytest.raises(PeerLost):  # it waits for its own answer
        desk.worker.step(desk.assigned(1))
    assert len(desk.wire.pushes) == len(desk.training.replica.buckets), "nothing more was pushed"


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_between_pulls_its_own_copy_steps_at_the_rate_it_was_told(rate: float) -> None:
    desk = Desk("gradient_clipping.enabled=false")
    replica = desk.training.replica
    before = replica.snapshot()
    desk.worker.step(desk.assigned(0, rate))
    torch.testing.assert_close(replica.params, before - rate * replica.grads)


def failing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on its batches come to NaN."""

    def fail(_: Assigned) -> float:
        raise NonFiniteLoss("loss is nan at layer fc1")

    monkeypatch.setattr(desk.worker, "compute", fail)


def test_a_copy_that_has_diverged_is_replaced_by_the_server_s_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk("optimizer=adam")
    start = desk.training.replica.snapshot()
    desk.worker.step(desk.assigned(0))
    desk.answer(desk.assigned(0), "applied")
    with monkeypatch.context() as patch:
        failing(desk, patch)
        desk.worker.step(desk.assigned(1))
    (skip,) = desk.wire.said
    assert isinstance(skip, Skip)
    assert (skip.lease, skip.reason) == (desk.assigned(1).lease, "loss is nan at layer fc1")
    desk.wire.events.append(WeightsArrived(7, [start]))
    desk.worker.step(desk.assigned(2))
    assert desk.wire.said[1:] == [Pull()]
    assert desk.worker.base_version == 7
    assert desk.training.replica.optimizer.state["step"].item() == 1, "its optimizer began anew"
    failing(desk, monkeypatch)
    desk.answer(desk.assigned(2), "applied")
    desk.worker.step(desk.assigned(3))  # not on fresh weights: it may try again


def test_who_fails_again_on_fresh_weights_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    start = desk.training.replica.snapshot()
    failing(desk, monkeypatch)
    desk.worker.step(desk.assigned(0))
    desk.wire.events.append(WeightsArrived(7, [start]))
    with pytest.raises(NonFiniteLoss, match=r"step 2: loss is nan .* weights of step 7"):
        desk.worker.step(desk.assigned(1))


def test_a_push_that_the_server_refuses_twice_in_a_row_ends_it() -> None:
    desk = Desk()
    start = desk.training.replica.snapshot()
    desk.worker.step(desk.assigned(0))
    desk.answer(desk.assigned(0), "non_finite")
    desk.worker.wait_until(lambda: not desk.wire.events)
    desk.wire.events.append(WeightsArrived(7, [start]))
    desk.worker.step(desk.assigned(1))
    desk.answer(desk.assigned(1), "non_finite")
    with pytest.raises(NonFiniteLoss, match="the server has refused its push"):
        desk.worker.wait_until(lambda: not desk.wire.events)


def test_of_a_gradient_that_cannot_be_encoded_whole_nothing_is_sent() -> None:
    desk = Desk(codec="int8")
    worker = desk.worker
    assert len(desk.training.replica.buckets) == 1
    lease = desk.assigned(0).lease
    desk.training.replica.grads[-1] = math.nan
    with pytest.raises(NonFiniteLoss):
        worker.frames(lease, 0, BatchLoss(0.5, 8), 0.1)
    assert desk.wire.pushes == []


def test_with_an_interval_of_1_it_waits_for_each_pull_and_does_not_step() -> None:
    desk = Desk("worker_update_interval=1")
    before = desk.training.replica.snapshot()
    with pytest.raises(PeerLost):  # no weights come
        desk.worker.step(desk.assigned(0))
    assert desk.wire.said == [Pull()]
    assert torch.equal(desk.training.replica.params, before)
