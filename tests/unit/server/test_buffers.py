"""Buffers that change, cut into pieces for the wire and put together again."""

import pytest
import torch
from torch import Tensor, nn

from peers import opened
from smolcluster.errors import ProtocolError
from smolcluster.server.buffers import BufferCollector, buffer_frames, most_buffer_frames
from smolcluster.training.buffers import ModelBuffers
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Buffers, LeaseKey

LEASE = LeaseKey(incarnation="here", epoch=0, start=0, stop=4, grant=1)
BUCKET_BYTES = 64


def trained() -> ModelBuffers:
    """Those of batch norm after a batch: 6 + 6 + 1 values, and so 13 in 2 pieces of 8 and 5."""
    torch.manual_seed(1)
    model = nn.BatchNorm1d(6)
    buffers = ModelBuffers(model)
    model(torch.randn(5, 6))
    buffers.find()
    return buffers


def deliver(frames: list[Frame], collector: BufferCollector) -> dict[int, Tensor] | None:
    values = None
    for frame in frames:
        assert values is None, "whole before its last piece"
        message, payload = opened(frame)
        assert isinstance(message, Buffers)
        assert payload.nbytes <= BUCKET_BYTES
        values = collector.take(message, payload)
    return values


def test_values_arrive_as_they_were_in_pieces_no_larger_than_a_bucket() -> None:
    buffers = trained()
    frames = buffer_frames(buffers.values(), BUCKET_BYTES, version=3, lease=LEASE)
    assert len(frames) == 2 == most_buffer_frames(buffers, BUCKET_BYTES)
    arrived = deliver(frames, BufferCollector(trained(), BUCKET_BYTES))
    assert arrived is not None
    for number, values in buffers.values().items():
        assert torch.equal(arrived[number], values)


def test_some_of_the_buffers_may_be_sent_and_of_nothing_there_is_no_frame() -> None:
    frames = buffer_frames({1: torch.ones(6, dtype=torch.float64)}, BUCKET_BYTES, version=0)
    arrived = deliver(frames, BufferCollector(trained(), BUCKET_BYTES))
    assert arrived is not None
    assert list(arrived) == [1]
    assert buffer_frames({}, BUCKET_BYTES, version=0) == []


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": (0, 3)},
        {"numbers": (1, 0, 2)},
        {"numbers": (0, 1)},
        {"version": 4},
    ],
    ids=str,
)
def test_what_was_not_agreed_on_is_refused(change: dict[str, object]) -> None:
    frames = buffer_frames(trained().values(), BUCKET_BYTES, version=3, lease=LEASE)
    collector = BufferCollector(trained(), BUCKET_BYTES)
    with pytest.raises(ProtocolError):
        for frame in frames:
            message, payload = opened(frame)
            assert isinstance(message, Buffers)
            is_first = message.bucket == 0 and "version" in change
            collector.take(message if is_first else message.model_copy(update=change), payload)


def test_nan_is_refused() -> None:
    values = {0: torch.full((6,), float("nan"), dtype=torch.float64)}
    frames = buffer_frames(values, BUCKET_BYTES, version=0)
    with pytest.raises(ProtocolError, match="NaN"):
        deliver(frames, BufferCollector(trained(), BUCKET_BYTES))
