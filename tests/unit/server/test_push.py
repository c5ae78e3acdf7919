"""How a gradient leaves a worker, and in which order the server takes it."""

import struct
import weakref
from typing import cast

import pytest
import torch
from torch import Tensor

from peers import deliver, opened, set_gradient, small_replica
from smolcluster.codec.registry import CODECS
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.server.push import (
    SPARE_AFTER,
    GradientBuffers,
    GradientReceiver,
    GradientSender,
    Pushed,
    push_assembler,
)
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.training.scaler import LEAST_SCALE
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import LeaseKey, Push
from smolcluster.wire.streams import Assembler

LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]


def lease(start: int = 0, stop: int = 32, grant: int = 1) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=grant)


@pytest.fixture
def replica() -> Replica:
    return small_replica()


def push_with(sender: GradientSender, num_samples: int = 32) -> list[Frame]:
    """Encode what the sender's replica has as gradient."""
    return list(sender.frames(lease(stop=num_samples), 7, BatchLoss(0.5, num_samples), 0.25))


def backup_with(sender: GradientSender, first_bucket: int) -> list[Frame]:
    what = lease(), 7, BatchLoss(0.5, 32), 0.25
    return list(sender.frames(*what, backup_from=first_bucket))


def said(frames: list[Frame]) -> list[Push]:
    """The messages that the frames carry."""
    return [cast("Push", opened(frame)[0]) for frame in frames]


def payloads(frames: list[Frame]) -> list[bytes]:
    return [bytes(frame.payload) for frame in frames]


def address(frame: Frame) -> int:
    """Where a frame's payload lies."""
    return torch.frombuffer(frame.payload, dtype=torch.uint8).data_ptr()


def values(frame: Frame, dtype: torch.dtype = torch.float32) -> Tensor:
    """A payload that is lossless."""
    return torch.frombuffer(bytearray(frame.payload), dtype=dtype)


def test_every_bucket_says_what_it_is_part_of(replica: Replica) -> None:
    sender = GradientSender("int8", replica)
    pushes = said(list(sender.frames(lease(64, 96), 7, BatchLoss(0.5, 32), 0.25)))
    assert [push.bucket for push in pushes] == [0, 1, 2]
    assert [push.tensor.shape for push in pushes] == [(256,), (256,), (98,)]
    for push in pushes:
        assert (push.lease, push.num_samples, push.num_buckets) == (lease(64, 96), 32, 3)
        assert (push.base_version, push.loss, push.compute_s) == (7, 0.5, 0.25)
        assert push.tensor.codec == "int8"


def test_what_waits_in_a_queue_does_not_change_with_the_next_push(replica: Replica) -> None:
    set_gradient(replica, 1)
    sender = GradientSender("fp32", replica)
    first = push_with(sender)
    kept = payloads(first)
    set_gradient(replica, 2)
    assert payloads(push_with(sender)) != payloads(first) == kept


def test_frames_in_place_are_the_gradients_own_memory(replica: Replica) -> None:
    gradient = set_gradient(replica, 1)
    frames = push_with(GradientSender("fp32", replica, in_place=True))
    start = replica.grads.data_ptr()
    assert [address(frame) for frame in frames] == [
        start + 4 * bucket.start for bucket in replica.buckets
    ]
    assert torch.equal(torch.cat([values(frame) for frame in frames]), gradient)


@pytest.mark.parametrize("codec", LOSSY)
def test_what_must_be_encoded_has_memory_of_its_own_even_in_place(
    replica: Replica, codec: str
) -> None:
    set_gradient(replica, 1)
    frames = push_with(GradientSender(codec, replica, in_place=True))
    kept = payloads(frames)
    set_gradient(replica, 2)
    assert payloads(frames) == kept


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_are_sent_as_a_gradient_is(replica: Replica, in_place: bool) -> None:
    gradient = set_gradient(replica, 1)
    weights = replica.snapshot()
    sender = GradientSender("fp32", replica, in_place=in_place)
    frames = list(sender.frames(lease(), 7, BatchLoss(0.5, 32), 0.25, weights))
    assert torch.equal(torch.cat([values(frame) for frame in frames]), weights)
    assert torch.equal(torch.cat([values(frame) for frame in push_with(sender)]), gradient)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_float64_model_is_sent_in_float64(in_place: bool) -> None:
    replica = small_replica(dtype=torch.float64)
    gradient = set_gradient(replica, 1)
    sender = GradientSender("fp64", replica, in_place=in_place)
    for frames in (push_with(sender), backup_with(sender, 0)):
        assert {push.tensor.dtype for push in said(frames)} == {"float64"}
        arrived = [values(frame, torch.float64) for frame in frames]
        assert torch.equal(torch.cat(arrived), gradient)


@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
@pytest.mark.parametrize("first_bucket", [0, 1, 2])
def test_a_backup_is_lossless_and_begins_at_the_first_bucket_that_is_wanted(
    replica: Replica, codec: str, first_bucket: int
) -> None:
    gradient = set_gradient(replica, 1)
    frames = backup_with(GradientSender(codec, replica), first_bucket)
    pushes = said(frames)
    assert [push.bucket for push in pushes] == list(range(first_bucket, 3))
    for push, frame in zip(pushes, frames, strict=True):
        assert (push.tensor.codec, push.num_buckets) == ("fp32", 3)
        assert (push.lease, push.base_version, push.loss) == (lease(), 7, 0.5)
        assert torch.equal(values(frame), gradient[replica.buckets[push.bucket]])


def test_a_backup_is_the_gradients_own_memory(replica: Replica) -> None:
    frames = backup_with(GradientSender("int8", replica), 1)
    start = replica.grads.data_ptr()
    assert [address(frame) for frame in frames] == [start + 4 * 256, start + 4 * 512]


@pytest.mark.parametrize("codec", LOSSY)
def test_a_backup_changes_nothing_of_what_is_owed(codec: str) -> None:
    """It may be made between a push and the news of what became of that."""

    def next_push(num_backups: int) -> list[bytes]:
        replica = small_replica()
        sender = GradientSender(codec, replica)
        set_gradient(replica, 1)
        push_with(sender)
        for number in range(num_backups):
            set_gradient(replica, 100 + number)
            backup_with(sender, 0)
        sender.settle()
        set_gradient(replica, 2)
        return payloads(push_with(sender))

    assert next_push(num_backups=1) == next_push(num_backups=0)


def after_three_pushes(codec: str, num_settled: int | None) -> list[bytes]:
    """The third push, where the first has counted, and of the second `num_settled` buckets."""
    replica = small_replica()
    sender = GradientSender(codec, replica)
    for seed, settled in ((1, None), (2, num_settled)):
        set_gradient(replica, seed)
        push_with(sender, num_samples=8 * seed)
        sender.settle(settled)
    set_gradient(replica, 3)
    return payloads(push_with(sender))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("num_buckets", [0, 1, 2, 3])
def test_what_is_owed_is_the_error_of_exactly_the_buckets_that_counted(
    codec: str, num_buckets: int
) -> None:
    counted, dropped = after_three_pushes(codec, None), after_three_pushes(codec, 0)
    assert all(one != other for one, other in zip(counted, dropped, strict=True))
    partly = after_three_pushes(codec, num_buckets)
    assert partly == counted[:num_buckets] + dropped[num_buckets:]


@pytest.mark.parametrize("codec", LOSSY)
def test_a_push_that_did_not_count_leaves_no_trace(codec: str) -> None:
    replica = small_replica()
    tried, untouched = GradientSender(codec, replica), GradientSender(codec, replica)
    set_gradient(replica, 1)
    push_with(tried)
    tried.settle(0)
    set_gradient(replica, 2)
    assert payloads(push_with(tried)) == payloads(push_with(untouched))


@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_a_gradient_that_is_not_finite_is_not_sent_and_its_layer_is_named(
    replica: Replica, codec: str
) -> None:
    gradient = torch.zeros(replica.num_params)
    gradient[dict(replica.layers)["2.weight"].start] = float("nan")
    replica.grads.copy_(gradient)
    sent: list[Frame] = []
    with pytest.raises(NonFiniteLoss, match=r"layer 2\.weight"):
        sent.extend(GradientSender(codec, replica).frames(lease(), 0, BatchLoss(0.5, 32), 0.25))
    with pytest.raises(NonFiniteLoss, match=r"^weights at layer 2\.weight cannot be sent"):
        sent.extend(
            GradientSender(codec, replica).frames(lease(), 0, BatchLoss(0.5, 32), 0.25, gradient)
        )


def pushes_of(replica: Replica, codec: str = "fp32", key: LeaseKey | None = None) -> list[Push]:
    """The messages of a whole push."""
    return said(
        list(GradientSender(codec, replica).frames(key or lease(), 7, BatchLoss(0.5, 32), 0.25))
    )


def ends(order: Assembler[Push], push: Push) -> bool:
    """Take the next frame; returns whether it is the last one of a push."""
    order.check(push)
    return order.first is None


def take_all(order: Assembler[Push], pushes: list[Push]) -> list[bool]:
    return [ends(order, push) for push in pushes]


@pytest.mark.parametrize("num_samples", [31, 33])
def test_a_push_has_as_many_samples_as_its_lease(replica: Replica, num_samples: int) -> None:
    wrong = pushes_of(replica)[0].model_copy(update={"num_samples": num_samples})
    with pytest.raises(ProtocolError, match=f"{num_samples} samples does not fit its lease"):
        push_assembler(replica.buckets, "fp32").check(wrong)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_where_parts_are_allowed_a_push_begins_anywhere_and_goes_on_to_the_end(
    replica: Replica, first: int
) -> None:
    order, pushes = push_assembler(replica.buckets, "fp32", partial=True), pushes_of(replica)
    assert take_all(order, pushes[first:]) == [False] * (2 - first) + [True]
    assert take_all(order, pushes) == [False, False, True], "and the next one anew"


def test_a_part_cannot_begin_behind_the_last_bucket(replica: Replica) -> None:
    beyond = pushes_of(replica)[0].model_copy(update={"bucket": 3})
    with pytest.raises(ProtocolError, match="bucket 3 of 3"):
        push_assembler(replica.buckets, "fp32", partial=True).check(beyond)


@pytest.mark.parametrize("codec", LOSSY)
def test_only_where_parts_are_allowed_a_push_may_be_lossless_instead(
    replica: Replica, codec: str
) -> None:
    lossless = said(backup_with(GradientSender(codec, replica), 1))
    assert take_all(push_assembler(replica.buckets, codec, partial=True), lossless) == [False, True]
    whole = pushes_of(replica, "fp32")
    with pytest.raises(
        ProtocolError, match=f"bucket 0 of 3 of its push is not the {codec} tensor agreed on"
    ):
        push_assembler(replica.buckets, codec).check(whole[0])


@pytest.mark.parametrize(
    ("has_loss_scale", "overflow", "is_taken"),
    [
        (True, 1024.0, True),
        (True, LEAST_SCALE, False),
        (True, 1e-30, False),
        (False, 1024.0, False),
        (False, None, True),
    ],
)
def test_a_gradient_overflows_only_with_a_loss_scale(
    replica: Replica, *, has_loss_scale: bool, overflow: float | None, is_taken: bool
) -> None:
    """Else a worker could let samples count that nobody trains on."""
    push = pushes_of(replica, "fp32")[0].model_copy(update={"overflow": overflow})
    order = push_assembler(replica.buckets, "fp32", has_loss_scale=has_loss_scale)
    if is_taken:
        order.check(push)
    else:
        with pytest.raises(ProtocolError, match="loss scale"):
            order.check(push)


# What the server takes whole.

SESSION = 3


@pytest.mark.parametrize(("codec", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64)])
def test_a_lossless_push_arrives_bit_for_bit(codec: str, dtype: torch.dtype) -> None:
    replica = small_replica(dtype=dtype)
    gradient = set_gradient(replica, 1)
    receiver = GradientReceiver(SESSION, codec, replica.buckets)
    frames = push_with(GradientSender(codec, replica))
    assert deliver(frames[:2], receiver) == []
    assert receiver.in_progress
    (event,) = deliver(frames[2:], receiver)
    assert isinstance(event, Pushed)
    assert torch.equal(event.values, gradient)
    assert (event.session_id, event.push.base_version, event.push.loss) == (SESSION, 7, 0.5)
    assert (event.push.lease, event.push.num_samples) == (lease(), 32)


def test_the_gradient_is_the_servers_until_it_says_otherwise(replica: Replica) -> None:
    receiver = GradientReceiver(SESSION, "fp32", replica.buckets)
    set_gradient(replica, 1)
    frames = push_with(GradientSender("fp32", replica))
    (event,) = deliver(frames, receiver)
    assert isinstance(event, Pushed)
    assert not receiver.in_progress, "it is whole"
    kept = event.values.clone()
    with pytest.raises(ProtocolError, match="before its last push was acknowledged"):
        deliver(frames[:1], receiver)
    assert torch.equal(event.values, kept)
    event.free()
    (again,) = deliver(frames, receiver)
    assert isinstance(again, Pushed)
    assert again.values.data_ptr() == event.values.data_ptr(), "its memory is used again"


def test_workers_push_into_the_same_memory_one_after_another(replica: Replica) -> None:
    memory = GradientBuffers()
    one, other = (GradientReceiver(each, "fp32", replica.buckets, memory=memory) for each in (1, 2))
    gradient = set_gradient(replica, 1)
    frames = push_with(GradientSender("fp32", replica))
    (first,) = deliver(frames, one)
    (second,) = deliver(frames, other)
    assert isinstance(first, Pushed)
    assert isinstance(second, Pushed)
    assert first.values.data_ptr() != second.values.data_ptr(), "both are under way"
    first.free()
    assert torch.equal(second.values, gradient)
    second.free()
    (third,) = deliver(frames, one)
    assert isinstance(third, Pushed)
    assert third.values.data_ptr() in {first.values.data_ptr(), second.values.data_ptr()}


def test_memory_of_a_push_that_breaks_off_is_given_back(replica: Replica) -> None:
    memory = GradientBuffers()
    receiver = GradientReceiver(SESSION, "fp32", replica.buckets, memory=memory)
    set_gradient(replica, 1)
    deliver(push_with(GradientSender("fp32", replica))[:2], receiver)
    receiver.close()
    kept = memory.take(replica.num_params, torch.float32)
    assert kept[0] == replica.grads[0], "what had come of it"
    receiver.close()
    assert memory.take(replica.num_params, torch.float32).data_ptr() != kept.data_ptr()


def test_memory_of_a_whole_push_outlives_its_session(replica: Replica) -> None:
    memory = GradientBuffers()
    receiver = GradientReceiver(SESSION, "fp32", replica.buckets, memory=memory)
    gradient = set_gradient(replica, 1)
    (event,) = deliver(push_with(GradientSender("fp32", replica)), receiver)
    assert isinstance(event, Pushed)
    receiver.close()
    memory.take(replica.num_params, torch.float32).zero_()
    assert torch.equal(event.values, gradient)
    event.free()
    again = memory.take(replica.num_params, torch.float32)
    assert again.data_ptr() == event.values.data_ptr()


def test_memory_of_many_pushes_at_one_time_is_let_go_when_it_is_not_needed_again() -> None:
    memory = GradientBuffers()
    taken = [memory.take(8, torch.float32) for _ in range(5)]
    held = [weakref.ref(buffer) for buffer in taken]
    while taken:
        memory.give_back(taken.pop())
    for _ in range(2 * SPARE_AFTER):
        pair = memory.take(8, torch.float32), memory.take(8, torch.float32)
        for buffer in pair:
            memory.give_back(buffer)
    del buffer, pair
    assert sum(ref() is not None for ref in held) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_push_with_a_value_that_is_not_finite_is_refused(replica: Replica, value: float) -> None:
    message, payload = opened(push_with(GradientSender("fp32", replica))[0])
    payload[40:44] = struct.pack("<f", value)
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        GradientReceiver(SESSION, "fp32", replica.buckets)(message, payload)
