"""EDP's averaging of weights: the formula, what a worker pushes, and what the server makes of it."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from harness import free_port, local_settings
from peers import DEADLINE_S, hello, opened, server_parts
from smolcluster.algorithms.EDP import rule
from smolcluster.algorithms.EDP.server import Server
from smolcluster.algorithms.EDP.worker import Worker
from smolcluster.cluster.link import Link
from smolcluster.errors import NonFiniteLoss, PeerLost
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.ps.assignment import Assigned, assignment_of
from smolcluster.ps.leases import Dispatcher
from smolcluster.ps.push import GradientReceiver, GradientSender, Pushed
from smolcluster.ps.store import Stores
from smolcluster.ps.weights import StateReceiver, WeightsArrived
from smolcluster.runs.events import PushDropped
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    Ack,
    Assignment,
    LeaseKey,
    Message,
    Outcome,
    Pull,
    State,
    Welcome,
)
from stages import EDPStage

pytestmark = pytest.mark.usefixtures("short_farewell")
BUCKET_BYTES = 16 * 1024
MIXING = ("update_rule=mixing", "optimizer=sgd")


def make_bench(*overrides: str) -> TrainingContext:
    settings = local_settings(*MIXING, *overrides)
    return build(
        settings.train,
        settings.cluster.seed,
        settings.node.dataset,
        torch.device("cpu"),
        bucket_bytes=BUCKET_BYTES,
    )


def some_weights(replica: Replica, seed: int = 0) -> Tensor:
    """Weights that another worker might have come to."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(replica.num_params, generator=generator)


# The formula.


def test_a_fresh_push_has_the_weight_that_the_user_set() -> None:
    assert rule.mixing_weight(0, 0.6, 0.5) == 0.6


@pytest.mark.parametrize(
    ("tau", "exponent", "alpha"), [(3, 0.5, 0.3), (5, 1.0, 0.1), (1, 2.0, 0.15), (100, 0.0, 0.6)]
)
def test_staleness_lowers_the_weight_as_in_fedasync(
    tau: int, exponent: float, alpha: float
) -> None:
    assert rule.mixing_weight(tau, 0.6, exponent) == pytest.approx(alpha)


def test_a_fresh_push_moves_the_server_60_percent_of_the_way() -> None:
    replica = make_bench().replica
    before, theirs = replica.snapshot(), some_weights(replica)
    distance = rule.mix(Stores(replica), theirs, rule.mixing_weight(0, 0.6, 0.5))
    torch.testing.assert_close(replica.params, 0.4 * before + 0.6 * theirs)
    assert distance == pytest.approx((theirs - before).norm().item(), rel=1e-5)
    torch.testing.assert_close(replica.grads, theirs - before)


@pytest.mark.parametrize("mixing_rate", [0.1, 0.6, 0.999])
def test_no_push_replaces_the_servers_weights_outright(mixing_rate: float) -> None:
    """What the others have taught the server must outlast the freshest of pushes."""
    replica = make_bench().replica
    before, theirs = replica.snapshot(), some_weights(replica)
    rule.mix(Stores(replica), theirs, rule.mixing_weight(0, mixing_rate, 0.5))
    left = (replica.params - theirs).norm() / (before - theirs).norm()
    assert left == pytest.approx(1 - mixing_rate, rel=1e-3)


def test_older_pushes_move_the_server_less() -> None:
    moved = []
    for tau in range(8):
        replica = make_bench().replica
        before = replica.snapshot()
        rule.mix(Stores(replica), some_weights(replica), rule.mixing_weight(tau, 0.6, 0.5))
        moved.append((replica.params - before).norm().item())
    assert moved == sorted(moved, reverse=True)
    assert moved[3] == pytest.approx(moved[0] / 2, rel=1e-4)


def test_weights_that_are_the_servers_own_change_nothing() -> None:
    replica = make_bench().replica
    before = replica.snapshot()
    assert rule.mix(Stores(replica), before.clone(), 0.6) == 0.0
    assert torch.equal(replica.params, before)


# What travels.


def lease_key(start: int = 0) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=start + 32, grant=1)


def arrived(frames: list[Frame], replica: Replica) -> Pushed:
    """What the server makes of the frames of one push."""
    receiver = GradientReceiver(3, "fp32", replica.buckets)
    *_, last = [receiver(*opened(frame)) for frame in frames]
    assert isinstance(last, Pushed)
    return last


def test_weights_are_sent_in_the_place_of_the_gradient_bit_for_bit() -> None:
    replica = make_bench().replica
    theirs = some_weights(replica)
    sender = GradientSender("fp32", replica)
    frames = list(sender.frames(lease_key(), 7, BatchLoss(0.5, 8), 0.01, theirs))
    kept = theirs.clone()
    theirs.zero_()  # the frames have memory of their own
    assert torch.equal(arrived(frames, replica).gradient, kept)


def test_weights_that_are_not_finite_are_not_sent_and_their_layer_is_named() -> None:
    replica = make_bench().replica
    theirs = some_weights(replica)
    theirs[replica.layers[2][1].start] = float("nan")
    name = replica.layers[2][0]
    with pytest.raises(NonFiniteLoss, match=f"^weights at layer {name} cannot be sent"):
        list(
            GradientSender("fp32", replica).frames(lease_key(), 7, BatchLoss(0.5, 8), 0.01, theirs)
        )


# The worker.


class ScriptedLink:
    """A link on which arrives what the test has written down; after that the server is lost."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.pulled: deque[Event] = deque()
        """What arrives on a pull."""
        self.said: list[Message] = []
        self.frames: list[Frame] = []

    def flush(self) -> None:
        """All has been sent."""

    def send(self, message: Message) -> None:
        self.said.append(message)
        if isinstance(message, Pull) and self.pulled:
            self.events.append(self.pulled.popleft())

    def send_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def next_event(self, timeout_s: float) -> Event | None:
        if self.events:
            return self.events.popleft()
        if timeout_s > 0:
            raise PeerLost("the script is over")
        return None


class Office:
    """A worker with a scripted link, and leases for it."""

    def __init__(self, *overrides: str) -> None:
        settings = local_settings(*MIXING, *overrides)
        self.run = settings.run_config("test-run", "edp")
        self.training, self.twin = make_bench(*overrides), make_bench(*overrides)
        self.replica = self.training.replica
        self.link = ScriptedLink()
        self.worker = Worker(
            Welcome(
                run_id="test-run",
                incarnation="here",
                run=self.run,
                model_fingerprint="m",
                bucket_bytes=BUCKET_BYTES,
                codec="fp32",
                heartbeat_timeout_s=5.0,
            ),
            self.training,
        )
        self.worker.link = cast(Link, self.link)
        self.worker.pulling = False
        self._dispatcher = Dispatcher(
            incarnation="here",
            num_samples=self.training.num_samples,
            num_epochs=1,
            batch_size=32,
            permutation=lambda _: torch.arange(self.training.num_samples, dtype=torch.int32),
        )

    def lease(self) -> Assigned:
        lease = self._dispatcher.grant(1, 0.0)
        assert lease is not None
        return Assigned(*assignment_of(lease.key, lease.indices, version=0, learning_rate=0.1))

    def stepped(self, lease: Assigned) -> Tensor:
        """Where one step of plain training brings a twin of the worker's copy."""
        self.twin.compute(lease.indices)
        self.twin.replica.clip(self.run.train.gradient_clipping)
        self.twin.replica.step(0.1)
        return self.twin.replica.snapshot()

    def acknowledge(self, lease: Assigned, outcome: Outcome = "applied") -> None:
        self.link.events.append(
            MessageReceived(0, Ack(lease=lease.lease, outcome=outcome, version=1))
        )


def test_a_worker_pushes_where_its_own_step_has_brought_it() -> None:
    office = Office()
    for number in range(3):
        lease = office.lease()
        office.link.frames.clear()
        office.worker.step(lease)
        pushed = arrived(office.link.frames, office.replica)
        assert pushed.push.lease == lease.lease
        torch.testing.assert_close(pushed.gradient, office.stepped(lease), rtol=0.0, atol=0.0)
        assert torch.equal(office.replica.params, pushed.gradient), f"one step a lease: {number}"
        office.acknowledge(lease)


def test_what_is_on_the_wire_stays_while_the_worker_trains_on() -> None:
    office = Office()
    first, second = office.lease(), office.lease()
    office.worker.step(first)
    pushed = office.replica.snapshot()
    with pytest.raises(PeerLost):
        office.worker.step(second)  # computes and steps, and then waits for the first push's fate
    assert not torch.equal(office.replica.params, pushed)
    assert torch.equal(arrived(office.link.frames, office.replica).gradient, pushed)


def test_weights_that_arrive_before_a_push_do_not_change_what_it_brings() -> None:
    """Else the work on its lease would be lost, though the lease counts."""
    office = Office("worker_update_interval=1000")
    first, second = office.lease(), office.lease()
    office.worker.step(first)
    office.stepped(first)
    office.link.frames.clear()
    office.worker.pulling = True
    pulled = some_weights(office.replica)
    office.link.events.append(WeightsArrived(5, [pulled]))
    office.acknowledge(first)
    office.worker.step(second)
    pushed = arrived(office.link.frames, office.replica)
    torch.testing.assert_close(pushed.gradient, office.stepped(second), rtol=0.0, atol=0.0)
    assert pushed.push.base_version == 0, "they came from weights that are older than those"
    assert torch.equal(office.replica.params, pulled)
    assert office.worker.base_version == 5


def test_with_an_interval_of_1_every_lease_begins_at_the_servers_weights() -> None:
    office = Office("worker_update_interval=1")
    first, second = office.lease(), office.lease()
    pulled = some_weights(office.replica, 1)
    office.link.pulled.extend(WeightsArrived(version, [pulled]) for version in (1, 2))
    office.worker.step(first)
    assert [type(message) for message in office.link.said] == [Pull]
    assert torch.equal(office.replica.params, pulled)
    office.link.frames.clear()
    office.acknowledge(first)
    office.worker.step(second)
    office.twin.replica.load(pulled)
    pushed = arrived(office.link.frames, office.replica)
    torch.testing.assert_close(pushed.gradient, office.stepped(second), rtol=0.0, atol=0.0)
    assert pushed.push.base_version == 1


# The server.


class Puppet:
    """A worker that has the weights and its first two leases."""

    def __init__(self, stage: EDPStage, worker_id: int = 1) -> None:
        self._stage = stage
        self._hand = stage.house.join(hello(worker_id))
        replica = make_bench().replica
        self._sender = GradientSender("fp32", replica)
        receiver = StateReceiver(replica.buckets, torch.float32)
        while not isinstance(self._heard_state(receiver), WeightsArrived):
            pass
        stage.hand_out()
        self.leases = deque(self._hand.hear_a(Assignment).lease for _ in range(2))

    def _heard_state(self, receiver: StateReceiver) -> Event | None:
        message, payload = self._hand.hear()
        assert isinstance(message, State)
        return receiver(message, memoryview(bytearray(payload)))

    def push(self, lease: LeaseKey, weights: Tensor, base_version: int = 0) -> Ack:
        seen = self._stage.count(Pushed)
        for frame in self._sender.frames(lease, base_version, BatchLoss(0.5, 8), 0.01, weights):
            self._hand.connection.send_frame(frame)
        self._stage.house.until(lambda: self._stage.count(Pushed) > seen)
        return self._hand.hear_a(Ack)


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EDPStage]:
    defaults = (f"heartbeat_timeout_s={DEADLINE_S}", f"port={free_port()}", "track_gradients=true")
    settings = local_settings(*MIXING, *defaults, *getattr(request, "param", ()))
    with ExitStack() as rooms:
        parts = rooms.enter_context(server_parts(settings, tmp_path, BUCKET_BYTES))
        yield EDPStage(Server(parts.context), parts, rooms)


@pytest.mark.parametrize("stage", [(), ("mixing_rate=0.25",)], indirect=True)
def test_the_server_moves_towards_a_fresh_workers_weights(stage: EDPStage) -> None:
    puppet = Puppet(stage)
    alpha = stage.server.config.mixing_rate
    assert alpha in {0.6, 0.25}
    before, theirs = stage.weights, some_weights(stage.server.replica)
    ack = puppet.push(puppet.leases[0], theirs)
    assert (ack.outcome, ack.version) == ("applied", 1)
    torch.testing.assert_close(stage.weights, (1 - alpha) * before + alpha * theirs)
    assert stage.server.dispatcher.samples_applied == 32


def test_how_far_apart_they_were_is_reported_with_the_schedules_learning_rate(
    stage: EDPStage,
) -> None:
    other, puppet = Puppet(stage, 1), Puppet(stage, 2)
    other.push(other.leases[0], some_weights(stage.server.replica, 1))
    before, theirs = stage.weights, some_weights(stage.server.replica, 2)
    puppet.push(puppet.leases[0], theirs)
    values = stage.parts.metrics.steps[1].values
    assert values["staleness"] == 1
    assert values["lr"] == stage.parts.context.run.train.learning_rate
    assert values["grad_norm"] == pytest.approx((theirs - before).norm().item(), rel=1e-5)
    for name, place in stage.server.replica.layers:
        expected = (theirs - before)[place].norm().item()
        assert values[f"grad_norm/{name}"] == pytest.approx(expected, rel=1e-5)


def test_only_the_pushes_of_others_lower_the_weight(stage: EDPStage) -> None:
    busy, slow = Puppet(stage, 1), Puppet(stage, 2)
    for number, lease in enumerate(busy.leases):
        before, theirs = stage.weights, some_weights(stage.server.replica, number)
        busy.push(lease, theirs)
        torch.testing.assert_close(stage.weights, 0.4 * before + 0.6 * theirs)
    before, theirs = stage.weights, some_weights(stage.server.replica, 9)
    slow.push(slow.leases[0], theirs)
    alpha = 0.6 / 3**0.5
    torch.testing.assert_close(stage.weights, (1 - alpha) * before + alpha * theirs)


@pytest.mark.parametrize("stage", [("staleness.bound=1",)], indirect=True)
def test_weights_that_are_too_old_or_come_twice_are_not_mixed_in(stage: EDPStage) -> None:
    busy, slow = Puppet(stage, 1), Puppet(stage, 2)
    for number, lease in enumerate(busy.leases):
        busy.push(lease, some_weights(stage.server.replica, number))
    before, theirs = stage.weights, some_weights(stage.server.replica, 9)
    assert busy.push(busy.leases[0], theirs).outcome == "duplicate"
    assert slow.push(slow.leases[0], theirs).outcome == "stale"
    assert torch.equal(stage.weights, before)
    assert stage.server.dispatcher.samples_applied == 64
    assert len(stage.parts.happened(PushDropped)) == 2
    assert [record.step for record in stage.parts.metrics.steps] == [1, 2]
