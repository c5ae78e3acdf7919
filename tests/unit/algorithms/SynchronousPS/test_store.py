"""Which buckets of which pushes count at a store, and what the server's links make of a silent one."""

import logging
import time
from typing import cast

import pytest

from connection_pairs import one_of_each
from harness import local_settings
from peers import store_setup
from smolcluster.algorithms.SynchronousPS.step import SliceStep
from smolcluster.algorithms.SynchronousPS.store import Held, MeanArrived, ReducingLinks
from smolcluster.codec.registry import get_codec
from smolcluster.data.permutation import Range
from smolcluster.errors import ProtocolError
from smolcluster.server.store_host import COORDINATOR
from smolcluster.server.store_links import Patience
from smolcluster.wire.acceptor import SessionOpened
from smolcluster.wire.handshake import Authenticated
from smolcluster.wire.inbox import Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    Accepted,
    LeaseKey,
    Push,
    Reduced,
    SendMeans,
    Slice,
    TensorSpec,
)
from smolcluster.wire.session import Session
from smolcluster.wire.streams import bucket_spec
from unit.algorithms.SynchronousPS.actors import commit_of, opened_step, reduction_of
from unit.server.test_store_links import (
    LISTENING,
    NODES,
    Client,
    FakeSession,
    new_replica,
    open_session,
)

SLICE = next(each for each in one_of_each() if isinstance(each, Slice))
"""Bucket 1 of 2, of 1000 weights in all."""
SPAN = range(2, 4)


def push(grant: int, bucket: int, start: int = 64, stop: int = 80, base_version: int = 7) -> Push:
    lease = LeaseKey(incarnation="here", epoch=1, start=start, stop=stop, grant=grant)
    return Push(
        lease=lease,
        base_version=base_version,
        bucket=bucket,
        num_buckets=4,
        num_samples=stop - start,
        num_terms=stop - start,
        loss=1.0,
        compute_s=0.1,
        tensor=TensorSpec(codec="fp32", dtype="float32", shape=(4,), nbytes=16),
    )


def open_step() -> SliceStep:
    """The step that makes version 8, of two parts."""
    return SliceStep(8, Range(1, 64, 112), [16, 32], SPAN)


def test_the_next_missing_bucket_counts_from_whoever_brings_it_first() -> None:
    step = open_step()
    assert step.claim(1, push(1, 2)) is not None
    assert step.claim(2, push(2, 2)) is None
    assert step.claim(2, push(2, 3)) is not None
    assert step.claim(1, push(1, 3)) is None
    assert step.counted_here(push(1, 2).lease) == (1, True)
    assert step.counted_here(push(2, 2).lease) == (1, True)
    other = push(3, 2, 80, 112)
    assert step.counted_here(other.lease) == (0, False)


@pytest.mark.parametrize(
    "stray", [push(1, 2, base_version=6), push(1, 2, 64, 81), push(1, 3), push(1, 0)]
)
def test_what_is_of_no_part_of_the_step_does_not_count(stray: Push) -> None:
    assert open_step().claim(1, stray) is None


def links_of(codec: str) -> ReducingLinks:
    """Links of a server at step 5."""
    replica = new_replica()
    reduction = reduction_of(replica, codec)
    links = ReducingLinks(
        replica,
        NODES,
        reduction=reduction,
        run=local_settings(algorithm="syncps").run_config("test-run", "syncps"),
        codec=codec,
        incarnation="here",
        patience=Patience(start_s=10.0, lost_s=60.0),
        log=logging.getLogger("test"),
    )
    links.begin(5, lambda: None)
    return links


def test_a_store_that_owes_means_and_says_nothing_is_cut() -> None:
    links = links_of("fp32")
    win, pi5 = (open_session(links, node, 1 + n) for n, node in enumerate(NODES[1:]))
    for each in (win, pi5):
        links.handle(MessageReceived(each.session_id, LISTENING))
    links.open_step(opened_step(6, [8], len(links.own_span)))
    for bucket in range(3, 6):
        links.take_mean(MeanArrived(bucket, links.attempt))
    links.take_mean(MeanArrived(6, links.attempt - 1))
    assert links.others == {"win": 3, "pi5": 4}
    now = time.monotonic()
    links.cut_silent(now, now + 59.0)
    assert not pi5.is_cut
    links.cut_silent(now, now + 61.0)
    assert pi5.reason == "it does not send the means of its buckets"
    assert not win.is_cut
    assert not links.has_all_means
    for bucket in range(6, 10):
        links.take_mean(MeanArrived(bucket, links.attempt))
    assert links.has_all_means


def owes_residual(links: ReducingLinks, session_id: int) -> bool:
    """Whether a store begins with a residual that is still owed."""
    given = open_session(links, "win", session_id).sent[0]
    assert isinstance(given, Slice)
    return given.owes_residual


def test_a_residual_that_a_step_has_paid_is_not_given_again() -> None:
    links = links_of("int8")
    assert owes_residual(links, 1)
    links.handle(SessionClosed(1, "its power is gone"))
    links.commit(commit_of(6))
    assert not owes_residual(links, 2)


def test_a_store_is_not_believed_a_mean_of_another_step() -> None:
    links = links_of("fp32")
    open_session(links, "win", 1)
    links.open_step(opened_step(6, [8], len(links.own_span)))
    receiver = links.receiver_for(1)
    assert receiver is not None
    bucket = bucket_spec(get_codec("fp32"), slice(0, 64))
    own = Reduced(attempt=links.attempt, version=6, bucket=3, num_buckets=10, tensor=bucket)
    payload = memoryview(bytearray(bucket.nbytes))
    assert receiver(own.model_copy(update={"attempt": 7}), payload) is None, (
        "of a step that is void"
    )
    assert isinstance(receiver(own, payload), MeanArrived)
    with pytest.raises(ProtocolError, match="bucket 3 of 10, expected 4 of 10"):
        receiver(own, payload)
    links.open_step(opened_step(6, [8], len(links.own_span)))
    own = own.model_copy(update={"attempt": links.attempt})
    assert isinstance(receiver(own, payload), MeanArrived), "it begins anew"
    with pytest.raises(ProtocolError, match="a mean of step 7, open is 6"):
        receiver(own.model_copy(update={"version": 7}), payload)


def test_who_comes_back_is_sent_nothing_before_it_asks() -> None:
    """Its StepReceiver is a new one, and the server lets it have all means from the open step on."""
    given = SLICE.model_copy(update={"contents": (), "rule": None})
    setup = store_setup(Held)
    answer = Accepted(node="mini1", bucket_bytes=512 * 4, heartbeat_timeout_s=1.0)
    held = Held(setup, answer, Inbox(), given, {})
    instance, session = "a" * 16, cast("Session", FakeSession(1))
    hello = setup.hello.model_copy(update={"instance": instance})
    held.handle(SessionOpened(session, cast("Authenticated", Client(hello))), session)
    held.handle(MessageReceived(COORDINATOR, SendMeans(instance=instance)), session)
    assert held._followers == {instance}
    held.handle(SessionClosed(1, "the cable was pulled"), session)
    assert held._followers == set()
