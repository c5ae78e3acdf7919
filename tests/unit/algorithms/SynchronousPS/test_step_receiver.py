"""What a worker takes from the server: steps, state, and nothing else."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from connection_pairs import connection_pair
from peers import opened, small_replica
from smolcluster.algorithms.SynchronousPS import step_receiver
from smolcluster.algorithms.SynchronousPS.members import Members
from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.algorithms.SynchronousPS.step_receiver import (
    Committed,
    FellBehind,
    MeanReceiver,
    MeanWhole,
    Outgoing,
    StateArrived,
    StepReceiver,
)
from smolcluster.errors import PeerLost, ProtocolError
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.server.push import digests_spec
from smolcluster.server.store import Store, state_of
from smolcluster.training.replica import Replica
from smolcluster.utils.retry import Deadline
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Cancel,
    HostPort,
    LeaseKey,
    Message,
    Park,
    Push,
    Reduced,
    StoreList,
    StorePlace,
    TensorSpec,
)
from smolcluster.wire.session import Receiver
from unit.algorithms.SynchronousPS.actors import (
    commit_of,
    committed,
    deliver,
    gradients_of,
    post_of,
    push_of,
    random_gradient,
    reduce_step,
    reduction_of,
    replica_for,
    worker_at,
)

DEADLINE_S = 60.0
REDUCED = Reduced(
    version=1,
    bucket=0,
    num_buckets=3,
    tensor=TensorSpec(codec="fp32", dtype="float32", shape=(1,), nbytes=4),
)
NOT_YET_S = 0.1


@pytest.fixture
def replica() -> Replica:
    return small_replica("adam")


@pytest.fixture
def reduction(replica: Replica) -> Reduction:
    return reduction_of(replica, "fp32")


@pytest.fixture
def receiver(replica: Replica) -> StepReceiver:
    return StepReceiver(replica, "fp32")


MakeFrames = Callable[[int], list[Frame]]


@pytest.fixture
def mean_of(replica: Replica, reduction: Reduction) -> MakeFrames:
    """The frames of a step's mean."""

    def frames(version: int) -> list[Frame]:
        gradient = random_gradient(replica.num_params, version)
        frames = reduce_step(reduction, replica, version, [gradient])
        reduction.close()
        return frames

    return frames


def deliver_all(frames: list[Frame], receiver: Receiver) -> list[Event]:
    events = [deliver(frame, receiver) for frame in frames]
    return [event for event in events if event is not None]


def test_two_gradients_take_turns(receiver: StepReceiver, mean_of: MakeFrames) -> None:
    """The server may be a step ahead of a worker that still computes."""
    kept = []
    for version in (1, 2):
        deliver_all(mean_of(version), receiver)
        kept.append(committed(receiver, version))
    for version, gradient in zip((1, 2), kept, strict=True):
        assert torch.equal(gradient, random_gradient(610, version)), (
            "the other one did not touch it"
        )
    for version in (3, 4, 5, 6):
        oldest = kept[version % 2 - 1]
        receiver.means.give_back(oldest)
        deliver_all(mean_of(version), receiver)
        assert committed(receiver, version) is oldest, "no new memory"
        assert torch.equal(oldest, random_gradient(610, version))


def third_step(receiver: StepReceiver, mean_of: MakeFrames) -> list[Tensor]:
    """Both gradients are with the worker; returns them."""
    taken = []
    for version in (1, 2):
        deliver_all(mean_of(version), receiver)
        taken.append(committed(receiver, version))
    return taken


@pytest.mark.parametrize("has_left", [False, True])
def test_a_third_step_waits_until_a_gradient_is_given_back_or_the_worker_leaves(
    receiver: StepReceiver, mean_of: MakeFrames, *, has_left: bool
) -> None:
    taken = third_step(receiver, mean_of)
    frames = mean_of(3)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(deliver_all, frames, receiver)
        with pytest.raises(NotYet):
            reading.result(0.05)
        assert torch.equal(taken[0], random_gradient(610, 1)), "it has not been written to"
        if has_left:
            receiver.close()
            with pytest.raises(PeerLost, match="has left"):
                reading.result(DEADLINE_S)
            return
        receiver.means.give_back(taken[0])
        assert reading.result(DEADLINE_S) == []
    assert committed(receiver, 3) is taken[0]
    assert torch.equal(taken[1], random_gradient(610, 2))


def behind(receiver: StepReceiver, mean_of: MakeFrames) -> list[Event]:
    """A third step comes while both gradients are with the worker; what it hears of that."""
    receiver.means._longest_wait_s = NOT_YET_S
    return deliver_all([*mean_of(3), *mean_of(4)], receiver)


def test_who_is_too_far_behind_leaves_steps_out_and_hears_so_once(
    receiver: StepReceiver, mean_of: MakeFrames
) -> None:
    """Its reader goes on, or the server would take it for dead."""
    taken = third_step(receiver, mean_of)
    (event,) = behind(receiver, mean_of)
    assert isinstance(event, FellBehind)
    assert receiver(commit_of(3), memoryview(b"")) is None
    assert receiver.means.has_fallen_behind
    assert torch.equal(taken[0], random_gradient(610, 1)), "they have not been written to"


def test_a_park_lets_a_receiver_begin_anew(receiver: StepReceiver, mean_of: MakeFrames) -> None:
    taken = third_step(receiver, mean_of)
    behind(receiver, mean_of)
    told = Park(lease=None, num_buckets=0)
    assert receiver(told, memoryview(b"")) == MessageReceived(0, told)
    assert not receiver.means.has_fallen_behind
    for gradient in taken:
        receiver.means.give_back(gradient)
    for version in (7, 8):
        deliver_all(mean_of(version), receiver)
        assert torch.equal(committed(receiver, version), random_gradient(610, version))


def test_a_park_forgets_the_open_step(receiver: StepReceiver, mean_of: MakeFrames) -> None:
    """And gives its memory back."""
    receiver.means._longest_wait_s = NOT_YET_S
    for version in (1, 2, 3):
        deliver_all(mean_of(version)[:2], receiver)
        assert not receiver.means.has_fallen_behind
        receiver(Park(lease=None, num_buckets=0), memoryview(b""))
    deliver_all(mean_of(4), receiver)
    assert torch.equal(committed(receiver, 4), random_gradient(610, 4))


def test_a_mean_of_no_bytes_is_refused(receiver: StepReceiver, mean_of: MakeFrames) -> None:
    """As any other length, though there is nothing to write."""
    message, _ = opened(mean_of(1)[0])
    assert isinstance(message, Reduced)
    empty = message.model_copy(update={"tensor": message.tensor.model_copy(update={"nbytes": 0})})
    with connection_pair() as (server, worker):
        server.send(empty)
        with pytest.raises(ProtocolError, match="is not the fp32 tensor agreed on"):
            worker.receive(deadline=Deadline(DEADLINE_S), place_for=receiver.place_for)


def from_stores(receiver: StepReceiver) -> list[Receiver]:
    """What takes the means of the server and of a store on another host: two buckets, and one."""
    places = (HostPort(host="127.0.0.1", port=1),)
    place = StorePlace(node="win", places=places, first=2, stop=3)
    receiver(StoreList(stores=(place,)), memoryview(b""))
    return [receiver, receiver.from_store(range(2, 3))]


def test_a_store_is_not_believed_a_bucket_that_it_has_not_or_has_sent(
    receiver: StepReceiver, mean_of: MakeFrames
) -> None:
    server, store = from_stores(receiver)
    frames = mean_of(1)
    with pytest.raises(ProtocolError, match="bucket 1 of 3, expected 2 of 3"):
        deliver(frames[1], store)
    deliver_all(frames[:2], server)
    assert not receiver.means.is_whole(1)
    assert [type(each) for each in deliver_all(frames[2:], store)] == [MeanWhole]
    assert receiver.means.is_whole(1)
    assert torch.equal(committed(receiver, 1), random_gradient(610, 1))


def test_a_commit_may_come_before_what_a_store_has_of_its_mean(
    receiver: StepReceiver, mean_of: MakeFrames
) -> None:
    server, _ = from_stores(receiver)
    deliver_all(mean_of(1)[:2], server)
    assert isinstance(receiver(commit_of(1), memoryview(b"")), Committed)


def test_readers_of_two_stores_wait_for_one_buffer_and_both_go_on(
    receiver: StepReceiver, mean_of: MakeFrames
) -> None:
    server, store = from_stores(receiver)
    free, receiver.means._free = receiver.means._free, []
    frames = mean_of(1)
    with ThreadPoolExecutor(2) as pool:
        reading = [
            pool.submit(deliver_all, own, each)
            for own, each in ((frames[:2], server), (frames[2:], store))
        ]
        receiver.means.give_back(free[0])
        try:
            assert sum(len(each.result(DEADLINE_S)) for each in reading) == 1, (
                "the store's is whole"
            )
        finally:
            receiver.close()
    assert not receiver.means.has_fallen_behind
    assert receiver.means.is_whole(1)


def test_readers_of_two_stores_share_no_codecs_scratch() -> None:
    receiver = StepReceiver(replica_for("int4"), "int4")
    _, store = from_stores(receiver)
    assert isinstance(store, MeanReceiver)
    one, other = (each._stream._pieces_of(REDUCED)[0].codec for each in (receiver._own, store))
    assert one is not None
    assert one is not other


def test_who_has_no_memory_for_a_store_tells_that_it_has_fallen_behind(
    receiver: StepReceiver, mean_of: MakeFrames
) -> None:
    server, store = from_stores(receiver)
    receiver.means._free.clear()
    receiver.means._longest_wait_s = 0.0
    frames = mean_of(1)
    assert deliver(frames[2], store) is None
    assert [type(each) for each in deliver_all(frames[:2], server)] == [FellBehind]


@pytest.mark.parametrize("num_buckets", [0, 1, 2])
def test_a_commit_before_the_whole_mean_is_refused(
    receiver: StepReceiver, mean_of: MakeFrames, num_buckets: int
) -> None:
    deliver_all(mean_of(1)[:num_buckets], receiver)
    with pytest.raises(ProtocolError, match="step 1 before it had sent all of its mean"):
        receiver(commit_of(1), memoryview(b""))


def test_only_a_lossless_mean_has_a_place_of_its_own(replica: Replica) -> None:
    """Encoded bytes are verified before they are decoded."""
    frames = reduce_step(reduction_of(replica, "int8"), replica, 1, gradients_of(replica, 1))
    assert StepReceiver(replica, "int8").place_for(opened(frames[0])[0]) is None
    assert StepReceiver(replica, "fp32").place_for(commit_of(1)) is None


def test_digests_are_those_of_the_weights_bucket_by_bucket(
    replica: Replica, receiver: StepReceiver, mean_of: MakeFrames
) -> None:
    digests = Store.of(replica).digests()
    commit = commit_of(4, clip=0.5, tensor=digests_spec(len(digests)))
    deliver_all(mean_of(4), receiver)
    event = receiver(commit, memoryview(b"".join(digests)))
    assert isinstance(event, Committed)
    assert (event.digests, event.commit) == (digests, commit)
    replica.params[replica.buckets[1].start] += 1e-6
    differ = [one != other for one, other in zip(digests, Store.of(replica).digests(), strict=True)]
    assert differ == [False, True, False]


@pytest.mark.parametrize(
    "spec",
    [
        *(digests_spec(num_buckets) for num_buckets in (1, 2, 4)),
        *(
            digests_spec(3).model_copy(update=change)
            for change in ({"dtype": "int64"}, {"codec": "fp32"}, {"shape": (24,)})
        ),
    ],
)
def test_digests_of_another_number_or_kind_are_refused(
    receiver: StepReceiver, mean_of: MakeFrames, spec: TensorSpec
) -> None:
    deliver_all(mean_of(4), receiver)
    with pytest.raises(ProtocolError, match="digests are not one a bucket"):
        receiver(commit_of(4, tensor=spec), memoryview(bytes(spec.nbytes)))


def states(replica: Replica) -> list[Frame]:
    """The whole state, as a joiner is sent it."""
    members = Members(replica, None, "here", num_buffers=2)
    worker = worker_at(1)
    members.send_state(members.welcome(worker), 3, [])
    return post_of(worker).frames


def test_the_state_comes_tensor_by_tensor_and_then_single_buckets_of_the_weights(
    replica: Replica, receiver: StepReceiver
) -> None:
    for tensor in state_of(replica).values():
        tensor.copy_(random_gradient(610, int(tensor[0] * 1e6)))
    frames = states(replica)
    for _ in range(2):
        events = deliver_all(frames, receiver)
        found = {
            each.state.content: each.values for each in events if isinstance(each, StateArrived)
        }
        assert list(found) == list(state_of(replica))
        for name, tensor in state_of(replica).items():
            assert torch.equal(found[name], tensor)
        bucket = deliver(frames[1], receiver)
        assert isinstance(bucket, StateArrived)
        assert torch.equal(bucket.values, replica.params[replica.buckets[1]])
        with pytest.raises(ProtocolError, match="of which nothing comes here"):
            deliver(frames[4], receiver)
        receiver(Park(lease=None, num_buckets=0), memoryview(b""))


@pytest.mark.parametrize(
    "change",
    [{"bucket": 3}, {"num_buckets": 2}, {"bucket": 2}, {"content": "step"}, {"content": "exp_avg"}],
    ids=["bucket", "number", "length", "unknown", "order"],
)
def test_a_state_of_another_shape_or_content_is_refused(
    replica: Replica, receiver: StepReceiver, change: dict[str, object]
) -> None:
    message, payload = opened(states(replica)[0])
    with pytest.raises(ProtocolError, match="state"):
        receiver(message.model_copy(update=change), payload)


def test_assignments_and_all_else_are_passed_on(receiver: StepReceiver) -> None:
    key = LeaseKey(incarnation="here", epoch=0, start=3, stop=7, grant=1)
    indices = torch.tensor([9, 4, 5, 6], dtype=torch.int32)
    event = receiver(*assignment_of(key, indices, version=2, learning_rate=0.1))
    assert isinstance(event, Assigned)
    assert event.indices.tolist() == [9, 4, 5, 6]
    cancel: Message = Cancel(lease=key, num_buckets=1)
    assert receiver(cancel, memoryview(b"")) == MessageReceived(0, cancel)


def returns(
    pool: ThreadPoolExecutor, receiver: StepReceiver, bucket: int, within_s: float = DEADLINE_S
) -> bool:
    """Whether a frame of this bucket may be sent without waiting for the mean."""
    try:
        pool.submit(receiver.means.hold, bucket, 2 * DEADLINE_S).result(within_s)
    except NotYet:
        receiver.close()
        return False
    return True


@pytest.mark.parametrize(
    ("num_reduced", "bucket", "may_go"),
    [(0, 9, True), (1, 3, True), (1, 4, False), (3, 5, True), (3, 6, False)],
)
def test_a_push_waits_when_it_is_ahead_of_the_mean(
    receiver: StepReceiver, mean_of: MakeFrames, num_reduced: int, bucket: int, *, may_go: bool
) -> None:
    """But not before the mean has begun to come: somebody may still be computing."""
    deliver_all(mean_of(1)[:num_reduced], receiver)
    receiver.means.pace(paced=True)
    with ThreadPoolExecutor(1) as pool:
        within_s = DEADLINE_S if may_go else NOT_YET_S
        assert returns(pool, receiver, bucket, within_s) is may_go


def test_a_held_push_goes_on_with_the_mean(receiver: StepReceiver, mean_of: MakeFrames) -> None:
    frames = mean_of(1)
    deliver_all(frames[:1], receiver)
    receiver.means.pace(paced=True)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(receiver.means.hold, 4, DEADLINE_S)
        with pytest.raises(NotYet):
            held.result(NOT_YET_S)
        deliver_all(frames[1:2], receiver)
        held.result(DEADLINE_S)


@pytest.mark.parametrize("end", ["commit", "close", "unpaced"])
def test_nobody_holds_a_push_that_others_wait_for(
    receiver: StepReceiver, mean_of: MakeFrames, end: str
) -> None:
    deliver_all(mean_of(1)[:1], receiver)
    receiver.means.pace(paced=True)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(receiver.means.hold, 10, DEADLINE_S)
        with pytest.raises(NotYet):
            held.result(NOT_YET_S)
        match end:
            case "commit":
                receiver.means.take(1)
            case "close":
                receiver.close()
            case _:
                receiver.means.pace(paced=False)
        held.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("patience_s", "longest_s"), [(NOT_YET_S, math.inf), (math.inf, NOT_YET_S)]
)
def test_a_push_is_held_for_no_longer_than_a_runs_timeout_or_its_link_and_once_in_vain(
    replica: Replica, mean_of: MakeFrames, patience_s: float, longest_s: float
) -> None:
    """Only a whole push tells the server that others are late."""
    receiver = StepReceiver(replica, "fp32", patience_s=patience_s)
    deliver_all(mean_of(1)[:1], receiver)
    receiver.means.pace(paced=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(receiver.means.hold, 9, longest_s).result(DEADLINE_S)
        assert returns(pool, receiver, 10)


def test_a_push_says_how_long_it_has_waited_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_receiver, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def hold(bucket: int, _: float) -> None:
        now[0] += 2.0 if bucket else 0.0

    key = LeaseKey(incarnation="here", epoch=0, start=0, stop=8, grant=1)
    outgoing = Outgoing(key, 0.25, hold)
    payload = memoryview(bytes(4))
    said = []
    for bucket in range(3):
        now[0] += 1.0  # other work
        frame = outgoing.frame(push_of(key, bucket), payload, DEADLINE_S)
        assert frame is not None
        message = opened(frame)[0]
        assert isinstance(message, Push)
        said.append(message.held_s)
    assert said == [0.0, 2.0, 4.0]
    assert outgoing.ending(0.0) is None
