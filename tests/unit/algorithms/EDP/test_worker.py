"""EDP's worker without a server: what it makes of what it is told."""

import math
from collections import deque
from typing import cast

import pytest
import torch
from torch import Tensor

from harness import local_settings
from peers import opened, welcome_of
from smolcluster.algorithms.EDP.worker import Worker
from smolcluster.errors import NonFiniteLoss, PeerLost
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.server.link import Link
from smolcluster.server.weights import WeightsArrived
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Ack,
    LeaseKey,
    Message,
    Outcome,
    Pull,
    Push,
    Skip,
)

RATE = 0.1


class Wire:
    """A link whose events the test has laid down; when they are over the server is lost."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.pulled: deque[Event] = deque()
        """What comes when it pulls."""
        self.said: list[Message] = []
        self.frames: list[Frame] = []

    @property
    def pushes(self) -> list[bytes]:
        """What has been queued, as it is now."""
        return [bytes(frame.payload) for frame in self.frames]

    def flush(self, timeout_s: float = 0.0) -> bool:  # noqa: ARG002
        return True

    def send(self, message: Message) -> None:
        self.said.append(message)
        if isinstance(message, Pull) and self.pulled:
            self.events.append(self.pulled.popleft())

    def send_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def next_event(self, timeout_s: float) -> Event | None:
        if not self.events and timeout_s > 0:
            raise PeerLost("the server is lost")
        return self.events.popleft() if self.events else None


class Desk:
    """A worker, and what lies before it."""

    def __init__(self, *overrides: str, codec: str = "fp32") -> None:
        self.settings = settings = local_settings("optimizer=sgd", *overrides)
        self.training = self.build()
        told = {"bucket_bytes": self.training.replica.bucket_bytes, "codec": codec}
        run = settings.run_config("test-run", "edp")
        self.wire = Wire()
        self.worker = Worker(welcome_of(run, **told), self.training)
        self.worker.link = cast(Link, self.wire)
        self.worker.stores.begin(self.worker.link)
        self.worker.pulling = False

    def build(self) -> TrainingContext:
        train, cluster = self.settings.train, self.settings.cluster
        return build(train, cluster.seed, self.settings.node.dataset, torch.device("cpu"))

    def assigned(self, number: int, learning_rate: float = RATE) -> Assigned:
        """The samples 32 at a time, as they lie in the dataset."""
        indices = torch.arange(32 * number, 32 * number + 32, dtype=torch.int32)
        key = LeaseKey(
            incarnation="here", epoch=0, start=32 * number, stop=32 * number + 32, grant=number
        )
        return Assigned(*assignment_of(key, indices, version=0, learning_rate=learning_rate))

    def answer(self, task: Assigned, outcome: Outcome) -> None:
        self.wire.events.append(
            MessageReceived(0, Ack(lease=task.lease, outcome=outcome, version=1))
        )

    def begin_again(self, weights: Tensor) -> None:
        """It hears all answers, and then pulls these weights."""
        self.worker.wait_until(lambda: not self.wire.events)
        self.worker.pulling = True
        self.wire.events.append(WeightsArrived(0, [weights]))
        self.worker.wait_until(lambda: not self.wire.events)


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
        desk.begin_again(start)
    desk.worker.step(desk.assigned(2))
    assert desk.wire.said == [Pull()] * (second_outcome == "stale")
    return desk.wire.pushes[-1]


@pytest.mark.parametrize("outcome", ["stale", "late", "duplicate"])
def test_a_push_that_was_not_applied_leaves_no_trace_in_the_next_one(outcome: Outcome) -> None:
    assert third_push(outcome) == third_push(None)


def test_a_push_that_overflowed_leaves_no_trace_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk("staleness.bound=1", codec="int8")
    start = desk.training.replica.snapshot()
    for number in range(2):
        task = desk.assigned(number)
        with monkeypatch.context() as patch:
            if number == 1:
                patch.setattr(desk.worker, "compute", lambda _: overflow(desk))
            desk.worker.step(task)
        desk.answer(task, "applied")
        desk.begin_again(start)
    desk.worker.step(desk.assigned(2))
    assert desk.wire.pushes[-1] == third_push(None)


def overflow(desk: Desk) -> BatchLoss:
    desk.training.replica.grads.zero_()
    return BatchLoss(0.5, 32, overflow=2.0)


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


@pytest.mark.parametrize("computes_on", [False, True])
def test_a_push_that_the_server_refuses_twice_in_a_row_ends_it(computes_on: bool) -> None:
    """Also where it hears of that only when it has computed the next one."""
    desk = Desk()
    start = desk.training.replica.snapshot()
    desk.worker.step(desk.assigned(0))
    desk.answer(desk.assigned(0), "non_finite")
    desk.worker.wait_until(lambda: not desk.wire.events)
    desk.wire.events.append(WeightsArrived(7, [start]))
    desk.worker.step(desk.assigned(1))
    desk.answer(desk.assigned(1), "non_finite")
    with pytest.raises(NonFiniteLoss, match="the server has refused its push"):
        if computes_on:
            desk.worker.step(desk.assigned(2))
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


def test_weights_that_come_unasked_are_the_runs_last_and_nothing_steps_on_them() -> None:
    desk = Desk()
    first, result = desk.assigned(0), torch.ones(desk.training.replica.num_params)
    desk.worker.step(first)
    desk.answer(first, "applied")
    desk.wire.events.append(WeightsArrived(9, [result]))
    with pytest.raises(PeerLost):  # it waits for the run's end
        desk.worker.step(desk.assigned(1))
    assert torch.equal(desk.training.replica.params, result)


# With update_rule mixing it pushes where its own step has brought it.


class Mixing(Desk):
    """A worker that pushes weights, and a twin of its copy that is trained plainly."""

    def __init__(self, *overrides: str) -> None:
        super().__init__("update_rule=mixing", *overrides)
        self.replica, self.twin = self.training.replica, self.build()

    def stepped(self, task: Assigned) -> Tensor:
        """Where one step of plain training brings the twin."""
        self.twin.compute(task.indices)
        self.twin.replica.clip(self.settings.train.gradient_clipping)
        self.twin.replica.step(RATE)
        return self.twin.replica.snapshot()

    def pushed(self) -> tuple[Push, Tensor]:
        """The last push, which is one bucket."""
        push, payload = opened(self.wire.frames[-1])
        assert isinstance(push, Push)
        assert push.num_buckets == 1
        return push, torch.frombuffer(payload, dtype=torch.float32)


def other_weights(desk: Mixing) -> Tensor:
    return torch.randn(desk.replica.num_params, generator=torch.Generator().manual_seed(1))


def test_a_mixing_worker_pushes_where_its_own_step_has_brought_it() -> None:
    desk = Mixing()
    for number in range(3):
        task = desk.assigned(number)
        desk.worker.step(task)
        push, weights = desk.pushed()
        assert push.lease == task.lease
        assert torch.equal(weights, desk.stepped(task))
        assert torch.equal(desk.replica.params, weights), "one step a lease"
        desk.answer(task, "applied")


def test_what_is_on_the_wire_stays_while_a_mixing_worker_trains_on() -> None:
    desk = Mixing()
    desk.worker.step(desk.assigned(0))
    stepped = desk.replica.snapshot()
    with pytest.raises(PeerLost):
        desk.worker.step(desk.assigned(1))  # it steps, and then waits for the first push's fate
    assert not torch.equal(desk.replica.params, stepped)
    assert torch.equal(desk.pushed()[1], stepped)


def test_weights_that_arrive_before_a_push_do_not_change_what_it_brings() -> None:
    """Else the work on its lease would be lost, though the lease counts."""
    desk = Mixing("worker_update_interval=1000")
    first, second = desk.assigned(0), desk.assigned(1)
    desk.worker.step(first)
    desk.stepped(first)
    desk.worker.pulling, pulled = True, other_weights(desk)
    desk.wire.events.append(WeightsArrived(5, [pulled]))
    desk.answer(first, "applied")
    desk.worker.step(second)
    push, weights = desk.pushed()
    assert torch.equal(weights, desk.stepped(second))
    assert push.base_version == 0, "they came from weights that are older than those"
    assert torch.equal(desk.replica.params, pulled)
    assert desk.worker.base_version == 5


def test_with_an_interval_of_1_every_lease_begins_at_the_servers_weights() -> None:
    desk = Mixing("worker_update_interval=1")
    first, second, pulled = desk.assigned(0), desk.assigned(1), other_weights(desk)
    desk.wire.pulled.extend(WeightsArrived(version, [pulled]) for version in (1, 2))
    desk.worker.step(first)
    assert desk.wire.said == [Pull()]
    assert torch.equal(desk.replica.params, pulled)
    desk.answer(first, "applied")
    desk.worker.step(second)
    desk.twin.replica.load(pulled)
    push, weights = desk.pushed()
    assert torch.equal(weights, desk.stepped(second))
    assert push.base_version == 1
