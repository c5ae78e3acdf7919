"""Which buckets of which pushes count at a store, and what the server's links make of a silent one."""

import logging
import time
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from connection_pairs import one_of_each
from harness import local_settings
from peers import store_setup
from smolcluster.algorithms.SynchronousPS.step import SliceStep
from smolcluster.algorithms.SynchronousPS.store import Held, ReducingLinks
from smolcluster.codec.registry import get_codec
from smolcluster.data.permutation import Range
from smolcluster.errors import ProtocolError
from smolcluster.server.slices import arrived
from smolcluster.server.store_host import COORDINATOR
from smolcluster.wire.acceptor import SessionOpened
from smolcluster.wire.handshake import Authenticated
from smolcluster.wire.inbox import Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    Accepted,
    Arrived,
    CountedPart,
    Drop,
    LeaseKey,
    Message,
    PartKey,
    Push,
    Reduced,
    SendWeights,
    Slice,
    TakeMean,
    TakeStep,
    TensorSpec,
)
from smolcluster.wire.session import Session
from smolcluster.wire.streams import bucket_spec
from unit.algorithms.SynchronousPS.actors import commit_of, opened_step, push_of
from unit.server.test_store_links import (
    LISTENING,
    NODES,
    Client,
    FakeSession,
    ignore,
    new_replica,
    open_session,
    patient,
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
    links = ReducingLinks(
        new_replica(),
        NODES,
        run=local_settings(algorithm="syncps").run_config("test-run", "syncps"),
        codec=codec,
        incarnation="here",
        cluster=patient(10.0, 60.0),
        log=logging.getLogger("test"),
    )
    links.begin(5, ignore)
    return links


BUCKET = bucket_spec(get_codec("fp32"), slice(0, 64))


def reduced(links: ReducingLinks, bucket: int, **changes: int) -> Reduced:
    """The mean of a bucket of the open step."""
    fields = {"attempt": links._wanted.attempt, "version": 6, **changes}
    return Reduced(bucket=bucket, num_buckets=10, tensor=BUCKET, **fields)


def test_a_store_that_owes_means_and_says_nothing_is_cut() -> None:
    links = links_of("fp32")
    win, pi5 = (open_session(links, node, 1 + n) for n, node in enumerate(NODES[1:]))
    for each in (win, pi5):
        links.handle(MessageReceived(each.session_id, LISTENING))
    step = opened_step(6, [8], len(links.own_span))
    links.open_step(step)
    for bucket in range(3, 6):
        links.note_mean(reduced(links, bucket))
    links.note_mean(reduced(links, 6, attempt=0))
    assert links.others == {"win": 3, "pi5": 4}
    now = time.monotonic()
    links.cut_silent(now, now + 59.0)
    assert not pi5.is_cut
    links.cut_silent(now, now + 61.0)
    assert pi5.reason == "it does not send the means of its buckets"
    assert not win.is_cut
    assert not links.has_all_means
    for bucket in range(6, 10):
        links.note_mean(reduced(links, bucket))
    assert not links.has_all_means, "the server's own are missing"
    [assignment] = step.assignments
    for bucket in links.own_span:
        own = push_of(assignment.key, bucket).model_copy(update={"base_version": 5})
        links.own.add(assignment.session_id, own, torch.ones(64), 1.0)
    assert len(list(links.own.new_means())) == 3
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
    receiver = open_session(links, "win", 1).receiver
    links.open_step(opened_step(6, [8], len(links.own_span)))
    own, payload = reduced(links, 3), memoryview(bytearray(BUCKET.nbytes))
    assert receiver(reduced(links, 3, attempt=7), payload) is None, "of a step that is void"
    assert receiver(own, payload) == MessageReceived(1, own)
    with pytest.raises(ProtocolError, match="bucket 3 of 10, expected 4 of 10"):
        receiver(own, payload)
    links.open_step(opened_step(6, [8], len(links.own_span)))
    own = reduced(links, 3)
    assert receiver(own, payload) == MessageReceived(1, own), "it begins anew"
    with pytest.raises(ProtocolError, match="a mean of step 7, open is 6"):
        receiver(reduced(links, 4, version=7), payload)


def test_a_store_is_not_believed_that_more_buckets_have_counted_than_it_has() -> None:
    links = links_of("fp32")
    receiver = open_session(links, "win", 1).receiver
    key = PartKey(instance="a" * 16, of=push(1, 2).lease)
    for count in (0, 3):
        told, norms = arrived(key, 0, 3, torch.empty(0, count))
        assert receiver(told, norms) == MessageReceived(1, told)
    with pytest.raises(ProtocolError, match="bucket 3 of fragment 0, which it has not"):
        receiver(*arrived(key, 0, 3, torch.empty(0, 4)))


def test_what_other_stores_have_of_a_step_is_void_when_one_is_lost() -> None:
    links = links_of("fp32")
    win, pi5 = (open_session(links, node, 1 + n) for n, node in enumerate(NODES[1:]))
    links.open_step(opened_step(6, [8], len(links.own_span)))
    wanted = win.sent[-1]
    assert isinstance(wanted, TakeMean)
    links.handle(SessionClosed(1, "its power is gone"))
    assert pi5.sent[-1] == Drop(key=wanted.parts[0].key)
    assert win.sent[-1] is wanted


INSTANCE = "a" * 16


@pytest.fixture
def held() -> Held:
    """Bucket 1 of 2 at a store, which adds up the only part of a step, and a worker's session with it."""
    given = SLICE.model_copy(update={"contents": (), "rule": None, "codec": "fp32"})
    setup = store_setup(Held)
    answer = Accepted(bucket_bytes=512 * 4, heartbeat_timeout_s=1.0)
    held = Held(setup, answer, Inbox(), given, {})
    hello = setup.hello.model_copy(update={"instance": INSTANCE})
    session = cast("Session", FakeSession(1))
    held.handle(SessionOpened(session, cast("Authenticated", Client(hello))), session)
    return held


def obey(held: Held, *messages: Message) -> FakeSession:
    """The coordinator says something; what it hears."""
    coordinator = Hearing(COORDINATOR)
    for message in messages:
        held.handle(MessageReceived(COORDINATOR, message), cast("Session", coordinator))
    return coordinator


@dataclass
class Hearing(FakeSession):
    """The coordinator's session, on which tensors may be said as well."""

    def send(self, message: Message, _payload: object = None) -> None:
        self.sent.append(message)


def bring(held: Held, value: float) -> FakeSession:
    """The worker pushes the whole part, whose gradient is `value` everywhere; what the coordinator hears."""
    spec = bucket_spec(get_codec("fp32"), slice(512, 1000))
    own = push(1, 1, 0, 8, base_version=0).model_copy(update={"num_buckets": 2, "tensor": spec})
    event = held._receiver_for(1)(own, memoryview(bytearray(torch.full((488,), value).numpy())))
    coordinator = Hearing(COORDINATOR)
    assert event is not None
    held.handle(event, cast("Session", coordinator))
    return coordinator


def mean(attempt: int) -> TakeMean:
    part = CountedPart(key=PartKey(instance=None, of=0), weight=8)
    return TakeMean(parts=(part,), epoch=1, version=1, attempt=attempt)


def values_in(session: FakeSession) -> list[float]:
    """The first value of each mean that was sent."""
    return [torch.frombuffer(f.payload, dtype=torch.float32)[0].item() for f in session.frames]


def test_a_store_adds_up_what_comes_tells_what_has_counted_and_sends_the_mean(held: Held) -> None:
    obey(held, SendWeights(instance=INSTANCE, version=0), mean(1))
    heard = bring(held, 2.0)
    [told] = heard.sent
    assert isinstance(told, Arrived)
    assert told.key is not None
    assert (told.key.instance, told.tensor.shape, told.is_whole) == (INSTANCE, (0, 1), True)
    worker = cast("FakeSession", held._workers[INSTANCE])
    assert values_in(heard) == values_in(worker) == [2.0]
    [again] = bring(held, 3.0).sent
    assert isinstance(again, Arrived)
    assert again.tensor.shape == (0, 1), "it counts once"
    obey(held, TakeStep(version=1, parts=(), learning_rate=0.1))
    assert held._slice.means == []


def test_nothing_of_a_step_that_is_void_is_sent_any_more(held: Held) -> None:
    """Who comes back has a new StepReceiver, and may ask before the step is done again."""
    obey(held, SendWeights(instance=INSTANCE, version=0), mean(1))
    bring(held, 2.0)
    worker = cast("FakeSession", held._workers[INSTANCE])
    worker.frames.clear()
    obey(held, Drop(key=mean(1).parts[0].key))
    assert bring(held, 3.0).frames == []
    obey(held, SendWeights(instance=INSTANCE, version=0))
    assert worker.frames == []
    obey(held, mean(2))
    heard = bring(held, 4.0)
    assert values_in(heard) == values_in(worker) == [4.0]


def test_who_comes_back_is_sent_nothing_before_it_asks(held: Held) -> None:
    """Its StepReceiver is a new one, and the server lets it have all means from the open step on."""
    obey(held, SendWeights(instance=INSTANCE, version=0))
    held.handle(SessionClosed(1, "the cable was pulled"), cast("Session", None))
    obey(held, mean(1))
    assert held._owed == {}
    assert bring(held, 2.0).sent == [], "the coordinator hears that it has gone"
    assert held._owed == {}
