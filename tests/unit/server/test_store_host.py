"""A store: what it checks of a slice before it takes memory for it, and what it keeps for whom."""

from typing import cast

import pytest
import torch

from connection_pairs import one_of_each
from harness import SECRET
from peers import DEADLINE_S, opened, store_setup
from smolcluster.algorithms.EDP.store import Held
from smolcluster.errors import ProtocolError
from smolcluster.server.slices import slice_frames
from smolcluster.server.store_host import (
    COORDINATOR,
    SliceArrived,
    StoreSession,
    buckets_of,
    check_fits,
)
from smolcluster.wire.connection import Connection
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.inbox import Inbox, MessageReceived
from smolcluster.wire.messages import (
    SESSION,
    SLICES,
    Accepted,
    SendWeights,
    Slice,
    WorkerGone,
)
from smolcluster.wire.node import Node
from smolcluster.wire.session import Session

BUCKET_BYTES = 512 * 4
ADAM = next(each for each in one_of_each() if isinstance(each, Slice))
"""Bucket 1 of 2, of 1000 weights in all, with two moments."""


def test_buckets_are_as_agreed_on() -> None:
    assert buckets_of(ADAM, BUCKET_BYTES) == [slice(0, 512), slice(512, 1000)]
    small = ADAM.model_copy(update={"num_params": 9, "bucket_length": 9, "first": 0, "stop": 1})
    assert buckets_of(small, BUCKET_BYTES) == [slice(0, 9)]


@pytest.mark.parametrize(
    "change",
    [
        {"bucket_length": 1},
        {"bucket_length": 2**53, "num_params": 2**53},
        {"num_params": 2**53},
        {"first": 2, "stop": 3},
        {"first": 1, "stop": 1},
    ],
)
def test_impossible_buckets_are_refused_before_memory_is_taken(change: dict[str, int]) -> None:
    with pytest.raises(ProtocolError):
        buckets_of(ADAM.model_copy(update=change), BUCKET_BYTES)


def test_a_slice_that_does_not_fit_is_refused() -> None:
    needed = BUCKET_BYTES * (3 + 2)
    check_fits(ADAM, needed)
    with pytest.raises(ProtocolError, match="more hosts"):
        check_fits(ADAM, needed - 1)


def test_a_slice_comes_whole_and_nothing_before_or_after_it() -> None:
    setup = store_setup(Held, addresses=("127.0.0.1",))
    answer = Accepted(bucket_bytes=BUCKET_BYTES, heartbeat_timeout_s=1.0)
    take = StoreSession(setup, cast("Connection", None), answer)
    whole = ADAM.model_copy(update={"first": 0})
    span, buckets = range(whole.first, whole.stop), buckets_of(whole, BUCKET_BYTES)
    sent = {name: torch.randn(1000) for name in whole.contents}
    held = {name: values.clone() for name, values in sent.items()}
    frames = slice_frames(held, buckets, span, incarnation="here", version=3)
    for values in held.values():
        values.zero_()  # as a server that takes the next step
    with pytest.raises(ProtocolError, match="of no slice"):
        take(*opened(frames[0]))
    events = [take(whole, memoryview(b"")), *(take(*opened(frame)) for frame in frames)]
    assert events[:-1] == [None] * len(frames)
    assert isinstance(events[-1], SliceArrived)
    for name, values in sent.items():
        assert torch.equal(events[-1].values[name], values)
    with pytest.raises(ProtocolError, match="of no slice"):
        take(*opened(frames[0]))


def test_nothing_is_kept_for_a_worker_that_has_gone() -> None:
    setup = store_setup(Held)
    answer = Accepted(bucket_bytes=BUCKET_BYTES, heartbeat_timeout_s=1.0)
    values = {name: torch.zeros(488) for name in ADAM.contents}
    held = Held(setup, answer, Inbox(), ADAM, values)
    nobody = cast("Session", None)
    for instance in ("a" * 8, "b" * 8):
        held._obey(SendWeights(instance=instance, version=3), nobody)
    held.handle(MessageReceived(COORDINATOR, WorkerGone(instance="a" * 8)), nobody)
    assert list(held._owed) == ["b" * 8]


def test_a_store_is_dialled_by_its_name() -> None:
    setup = store_setup(Held)
    answer = Accepted(bucket_bytes=BUCKET_BYTES, heartbeat_timeout_s=1.0)
    values = {name: torch.zeros(488) for name in ADAM.contents}
    held = Held(setup, answer, Inbox(), ADAM, values)
    [place] = held.listen(["127.0.0.1"])
    worker = introduce("pi5", 1, (SESSION, SLICES))
    way = Address(place.host, place.port, "win")
    try:
        node = Node(hello=worker, secret=SECRET, log=setup.log)
        connection, _ = node.dial(way, Accepted, timeout_s=DEADLINE_S)
        connection.close()
    finally:
        held.close(0.0)
