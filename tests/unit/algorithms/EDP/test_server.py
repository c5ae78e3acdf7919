"""EDP's server in the test's own hands: what becomes of every push, and who gets which weights and leases."""

import operator
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import stages
from harness import free_port, local_settings
from peers import (
    DEADLINE_S,
    Hand,
    hello,
    opened,
    server_parts,
    set_gradient,
)
from smolcluster.algorithms.EDP.server import LEASES_PER_WORKER, Server
from smolcluster.errors import NonFiniteLoss
from smolcluster.runs.events import LeaseReturned, PushDropped, WorkerLost, WorkerStalled
from smolcluster.server.plausible import MAX_FAILURES
from smolcluster.server.push import GradientSender, Pushed
from smolcluster.server.weights import StateReceiver, WeightsArrived
from smolcluster.server.worker_pool import Departed
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Ack, Assignment, LeaseKey, Pull, Skip, State

INSTANCE = "0123456789abcdef"
pytestmark = pytest.mark.usefixtures("short_farewell")
BUCKET_BYTES = 16 * 1024


class Stage(stages.Stage[Server]):
    """A server, and workers spoken by hand."""

    def hand_out(self) -> None:
        """What the loop does between two events."""
        list(self.server.pool.next_events(0.0))
        self.server.hand_out()

    def worker(
        self,
        worker_id: int = 1,
        instance: str | None = None,
        unacknowledged: LeaseKey | None = None,
    ) -> "Puppet":
        hand = self.house.join(hello(worker_id, instance=instance), unacknowledged)
        return Puppet(self, hand)


class Puppet:
    """A worker that does what the test says."""

    def __init__(self, stage: Stage, hand: Hand) -> None:
        self._stage = stage
        self.hand = hand
        self.replica = stage.workers_replica()
        self._sender = GradientSender(stage.parts.context.codec, self.replica)
        self.scale = 1.0
        """How many times as long its gradients are as those of others."""

    def weights(self) -> tuple[int, Tensor]:
        """The weights that the server sends next, with their version."""
        receiver = StateReceiver(self.replica.buckets, self.replica.params.dtype)
        while True:
            message, payload = self.hand.hear()
            assert isinstance(message, State)
            event = receiver(message, memoryview(bytearray(payload)))
            if isinstance(event, WeightsArrived):
                return event.version, torch.cat(event.weights)

    def assignment(self) -> Assignment:
        return self.hand.hear_a(Assignment)

    def lease(self) -> LeaseKey:
        return self.assignment().lease

    def frames(
        self,
        lease: LeaseKey,
        base_version: int = 0,
        seed: int = 0,
        weights: Tensor | None = None,
    ) -> list[Frame]:
        self.replica.grads.copy_(set_gradient(self.replica, seed).mul_(self.scale))
        return list(self._sender.frames(lease, base_version, BatchLoss(0.5, 8), 0.25, weights))

    def push(
        self,
        lease: LeaseKey,
        base_version: int = 0,
        seed: int = 0,
        weights: Tensor | None = None,
    ) -> Ack:
        """Push some gradient, or weights, and hear what became of it."""
        seen = self._stage.count(Pushed)
        for frame in self.frames(lease, base_version, seed, weights):
            self.hand.connection.send_frame(frame)
        self._stage.house.until(lambda: self._stage.count(Pushed) > seen)
        return self.hand.hear_a(Ack)


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    overrides = getattr(request, "param", ())
    defaults = (f"heartbeat_timeout_s={DEADLINE_S}", f"port={free_port()}", "num_epochs=2")
    settings = local_settings(*defaults, "optimizer=sgd", *overrides)
    with ExitStack() as rooms:
        parts = rooms.enter_context(server_parts(settings, tmp_path, BUCKET_BYTES))
        assert len(parts.context.training.replica.buckets) > 2
        yield Stage(Server(parts.context), parts, rooms)


def working(
    stage: Stage, worker_id: int = 1, instance: str | None = None
) -> tuple[Puppet, LeaseKey]:
    """A worker that has the weights and its first two leases; the second is left lying."""
    puppet = stage.worker(worker_id, instance)
    puppet.weights()
    stage.hand_out()
    lease = puppet.lease()
    puppet.lease()
    return puppet, lease


def test_a_worker_gets_the_weights_and_then_its_leases(stage: Stage) -> None:
    puppet = stage.worker()
    version, weights = puppet.weights()
    assert version == 0
    assert torch.equal(weights, stage.weights)
    stage.hand_out()
    leases = [puppet.lease() for _ in range(LEASES_PER_WORKER)]
    assert [(lease.epoch, lease.start, lease.stop) for lease in leases] == [(0, 0, 32), (0, 32, 64)]
    assert puppet.push(leases[0]).outcome == "applied"
    stage.hand_out()
    more = puppet.assignment()
    assert more.lease.start == 64, "one answer, one more lease"
    assert (more.version, more.first_bucket, more.backup) == (1, 0, False)


def test_a_push_is_one_step_and_is_counted_once(stage: Stage) -> None:
    puppet, lease = working(stage)
    before = stage.weights
    ack = puppet.push(lease)
    assert (ack.lease, ack.outcome, ack.version) == (lease, "applied", 1)
    rate = stage.parts.context.run.train.learning_rate
    norm = puppet.replica.grads.norm()
    expected = before - rate * puppet.replica.grads / (norm + 1e-6)  # clipped to a norm of 1
    torch.testing.assert_close(stage.weights, expected, rtol=1e-5, atol=1e-7)
    assert stage.server.dispatcher.samples_applied == 32
    (record,) = stage.parts.metrics.steps
    assert (record.step, record.epoch, record.rank, record.node) == (1, 0, 0, "macbook")
    assert (record.values["start"], record.values["stop"]) == (lease.start, lease.stop)
    assert record.values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    share = stage.server.report.counts.tally.workers[1]
    assert (share.samples, share.pushes) == (32, 1)


@pytest.mark.parametrize("stage", [("track_gradients=true",)], indirect=True)
def test_the_norms_of_a_push_are_told_layer_by_layer_when_asked_for(stage: Stage) -> None:
    puppet, lease = working(stage)
    puppet.push(lease)
    values = stage.parts.metrics.steps[0].values
    assert len(puppet.replica.layers) == 4
    for name, place in puppet.replica.layers:
        norm = puppet.replica.grads[place].norm().item()
        assert values[f"grad_norm/{name}"] == pytest.approx(norm, rel=1e-5), "as it was pushed"


def test_the_statistics_of_a_worker_count_as_those_of_one_of_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Mock()
    monkeypatch.setattr(stage.server.replica.buffers, "add", add)
    (one, lease), _ = working(stage), working(stage, 2)
    assert one.push(lease).outcome == "applied"
    add.assert_called_once_with({}, num_workers=2)


def test_a_push_that_comes_twice_is_applied_once(stage: Stage) -> None:
    puppet, lease = working(stage)
    puppet.push(lease)
    after = stage.weights
    ack = puppet.push(lease, seed=1)
    assert (ack.outcome, ack.version) == ("duplicate", 1)
    assert torch.equal(stage.weights, after)
    assert stage.server.report.counts.tally.pushes == {"applied": 1, "duplicate": 1}
    assert stage.server.dispatcher.samples_applied == 32
    (dropped,) = stage.parts.happened(PushDropped)
    assert isinstance(dropped, PushDropped)
    assert (dropped.outcome, dropped.start) == ("duplicate", 0)


def test_a_push_that_comes_too_late_is_counted_and_not_applied(stage: Stage) -> None:
    puppet, lease = working(stage)
    before = stage.weights
    stage.server.take_back_expired(1e12)
    assert puppet.push(lease).outcome == "late"
    assert torch.equal(stage.weights, before)
    assert stage.server.report.counts.tally.pushes == {"late": 1}
    assert len(stage.parts.happened(LeaseReturned)) == 2
    assert stage.server.dispatcher.samples_applied == 0


def test_whose_time_was_over_gets_no_more_until_it_answers(stage: Stage) -> None:
    """A machine that hangs must not collect leases."""
    puppet, lease = working(stage)
    stage.server.take_back_expired(1e12)
    stage.hand_out()
    puppet.push(lease)  # the next message is the answer, not an assignment
    stage.hand_out()
    assert puppet.lease().start == 0, "and its samples are handed out again"


def test_who_hangs_is_named_once_and_when_it_answers_again(stage: Stage) -> None:
    puppet, lease = working(stage)
    stage.server.take_back_expired(1e6)
    (stalled,) = stage.parts.happened(WorkerStalled)
    assert isinstance(stalled, WorkerStalled)
    assert (stalled.rank, stalled.node) == (0, "macbook")
    assert stalled.silent_s > 0
    assert sum("has not answered" in line for line in stage.parts.log_lines) == 1
    puppet.push(lease)
    assert any("worker 1 (macbook) answers again" in line for line in stage.parts.log_lines)
    stage.hand_out()
    stage.server.take_back_expired(2e6)
    assert len(stage.parts.happened(WorkerStalled)) == 2


def test_nobody_is_late_because_the_server_was_held_up(stage: Stage) -> None:
    """What workers have pushed meanwhile may wait in the inbox."""
    puppet, lease = working(stage)
    stage.server.decide_at(time.monotonic() + 1e6)
    assert puppet.push(lease).outcome == "applied"


def test_the_time_of_a_lease_begins_when_its_batch_has_been_loaded(stage: Stage) -> None:
    feed = stage.server.feed = stages.SlowFeed()
    puppet = stage.worker()
    puppet.weights()
    stage.hand_out()
    stage.server.take_back_expired(1e12)
    assert stage.parts.happened(WorkerStalled) == []
    feed.arrived()
    stage.server.take_back_expired(1e12)
    assert len(stage.parts.happened(WorkerStalled)) == 1


def test_samples_that_are_skipped_go_back_and_end_the_run_only_when_they_fail_again_and_again(
    stage: Stage,
) -> None:
    puppet, lease = working(stage)
    for number in range(MAX_FAILURES):
        puppet.hand.say(Skip(lease=lease, compute_s=0.1, reason="loss is nan at layer fc1"))
        if number == MAX_FAILURES - 1:
            with pytest.raises(NonFiniteLoss, match=r"samples 0 to 32 of epoch 1 .* worker 1"):
                stage.house.until(lambda: False)
            break
        stage.house.until(lambda n=number: len(stage.parts.happened(PushDropped)) > n)  # type: ignore[misc]
        stage.hand_out()
        lease = puppet.lease()
        assert (lease.start, lease.stop) == (0, 32)
    (dropped, *_) = stage.parts.happened(PushDropped)
    assert isinstance(dropped, PushDropped)
    assert (dropped.outcome, dropped.reason) == ("non_finite", "loss is nan at layer fc1")


def test_only_the_pushes_of_others_make_a_worker_stale(stage: Stage) -> None:
    busy, lease = working(stage, 1)
    slow, old_lease = working(stage, 2)
    for number in range(3):
        busy.push(lease, base_version=0, seed=number)
        stage.hand_out()
        lease = busy.lease()
    assert slow.push(old_lease, base_version=0).outcome == "applied"
    records = stage.parts.metrics.steps
    assert [record.values["staleness"] for record in records] == [0, 0, 0, 3]
    rates = [record.values["lr"] for record in records]
    assert rates[3] == pytest.approx(0.5 * rates[0]), "s(3) with a = 0.5"


@pytest.mark.parametrize("stage", [("staleness.bound=2",)], indirect=True)
def test_a_push_beyond_the_bound_is_dropped_and_its_samples_are_handed_out_again(
    stage: Stage,
) -> None:
    busy, lease = working(stage, 1)
    slow, old_lease = working(stage, 2)
    for number in range(3):
        busy.push(lease, base_version=number, seed=number)
        stage.hand_out()
        lease = busy.lease()
    before = stage.weights
    assert slow.push(old_lease).outcome == "stale"
    assert torch.equal(stage.weights, before)
    (returned,) = stage.parts.happened(LeaseReturned)
    assert isinstance(returned, LeaseReturned)
    assert (returned.start, returned.rank) == (old_lease.start, 1)
    assert "too stale" in returned.reason
    stage.hand_out()
    assert slow.lease().start == old_lease.start
    assert slow.push(old_lease, base_version=3).outcome == "late", "its grant is over"


UNCLIPPED = ("gradient_clipping.enabled=false", "optimizer=adam")


@pytest.mark.parametrize(
    ("stage", "is_applied"), [(UNCLIPPED, False), ((), True)], indirect=["stage"]
)
def test_a_push_out_of_all_proportion_changes_nothing_unless_it_is_clipped(
    stage: Stage, is_applied: bool
) -> None:
    puppet, lease = working(stage)
    stage.server.norms.add(2.0, "worker 2")
    replica = stage.server.replica
    before = stage.weights, {name: each.clone() for name, each in replica.optimizer.state.items()}
    puppet.scale = 1e12
    assert puppet.push(lease).outcome == ("applied" if is_applied else "non_finite")
    moved = (stage.weights - before[0]).norm()
    rate = stage.parts.context.run.train.learning_rate
    assert (0 < moved <= rate * 1.001) if is_applied else moved == 0
    for name, each in () if is_applied else replica.optimizer.state.items():
        assert torch.equal(each, before[1][name])
    stage.hand_out()
    puppet.scale = 1.0
    assert puppet.push(puppet.lease()).outcome == "applied", "its memory is free again"


def test_weights_that_do_not_exist_yet_cost_the_connection(stage: Stage) -> None:
    puppet, lease = working(stage)
    before = stage.weights
    for frame in puppet.frames(lease, base_version=1):
        puppet.hand.connection.send_frame(frame)
    stage.house.until(lambda: stage.count(Departed) == 1)
    assert torch.equal(stage.weights, before)
    (lost,) = stage.parts.happened(WorkerLost)
    assert isinstance(lost, WorkerLost)
    assert "version 1, the newest is 0" in lost.reason


def test_half_a_push_is_lost_and_its_samples_go_to_another(stage: Stage) -> None:
    first, lease = working(stage, 1)
    first.hand.connection.send_frame(first.frames(lease)[0])
    first.hand.leave()
    stage.house.until(lambda: stage.count(Departed) == 1)
    assert stage.server.report.counts.tally.pushes == {"lost": 1}
    _, again = working(stage, 2)
    assert (again.start, again.grant != lease.grant) == (lease.start, True)


def test_a_push_that_was_applied_is_confirmed_after_a_reconnect(stage: Stage) -> None:
    puppet, lease = working(stage, instance=INSTANCE)
    puppet.push(lease)
    after = stage.weights
    back = stage.worker(instance=INSTANCE, unacknowledged=lease)
    ack = back.hand.hear_a(Ack)
    assert (ack.lease, ack.outcome, ack.version) == (lease, "applied", 1)
    version, weights = back.weights()
    assert version == 1
    assert torch.equal(weights, after)


def test_a_push_that_did_not_arrive_whole_is_late_after_a_reconnect(stage: Stage) -> None:
    puppet, lease = working(stage, instance=INSTANCE)
    before = stage.weights
    puppet.hand.connection.send_frame(puppet.frames(lease)[0])
    back = stage.worker(instance=INSTANCE, unacknowledged=lease)
    assert back.hand.hear_a(Ack).outcome == "late"
    assert torch.equal(back.weights()[1], before)


def test_another_process_cannot_claim_a_push_that_was_not_its_own(stage: Stage) -> None:
    puppet, lease = working(stage, 1)
    puppet.push(lease)
    other = stage.worker(2, unacknowledged=lease)
    assert other.hand.hear_a(Ack).outcome == "late"


def test_what_a_fenced_session_still_pushes_is_ignored(stage: Stage) -> None:
    """Its push may have been whole in memory when the new session took its place."""
    working(stage, instance=INSTANCE)
    (first,) = stage.server.peers
    stage.worker(instance=INSTANCE)
    assert len(stage.parts.happened(LeaseReturned)) == 2
    before = stage.weights
    receiver = stage.server.receiver_for(first)
    puppet, lease = working(stage, 2)
    for frame in puppet.frames(lease):
        event = receiver(*opened(frame))
    assert isinstance(event, Pushed)
    stage.parts.context.inbox.put(event)
    stage.house.until(lambda: stage.count(Pushed) == 1)
    assert torch.equal(stage.weights, before)
    assert stage.server.report.counts.tally.pushes == {"lost": 1}


def test_pulls_of_one_version_share_one_copy(stage: Stage) -> None:
    one, lease = working(stage, 1)
    stores = stage.server.stores
    frames = stores.send_whole(INSTANCE, 0)
    assert all(map(operator.is_, stores.send_whole("f" * 16, 0), frames))
    one.push(lease)
    one.hand.say(Pull())
    stage.house.until(lambda: len(stage.house.events) == 3)
    version, weights = one.weights()
    assert version == 1
    assert torch.equal(weights, stage.weights)
    assert stores.send_whole(INSTANCE, 1)[0] is not frames[0]


def test_what_waits_in_a_queue_does_not_change_when_the_weights_do(stage: Stage) -> None:
    puppet = stage.worker()
    version, before = puppet.weights()
    stage.server.replica.params.zero_()
    puppet.hand.say(Pull())  # the version is the same: so are the frames, wherever they lie
    stage.house.until(lambda: len(stage.house.events) == 2)
    assert puppet.weights()[0] == version
    frame = stage.server.stores.send_whole(INSTANCE, version)[0]
    first = before[stage.server.replica.buckets[0]]
    assert torch.equal(torch.frombuffer(frame.payload, dtype=torch.float32), first)


MIXING = ("update_rule=mixing", "track_gradients=true")


@pytest.mark.parametrize(
    ("stage", "rate"), [(MIXING, 0.6), ((*MIXING, "mixing_rate=0.25"), 0.25)], indirect=["stage"]
)
def test_mixing_moves_towards_a_workers_weights_and_less_far_if_others_have_pushed(
    stage: Stage, rate: float
) -> None:
    busy, lease = working(stage, 1)
    slow, old_lease = working(stage, 2)
    for seed in (1, 2):
        before, theirs = stage.weights, set_gradient(busy.replica, seed)
        assert busy.push(lease, weights=theirs).outcome == "applied"
        torch.testing.assert_close(stage.weights, (1 - rate) * before + rate * theirs)
        stage.hand_out()
        lease = busy.lease()
    before, theirs = stage.weights, set_gradient(slow.replica, 9)
    assert slow.push(old_lease, weights=theirs).version == 3
    alpha = rate / 3**0.5
    torch.testing.assert_close(stage.weights, (1 - alpha) * before + alpha * theirs)
    values = stage.parts.metrics.steps[2].values
    assert values["staleness"] == 2
    assert values["lr"] == stage.parts.context.run.train.learning_rate, "the schedule's"
    way = theirs - before
    assert values["grad_norm"] == pytest.approx(way.norm().item(), rel=1e-5)
    for name, place in stage.server.replica.layers:
        assert values[f"grad_norm/{name}"] == pytest.approx(way[place].norm().item(), rel=1e-5)
    assert stage.server.dispatcher.samples_applied == 96


@pytest.mark.parametrize("stage", [MIXING], indirect=True)
def test_weights_out_of_all_proportion_are_not_mixed_though_gradients_are_clipped(
    stage: Stage,
) -> None:
    puppet, lease = working(stage)
    stage.server.norms.add(2.0, "worker 2")
    before = stage.weights
    assert puppet.push(lease, weights=before + 1e12).outcome == "non_finite"
    assert torch.equal(stage.weights, before)
