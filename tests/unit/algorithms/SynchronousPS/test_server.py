"""SyncPS's server in the test's own hands: what counts, who takes over, and what each worker is told."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import stages
from harness import local_settings
from peers import DEADLINE_S, Hand, hello, server_parts
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.algorithms.SynchronousPS.members import FIRST_PAUSE_S, StepMember
from smolcluster.algorithms.SynchronousPS.reduction import PushArrived
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.step import Need, Part, Step, needs_holder
from smolcluster.algorithms.SynchronousPS.store import ReducingLinks
from smolcluster.configs.schema import GradientClipping
from smolcluster.data.permutation import epoch_permutation
from smolcluster.runs.events import (
    LeaseReturned,
    PushDropped,
    StepOverdue,
    WorkerLost,
    WorkerParked,
)
from smolcluster.server.push import GradientSender
from smolcluster.server.slices import arrived
from smolcluster.server.store import Store
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.compute import BatchLoss
from smolcluster.training.optimizer import clip_factor
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    Arrived,
    Assignment,
    Cancel,
    Commit,
    LeaseKey,
    Park,
    PartKey,
    Pull,
    Reduced,
    Skip,
    State,
)
from smolcluster.wire.session import HEARTBEATS_PER_TIMEOUT
from unit.algorithms.SynchronousPS.actors import deliver, random_gradient

pytestmark = pytest.mark.usefixtures("short_farewell")
BUCKET_BYTES = 16 * 1024
NUM_BUCKETS = 3
BATCH = 64
INSTANCE = "0123456789abcdef"
NODES = ("pi5", "win", "macbook", "mini1")


class Stage(stages.Stage[Server]):
    """A server, and workers spoken by hand."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def handle(self, event: Event) -> None:
        """Let the server handle an event, and go on with its step; it deals nothing again."""
        super().handle(event)
        now, step = self.clock(), self.server.step
        if step is not None and self.server.collect(step, now):
            assert self.server.take_step(now)
            self.server.take_step(now)

    @property
    def step(self) -> Step:
        """The open step."""
        assert self.server.step is not None
        return self.server.step

    @property
    def pushes(self) -> dict[str, int]:
        """What became of the pushes that were counted."""
        return dict(self.server.report.counts.tally.pushes)

    def answers(self) -> int:
        """How many pushes have come to their end."""
        return sum(isinstance(each, PushArrived) and each.whole for each in self.house.events)

    def newcomer(
        self,
        worker_id: int = 1,
        instance: str | None = None,
        unacknowledged: LeaseKey | None = None,
    ) -> "Puppet":
        """A worker that has been let in and was sent nothing yet."""
        greeting = hello(worker_id, NODES[worker_id - 1], instance)
        hand = self.house.join(greeting, unacknowledged)
        joined = [event for event in self.house.events if isinstance(event, Joined)]
        member = self.server.members.get(joined[-1].worker.member.session_id)
        assert member is not None
        return Puppet(self, hand, member)

    def member(self, worker_id: int = 1, instance: str | None = None) -> "Puppet":
        """A worker that has the whole state."""
        puppet = self.newcomer(worker_id, instance)
        puppet.take_state()
        return puppet

    def advance(self, after_s: float = 0.0) -> None:
        """What the loop does between two events, so many seconds later."""
        for event in self.server.pool.next_events(0.0):
            self.handle(event)
        self.server.advance(time.monotonic() + after_s)


class Puppet:
    """A worker that does what the test says."""

    def __init__(self, stage: Stage, hand: Hand, member: StepMember) -> None:
        self._stage = stage
        self.hand = hand
        self.member = member
        self.replica = stage.workers_replica()
        self._sender = GradientSender(stage.parts.context.codec, self.replica)

    @property
    def session_id(self) -> int:
        return self.member.worker.member.session_id

    def take_state(self) -> list[State | Reduced]:
        """Be sent the weights, without a step being opened meanwhile; returns what came."""
        server = self._stage.server

        def caught_up() -> bool:
            server.members.note_joined()
            return self.member.joined

        self._stage.house.until(caught_up)
        came: list[State | Reduced] = []
        for _ in range(NUM_BUCKETS + len(server.reduction.means)):
            message, payload = self.hand.hear()
            assert isinstance(message, State | Reduced)
            if isinstance(message, State):
                weights = torch.frombuffer(bytearray(payload), dtype=torch.float32)
                self.replica.params[self.replica.buckets[message.bucket]] = weights
            came.append(message)
        return came

    def part(self) -> Assignment:
        return self.hand.hear_a(Assignment)

    def next_part(self) -> Assignment:
        """The next part, whatever comes before it."""
        while not isinstance(message := self.hand.hear()[0], Assignment):
            pass
        return message

    def gradient(self, seed: int) -> Tensor:
        return random_gradient(self.replica.num_params, seed)

    def frames(self, part: Assignment, seed: int = 0, loss: float = 0.5) -> list[Frame]:
        """A push of some gradient, or what a backup sends of it."""
        self.replica.grads.copy_(self.gradient(seed))
        batch = BatchLoss(loss, part.lease.stop - part.lease.start)
        backup_from = part.first_bucket if part.backup else None
        what = part.lease, part.version, batch, 0.25
        return list(self._sender.frames(*what, backup_from=backup_from))

    def send(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.hand.connection.send_frame(frame)

    def push(self, part: Assignment, seed: int = 0, loss: float = 0.5) -> None:
        """Push the whole of it; returns when the server has taken note."""
        seen = self._stage.answers()
        self.send(self.frames(part, seed, loss))
        self._stage.house.until(lambda: self._stage.answers() > seen)

    def begin(self, part: Assignment, seed: int = 0, count: int = 1) -> list[Frame]:
        """Push the first buckets, which must count; returns the frames that are left."""
        frames = self.frames(part, seed)
        mine = next(each for each in self._stage.step.assignments if each.key == part.lease)
        self.send(frames[:count])
        self._stage.house.until(lambda: mine.num_counted == count)
        return frames[count:]

    def skip(self, part: Assignment) -> None:
        self.skip_of(part.lease)

    def skip_of(self, lease: LeaseKey) -> None:
        seen = len(self._stage.house.events)
        self.hand.say(Skip(lease=lease, compute_s=0.0))
        self._stage.house.until(lambda: len(self._stage.house.events) > seen)

    def step(self) -> tuple[Tensor, Commit]:
        """The next mean gradient, and its commit."""
        buckets: dict[int, Tensor] = {}
        while True:
            message, payload = self.hand.hear()
            if isinstance(message, Commit):
                assert sorted(buckets) == list(range(NUM_BUCKETS))
                return torch.cat([buckets[number] for number in sorted(buckets)]), message
            assert isinstance(message, Reduced), message
            buckets[message.bucket] = torch.frombuffer(bytearray(payload), dtype=torch.float32)

    def read_step(self) -> None:
        """Take from the link what comes up to the next commit: who does not is parked."""
        while not isinstance(self.hand.hear()[0], Commit):
            pass

    def beaten_step(self) -> tuple[LeaseKey, int | None]:
        """The next step up to its commit, in which a push is cancelled: which, and how much had counted."""
        heard = [self.hand.hear()[0] for _ in range(NUM_BUCKETS + 2)]
        assert isinstance(heard[-1], Commit)
        buckets = [each.bucket for each in heard if isinstance(each, Reduced)]
        assert buckets == list(range(NUM_BUCKETS))
        (cancel,) = (each for each in heard if isinstance(each, Cancel))
        return cancel.lease, cancel.num_buckets


def orphans(stage: Stage) -> list[Part]:
    parts = stage.step.parts
    return [part for part in parts if needs_holder(part, 0.0, is_late=False) is Need.ORPHAN]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    overrides = getattr(request, "param", ())
    settings = local_settings(
        *(f"heartbeat_timeout_s={DEADLINE_S}", f"global_batch_size={BATCH}", "optimizer=sgd"),
        *("batch_share.pi5=0.75", "batch_share.win=0.25", "batch_share.macbook=0.0"),
        *("num_epochs=2", *overrides),
        workers=3,
        algorithm="syncps",
    )
    with ExitStack() as rooms:
        parts = rooms.enter_context(server_parts(settings, tmp_path, BUCKET_BYTES, "syncps"))
        assert len(parts.context.training.replica.buckets) == NUM_BUCKETS
        yield Stage(Server(parts.context), parts, rooms)


def with_overrides(*overrides: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stage", [overrides], indirect=True)


patient = with_overrides("timeout=1000.0")
LONGER = 2000.0
"""More seconds than `timeout` there."""


def two(stage: Stage) -> tuple[Puppet, Assignment, Puppet, Assignment]:
    """Two members with three quarters and a quarter of the first batch."""
    one, other = stage.member(1, INSTANCE), stage.member(2)
    stage.advance()
    return one, one.part(), other, other.part()


def range_of(part: Assignment) -> tuple[int, int]:
    return part.lease.start, part.lease.stop


def test_a_worker_gets_the_whole_state_and_then_its_part(stage: Stage) -> None:
    puppet = stage.newcomer()
    states = [each for each in puppet.take_state() if isinstance(each, State)]
    assert [(state.version, state.bucket) for state in states] == [(0, 0), (0, 1), (0, 2)]
    assert torch.equal(puppet.replica.params, stage.weights)
    stage.advance()
    message, payload = puppet.hand.hear()
    assert isinstance(message, Assignment)
    assert (range_of(message), message.version, message.backup) == ((0, BATCH), 0, False)
    order = epoch_permutation(42, 0, 1438)[:BATCH]
    assert torch.equal(torch.frombuffer(bytearray(payload), dtype=torch.int32), order)


def test_a_step_is_the_optimizers_step_with_the_weighted_mean(stage: Stage) -> None:
    one, its_part, other, other_part = two(stage)
    assert (range_of(its_part), range_of(other_part)) == ((0, 48), (48, 64))
    before = stage.weights
    one.push(its_part, seed=1, loss=1.0)
    other.push(other_part, seed=2, loss=3.0)
    mean = 0.75 * one.gradient(1) + 0.25 * one.gradient(2)
    rate = stage.parts.context.run.train.learning_rate
    clip = clip_factor(float(mean.norm()), GradientClipping())
    torch.testing.assert_close(stage.weights, before - rate * clip * mean)
    (reduced, commit), (same, as_well) = one.step(), other.step()
    torch.testing.assert_close(reduced, mean, rtol=1e-6, atol=1e-6)
    assert torch.equal(reduced, same)
    assert commit == as_well
    assert (commit.version, commit.num_samples, commit.tensor) == (1, BATCH, None)
    assert commit.clip == pytest.approx(clip, rel=1e-6)
    stores = Store.of(one.replica)
    stores.take(reduced)
    stores.step(commit.clip, commit.learning_rate)
    assert torch.equal(one.replica.params, stage.weights), "every replica takes the same step"
    (record,) = stage.parts.metrics.steps
    assert (record.step, record.rank) == (1, None)
    assert record.values["loss"] == pytest.approx(0.75 * 1.0 + 0.25 * 3.0)
    assert record.values["grad_norm"] == pytest.approx(float(mean.norm()), rel=1e-5)
    assert (record.values["start"], record.values["stop"]) == (0, BATCH)
    assert stage.pushes == {"applied": 2}
    assert [range_of(each.part()) for each in (one, other)] == [(64, 112), (112, 128)]


def test_half_of_the_parts_is_not_enough_and_a_complete_bucket_goes_back_at_once(
    stage: Stage,
) -> None:
    """However many buckets have come: the server itself is nobody to wait for or to count."""
    one, its_part, other, other_part = two(stage)
    one.push(its_part)
    stage.advance(LONGER)
    assert (stage.server.version, stage.server.reduction.means) == (0, [])
    left = other.begin(other_part, count=2)
    stage.house.until(lambda: len(stage.server.reduction.means) == 2)
    assert [other.hand.hear_a(Reduced).bucket for _ in range(2)] == [0, 1]
    assert stage.server.version == 0
    other.send(left)
    stage.house.until(lambda: stage.server.version == 1)


def test_a_push_that_comes_twice_counts_once(stage: Stage) -> None:
    """Of a step that is open, and of one that is long over."""
    one, its_part, other, other_part = two(stage)
    one.push(its_part, seed=1)
    one.push(its_part, seed=5)
    other.push(other_part, seed=2)
    mean = 0.75 * one.gradient(1) + 0.25 * one.gradient(2)
    torch.testing.assert_close(one.step()[0], mean, rtol=1e-6, atol=1e-6)
    after = stage.weights
    for _ in range(2):
        one.push(its_part, seed=6)
    assert torch.equal(stage.weights, after)
    assert stage.server.version == 1
    assert all(part.num_counted == 0 for part in stage.step.parts)
    assert stage.pushes["applied"] == 2
    one.push(one.part())
    assert stage.step.parts[0].finished_by is not None, "it may go on"


def test_without_a_timeout_a_part_may_take_a_quarter_of_the_heartbeats_and_what_it_usually_takes(
    stage: Stage,
) -> None:
    """The whole of it as long as nobody has shown how long a part takes."""
    one, its_part, other, _ = two(stage)
    (assignment,) = stage.step.parts[1].assignments
    usual_s = other.member.pace.cost.seconds(16)
    assert assignment.term.due_at - assignment.term.since == pytest.approx(DEADLINE_S + 4 * usual_s)
    one.push(its_part)
    usual_s = min(stage.server.members.expected_s(other.member), 2 * stage.step.expected_s)
    assert usual_s > 0.0
    assert assignment.term.due_at - assignment.term.since == pytest.approx(
        DEADLINE_S / 4 + 4 * usual_s
    )
    stage.advance(0.9 * DEADLINE_S / 4)
    assert [len(part.assignments) for part in stage.step.parts] == [0, 1]
    stage.advance(DEADLINE_S / 4 + 4 * usual_s)
    assert [len(part.assignments) for part in stage.step.parts] == [0, 2]


@patient
def test_the_first_part_starts_the_clock(stage: Stage) -> None:
    """A batch that takes everybody long makes nobody late."""
    one, its_part, _, _ = two(stage)
    stage.advance(LONGER)
    assert [len(part.assignments) for part in stage.step.parts] == [1, 1]
    one.push(its_part)
    stage.advance(LONGER / 4)
    assert [len(part.assignments) for part in stage.step.parts] == [0, 1]
    stage.advance(LONGER)
    assert [len(part.assignments) for part in stage.step.parts] == [0, 2]
    stage.advance(2 * LONGER)
    assert [len(part.assignments) for part in stage.step.parts] == [0, 2], "one backup, not two"


OVERDUE_S = 2 * DEADLINE_S
"""Longer than any part here may take, heartbeat_timeout_s and four times what was expected."""
ONLY_PART = with_overrides(
    *("batch_share.pi5=1.0", "batch_share.win=0.0", "batch_share.macbook=0.0", "timeout=0.1")
)


@ONLY_PART
def test_a_hung_worker_with_the_only_part_is_not_waited_for_for_ever(stage: Stage) -> None:
    """No part is whole, so that the clock of `timeout` does not run; its heartbeat lives."""
    one, other = stage.member(1), stage.member(2)
    stage.advance()
    one.part()
    stage.advance(OVERDUE_S)
    backup = other.part()
    assert (range_of(backup), backup.backup) == ((0, BATCH), True)
    other.push(backup)
    assert stage.server.version == 1
    (overdue,) = stage.parts.happened(StepOverdue)
    assert isinstance(overdue, StepOverdue)
    assert (overdue.rank, overdue.node, overdue.step) == (0, "pi5", 1)
    (line,) = [line for line in stage.parts.log_lines if "waits for" in line]
    assert line.startswith("WARNING step 1 waits for worker 1 (pi5): it has had 64 samples for")


@with_overrides("timeout=null")
def test_a_step_that_nobody_can_take_over_is_told_at_once_and_at_twice_the_time(
    stage: Stage,
) -> None:
    stage.member(1)
    stage.advance()
    for after_s in (1.0, 1.5, 3.0, 3.5, 5.0):
        stage.advance(after_s * OVERDUE_S)
    lines = [line for line in stage.parts.log_lines if "waits for" in line]
    assert len(lines) == 2
    assert all("nobody is free to take them over" in line for line in lines)
    assert len(stage.parts.happened(StepOverdue)) == 2


def test_the_time_of_a_part_begins_when_its_batch_has_been_loaded(stage: Stage) -> None:
    feed = stage.server.feed = stages.SlowFeed()
    stage.member(1)
    stage.advance()
    stage.advance(10 * OVERDUE_S)
    assert stage.parts.happened(StepOverdue) == []
    (assignment,) = stage.step.parts[0].assignments
    since = assignment.term.since
    feed.arrived()
    assert assignment.term.since > since
    stage.advance(10 * OVERDUE_S)
    assert len(stage.parts.happened(StepOverdue)) == 1


STEP_S = 10.0
"""How long a part takes, on the test's clock."""


class Clocked:
    """Workers that compute, beside some that hang, and a server whose clock is the test's."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage, self.now = stage, 1000.0
        self.honest: list[Puppet] = []
        self.hung: list[Puppet] = []
        stage.clock = lambda: self.now
        monkeypatch.setattr(syncps, "time", SimpleNamespace(monotonic=stage.clock))

    def enter(self, role: list[Puppet], count: int) -> None:
        for _ in range(count):
            puppet = self.stage.member(len(self.honest) + len(self.hung) + 1)
            connection = puppet.member.worker.live_session.connection
            connection.stall_timeout_s = DEADLINE_S  # its heartbeats are the test's affair
            role.append(puppet)

    def steps(self, count: int, after_each: Callable[[], None] = lambda: None) -> float:
        """Take so many steps; returns how many seconds longer that took than without anybody who hangs."""
        server, began = self.stage.server, self.now
        server.advance(self.now)
        for version in range(server.version + 1, server.version + count + 1):
            self.push_all()
            while server.version < version:
                self.now += STEP_S / 10
                server.advance(self.now)
                self.push_all()
            for puppet in self.hung:
                puppet.read_step()
            after_each()
        return self.now - began - count * STEP_S

    def push_all(self) -> None:
        """All that compute push what they hold, a step's time later."""
        waiting = [(puppet, len(puppet.member.unanswered)) for puppet in self.honest]
        self.now += STEP_S * max(count for _, count in waiting)
        for puppet, count in waiting:
            for _ in range(count):
                puppet.push(puppet.next_part())

    def let_hung_answer(self) -> None:
        """They skip what others have done meanwhile."""
        for puppet in self.hung:
            for lease, assignment in puppet.member.unanswered.copy().items():
                if assignment.push.is_cancelled:
                    puppet.skip_of(lease)


@pytest.fixture
def clocked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(stage, monkeypatch)


hundred_steps = with_overrides(
    "batch_share=null", "timeout=null", "num_epochs=6", "elastic=true", "heartbeat_timeout_s=40"
)
HOLD_S = 40 / HEARTBEATS_PER_TIMEOUT + 6 * STEP_S
"""A quarter of heartbeat_timeout_s, four times what the part should take, and that for doing it again."""


@hundred_steps
@pytest.mark.parametrize("num_hung", [1, 2])
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_workers_that_hang_hold_up_a_hundred_steps_once(
    clocked: Clocked, num_hung: int, num_steps_before: int
) -> None:
    """Whether they hang in the first step, or join when others have been measured."""
    clocked.enter(clocked.honest, 2)
    assert clocked.steps(num_steps_before) == 0.0
    clocked.enter(clocked.hung, num_hung)
    assert 0.0 < clocked.steps(100) <= HOLD_S
    assert len(clocked.stage.parts.happened(StepOverdue)) == num_hung


@hundred_steps
def test_a_worker_that_is_always_too_late_holds_up_ever_fewer_steps(clocked: Clocked) -> None:
    """It answers after each step, and hangs in the next one."""
    clocked.enter(clocked.honest, 2)
    clocked.enter(clocked.hung, 1)
    assert 0.0 < clocked.steps(100, clocked.let_hung_answer) <= 7 * HOLD_S
    held = clocked.stage.parts.happened(StepOverdue)
    steps = [each.step for each in held if isinstance(each, StepOverdue)]
    assert steps == [1, 3, 5, 9, 17, 33, 65]


class Laggard:
    """The third worker has no part, and its link is stuck until it is parked, while the first one trains."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.one, self.slow = stage.member(1), stage.member(3)
        self._gate = threading.Event()

        def stuck(_: float) -> None:
            self._gate.wait(DEADLINE_S)

        self.slow.member.session.send_later(stuck)
        stage.advance()
        while not self.slow.member.is_parked:
            self.train()

    def train(self) -> None:
        version = self.stage.server.version
        self.one.push(self.one.part())
        self.one.step()
        assert self.stage.server.version == version + 1 < 40

    def ask(self) -> None:
        """The link is free again, and the worker hears that it begins anew."""
        self._gate.set()
        self.slow.hand.hear_a(Park)
        self.slow.hand.say(Pull())
        self.stage.house.until(lambda: self.slow.member.has_asked)
        self.stage.house.until(lambda: self.slow.member.session.backlog == 0)


def test_a_member_that_does_not_keep_up_is_parked_and_neither_cut_nor_waited_for(
    stage: Stage,
) -> None:
    laggard = Laggard(stage)
    for _ in range(20):
        laggard.train()
    assert stage.server.members.get(laggard.slow.session_id) is laggard.slow.member
    assert laggard.slow.member.session.backlog == 2, "what it is stuck in, and the Park"
    (parked,) = stage.parts.happened(WorkerParked)
    assert isinstance(parked, WorkerParked)
    assert (parked.rank, parked.node) == (2, "macbook")
    assert stage.parts.happened(WorkerLost) == []
    (line,) = [line for line in stage.parts.log_lines if "parked" in line]
    assert line.startswith("WARNING worker 3 (macbook) does not keep up")
    assert "launch_edp.sh" in line
    laggard.ask()


def test_who_is_parked_and_asks_gets_the_newest_state_and_takes_part_again(stage: Stage) -> None:
    laggard = Laggard(stage)
    laggard.ask()
    stage.advance()
    assert laggard.slow.member.is_parked, "not before its time"
    stage.advance(FIRST_PAUSE_S)

    def is_sent() -> bool:
        """It takes part when the state has left."""
        stage.advance()
        return laggard.slow.member.joined

    stage.house.until(is_sent)
    states = [laggard.slow.hand.hear_a(State) for _ in range(NUM_BUCKETS)]
    assert [state.bucket for state in states] == list(range(NUM_BUCKETS))
    assert {state.version for state in states} == {stage.server.version}
    assert laggard.slow.member in stage.server.members.free


def test_when_nobody_else_is_there_a_parked_member_need_not_wait(stage: Stage) -> None:
    laggard = Laggard(stage)
    laggard.ask()
    laggard.one.hand.leave()
    stage.house.until(lambda: stage.count(Departed) == 1)
    stage.advance()
    assert laggard.slow.hand.hear_a(State).version == stage.server.version


def test_a_loop_that_is_parked_as_the_run_ends_is_sent_the_final_weights(stage: Stage) -> None:
    one, other = stage.member(1), stage.member(2)
    stage.server.park(other.member, "it is slow", time.monotonic())
    stage.advance()
    one.push(one.part())
    stage.server.give_result()
    assert other.hand.hear_a(Park).lease is None
    state = other.hand.hear_a(State)
    assert (state.content, state.version) == ("weights", 1)


def test_what_a_member_is_parked_for_again_is_not_logged_again(stage: Stage) -> None:
    member = stage.member(1)
    for _ in range(3):
        stage.server.park(member.member, "it is slow", time.monotonic())
    assert len(stage.parts.happened(WorkerParked)) == 3
    assert len([line for line in stage.parts.log_lines if "parked" in line]) == 1


def test_a_member_that_says_it_has_fallen_behind_is_parked_and_its_part_goes_to_another(
    stage: Stage,
) -> None:
    one, its_part, other, other_part = two(stage)
    other.begin(other_part, seed=2)
    other.hand.say(Pull())
    stage.house.until(lambda: other.member.is_parked)
    park = other.hand.hear_a(Park)
    assert (park.lease, park.num_buckets) == (other_part.lease, 1)
    stage.advance()
    again = one.part()
    assert (range_of(again), again.first_bucket, again.backup) == ((48, 64), 1, True)
    one.push(its_part)
    one.push(again)
    assert stage.server.version == 1
    other.skip(other_part)
    assert stage.count(Departed) == 0, "it was not wanted any more"


def late_by(stage: Stage) -> tuple[Puppet, Assignment, Puppet, Assignment, Assignment]:
    """The second worker is late, and the first one has its part as well."""
    one, its_part, other, other_part = two(stage)
    one.push(its_part, seed=1)
    stage.advance(LONGER)
    backup = one.part()
    assert (backup.lease.start, backup.backup) == (other_part.lease.start, True)
    assert backup.lease.grant != other_part.lease.grant
    return one, its_part, other, other_part, backup


@patient
def test_a_late_push_is_counted_as_a_duplicate_and_changes_nothing(stage: Stage) -> None:
    one, _, other, other_part, backup = late_by(stage)
    assert backup.first_bucket == 0
    one.push(backup, seed=2)
    assert stage.server.version == 1
    after = stage.weights
    mean = 0.75 * one.gradient(1) + 0.25 * one.gradient(2)
    torch.testing.assert_close(one.step()[0], mean, rtol=1e-6, atol=1e-6)
    assert other.beaten_step() == (other_part.lease, 0)
    other.push(other_part, seed=9)
    assert torch.equal(stage.weights, after)
    assert stage.pushes == {"applied": 2, "duplicate": 1}
    (dropped,) = stage.parts.happened(PushDropped)
    assert isinstance(dropped, PushDropped)
    assert (dropped.outcome, dropped.rank, dropped.start) == ("duplicate", 1, 48)


@patient
def test_who_was_beaten_in_mid_push_is_told_how_much_of_it_counted(stage: Stage) -> None:
    one, its_part, other, other_part = two(stage)
    one.push(its_part, seed=1)
    left = other.begin(other_part, seed=2)
    stage.house.until(lambda: len(stage.server.reduction.means) == 1)
    stage.advance(LONGER)
    assert one.hand.hear_a(Reduced).bucket == 0
    backup = one.part()
    assert (backup.first_bucket, backup.backup) == (1, True)
    one.push(backup, seed=3)
    assert stage.server.version == 1
    other.send(left)
    stage.house.until(lambda: stage.pushes.get("duplicate") == 1)
    assert other.beaten_step() == (other_part.lease, 1)
    assert stage.server.version == 1


@with_overrides(
    "timeout=1000.0", "batch_share.pi5=0.5", "batch_share.win=0.25", "batch_share.macbook=0.25"
)
def test_a_beaten_push_is_told_so_at_its_end_and_need_not_wait_for_the_step(stage: Stage) -> None:
    """Its worker may compute the next part with the right error feedback."""
    one, other, third = (stage.member(number) for number in (1, 2, 3))
    stage.advance()
    its_part, other_part = one.part(), other.part()
    third.part()
    one.push(its_part, seed=1)
    left = other.begin(other_part, seed=2)
    stage.advance(LONGER)
    one.push(one.part(), seed=3)
    other.send(left)
    stage.house.until(lambda: stage.pushes.get("duplicate") == 1)
    cancel = other.hand.hear_a(Cancel)
    assert (cancel.lease, cancel.num_buckets) == (other_part.lease, 1)
    assert stage.server.version == 0


@patient
def test_who_is_late_and_first_all_the_same_wins(stage: Stage) -> None:
    one, _, other, other_part, backup = late_by(stage)
    other.push(other_part, seed=2)
    assert stage.server.version == 1
    mean, commit = other.step()
    torch.testing.assert_close(mean, 0.75 * one.gradient(1) + 0.25 * one.gradient(2))
    assert commit.version == 1
    assert one.beaten_step() == (backup.lease, 0)
    one.skip(backup)
    assert stage.pushes == {"applied": 2}, "what is not pushed is no duplicate"


@patient
def test_who_does_not_answer_gets_no_more_parts_until_it_does(stage: Stage) -> None:
    """A machine that hangs is waited for once."""
    one, _, other, other_part, backup = late_by(stage)
    one.push(backup, seed=2)
    for version in (2, 3):
        one.step()
        whole = one.part()
        assert range_of(whole) == ((version - 1) * BATCH, version * BATCH), "all is one's alone"
        assert stage.step.parts[0].num_samples == BATCH
        one.push(whole)
        assert stage.server.version == version
    one.step()
    last = one.part()
    other.skip(other_part)
    stage.advance()
    assert range_of(last) == (3 * BATCH, 4 * BATCH), "not in the middle of a step"
    one.push(last)
    one.step()
    assert range_of(one.part()) == (4 * BATCH, 4 * BATCH + 48)
    assert [part.num_samples for part in stage.step.parts] == [48, 16]


def test_a_part_that_its_holder_gives_back_is_given_to_the_least_busy(stage: Stage) -> None:
    one, its_part, other, other_part = two(stage)
    idle = stage.member(3)
    one.skip(its_part)
    stage.house.until(lambda: orphans(stage) == [stage.step.parts[0]])
    one.hand.leave()
    stage.house.until(lambda: stage.count(Departed) == 1)
    stage.advance()
    again = idle.part()
    assert (range_of(again), again.backup, again.first_bucket) == ((0, 48), True, 0)
    assert any("takes over 48 samples of step 1" in line for line in stage.parts.log_lines)
    idle.push(again)
    other.push(other_part)
    assert stage.server.version == 1


def test_who_skips_a_part_that_is_wanted_is_cut(stage: Stage) -> None:
    """Else it might be given the same part for ever."""
    one, its_part, other, other_part = two(stage)
    one.skip(its_part)
    stage.house.until(lambda: stage.count(Departed) == 1)
    assert any("skipped a part that is wanted" in line for line in stage.parts.log_lines)
    other.push(other_part)
    stage.advance()
    other.push(other.part())
    assert stage.server.version == 1


def test_what_is_missing_of_a_lost_workers_part_goes_to_another(stage: Stage) -> None:
    one, its_part, other, other_part = two(stage)
    one.begin(its_part, seed=1)
    one.hand.leave()
    stage.house.until(lambda: stage.count(Departed) == 1)
    assert stage.pushes == {"lost": 1}
    (returned,) = stage.parts.happened(LeaseReturned)
    assert isinstance(returned, LeaseReturned)
    assert (returned.start, returned.stop, returned.rank) == (0, 48, 0)
    stage.advance()
    again = other.part()
    assert (range_of(again), again.first_bucket, again.backup) == ((0, 48), 1, True)
    other.push(other_part, seed=2)
    other.push(again, seed=3)
    mean, commit = other.step()
    assert commit.version == 1
    first = other.replica.buckets[0].stop
    expected = 0.75 * other.gradient(3) + 0.25 * other.gradient(2)
    expected[:first] = (0.75 * other.gradient(1) + 0.25 * other.gradient(2))[:first]
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6)
    assert stage.pushes == {"lost": 1, "applied": 2}


def test_a_lost_workers_part_that_was_whole_is_not_computed_again(stage: Stage) -> None:
    one, its_part, other, other_part = two(stage)
    one.push(its_part, seed=1)
    one.hand.leave()
    stage.house.until(lambda: stage.count(Departed) == 1)
    stage.advance()
    assert stage.parts.happened(LeaseReturned) == []
    other.push(other_part, seed=2)
    mean, _ = other.step()
    torch.testing.assert_close(mean, 0.75 * other.gradient(1) + 0.25 * other.gradient(2))


def test_a_part_waits_where_nobody_is_left_for_it(stage: Stage) -> None:
    """Until somebody has the weights."""
    puppet = stage.member(1)
    stage.advance()
    puppet.begin(puppet.part(), seed=1, count=2)
    puppet.hand.leave()
    stage.house.until(lambda: stage.count(Departed) == 1)
    stage.advance()
    assert any("all workers have gone" in line for line in stage.parts.log_lines)
    heir = stage.newcomer(2)
    came = heir.take_state()
    assert [(type(each), each.bucket) for each in came] == [
        *((State, 0), (State, 1), (State, 2), (Reduced, 0), (Reduced, 1))
    ], "also what the open step has reduced"
    stage.advance()
    part = heir.part()
    assert (part.first_bucket, part.backup) == (2, True)
    heir.push(part, seed=1)
    assert stage.server.version == 1


@pytest.mark.parametrize("num_counted", [0, 1, NUM_BUCKETS])
def test_who_returns_is_told_how_much_of_its_push_counted(stage: Stage, num_counted: int) -> None:
    one, its_part, _, _ = two(stage)
    if num_counted == NUM_BUCKETS:
        one.push(its_part)
    elif num_counted:
        one.begin(its_part, count=num_counted)
    back = stage.newcomer(1, INSTANCE, its_part.lease)
    cancel = back.hand.hear_a(Cancel)
    assert (cancel.lease, cancel.num_buckets) == (its_part.lease, num_counted)


def test_what_a_fenced_session_still_pushes_does_not_count(stage: Stage) -> None:
    """Its reader may be in the middle of it when the new session takes its place."""
    one, its_part, _, _ = two(stage)
    receiver = stage.server.receiver_for(one.session_id)
    frames = one.frames(its_part, seed=1)
    assert deliver(frames[0], receiver) is None
    assert stage.step.parts[0].num_counted == 1
    stage.newcomer(1, INSTANCE)
    events = [deliver(frame, receiver) for frame in frames[1:]]
    assert stage.step.parts[0].num_counted == 1
    for event in filter(None, events):
        stage.server.handle(event)
    assert stage.step.parts[0].finished_by is None
    assert orphans(stage) == [stage.step.parts[0]]


@pytest.fixture
def other_host(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if a store on another host had one more bucket; what was said of it."""
    cuts: list[str] = []
    monkeypatch.setattr(ReducingLinks, "others", {"win": 1})
    monkeypatch.setattr(stage.server.links, "node_of", lambda _: "win")
    monkeypatch.setattr(stage.server.links, "cut_silent", lambda *_: cuts.append("it owes means"))
    return cuts


def counted(part: Assignment, num_buckets: int) -> Arrived:
    key = PartKey(instance=INSTANCE, of=part.lease)
    return arrived(key, 0, 3, torch.empty(0, num_buckets), is_whole=True)[0]


def test_a_store_owes_means_when_members_have_brought_all(
    stage: Stage, other_host: list[str]
) -> None:
    one, its_part, other, other_part = two(stage)
    one.push(its_part)
    stage.advance()
    assert other_host == []
    rest = other.begin(other_part, count=NUM_BUCKETS - 1)
    stage.advance()
    assert other_host == []
    began = time.monotonic()
    other.send(rest)
    stage.house.until(lambda: stage.step.has_ended_here)
    stage.advance()
    assert set(other_host) == {"it owes means"}
    assert stage.step.heard_at >= began


def test_who_wins_here_and_was_beaten_at_a_store_keeps_no_residual(
    stage: Stage, other_host: list[str]
) -> None:
    one, its_part, _, _ = two(stage)
    one.push(its_part)
    stage.server.on_counted(0, counted(its_part, 0))
    cancel = one.hand.hear_a(Cancel)
    assert (cancel.lease, cancel.num_buckets) == (its_part.lease, None)
    assert other_host == []


def test_a_part_is_finished_when_it_is_whole_at_every_store(
    stage: Stage, other_host: list[str]
) -> None:
    one, its_part, _, _ = two(stage)
    part = stage.step.parts[0]
    one.push(its_part)
    told = counted(its_part, 1)
    stage.server.on_counted(0, told.model_copy(update={"is_whole": False}))
    assert part.finished_by is None
    stage.server.on_counted(0, told)
    assert part.finished_by is None, "that push had ended there before"
    assert other_host == []


@with_overrides("lr_schedule.warmup_iters=4", "lr_schedule.min_lr=0.0")
def test_the_learning_rate_follows_the_samples_applied(stage: Stage) -> None:
    puppet = stage.member(1)
    stage.advance()
    rates = []
    for _ in range(3):
        part = puppet.part()
        puppet.push(part)
        _, commit = puppet.step()
        assert part.learning_rate == commit.learning_rate
        rates.append(commit.learning_rate)
    assert rates == pytest.approx([0.001 * step / 5 for step in (1, 2, 3)])


def overtaken(stage: Stage) -> Callable[[], None]:
    """Both parts are whole, but the end of the first one is heard only after the commit.

    Its reader was interrupted between adding its last bucket and telling the server. Returns what tells it.
    """
    one, its_part, other, other_part = two(stage)
    receivers = [stage.server.receiver_for(each.session_id) for each in (one, other)]
    held = [deliver(frame, receivers[0]) for frame in one.frames(its_part, seed=1)]
    events = [deliver(frame, receivers[1]) for frame in other.frames(other_part, seed=2)]
    assert held[:2] == [None, None]
    for event in filter(None, events):
        stage.handle(event)
    assert stage.server.version == 1
    last = held[2]
    assert isinstance(last, PushArrived)
    return lambda: stage.handle(last)


@patient
def test_the_end_of_an_old_part_does_not_start_the_clock(stage: Stage) -> None:
    tell = overtaken(stage)
    assert stage.step.first_part_at is None
    tell()
    assert stage.step.first_part_at is None


def test_who_is_through_takes_part_in_the_next_step(stage: Stage) -> None:
    overtaken(stage)
    assert [part.num_samples for part in stage.step.parts] == [48, 16]
