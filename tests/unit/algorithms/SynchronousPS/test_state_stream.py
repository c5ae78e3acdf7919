"""The state that a joiner is sent."""

import pytest
import torch

from smolcluster.algorithms.SynchronousPS.members import StateStream
from smolcluster.algorithms.SynchronousPS.step_receiver import StateArrived, StepReceiver
from smolcluster.codec.registry import lossless_for
from smolcluster.ps.store import Stores
from smolcluster.training.replica import Replica
from unit.algorithms.SynchronousPS.actors import (
    deliver,
    random_gradient,
    small_replica,
    weights_frame,
)


@pytest.fixture
def replica() -> Replica:
    return small_replica("adam")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("optimizer", "contents"),
    [("sgd", ["weights"]), ("adam", ["weights", "exp_avg", "exp_avg_sq"])],
)
def test_the_state_is_the_weights_and_the_optimizers_tensors(
    optimizer: str, contents: list[str], dtype: torch.dtype
) -> None:
    replica = small_replica(optimizer, dtype)
    receiver = StepReceiver(replica, lossless_for(dtype))
    for seed in (1, 2):
        replica.grads.copy_(random_gradient(replica.num_params, seed, dtype))
        replica.step(0.1)
    stores = Stores(replica, 2)
    assert list(stores.contents(0)) == contents
    stream = StateStream(stores, "here")
    for number in range(3):
        assert [stream.covers(each) for each in range(3)] == [each < number for each in range(3)]
        assert not stream.done
        sent, frames = stream.next_frames(2)
        assert sent == number
        events = [deliver(frame, receiver) for frame in frames]
        for content, event in zip(contents, events, strict=True):
            assert isinstance(event, StateArrived)
            assert (event.state.content, event.state.bucket) == (content, number)
            assert (event.state.version, event.state.num_buckets) == (2, 3)
            assert torch.equal(event.values, stores.contents(number)[content])
    assert stream.done


def test_what_waits_of_the_state_does_not_change_with_the_weights(replica: Replica) -> None:
    frames = [*StateStream(Stores(replica), "here").next_frames(0)[1], weights_frame(replica, 0, 0)]
    before = [bytes(frame.payload) for frame in frames]
    replica.grads.copy_(random_gradient(replica.num_params, 1))
    replica.step(0.1)
    assert [bytes(frame.payload) for frame in frames] == before
    assert bytes(weights_frame(replica, 1, 0).payload) != before[-1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_bucket_of_the_weights_is_a_state_without_the_optimizers(
    replica: Replica, number: int
) -> None:
    event = deliver(weights_frame(replica, 7, number), StepReceiver(replica, "fp32"))
    assert isinstance(event, StateArrived)
    assert (event.state.content, event.state.bucket, event.state.version) == ("weights", number, 7)
    assert event.state.incarnation == "here"
    assert torch.equal(event.values, replica.params[replica.buckets[number]])
