"""The server's weights on their way: what is sent arrives whole, and what must not be sent is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peers import deliver, opened, small_replica
from smolcluster.errors import ProtocolError
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.server.buffers import BufferCollector, buffer_frames
from smolcluster.server.slices import slice_frames
from smolcluster.server.weights import StateReceiver, WeightsArrived
from smolcluster.training.buffers import ModelBuffers
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import MessageReceived
from smolcluster.wire.messages import WEIGHTS, Ack, LeaseKey, State

LEASE = LeaseKey(incarnation="here", epoch=0, start=4, stop=7, grant=1)


@pytest.fixture
def replica() -> Replica:
    return small_replica()


@pytest.fixture
def receiver(replica: Replica) -> StateReceiver:
    return receiver_of(replica)


def receiver_of(replica: Replica) -> StateReceiver:
    return StateReceiver(replica.buckets, replica.params.dtype)


def weights_of(replica: Replica, version: int) -> tuple[Tensor, list[Frame]]:
    generator = torch.Generator().manual_seed(version)
    weights = torch.randn(replica.num_params, generator=generator, dtype=replica.params.dtype)
    of: dict[str, Any] = {"incarnation": "here", "version": version}
    return weights, slice_frames({WEIGHTS: weights}, replica.buckets, **of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_arrive_bit_for_bit_one_version_after_another(dtype: torch.dtype) -> None:
    replica = small_replica(dtype=dtype)
    receiver = receiver_of(replica)
    for version in (4, 5):
        weights, frames = weights_of(replica, version)
        assert deliver(frames[:1], receiver) == []
        (event,) = deliver(frames[1:], receiver)
        assert isinstance(event, WeightsArrived)
        assert event.version == version
        assert torch.equal(torch.cat(event.weights), weights)


def test_weights_are_sent_from_one_copy_however_many_ask(replica: Replica) -> None:
    weights, frames = weights_of(replica, 4)
    starts = [torch.frombuffer(f.payload, dtype=torch.uint8).data_ptr() for f in frames]
    assert starts == [starts[0] + 4 * bucket.start for bucket in replica.buckets]
    assert starts[0] != weights.data_ptr(), "which may change meanwhile"
    for frame in frames:
        state = opened(frame)[0]
        assert isinstance(state, State)
        assert state.incarnation == "here"


def test_weights_are_not_mistaken_for_what_else_a_state_may_hold(
    replica: Replica, receiver: StateReceiver
) -> None:
    message, payload = opened(weights_of(replica, 4)[1][0])
    with pytest.raises(
        ProtocolError, match=r"bucket 0 of 3 \('exp_avg'\), expected 0 of 3 \('weights'\)"
    ):
        receiver(message.model_copy(update={"content": "exp_avg"}), payload)


def test_an_assignment_is_unpacked_and_all_else_passed_on(receiver: StateReceiver) -> None:
    indices = torch.tensor([5, 3, 8], dtype=torch.int32)
    message, payload = assignment_of(LEASE, indices, version=2, learning_rate=1e-3)
    event = receiver(message, memoryview(bytearray(payload)))
    assert isinstance(event, Assigned)
    assert (event.assignment, event.indices.tolist()) == (message, [5, 3, 8])
    ack = Ack(lease=LEASE, outcome="applied", version=4)
    assert receiver(ack, memoryview(b"")) == MessageReceived(0, ack)


def test_buffers_of_weights_that_are_void_are_not_taken_for_the_next_ones(replica: Replica) -> None:
    buffers = ModelBuffers(model := nn.BatchNorm1d(6))
    model(torch.randn(5, 6))
    buffers.find()
    collector = BufferCollector(buffers, replica.bucket_bytes)
    receiver = StateReceiver(replica.buckets, replica.params.dtype, collector)
    told = buffer_frames(buffers.values(), replica.bucket_bytes, version=4)
    for is_void in (False, True):
        assert deliver(told, receiver) == []
        if is_void:
            receiver.forget()
        (event,) = deliver(weights_of(replica, 5)[1], receiver)
        assert isinstance(event, WeightsArrived)
        assert bool(event.buffers) != is_void
