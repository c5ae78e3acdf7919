"""Both ends of EDP's transfers: what is sent arrives, and what must not be sent is refused."""

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smolcluster.algorithms.EDP.exchange import (
    Assigned,
    GradientReceiver,
    GradientSender,
    Pushed,
    StateReceiver,
    WeightsArrived,
    indices_payload,
    state_frames,
)
from smolcluster.cluster.inbox import Event, Said
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import PREFIX_NBYTES, Frame, check_head
from smolcluster.transport.messages import (
    Assignment,
    LeaseKey,
    Message,
    Pull,
    Push,
    State,
    decode,
)

SEAT = 3
BUCKET_BYTES = 1024
Receive = Callable[[Message, memoryview], Event | None]


def lease(start: int = 0, stop: int = 32, grant: int = 1) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=grant)


@pytest.fixture
def replica() -> Replica:
    """Three buckets, the last one shorter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    replica = Replica(model, "sgd", bucket_bytes=BUCKET_BYTES)
    lengths = [bucket.stop - bucket.start for bucket in replica.buckets]
    assert lengths == [256, 256, 98]
    return replica


def opened(frame: Frame) -> tuple[Message, memoryview]:
    """What the other side makes of a frame; the payload is a copy, as from a socket."""
    assert len(frame.head) > PREFIX_NBYTES
    return decode(frame.kind, check_head(frame.head)), memoryview(bytearray(frame.payload))


def deliver(frames: list[Frame], receive: Receive) -> list[Event]:
    events = [receive(*opened(frame)) for frame in frames]
    return [event for event in events if event is not None]


def set_gradient(replica: Replica, seed: int) -> Tensor:
    gradient = torch.randn(replica.num_params, generator=torch.Generator().manual_seed(seed))
    replica.load_gradient(gradient)
    return gradient


def push_frames(
    replica: Replica, codec: str = "fp32", *, key: LeaseKey | None = None
) -> list[Frame]:
    """A whole push of some gradient."""
    set_gradient(replica, 1)
    return list(GradientSender(codec, replica).frames(key or lease(), 7, 0.5))


def test_a_lossless_push_arrives_bit_for_bit(replica: Replica) -> None:
    gradient = set_gradient(replica, 1)
    sender = GradientSender("fp32", replica)
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    frames = list(sender.frames(lease(), 7, 0.5))
    assert deliver(frames[:2], receiver) == []
    assert receiver.in_progress
    (event,) = deliver(frames[2:], receiver)
    assert isinstance(event, Pushed)
    assert torch.equal(event.gradient, gradient)
    assert (event.seat, event.push.base_version, event.push.loss) == (SEAT, 7, 0.5)
    assert (event.push.lease, event.push.num_samples) == (lease(), 32)


def test_an_8_bit_push_is_a_quarter_and_close(replica: Replica) -> None:
    gradient = set_gradient(replica, 1)
    sender = GradientSender("int8", replica)
    frames = list(sender.frames(lease(), 7, 0.5))
    (event,) = deliver(frames, GradientReceiver(SEAT, "int8", replica.buckets))
    assert isinstance(event, Pushed)
    largest = gradient.abs().max().item()
    assert (event.gradient - gradient).abs().max() <= largest / 254 * 1.001
    assert sum(frame.payload.nbytes for frame in frames) == replica.num_params + 3 * 4


def test_a_sender_uses_the_same_memory_for_every_push(replica: Replica) -> None:
    """What a push leaves in a queue is only good until the next push is encoded."""
    sender = GradientSender("fp32", replica)
    first = list(sender.frames(lease(), 7, 0.5))
    kept = bytes(first[0].payload)
    set_gradient(replica, 2)
    assert bytes(first[0].payload) == kept, "the gradient itself may change at once"
    second = list(sender.frames(lease(), 8, 0.5))
    assert bytes(first[0].payload) == bytes(second[0].payload) != kept


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
        replica.load_gradient(gradient)
        (event,) = deliver(list(sender.frames(lease(stop=num_samples), 0, 0.5)), receiver)
        assert isinstance(event, Pushed)
        if applied:
            wanted.add_(num_samples * gradient.double())
            arrived.add_(event.push.num_samples * event.gradient.double())
        event.receiver.free()
        sender.settle(applied)

    for number in range(60):
        gradient = set_gradient(replica, number)
        push(gradient, [32, 32, 7, 1][number % 4], applied=number % 3 != 2)
    one_push = 32 * 5.0 / 254
    assert (wanted - arrived).abs().max() <= one_push, "the error does not grow with their number"
    for _ in range(3):  # each pays all that is owed but for a 254th
        push(torch.zeros(replica.num_params), 1, applied=True)
    torch.testing.assert_close(arrived, wanted, rtol=0.0, atol=2e-4)


def test_a_dropped_push_leaves_no_trace_in_the_next_one(replica: Replica) -> None:
    tried, untouched = GradientSender("int8", replica), GradientSender("int8", replica)
    for number, sender in ((1, tried), (2, tried), (1, untouched)):
        set_gradient(replica, number)
        list(sender.frames(lease(), 0, 0.5))
        sender.settle(applied=number == 1)
    set_gradient(replica, 3)
    frames = [list(sender.frames(lease(), 0, 0.5)) for sender in (tried, untouched)]
    payloads = [[bytes(frame.payload) for frame in push] for push in frames]
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_gradient_that_is_not_finite_is_not_sent_and_its_layer_is_named(
    replica: Replica, codec: str
) -> None:
    gradient = torch.zeros(replica.num_params)
    gradient[replica.layers[2][1].start] = float("nan")
    replica.load_gradient(gradient)
    sent: list[Frame] = []
    with pytest.raises(NonFiniteLoss, match=r"layer 2\.weight"):
        sent.extend(GradientSender(codec, replica).frames(lease(), 0, 0.5))


@pytest.mark.parametrize(("order", "number"), [([1], 1), ([0, 2], 2), ([0, 0], 0), ([0, 1, 0], 0)])
def test_buckets_come_in_order(replica: Replica, order: list[int], number: int) -> None:
    frames = push_frames(replica)
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    deliver([frames[index] for index in order[:-1]], receiver)
    with pytest.raises(
        ProtocolError, match=f"bucket {number} of 3, expected {len(order) - 1} of 3"
    ):
        deliver([frames[order[-1]]], receiver)


def test_two_pushes_cannot_be_mixed(replica: Replica) -> None:
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    first = push_frames(replica, key=lease(grant=1))
    second = push_frames(replica, key=lease(grant=2))
    with pytest.raises(ProtocolError, match="another push in the middle"):
        deliver([first[0], second[1]], receiver)


def test_a_push_has_as_many_samples_as_its_lease(replica: Replica) -> None:
    message, payload = opened(push_frames(replica)[0])
    wrong = message.model_copy(update={"num_samples": 33})
    with pytest.raises(ProtocolError, match="33 samples does not fit its lease"):
        GradientReceiver(SEAT, "fp32", replica.buckets)(wrong, payload)


def test_a_push_in_another_codec_is_refused(replica: Replica) -> None:
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    with pytest.raises(ProtocolError, match="not the fp32 tensor agreed on"):
        deliver(push_frames(replica, "int8"), receiver)


def test_buckets_of_another_size_are_refused(replica: Replica) -> None:
    other = Replica(nn.Linear(16, 48), "sgd", bucket_bytes=BUCKET_BYTES // 2)
    receiver = GradientReceiver(SEAT, "fp32", replica.buckets)
    with pytest.raises(ProtocolError, match="of 7, expected 0 of 3"):
        deliver(push_frames(other), receiver)
    message, payload = opened(push_frames(other)[0])
    with pytest.raises(ProtocolError, match="not the fp32 tensor agreed on"):
        receiver(message.model_copy(update={"num_buckets": 3}), payload)


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
    assert receiver(Pull(), memoryview(b"")) == Said(SEAT, Pull())


def weights_of(replica: Replica, version: int, seed: int) -> tuple[Tensor, list[Frame]]:
    weights = torch.randn(replica.num_params, generator=torch.Generator().manual_seed(seed))
    return weights, state_frames("here", version, weights, replica.buckets)


def test_weights_arrive_bit_for_bit_one_version_after_another(replica: Replica) -> None:
    receiver = StateReceiver(replica.buckets)
    for version in (4, 5):
        weights, frames = weights_of(replica, version, version)
        assert deliver(frames[:1], receiver) == []
        assert receiver.in_progress
        (event,) = deliver(frames[1:], receiver)
        assert isinstance(event, WeightsArrived)
        assert event.version == version
        assert torch.equal(event.weights, weights)
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
        deliver(frames[first:], StateReceiver(replica.buckets))


def test_weights_of_two_versions_are_not_mixed(replica: Replica) -> None:
    (_, old), (_, new) = weights_of(replica, 4, 4), weights_of(replica, 5, 5)
    with pytest.raises(ProtocolError, match="bucket 1"):
        deliver([old[0], new[1]], StateReceiver(replica.buckets))


def test_weights_of_another_model_are_refused(replica: Replica) -> None:
    as_many_buckets = Replica(nn.Linear(3, 3), "sgd", bucket_bytes=16)
    _, frames = weights_of(as_many_buckets, 4, 4)
    with pytest.raises(ProtocolError, match="not of the agreed shape"):
        deliver(frames, StateReceiver(replica.buckets))


def test_weights_in_another_number_of_buckets_are_refused(replica: Replica) -> None:
    _, frames = weights_of(Replica(nn.Linear(3, 3), "sgd"), 4, 4)
    with pytest.raises(ProtocolError, match="bucket 0 of 1 of its weights, expected 0 of 3"):
        deliver(frames, StateReceiver(replica.buckets))


def assignment(indices: Tensor, key: LeaseKey) -> tuple[Assignment, memoryview]:
    spec, payload = indices_payload(indices)
    message = Assignment(lease=key, learning_rate=1e-3, tensor=spec)
    return message, memoryview(bytearray(payload))


def test_an_assignment_holds_its_lease_s_indices(replica: Replica) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    message, payload = assignment(order[64:96], lease(64, 96))
    event = StateReceiver(replica.buckets)(message, payload)
    assert isinstance(event, Assigned)
    assert (event.lease, event.learning_rate) == (lease(64, 96), 1e-3)
    payload[:] = bytes(len(payload))
    assert event.indices.tolist() == order[64:96].tolist(), "a copy: the payload's memory is reused"


def test_an_assignment_that_is_not_its_lease_s_is_refused(replica: Replica) -> None:
    receiver = StateReceiver(replica.buckets)
    indices = torch.arange(31, dtype=torch.int32)
    with pytest.raises(ProtocolError, match="its lease's indices"):
        receiver(*assignment(indices, lease(0, 32)))
    message, payload = assignment(torch.arange(32, dtype=torch.int32), lease(0, 32))
    odd = message.tensor.model_copy(update={"dtype": "int64"})
    with pytest.raises(ProtocolError, match="its lease's indices"):
        receiver(message.model_copy(update={"tensor": odd}), payload)


def test_a_push_and_a_state_are_what_they_seem(replica: Replica) -> None:
    """The messages in the frames carry what the other side checks."""
    messages = [opened(frame)[0] for frame in push_frames(replica)]
    assert [m.bucket for m in messages if isinstance(m, Push)] == [0, 1, 2]
    states = [opened(frame)[0] for frame in weights_of(replica, 4, 4)[1]]
    assert all(isinstance(m, State) and m.incarnation == "here" for m in states)
