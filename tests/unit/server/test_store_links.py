"""The coordinator's side of stores on other machines, with sessions that only remember what was sent."""

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from harness import local_settings
from peers import opened, small_replica
from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import ClusterEmpty, NonFiniteLoss
from smolcluster.server.hosted_stores import HostedStores
from smolcluster.server.push import Pushed
from smolcluster.server.slices import place_of, slice_frames
from smolcluster.server.store import Part
from smolcluster.server.store_links import (
    GATHER_SLOWER,
    NormsArrived,
    StepsUndone,
    StoreLinks,
)
from smolcluster.training.replica import Replica
from smolcluster.wire.acceptor import SessionOpened
from smolcluster.wire.frames import Frame
from smolcluster.wire.handshake import Authenticated, introduce
from smolcluster.wire.inbox import MessageReceived, SessionClosed
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import (
    SESSION,
    STORE,
    Drop,
    Goodbye,
    HostPort,
    LeaseKey,
    Listening,
    Message,
    PartKey,
    Reject,
    State,
)
from smolcluster.wire.session import Receiver, Session

NODES = ("mini1", "win", "pi5")
LISTENING = Listening(places=(HostPort(host="127.0.0.1", port=1),))


@dataclass
class FakeSession:
    """What was sent, as messages and frames; `num_gone` is said by the test."""

    session_id: int
    receiver: Receiver = field(default_factory=Mock)
    num_gone: int = 0
    reason: str = ""
    sent: list[Message] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        return bool(self.reason)

    def cut(self, reason: str) -> None:
        self.reason = self.reason or reason

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def end_with(self, message: Message) -> None:
        self.sent = [message]

    def send_frame(self, frame: Frame) -> None:
        self.frames.append(frame)


@dataclass
class Client:
    """Who has proved itself, as much of it as is asked for."""

    hello: object


def new_replica() -> Replica:
    """610 weights in ten buckets."""
    return small_replica("adamw", bucket_values=64, weight_decay=0.1)


def patient(start_s: float, lost_s: float) -> ClusterConfig:
    """How long stores are waited for: at the start, and when one is lost."""
    told = {"start_timeout_s": start_s, "empty_cluster_timeout_s": lost_s}
    return local_settings().cluster.model_copy(update=told)


def ignore(node: str, num_steps: int, share: float) -> None:
    """Nobody wants to know."""


def spread(lost_s: float = 60.0, on_undone: StepsUndone = ignore) -> HostedStores:
    stores = HostedStores(
        new_replica(),
        NODES,
        run=local_settings().run_config("test-run", "edp"),
        codec="fp32",
        incarnation="here",
        cluster=patient(600.0, lost_s),
        log=logging.getLogger("test"),
    )
    stores.begin(0, on_undone)
    return stores


def open_session(stores: StoreLinks[Any], node: str, session_id: int) -> FakeSession:
    hello = introduce(node, sets=(SESSION, STORE))
    answer = stores.admit(session_id, hello)
    assert not isinstance(answer, Refused)
    session = FakeSession(session_id, answer[1])
    client = cast("Authenticated", Client(hello))
    stores.handle(SessionOpened(cast("Session", session), client))
    return session


def ready(stores: HostedStores) -> list[FakeSession]:
    sessions = [open_session(stores, node, 1 + n) for n, node in enumerate(NODES[1:])]
    told = [stores.handle(MessageReceived(each.session_id, LISTENING)) for each in sessions]
    assert told == [False, True]
    return sessions


def test_a_store_that_gets_no_further_with_its_slice_ends_the_run() -> None:
    stores, began = spread(), time.monotonic()
    win = open_session(stores, "win", 1)
    pi5 = open_session(stores, "pi5", 2)
    stores.handle(MessageReceived(pi5.session_id, LISTENING))
    win.num_gone = 3
    stores.check_patience(began + 540)
    win.num_gone = 4
    stores.check_patience(began + 1080)  # from the last frame on
    stores.check_patience(began + 1620)
    with pytest.raises(ClusterEmpty, match="win has not got on with its slice for 10 min"):
        stores.check_patience(began + 1740)


def test_a_store_that_comes_and_goes_without_taking_its_slice_ends_the_run() -> None:
    stores, began = spread(), time.monotonic()
    for session_id, after_s in enumerate((0, 360), 1):
        win = open_session(stores, "win", session_id)
        win.num_gone = 3
        stores.check_patience(began + after_s)
        stores.handle(SessionClosed(session_id, "it has crashed"))
    with pytest.raises(ClusterEmpty, match="win did not come within 10 min"):
        stores.check_patience(began + 660)


def test_a_store_that_is_ready_and_says_nothing_is_silent_until_it_speaks() -> None:
    stores = spread(lost_s=600.0)
    assert not stores.are_silent(time.monotonic() + 1000), "none has its slice yet"
    ready(stores)
    assert not stores.are_silent(time.monotonic() + 500)
    assert stores.are_silent(time.monotonic() + 700)


def pushed(stores: HostedStores, value: float = 0.0) -> Pushed:
    """The server's own part of a push."""
    place = place_of(stores._replica.buckets, stores.own_span)
    gradient = torch.full_like(stores._replica.params[place], value)
    return Pushed(
        session_id=0,
        of=0,
        fragment=0,
        bucket=0,
        values=gradient,
        part=Part(0, gradient, Mock()),
        push=Mock(),
        buffers={},
    )


def norms_of(stores: HostedStores, session_id: int, key: PartKey) -> NormsArrived:
    """All that the store of a session holds of a part has arrived."""
    span = stores._stores[session_id - 1].span
    return NormsArrived(session_id, key, 0, span.start, ((0.0,) * len(span),))


def test_a_part_counts_only_in_the_name_of_who_sent_it() -> None:
    stores = spread()
    win, pi5 = ready(stores)
    lease = LeaseKey(incarnation="here", epoch=0, start=0, stop=10, grant=1)
    honest, liar = (PartKey(instance=each * 8, of=lease) for each in "ab")
    own = pushed(stores)
    assert stores.take(honest, own) is None
    lie, *parts = (norms_of(stores, *told) for told in ((1, liar), (1, honest), (2, honest)))
    stores.drop_part(lie)
    assert win.sent[-1] == Drop(key=liar)
    assert Drop(key=liar) not in pi5.sent
    first, last = (stores.collect(honest, part) for part in parts)
    assert first is None
    assert last is own


def test_a_part_that_is_sent_again_counts_as_it_was_sent_first() -> None:
    stores = spread()
    ready(stores)
    lease = LeaseKey(incarnation="here", epoch=0, start=0, stop=10, grant=1)
    key, own, again = PartKey(instance="a" * 8, of=lease), pushed(stores), pushed(stores, 1.0)
    for came in (own, again, dataclasses.replace(again, part=None)):
        assert stores.take(key, came) is None
    assert again.part is not None
    cast("Mock", again.part.free).assert_called_once()
    first, last = (stores.collect(key, norms_of(stores, each, key)) for each in (1, 2))
    assert first is None
    assert last is own
    assert stores._pending[key].row(0)[: len(stores.own_span)] == [0.0] * len(stores.own_span)


def slice_of(stores: HostedStores, span: range, version: int) -> list[tuple[State, memoryview]]:
    """The frames in which a store sends its slice, all of whose values are `version`."""
    replica = stores._replica
    values = stores._contents(place_of(replica.buckets, span))
    values = {name: torch.full_like(each, version) for name, each in values.items()}
    frames = slice_frames(values, replica.buckets, span, incarnation="here", version=version)
    return [cast("tuple[State, memoryview]", opened(frame)) for frame in frames]


def test_what_an_aborted_gathering_has_asked_for_is_taken_before_what_the_next_one_asks() -> None:
    stores = spread()
    receivers = [each.receiver for each in ready(stores)]
    spans = [store.span for store in stores._stores]

    def send(version: int, frames: slice) -> None:
        for receiver, span in zip(receivers, spans, strict=True):
            for frame in slice_of(stores, span, version)[frames]:
                receiver(*frame)

    def send_some_and_stop() -> None:
        send(1, slice(0, 5))
        raise KeyboardInterrupt

    def send_the_rest_and_all() -> None:
        send(1, slice(5, None))
        send(2, slice(None))

    with pytest.raises(KeyboardInterrupt):
        stores.gather(1, send_some_and_stop)
    assert stores.gather(2, send_the_rest_and_all)
    params = stores._replica.params
    assert (params[place_of(stores._replica.buckets, range(spans[0].start, 10))] == 2.0).all()


def test_a_store_that_trickles_is_cut() -> None:
    stores = spread()
    win, _ = ready(stores)
    win_store = stores._stores[0]
    win_store.took_s = -61.0 / GATHER_SLOWER  # its time is over from the beginning
    frames = iter(slice_of(stores, win_store.span, 0))

    def trickle() -> None:
        win.receiver(*next(frames))

    assert not stores.gather(0, trickle)
    assert "has not sent its slice within" in win.reason


def test_a_second_process_of_one_store_is_told_that_it_is_busy() -> None:
    stores = spread()
    win, _ = ready(stores)
    second = open_session(stores, "win", 9)
    assert isinstance(second.sent[-1], Reject)
    assert second.sent[-1].code == "busy"
    assert stores._stores[0].session is cast("Session", win)
    assert stores.is_ready


def test_a_fault_ends_the_run_unless_its_store_was_refused_or_lost() -> None:
    stores = spread()
    win, _ = ready(stores)
    second = open_session(stores, "win", 9)
    fault = Goodbye(reason="the norm of bucket 3 is nan", fault="non-finite")
    stores.handle(MessageReceived(second.session_id, fault))
    with pytest.raises(NonFiniteLoss, match="bucket 3"):
        stores.handle(MessageReceived(win.session_id, fault))


def step(stores: HostedStores, sessions: list[FakeSession]) -> None:
    lease = LeaseKey(incarnation="here", epoch=0, start=0, stop=10, grant=1)
    key = PartKey(instance="a" * 8, of=lease)
    for session in sessions:
        stores.collect(key, norms_of(stores, session.session_id, key))
    assert stores.take(key, pushed(stores)) is not None
    stores.step(key, 1.0, 0.1)


def test_the_steps_that_a_lost_store_had_taken_since_it_was_gathered_are_told_once() -> None:
    told: list[tuple[str, int, float]] = []
    stores = spread(on_undone=lambda *what: told.append(what))
    sessions = ready(stores)
    step(stores, sessions)
    step(stores, sessions)
    stores.handle(SessionClosed(1, "its power is gone"))
    assert told == [("win", 2, 192 / 610)]
    open_session(stores, "win", 3)
    stores.handle(MessageReceived(3, LISTENING))
    stores.handle(SessionClosed(3, "its power is gone"))
    assert len(told) == 1, "it had taken none since"


def test_slices_are_gathered_now_and_then_when_they_have_changed() -> None:
    stores = spread()
    sessions, later = ready(stores), time.monotonic() + 1000
    assert not stores.is_copy_due(later)
    step(stores, sessions)
    assert stores.is_copy_due(later)
    assert not stores.is_copy_due(time.monotonic())
    stores._copying_took_s = 100.0
    assert not stores.is_copy_due(later)


def test_a_store_that_does_not_send_its_slice_is_cut() -> None:
    stores = spread(lost_s=0.0)
    win, _ = ready(stores)
    assert not stores.gather(version=0)
    assert win.reason == "it does not send its slice"
