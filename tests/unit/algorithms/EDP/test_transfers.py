"""Both ends of EDP's transfers: what is sent arrives, and what must not be sent is refused."""

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from peers import opened, set_gradient, small_replica
from smolcluster.errors import ProtocolError
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.ps.assignment import Assigned, work_payload
from smolcluster.ps.push import GradientReceiver, GradientSender, Pushed
from smolcluster.ps.weights import StateReceiver, WeightsArrived, state_frames
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import Ack, Assignment, LeaseKey, Message, Pull, State

SEAT = 3
Receive = Callable[[Message, memoryview], Event | None]


def lease(start: int = 0, stop: int = 32, grant: int = 1) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=grant)


@pytest.fixture
def replica() -> Replica:
    return small_replica()


def deliver(frames: list[Frame], receive: Receive) -> list[Event]:
    events = [receive(*opened(frame)) for frame in frames]
    return [event for event in events if event is not None]


def push_frames(
    replica: Replica, codec: str = "fp32", *, key: LeaseKey | None = None
) -> list[Frame]:
    """A whole push of some gradient."""
    set_gradient(replica, 1)
    return list(GradientSender(codec, replica).frames(key or lease(), 7, BatchLoss(0.5, 32), 0.25))


@pytest.mark.parametrize(("codec", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64)])
def test_a_lossless_push_arrives_bit_for_bit(codec: str, dtype: torch.dtype) -> None:
    replica = small_replica(dtype)
    gradient = set_gradient(replica, 1)
    sender = GradientSender(codec, replica)
    receiver = GradientReceiver(SEAT, codec, replica.buckets)
    frames = list(sender.frames(lease(), 7, BatchLoss(0.5, 32), 0.25))
    assert deliver(frames[:2], receiver) == []
    assert receiver.in_progress
    (event,) = deliver(frames[2:], receiver)
    assert isinstance(event, Pushed)
    assert torch.equal(event.gradient, gradient)
    assert (event.session_id, event.push.base_version, event.push.loss) == (SEAT, 7, 0.5)
    assert (event.push.lease, event.push.num_samples) == (lease(), 32)


def test_an_8_bit_push_is_a_quarter_and_close(replica: Replica) -> None:
    gradient = set_gradient(replica, 1)
    sender = GradientSender("int8", replica)
    frames = list(sender.frames(lease(), 7, BatchLoss(0.5, 32), 0.25))
    (event,) = deliver(frames, GradientReceiver(SEAT, "int8", replica.buckets))
    assert isinstance(event, Pushed)
    largest = gradient.abs().max().item()
    assert (event.gradient - gradient).abs().max() <= largest / 254 * 1.001
    assert sum(frame.payload.nbytes for frame in frames) == replica.num_params + 3 * 4


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_was_applied_and_what_is_owed_add_up_to_all_gradients(
    replica: Replica, codec: str
) -> None:
    """Pushes of unequal size, every third one dropped: in units of the weighted sum nothing is lost."""
    sender = GradientSender(codec, replica)
    receiver = GradientReceiver(SEAT, codec, replica.buckets)
    wanted = torch.zeros(replica.num_params, dtype=torch.float64)
    arrived = torch.zeros_like(wanted)

    def push(gradient: Tensor, num_samples: int, applied: bool) -> None:
        replica.grads.copy_(gradient)
        frames = list(sender.frames(lease(stop=num_samples), 0, BatchLoss(0.5, num_samples), 0.25))
        (event,) = deliver(frames, receiver)
        assert isinstance(event, Pushed)
        if applied:
            wanted.add_(num_samples * gradient.double())
            arrived.add_(event.push.num_samples * event.gradient.double())
        event.receiver.free()
        sender.settle(None if applied else 0)

    for number in range(60):
        gradient = set_gradient(replica, number)
        push(gradient, [32, 32, 7, 1][number % 4], applied=number % 3 != 2)
    one_push = 32 * 5.0 / 254
    assert (wanted - arrived).abs().max() <= one_push, "the error does not grow with their number"
    for _ in range(3):  # each pays all that is owed but for a 254th
        push(torch.zeros(replica.num_params), 1, applied=True)
    torch.testing.assert_close(arrived, wanted, rtol=0.0, atol=2e-4)


@pytest.mark.parametrize(("order", "number"), [([1], 1), ([0, 2], 2), ([0, 0], 0), ([0, 1, 0], 0)])
def test_buckets_come_in_order(replica: Replica, order: list[int], number: int) -> None:
    frames = push_frames(replica)
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    deliver([frames[index] for index in order[:-1]], receiver)
    with pytest.raises(
        ProtocolError, match=f"bucket {number} of 3, expected {len(order) - 1} of 3"
    ):
        deliver([frames[order[-1]]], receiver)


@pytest.mark.parametrize(("agreed", "sent"), [("fp32", "int8"), ("int8", "fp32")])
def test_a_push_in_another_codec_is_refused(replica: Replica, agreed: str, sent: str) -> None:
    receiver = GradientReceiver(SEAT, agreed, replica.buckets)
    with pytest.raises(ProtocolError, match=f"not the {agreed} tensor agreed on"):
        deliver(push_frames(replica, sent), receiver)


def test_the_gradient_is_the_servers_until_it_says_otherwise(replica: Replica) -> None:
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    frames = push_frames(replica)
    (event,) = deliver(frames, receiver)
    assert isinstance(event, Pushed)
    assert not receiver.in_progress, "it is whole"
    kept = event.gradient.clone()
    with pytest.raises(ProtocolError, match="before its last push was acknowledged"):
        deliver(push_frames(replica)[:1], receiver)
    assert torch.equal(event.gradient, kept)
    event.receiver.free()
    (again,) = deliver(frames, receiver)
    assert isinstance(again, Pushed)
    assert again.gradient.data_ptr() == event.gradient.data_ptr(), "one buffer a worker"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_push_with_a_value_that_is_not_finite_is_refused(replica: Replica, value: float) -> None:
    message, payload = opened(push_frames(replica)[0])
    payload[40:44] = struct.pack("<f", value)
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        GradientReceiver(SEAT, "fp32", replica.buckets)(message, payload)


def test_other_messages_are_passed_on_with_their_seat(replica: Replica) -> None:
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    assert receiver(Pull(), memoryview(b"")) == MessageReceived(SEAT, Pull())


def weights_of(replica: Replica, version: int, seed: int) -> tuple[Tensor, list[Frame]]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(replica.num_params, generator=generator, dtype=replica.params.dtype)
    return weights, state_frames("here", version, weights, replica.buckets)


def receiver_of(replica: Replica) -> StateReceiver:
    """What takes a worker's messages."""
    return StateReceiver(replica.buckets, replica.params.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_arrive_bit_for_bit_one_version_after_another(dtype: torch.dtype) -> None:
    replica = small_replica(dtype)
    receiver = receiver_of(replica)
    for version in (4, 5):
        weights, frames = weights_of(replica, version, version)
        assert deliver(frames[:1], receiver) == []
        assert receiver.in_progress
        (event,) = deliver(frames[1:], receiver)
        assert isinstance(event, WeightsArrived)
        assert event.version == version
        assert torch.equal(torch.cat(event.weights), weights)
        assert not receiver.in_progress


def test_weights_are_sent_from_one_copy_however_many_ask(replica: Replica) -> None:
    weights, frames = weights_of(replica, 4, 4)
    start = weights.data_ptr()
    for frame, bucket in zip(frames, replica.buckets, strict=True):
        address = torch.frombuffer(frame.payload, dtype=torch.uint8).data_ptr()
        assert address == start + 4 * bucket.start


@pytest.mark.parametrize("first", [1, 2])
def test_weights_come_in_order(replica: Replica, first: int) -> None:
    _, frames = weights_of(replica, 4, 4)
    with pytest.raises(ProtocolError, match=f"bucket {first} of 3 of its weights, expected 0"):
        deliver(frames[first:], receiver_of(replica))


def test_weights_of_two_versions_are_not_mixed(replica: Replica) -> None:
    (_, old), (_, new) = weights_of(replica, 4, 4), weights_of(replica, 5, 5)
    with pytest.raises(ProtocolError, match="bucket 1"):
        deliver([old[0], new[1]], receiver_of(replica))


def test_weights_of_another_model_are_refused(replica: Replica) -> None:
    as_many_buckets = Replica(nn.Linear(3, 3), "sgd", bucket_bytes=16)
    _, frames = weights_of(as_many_buckets, 4, 4)
    with pytest.raises(ProtocolError, match="not of the agreed shape"):
        deliver(frames, receiver_of(replica))


def test_weights_in_another_number_of_buckets_are_refused(replica: Replica) -> None:
    _, frames = weights_of(Replica(nn.Linear(3, 3), "sgd"), 4, 4)
    with pytest.raises(ProtocolError, match="bucket 0 of 1 of its weights, expected 0 of 3"):
        deliver(frames, receiver_of(replica))


def test_weights_are_not_mistaken_for_what_else_a_state_may_hold(replica: Replica) -> None:
    _, frames = weights_of(replica, 4, 4)
    message, payload = opened(frames[0])
    moments = message.model_copy(update={"content": "exp_avg"})
    with pytest.raises(
        ProtocolError, match="bucket 0 of the server's weights is not of the agreed"
    ):
        receiver_of(replica)(moments, payload)


def test_weights_say_whose_they_are(replica: Replica) -> None:
    states = [opened(frame)[0] for frame in weights_of(replica, 4, 4)[1]]
    assert all(isinstance(state, State) and state.incarnation == "here" for state in states)


def test_an_assignment_is_unpacked(replica: Replica) -> None:
    indices = torch.tensor([5, 3, 8], dtype=torch.int32)
    spec, _, payload = work_payload(indices)
    message = Assignment(lease=lease(4, 7), version=2, learning_rate=1e-3, tensor=spec)
    event = receiver_of(replica)(message, memoryview(bytearray(payload)))
    assert isinstance(event, Assigned)
    assert event.assignment == message
    assert event.indices.tolist() == [5, 3, 8]


def test_a_worker_hears_of_everything_else_as_it_is(replica: Replica) -> None:
    ack = Ack(lease=lease(), outcome="applied", version=4)
    assert receiver_of(replica)(ack, memoryview(b"")) == MessageReceived(0, ack)
