"""SyncPS's worker, told by hand what comes: what it computes, pushes, leaves out, and applies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from harness import local_settings
from peers import opened, small_replica, welcome_of
from smolcluster.algorithms.SynchronousPS.step_receiver import Committed, FellBehind, StateArrived
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.errors import NonFiniteLoss, PeerLost
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.server.link import Link
from smolcluster.server.push import GradientSender
from smolcluster.server.slices import content_pieces
from smolcluster.server.store import Store, state_of
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.recipe import Training
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    MAX_PULLED_BUCKETS,
    Cancel,
    LeaseKey,
    Message,
    Park,
    Pull,
    Push,
    Skip,
    State,
)
from smolcluster.wire.session import Later
from unit.algorithms.SynchronousPS.actors import (
    commit_of,
    committed,
    decoded,
    deliver,
    random_gradient,
    reduce_step,
    reduction_of,
)


class Wire(Link):
    """A link whose server is a list of events; it ends when there are no more."""

    def __init__(self, diary: list[str]) -> None:
        self.frames: list[Frame] = []
        self.coming: list[Event] = []
        self.lost = False
        self.unsent: list[bool] = []
        """Whether something is still being sent at the next flushes."""
        self._diary = diary

    def send_frame(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._diary.append(type(opened(frame)[0]).__name__)

    def send_later(self, later: Later) -> None:
        if (frame := later(0.0)) is not None:
            self.send_frame(frame)

    def flush(self, timeout_s: float = 0.0) -> bool:  # noqa: ARG002
        self._diary.append("flush")
        return not self.unsent or not self.unsent.pop()

    def next_event(self, timeout_s: float) -> Event | None:
        if self.coming:
            return self.coming.pop(0)
        if timeout_s > 0 or self.lost:
            raise PeerLost("the server is lost")
        return None

    @property
    def said(self) -> list[Message]:
        return [opened(frame)[0] for frame in self.frames]


@dataclass(frozen=True)
class Bench(TrainingContext):
    """Computes a gradient that the samples' sum names, and lets something happen meanwhile."""

    diary: list[str] = field(default_factory=list)
    meanwhile: list[Callable[[], None]] = field(default_factory=list)

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:  # noqa: ARG002
        self.diary.append("compute")
        self.replica.grads.copy_(gradient_for(self.replica, indices))
        for happen in self.meanwhile:
            happen()
        return BatchLoss(0.5, len(indices))


def gradient_for(replica: Replica, indices: Tensor) -> Tensor:
    return random_gradient(replica.num_params, int(indices.sum()), replica.params.dtype)


class Shop:
    """A worker at version 3 that has the whole state, unless told otherwise."""

    def __init__(
        self,
        codec: str = "fp32",
        optimizer: str = "sgd",
        *overrides: str,
        replica: Replica | None = None,
    ) -> None:
        self.diary: list[str] = []
        self.replica = replica or small_replica(optimizer)
        samples = SimpleNamespace(num_samples=96)
        workload = cast(Workload, SimpleNamespace(training=Training(), train=samples))
        self.training = Bench(workload, self.replica, 0, diary=self.diary)
        run = local_settings(*overrides, algorithm="syncps").run_config("run", "syncps")
        welcome = welcome_of(run, bucket_bytes=1024, codec=codec, heartbeat_timeout_s=5.0)
        self.worker = Worker(welcome, self.training)
        self.wire = Wire(self.diary)
        self.worker.link = self.wire
        self.worker.client.begin(self.wire)
        self.worker.new_receiver()
        self.worker.version, self.worker.has_state = 3, True

    def state(self, version: int, values: float) -> Iterator[StateArrived]:
        """Everything a joiner is sent; all of it is `values`."""
        for content, tensor in state_of(self.replica).items():
            [piece, *_] = content_pieces(content, tensor, self.replica.buckets)
            state = State(incarnation="here", version=version, **piece.fields)
            yield StateArrived(state, torch.full_like(tensor, values))

    def commit(self, version: int, seed: int = 0, digests: Sequence[bytes] = ()) -> Committed:
        """A commit whose mean has come."""
        means, [span] = self.worker.receiver.means, self.worker.receiver.means.spans
        gradient = means.memory_for(version)
        assert gradient is not None
        gradient.copy_(random_gradient(self.replica.num_params, seed))
        for _ in span:
            means.arrived(version, span)
        return Committed(commit_of(version, clip=0.5, learning_rate=0.1), digests)

    def pushed(self, codec: str = "fp32") -> dict[int, Tensor]:
        """What was pushed, by bucket."""
        found = {}
        for frame in self.wire.frames:
            message, _ = opened(frame)
            if isinstance(message, Push):
                used = message.tensor.codec
                assert used == codec
                found[message.bucket] = decoded(frame, used, torch.float32)
        return found


def lease(grant: int = 1, start: int = 0, stop: int = 4) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=grant)


def task(
    grant: int = 1,
    version: int = 3,
    first_bucket: int = 0,
    *,
    backup: bool = False,
    batch_samples: int = 32,
) -> Assigned:
    """Four samples of a batch, which differ from grant to grant."""
    indices = torch.arange(4 * grant, 4 * grant + 4, dtype=torch.int32)
    return Assigned(
        *assignment_of(
            lease(grant),
            indices,
            version=version,
            learning_rate=0.1,
            batch_samples=batch_samples,
            first_bucket=first_bucket,
            backup=backup,
        )
    )


def cancel(grant: int = 1, num_buckets: int | None = 0) -> MessageReceived:
    return MessageReceived(0, Cancel(lease=lease(grant), num_buckets=num_buckets))


def live(shop: Shop, *events: Event) -> None:
    """A session in which this comes, and then the connection is lost; the next one begins."""
    has_state = shop.worker.has_state
    shop.wire.coming = [*shop.state(shop.worker.version, 0.5)] if has_state else []
    shop.wire.coming += events
    with pytest.raises(PeerLost):
        shop.worker.take_part(shop.wire)
    shop.worker.new_receiver()


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_part_is_computed_and_pushed(shop: Shop) -> None:
    live(shop, task())
    assert shop.diary == ["flush", "compute", "Push", "Push", "Push"]
    gradient = gradient_for(shop.replica, task().indices)
    assert torch.equal(torch.cat(list(shop.pushed().values())), gradient)
    (push,) = {(each.lease, each.base_version) for each in shop.wire.said if isinstance(each, Push)}
    assert push == (lease(), 3)
    assert all(each.loss == 0.5 and each.compute_s > 0 for each in pushes(shop))
    assert shop.worker.unacknowledged == lease()


def pushes(shop: Shop) -> list[Push]:
    return [each for each in shop.wire.said if isinstance(each, Push)]


def skips(shop: Shop) -> list[Skip]:
    return [each for each in shop.wire.said if isinstance(each, Skip)]


def test_what_is_still_being_sent_is_waited_for_before_the_next_part_is_computed(
    shop: Shop,
) -> None:
    """Its frames are the gradient's own memory."""
    live(shop, task(1), task(2))
    assert shop.diary == [*["flush", "compute", "Push", "Push", "Push"] * 2]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("first_bucket", [0, 1, 2])
def test_a_backup_is_lossless_and_only_what_is_missing(codec: str, first_bucket: int) -> None:
    shop = Shop(codec)
    held = held_buckets(shop)
    live(shop, task(first_bucket=first_bucket, backup=True))
    gradient = gradient_for(shop.replica, task().indices)
    expected = dict(list(enumerate(shop.replica.buckets))[first_bucket:])
    sent = shop.pushed("fp32")
    assert list(sent) == list(expected)
    assert all(torch.equal(sent[number], gradient[place]) for number, place in expected.items())
    assert shop.worker.unacknowledged is None, "it owes nothing"
    assert held == [], "the mean may be waiting for it"


def held_buckets(shop: Shop) -> list[int]:
    """Of which buckets the worker's receiver is asked whether they may be sent."""
    held: list[int] = []
    shop.worker.receiver.means.hold = lambda bucket, longest_s: held.append(bucket)  # type: ignore[method-assign]  # noqa: ARG005
    return held


@pytest.mark.parametrize(("tasks", "paced"), [((1,), True), ((1, 2), False)])
def test_a_push_keeps_pace_with_the_mean_unless_another_part_waits_behind_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tasks: tuple[int, ...], *, paced: bool
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(shop.worker.receiver.means, "pace", lambda *, paced: said.append(paced))
    shop.training.meanwhile.append(shop.wire.coming.clear)
    held = held_buckets(shop)
    live(shop, *map(task, tasks))
    assert held == [0, 1, 2] * len(tasks)
    assert said[len(tasks)] is paced, "after one False for each part that came"


def test_a_part_that_waits_and_is_cancelled_is_not_computed_and_the_others_are(shop: Shop) -> None:
    live(shop, task(1), task(2), cancel(1))
    assert shop.diary == ["Skip", "flush", "compute", "Push", "Push", "Push"]
    assert skips(shop) == [Skip(lease=lease(1), compute_s=0.0)]
    assert {each.lease for each in pushes(shop)} == {lease(2)}


def test_a_part_that_is_cancelled_while_it_is_computed_is_not_pushed(shop: Shop) -> None:
    shop.training.meanwhile.append(lambda: shop.wire.coming.append(cancel()))
    live(shop, task())
    assert shop.diary == ["flush", "compute", "Skip"]
    (skip,) = skips(shop)
    assert skip.lease == lease()
    assert skip.compute_s > 0, "the server learns how long it took"
    assert shop.worker.unacknowledged is None


def test_a_part_whose_step_is_over_when_it_is_computed_is_not_pushed(shop: Shop) -> None:
    shop.training.meanwhile.append(lambda: shop.wire.coming.append(shop.commit(4)))
    live(shop, task())
    assert shop.diary == ["flush", "compute", "Skip"]
    assert shop.worker.version == 4


def test_a_part_whose_step_is_over_before_it_is_begun_is_not_computed(shop: Shop) -> None:
    live(shop, task(version=3), shop.commit(4))
    assert shop.diary == ["Skip"]


def test_an_old_cancellation_does_not_hit_the_next_step(shop: Shop) -> None:
    """It is forgotten with its step."""
    live(shop, task(5), task(6, version=4), cancel(5), shop.commit(4))
    assert shop.worker.cancelled == set()
    assert {each.lease for each in pushes(shop)} == {lease(6)}


def test_a_cancellation_may_come_before_what_it_cancels_and_the_step_before_that(
    shop: Shop,
) -> None:
    """It is sent before all that is queued."""
    live(shop, cancel(5), shop.commit(4), task(5, version=4))
    assert shop.diary == ["Skip"]


class Stuck:
    """What the worker queues waits until the test sends it."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._queued: list[Later] = []
        shop.wire.send_later = self._queued.append  # type: ignore[method-assign, assignment]
        held_buckets(shop)

    def send(self, count: int = 100) -> None:
        sending, self._queued[:count] = self._queued[:count], []
        for later in sending:
            if (frame := later(0.0)) is not None:
                self._shop.wire.send_frame(frame)


@pytest.mark.parametrize("num_sent", [0, 1, 3])
@pytest.mark.parametrize("backup", [False, True])
def test_of_a_push_that_is_cancelled_no_more_is_sent(
    shop: Shop, num_sent: int, *, backup: bool
) -> None:
    stuck = Stuck(shop)
    shop.worker.work_on(task(backup=backup))
    stuck.send(num_sent)
    shop.worker.handle(cancel(1, num_sent))
    stuck.send()
    assert [push.bucket for push in pushes(shop)] == list(range(num_sent))
    expected = [] if num_sent == 3 else [lease()]
    assert [skip.lease for skip in skips(shop)] == expected, "what is whole needs no end"
    assert all(skip.compute_s > 0 for skip in skips(shop))


def test_what_is_being_sent_can_be_called_off_while_the_next_part_waits_for_it(shop: Shop) -> None:
    """A part that others have lost may come in the middle of a push."""
    stuck = Stuck(shop)
    shop.worker.work_on(task(1))
    shop.wire.unsent, shop.wire.coming = [True], [cancel(1)]
    shop.worker.work_on(task(2))
    stuck.send()
    assert {push.lease for push in pushes(shop)} == {lease(2)}
    assert [skip.lease for skip in skips(shop)] == [lease(1)]


def test_a_push_is_called_off_alone(shop: Shop) -> None:
    stuck = Stuck(shop)
    shop.worker.work_on(task(1))
    shop.worker.handle(cancel(7))
    stuck.send()
    assert len(pushes(shop)) == 3
    assert skips(shop) == []


def park(grant: int | None, num_buckets: int = 0) -> MessageReceived:
    return MessageReceived(
        0, Park(lease=None if grant is None else lease(grant), num_buckets=num_buckets)
    )


def test_who_is_parked_forgets_what_it_had_and_asks_for_the_state(shop: Shop) -> None:
    stuck = Stuck(shop)
    shop.worker.work_on(task(1))
    stuck.send(1)
    shop.worker.handle(task(2))
    shop.worker.handle(park(1, 1))
    stuck.send()
    assert shop.diary[-4:] == ["compute", "Push", "Pull", "Skip"]
    assert not shop.worker.tasks
    assert (shop.worker.joined, shop.worker.unacknowledged) == (False, None)
    shop.worker.work_on(task(3))
    assert skips(shop)[-1].lease == lease(3), "it has no weights to compute with"
    for event in shop.state(9, 0.5):
        shop.worker.handle(event)
    assert (shop.worker.joined, shop.worker.version) == (True, 9)


@pytest.mark.parametrize(("grant", "counted"), [(1, 2), (9, 0), (None, 0)])
def test_who_is_parked_hears_how_much_of_its_last_push_has_counted(
    grant: int | None, counted: int
) -> None:
    shop = Shop("int8")
    shop.worker.work_on(task(1))
    shop.worker.handle(park(grant, 2))
    for event in shop.state(3, 0.5):
        shop.worker.handle(event)
    shop.wire.frames.clear()
    shop.worker.work_on(task(2))
    assert [bytes(frame.payload) for frame in shop.wire.frames] == reference(counted)


def test_who_has_left_steps_out_says_so_and_does_nothing_until_it_begins_anew(shop: Shop) -> None:
    shop.worker.receiver.means.has_fallen_behind = True
    shop.worker.handle(FellBehind())
    assert shop.wire.said == [Pull()]
    before = shop.replica.snapshot()
    shop.worker.handle(next(shop.state(3, 2.0)))
    assert torch.equal(shop.replica.params, before), "what it had asked for before is of no use"
    shop.worker.work_on(task())
    assert [skip.lease for skip in skips(shop)] == [lease()]


def test_who_has_been_parked_meanwhile_need_not_say_that_it_has_fallen_behind(shop: Shop) -> None:
    shop.worker.handle(FellBehind())
    assert shop.wire.said == []


def test_a_commit_is_the_optimizers_step_with_the_clipped_mean(shop: Shop) -> None:
    before = shop.replica.snapshot()
    shop.worker.handle(shop.commit(4, seed=9))
    expected = before - 0.1 * 0.5 * random_gradient(610, 9)
    torch.testing.assert_close(shop.replica.params, expected)
    assert shop.worker.version == 4


def test_a_step_gives_its_gradient_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the third one would wait for ever."""
    returned: list[Tensor] = []
    means = shop.worker.receiver.means
    monkeypatch.setattr(means, "give_back", returned.append)
    events = [shop.commit(version) for version in (4, 5)]
    gradients = [means.memory_for(version) for version in (4, 5)]
    for event in events:
        shop.worker.handle(event)
    assert [id(gradient) for gradient in returned] == [id(gradient) for gradient in gradients]


@pytest.mark.parametrize(("version", "has_state"), [(3, True), (5, True), (2, True), (4, False)])
def test_a_commit_that_does_not_follow_ends_the_session(
    shop: Shop, version: int, *, has_state: bool
) -> None:
    shop.worker.has_state = has_state
    before = shop.replica.snapshot()
    with pytest.raises(PeerLost, match=f"step {version} does not follow on step 3"):
        shop.worker.handle(shop.commit(version))
    assert torch.equal(shop.replica.params, before)


def test_a_commit_that_comes_twice_before_it_is_acted_on_ends_the_session(shop: Shop) -> None:
    """When the first one has been taken, the second one's mean is gone: it must not be waited for."""
    shop.wire.coming = [shop.commit(4), Committed(commit_of(4))]
    with pytest.raises(PeerLost, match="step 4 does not follow"):
        shop.worker.hear()
    assert shop.worker.version == 4


def test_weights_are_compared_before_the_step(shop: Shop) -> None:
    digests = Store.of(shop.replica).digests()
    shop.worker.handle(shop.commit(4))
    shop.worker.handle(shop.commit(5, digests=digests))
    assert shop.wire.said == [Pull(buckets=(0, 1, 2))]


@pytest.mark.parametrize("drifted", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_exactly_the_buckets_that_drifted_are_asked_for(
    shop: Shop, drifted: tuple[int, ...]
) -> None:
    digests = Store.of(shop.replica).digests()
    for number in drifted:
        shop.replica.params[shop.replica.buckets[number].stop - 1] += 1e-6
    shop.worker.handle(shop.commit(4, digests=digests))
    assert shop.wire.said == ([Pull(buckets=drifted)] if drifted else [])


def test_no_more_is_asked_for_at_a_time_than_a_message_holds() -> None:
    model = nn.Linear(70, 60)
    shop = Shop(replica=Replica(model, "sgd", bucket_bytes=4))
    num_buckets = len(shop.replica.buckets)
    assert num_buckets > MAX_PULLED_BUCKETS
    shop.worker.handle(shop.commit(4, digests=[bytes(8)] * num_buckets))
    assert shop.wire.said == [Pull(buckets=tuple(range(MAX_PULLED_BUCKETS)))]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_weights_that_were_asked_for_are_blended_in(alpha: float) -> None:
    shop = Shop("fp32", "sgd", f"polyak_alpha={alpha}")
    before = shop.replica.snapshot()
    first = shop.replica.buckets[0]
    whole = next(shop.state(3, 2.0))
    shop.worker.handle(StateArrived(whole.state, whole.values[first]))
    torch.testing.assert_close(
        shop.replica.params[first], (1 - alpha) * before[first] + alpha * 2.0
    )
    assert torch.equal(shop.replica.params[first.stop :], before[first.stop :])
    assert (shop.worker.version, shop.worker.joined) == (3, True)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_state_makes_a_joiner_whole(optimizer: str) -> None:
    shop = Shop("fp32", optimizer)
    shop.worker.version, shop.worker.has_state = 0, False
    for event in shop.state(17, 0.5):
        assert not shop.worker.joined
        shop.worker.handle(event)
    assert (shop.worker.version, shop.worker.joined) == (17, True)
    for tensor in (shop.replica.params, *shop.replica.optimizer.moments.values()):
        assert torch.equal(tensor, torch.full((610,), 0.5))
    if optimizer == "adam":
        assert float(shop.replica.optimizer.state["step"]) == 17


def test_a_new_session_begins_with_the_whole_state(shop: Shop) -> None:
    """What was left over is not worked on: it is somebody else's by now."""
    shop.worker.tasks.append(task())
    shop.worker.cancelled.add(lease(2))
    shop.worker.has_state = False
    live(shop)
    assert (shop.diary, shop.worker.has_state) == ([], False)
    assert shop.worker.cancelled == set()
    live(shop, *shop.state(9, 0.5), task(2, version=9))
    assert {each.lease for each in pushes(shop)} == {lease(2)}


def test_the_end_of_a_session_lets_its_reader_go(shop: Shop) -> None:
    reduction, first = reduction_of(shop.replica, "fp32"), shop.worker.receiver
    for version in (1, 2):
        for frame in reduce_step(reduction, shop.replica, version, [random_gradient(610, 1)]):
            deliver(frame, first)
        committed(first, version)
    live(shop)
    (frame, *_) = reduce_step(reduction, shop.replica, 3, [random_gradient(610, 1)])
    with pytest.raises(PeerLost, match="has left"):
        deliver(frame, first)
    assert shop.worker.new_receiver() is not first


def test_what_is_not_finite_names_the_step(shop: Shop) -> None:
    def explode() -> None:
        raise NonFiniteLoss("loss is nan at layer fc1")

    shop.training.meanwhile.append(explode)
    shop.wire.coming = [*shop.state(3, 0.5), task()]
    with pytest.raises(NonFiniteLoss, match=r"step 4: loss is nan at layer fc1"):
        shop.worker.take_part(shop.wire)


def next_push(settled: int | None, *, by_commit: bool = False) -> list[bytes]:
    """What a worker pushes after a push of which `settled` buckets have counted."""
    shop = Shop("int8")
    live(shop, task(1))
    shop.worker.has_state = True
    if settled is not None:
        shop.worker.handle(cancel(1, settled))
    if by_commit:
        shop.worker.handle(shop.commit(4))
    assert shop.worker.unacknowledged is None
    shop.wire.frames.clear()
    shop.worker.work_on(task(2, version=4 if by_commit else 3))
    return [bytes(frame.payload) for frame in shop.wire.frames]


def reference(settled: int | None) -> list[bytes]:
    """The same without a worker: the residual of exactly these buckets is in the next push."""
    replica = small_replica()
    sender = GradientSender("int8", replica)
    for grant in (1, 2):
        replica.grads.copy_(gradient_for(replica, task(grant).indices))
        frames = list(sender.frames(lease(grant), 3, BatchLoss(0.5, 8), 0.25))
        sender.settle(settled)
    return [bytes(frame.payload) for frame in frames]


def test_a_commit_settles_the_whole_push() -> None:
    assert next_push(None, by_commit=True) == reference(None)


@pytest.mark.parametrize("num_buckets", [0, 1, 2, 3])
def test_a_cancel_settles_what_has_counted_and_the_commit_after_it_no_more(
    num_buckets: int,
) -> None:
    assert next_push(num_buckets) == reference(num_buckets)
    assert next_push(num_buckets, by_commit=True) == reference(num_buckets)


def test_a_push_of_which_nobody_knows_what_has_counted_ends_all_debts() -> None:
    """What it carried of the push before may be paid."""
    shop, fresh = Shop("int8"), Shop("int8")
    for grant, num_counted in ((1, 3), (2, None)):
        shop.worker.work_on(task(grant))
        shop.worker.handle(cancel(grant, num_counted))
    shop.wire.frames.clear()
    for each in (shop, fresh):
        each.worker.work_on(task(3))
    payloads = [[bytes(frame.payload) for frame in each.wire.frames] for each in (shop, fresh)]
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("batch_samples", [4, 8, 32])
def test_a_debt_is_paid_by_the_share_of_this_batch_whatever_the_last_one_was(
    batch_samples: int,
) -> None:
    """Of a last batch of a few samples a part is more than of the batches before it."""
    shop = Shop("int8")
    live(shop, task(1))
    shop.worker.has_state = True
    shop.worker.handle(cancel(1, 3))
    shop.wire.frames.clear()
    shop.worker.work_on(task(2, batch_samples=batch_samples))
    sender = GradientSender("int8", shop.replica)
    for grant, share in ((1, 4 / 32), (2, 4 / batch_samples)):
        shop.replica.grads.copy_(gradient_for(shop.replica, task(grant).indices))
        pushes = list(sender.pushes(lease(grant), 3, BatchLoss(0.5, 8), 0.25, share=share))
        sender.settle()
    sent = [bytes(frame.payload) for frame in shop.wire.frames]
    assert sent == [bytes(payload) for _, payload in pushes]


def test_a_push_owes_what_it_lost_of_what_it_has_counted_in_fact() -> None:
    """Half of the batch's loss terms, though only an eighth of its samples."""
    shop = Shop("int8")
    live(shop, task(1))
    shop.worker.has_state = True
    num_terms = 2 * shop.worker.unacknowledged_terms
    commit = shop.commit(4).commit.model_copy(update={"num_terms": num_terms})
    shop.worker.handle(Committed(commit))
    shop.wire.frames.clear()
    shop.worker.work_on(task(2, version=4))
    sender = GradientSender("int8", shop.replica)
    for grant in (1, 2):
        shop.replica.grads.copy_(gradient_for(shop.replica, task(grant).indices))
        pushes = list(sender.pushes(lease(grant), 3, BatchLoss(0.5, 8), 0.25, share=4 / 32))
        sender.settle(share=0.5)
    sent = [bytes(frame.payload) for frame in shop.wire.frames]
    assert sent == [bytes(payload) for _, payload in pushes]


def test_what_is_owed_differs_with_what_counted() -> None:
    """Otherwise the tests before would prove nothing."""
    assert len({b"".join(reference(count)) for count in (0, 1, 2, 3)}) == 4
    assert reference(3) == reference(None)


def test_a_push_of_unknown_fate_is_asked_for_after_a_loss(shop: Shop) -> None:
    live(shop, task())
    assert shop.worker.unacknowledged == lease(), "the next Ready names it"
    shop.wire.coming = [cancel(1, 2)]
    with pytest.raises(PeerLost):
        shop.worker.take_part(shop.wire)
    assert shop.worker.unacknowledged is None
