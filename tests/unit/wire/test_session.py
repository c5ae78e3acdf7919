"""A session reads, writes, keeps itself alive, and ends exactly once, whatever ends it."""

import itertools
import math
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from connection_pairs import (
    BUCKET_BYTES,
    connection_pair,
    push,
    telemetry,
)
from peers import DEADLINE_S, Echo, Hand, next_event, session_threads
from smolcluster.errors import ProtocolError
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    FROM_WORKER,
    Ack,
    Goodbye,
    Heartbeat,
    Message,
    Pull,
    Push,
    Telemetry,
    frame_of,
)
from smolcluster.wire.session import Receiver, Session

SEAT = 7
ACK = Ack(lease=push().lease, outcome="applied", version=4)
FULL_BUCKET = frame_of(push(BUCKET_BYTES), bytes(BUCKET_BYTES))
NUM_FRAMES = 1000
"""More full buckets than a system takes over for a peer that does not read."""
SOON_S = 0.04
"""A heartbeat timeout for tests that listen to heartbeats."""


class Ends:
    """One end of a connection for a session, and the other one spoken by hand."""

    def __init__(self, ours: Connection, theirs: Connection) -> None:
        self.ours, self.peer, self.inbox = ours, Hand(theirs), Inbox()

    def session(
        self, *, starts: bool = True, receiver: Receiver | None = None, **options: Any
    ) -> Session:
        """The session, which is patient unless `options` say otherwise."""
        usual = {"heartbeat_timeout_s": DEADLINE_S, "max_queued": 100, "session_id": SEAT}
        self.made = Session(
            self.ours,
            receiver=receiver or Echo(SEAT),
            inbox=self.inbox,
            kinds=FROM_WORKER,
            **(usual | options),
        )
        if starts:
            self.made.start()
        return self.made

    def full_session(self) -> Session:
        """A session with more queued than can be sent while the peer does not read."""
        session = self.session(max_queued=NUM_FRAMES)
        for _ in range(NUM_FRAMES):
            session.send_frame(FULL_BUCKET)
        return session

    def reason(self) -> str:
        """Why the session has ended, which is the next that happens."""
        return next_event(self.inbox, SessionClosed).reason

    def hear_anything(self) -> Message:
        """The peer's next message, heartbeats and reports included."""
        return self.peer.connection.receive(deadline=Deadline(DEADLINE_S))[0]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The peer leaves with the test, and so does the session."""
    with connection_pair("tcp", DEADLINE_S) as (ours, theirs):
        ends = Ends(ours, theirs)
        yield ends
        ends.peer.leave()
        assert ends.made.join(DEADLINE_S)
        assert session_threads() == []


def test_what_the_peer_says_goes_through_the_receiver_to_the_inbox(ends: Ends) -> None:
    receiver = Echo(SEAT)
    ends.session(receiver=receiver)
    ends.peer.say(Heartbeat(sent_at=1.0))  # nobody's business
    ends.peer.say(push(16), bytes(range(16)))
    assert next_event(ends.inbox, MessageReceived) == MessageReceived(SEAT, push(16))
    assert receiver.payloads == [bytes(range(16))]


def test_messages_arrive_in_the_order_they_were_queued(ends: Ends) -> None:
    session = ends.session()
    for version in range(50):
        session.send(ACK.model_copy(update={"version": version}))
    assert [ends.peer.hear_a(Ack).version for _ in range(50)] == list(range(50))


def test_no_frames_are_sent_as_soon_as_their_turn_comes(ends: Ends) -> None:
    session = ends.session()
    session.send_frames([])
    session.send(ACK)
    ends.peer.hear_a(Ack)
    assert session.flush(DEADLINE_S)
    assert (session.num_gone, session.backlog) == (2, 0)


def test_what_is_queued_wakes_an_idle_session(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the next heartbeat, which never comes here."""
    monkeypatch.setattr("smolcluster.wire.session.LONGEST_PULSE_S", math.inf)
    session = ends.session(heartbeat_timeout_s=100 * DEADLINE_S)
    session.send(ACK)
    ends.peer.hear_a(Ack)
    session.send_urgent(Pull())
    ends.peer.hear_a(Pull)
    session.finish()
    ends.peer.hear_the_end()


def test_a_held_frame_is_sent_when_it_is_released(ends: Ends) -> None:
    asked: list[float] = []
    is_asked, released = threading.Event(), threading.Event()

    def later(longest_s: float) -> Frame:
        asked.append(longest_s)
        is_asked.set()
        released.wait(DEADLINE_S)
        return frame_of(ACK)

    session = ends.session()
    session.send_later(later)
    session.send(Goodbye(reason="behind it"))
    assert is_asked.wait(DEADLINE_S)
    assert session.num_gone == 0
    released.set()
    ends.peer.hear_a(Ack)
    ends.peer.hear_a(Goodbye)
    assert asked == [DEADLINE_S / 4], "so that heartbeats go on"


def test_what_is_wanted_no_more_when_its_turn_comes_is_left_out(ends: Ends) -> None:
    session = ends.session(starts=False)
    session.send_later(lambda _: None)
    session.send(ACK)
    session.start()
    ends.peer.hear_a(Ack)
    assert session.flush(DEADLINE_S)
    assert session.backlog == 0


def test_what_is_urgent_overtakes_all_but_the_frame_that_is_being_sent(ends: Ends) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def first(_: float) -> Frame:
        begun.set()
        go_on.wait(DEADLINE_S)
        return frame_of(ACK)

    session = ends.session()
    session.send_later(first)
    session.send(ACK)
    assert begun.wait(DEADLINE_S)
    session.send_urgent(Goodbye(reason="first"))
    go_on.set()
    assert [type(ends.peer.hear()[0]) for _ in range(3)] == [Ack, Goodbye, Ack]


def test_what_is_taken_back_is_not_sent_and_a_frame_that_was_begun_is_whole(ends: Ends) -> None:
    session = ends.full_session()
    session.drop_queued()
    num_begun = session.backlog
    session.send(ACK)
    num_whole = 0
    while isinstance(message := ends.peer.hear()[0], Push):
        num_whole += 1
    assert isinstance(message, Ack)
    assert num_begun <= 1
    assert num_whole < NUM_FRAMES
    assert session.flush(DEADLINE_S)
    assert session.backlog == 0


def test_frames_that_are_taken_back_while_a_heartbeat_goes_between_them_are_over(
    ends: Ends,
) -> None:
    first, second, last = (ACK.model_copy(update={"version": version}) for version in range(3))
    begun = threading.Event()

    def frames() -> Iterator[Frame]:
        begun.set()
        time.sleep(SOON_S)  # until a heartbeat is due
        yield frame_of(first)
        yield frame_of(second)

    def report() -> Message | None:
        if begun.is_set():
            session.drop_queued()
        return None

    session = ends.session(heartbeat_timeout_s=SOON_S, report=report)
    session.send_frames(frames())
    assert session.flush(DEADLINE_S)
    session.send(last)
    assert [ends.peer.hear_a(Ack) for _ in range(2)] == [first, last]


def test_a_frame_that_was_sent_is_free_while_the_next_one_is_waited_for(ends: Ends) -> None:
    class Payload(bytearray):
        """Unlike its base, it can be referred to weakly."""

    kept: list[object] = []

    def frames() -> Iterator[Frame]:
        payload = Payload(16)
        sent = weakref.ref(payload)
        yield frame_of(push(16), payload)
        del payload
        kept.append(sent())
        yield frame_of(ACK)

    ends.session().send_frames(frames())
    ends.peer.hear_a(Push)
    ends.peer.hear_a(Ack)
    assert kept == [None]


def test_gone_comes_once_after_everything_the_peer_said(ends: Ends) -> None:
    session = ends.session()
    for _ in range(50):
        ends.peer.say(Pull())
    ends.peer.leave()
    events = [ends.inbox.get(DEADLINE_S) for _ in range(51)]
    assert events[:50] == [MessageReceived(SEAT, Pull())] * 50
    assert isinstance(events[50], SessionClosed)
    assert events[50].session_id == SEAT
    assert session.join(DEADLINE_S)
    assert ends.inbox.get(0.0) is None
    assert ends.ours.is_closed, "its socket is closed"


def test_however_often_it_is_cut_it_ends_once_and_the_first_reason_counts(ends: Ends) -> None:
    session = ends.session()
    session.cut("the first reason")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(session.cut, [f"reason {number}" for number in range(8)]))
    assert ends.reason() == "the first reason"
    assert session.join(DEADLINE_S)
    session.cut("too late")
    session.send(ACK)
    session.finish()
    assert ends.inbox.get(0.0) is None


def test_a_peer_that_does_not_keep_up_is_cut_and_the_sender_never_waits_for_it(ends: Ends) -> None:
    session = ends.session(max_queued=8)
    deadline = Deadline(DEADLINE_S)
    while not session.join(0.0):  # nobody reads on the other side
        session.send_frame(FULL_BUCKET)
        assert not deadline.expired
    assert "does not keep up: 8 frames" in ends.reason()


def test_each_message_wakes_the_writer_once_also_the_one_that_is_too_many(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, woken = ends.session(starts=False, max_queued=1), Mock()
    monkeypatch.setattr(session, "_wake", woken)
    session.send(ACK)
    session.send(ACK)
    assert session.is_cut
    assert woken.call_count == 2
    session.start()


def test_a_peer_whose_messages_are_not_taken_up_is_cut_when_they_are_too_many(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.wire.session.MOST_UNREAD", 3)
    ends.session()
    for _ in range(3):
        ends.peer.say(Pull())
        next_event(ends.inbox, MessageReceived)
    for _ in range(4):
        ends.peer.say(Pull())
    assert ends.made.join(DEADLINE_S)
    for _ in range(3):
        next_event(ends.inbox, MessageReceived)
    assert ends.reason() == "3 of its messages are waiting to be taken"


def test_a_flush_waits_until_the_memory_of_all_frames_is_free(ends: Ends) -> None:
    session = ends.full_session()
    assert not session.flush(0.05)
    assert session.num_gone < session.num_queued == NUM_FRAMES
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(session.flush, DEADLINE_S)
        for _ in range(NUM_FRAMES):
            ends.peer.hear_a(Push)
        assert flushed.result(DEADLINE_S)
    assert session.num_gone == session.num_queued == NUM_FRAMES


def test_who_waits_for_what_is_taken_back_waits_no_more(ends: Ends) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(_: float) -> Frame:
        begun.set()
        go_on.wait(DEADLINE_S)
        return frame_of(ACK)

    session = ends.session()
    session.send_later(held)
    session.send(ACK)
    assert begun.wait(DEADLINE_S)
    session.drop_queued()
    assert not session.flush(0.01), "what has begun is sent"
    go_on.set()
    assert session.flush(DEADLINE_S)
    assert isinstance(ends.peer.hear()[0], Ack)
    session.send(Goodbye(reason="the next"))
    ends.peer.hear_a(Goodbye)


def test_a_flush_ends_with_its_session(ends: Ends) -> None:
    session = ends.full_session()
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(session.flush, math.inf)
        session.cut("enough")
        assert flushed.result(DEADLINE_S), "nothing of it will be sent any more"
    assert session.flush(math.inf), "nor later"
    assert ends.reason() == "enough"


def test_a_session_that_is_not_started_yet_has_neither_sent_nor_ended(ends: Ends) -> None:
    session = ends.session(starts=False)
    session.send(Pull())
    assert not session.flush(0.01)
    assert not session.join(0.01)
    session.start()
    assert session.flush(DEADLINE_S)
    assert not session.join(0.01)
    ends.peer.hear_a(Pull)
    ends.peer.leave()
    assert session.join(DEADLINE_S)


def test_heartbeats_are_not_counted_as_frames_that_were_queued(ends: Ends) -> None:
    session = ends.session(heartbeat_timeout_s=SOON_S)
    assert [type(ends.hear_anything()) for _ in range(5)] == [Heartbeat] * 5
    session.send(ACK)
    ends.peer.hear_a(Ack)
    assert session.flush(DEADLINE_S)
    assert (session.num_queued, session.num_gone) == (1, 1)


def test_a_finished_session_sends_what_is_queued_and_ends_when_the_peer_closes(ends: Ends) -> None:
    session = ends.session(starts=False, max_queued=10)  # though the queue is full
    for _ in range(10):
        session.send(ACK)
    session.finish()
    session.start()
    for _ in range(10):
        ends.peer.hear_a(Ack)
    ends.peer.hear_the_end()
    ends.peer.say(Pull())
    heard = next_event(ends.inbox, MessageReceived)
    assert heard.message == Pull(), "the other direction is still open"
    ends.peer.leave()
    assert "closed the connection" in ends.reason()


@pytest.mark.parametrize("max_queued", [100, 20])
def test_last_words_are_all_that_is_said_and_what_was_queued_is_free(
    ends: Ends, max_queued: int
) -> None:
    """Half of what belongs together would be worse than nothing. A full queue does not keep them back."""
    session = ends.session(starts=False, max_queued=max_queued)
    for _ in range(10):
        session.send(ACK)
        session.send_frame(FULL_BUCKET)
    session.finish()
    session.end_with(Goodbye(reason="done"))
    session.start()
    assert ends.peer.hear_a(Goodbye).reason == "done"
    ends.peer.hear_the_end()
    assert (session.num_queued, session.backlog) == (21, 0)


def test_a_receiver_that_refuses_a_message_ends_the_session(ends: Ends) -> None:
    class Refusing(Echo):
        def place_for(self, _message: Message) -> memoryview | None:
            raise ProtocolError("this bucket is not of the agreed shape")

    ends.session(receiver=Refusing())
    ends.peer.say(push(16), bytes(16))
    assert "not of the agreed shape" in ends.reason()


def fail(*arguments: object) -> Any:
    """What has a bug."""
    raise ZeroDivisionError(str(arguments))


class Broken(Echo):
    """A receiver with a bug."""

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Fail."""
        return fail(message, payload)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "where"), [({"receiver": Broken()}, "reader"), ({"report": fail}, "writer")]
)
def test_an_internal_error_ends_the_session_and_nothing_else(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], where: str
) -> None:
    errors: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    session = ends.session(heartbeat_timeout_s=SOON_S, **options)
    ends.peer.say(Pull())
    event = next_event(ends.inbox, Event)
    closed = event if isinstance(event, SessionClosed) else next_event(ends.inbox, SessionClosed)
    assert closed.reason == f"an internal error in its {where}, see the log file"
    assert session.join(DEADLINE_S)
    assert errors == [ZeroDivisionError]


def test_a_peer_that_is_gone_before_the_session_begins_is_noticed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader may end before the writer has begun; it must not fail on that."""
    start = threading.Thread.start

    def start_and_see_it_end(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("reader-"):
            thread.join(DEADLINE_S)

    monkeypatch.setattr(threading.Thread, "start", start_and_see_it_end)
    ends.peer.leave()
    ends.session()
    ends.reason()


def test_a_report_goes_with_every_heartbeat_and_before_the_last_words(ends: Ends) -> None:
    count = itertools.count(1)
    session = ends.session(heartbeat_timeout_s=SOON_S, report=lambda: telemetry(steps=next(count)))
    heard = [ends.hear_anything() for _ in range(6)]
    assert [type(message) for message in heard] == [Heartbeat, Telemetry] * 3
    session.end_with(Goodbye(reason="done"))
    while not isinstance(heard[-1], Goodbye):
        heard.append(ends.hear_anything())
    assert isinstance(heard[-2], Telemetry)
    steps = [message.steps for message in heard if isinstance(message, Telemetry)]
    assert steps == list(range(1, len(steps) + 1))
