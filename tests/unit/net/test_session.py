"""A session reads, writes, keeps itself alive, and ends exactly once, whatever ends it."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from connection_pairs import BUCKET_BYTES, connection_pair, push, telemetry
from peers import DEADLINE_S, Echo, Hand, next_event, session_threads
from smolcluster.errors import ProtocolError
from smolcluster.net.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.net.session import Receiver, Session
from smolcluster.transport.connection import Connection
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    FROM_WORKER,
    Ack,
    Goodbye,
    Heartbeat,
    Message,
    Pull,
    Push,
    Ready,
    State,
    Telemetry,
    frame_of,
)
from smolcluster.utils.retry import Deadline

SEAT = 7
ACK = Ack(lease=push().lease, outcome="applied", version=4)
FULL_BUCKET = push(BUCKET_BYTES)


def session_on(
    connection: Connection,
    inbox: Inbox,
    *,
    session_id: int = SEAT,
    receiver: Receiver | None = None,
    heartbeat_timeout_s: float = DEADLINE_S,
    max_queued: int = 100,
    report: Callable[[], Message | None] = lambda: None,
) -> Session:
    return Session(
        connection,
        session_id=session_id,
        receiver=receiver or Echo(session_id),
        inbox=inbox,
        heartbeat_timeout_s=heartbeat_timeout_s,
        max_queued=max_queued,
        kinds=FROM_WORKER,
        report=report,
    )


@pytest.fixture(params=["socketpair", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Hand]]:
    with connection_pair(request.param, DEADLINE_S) as (ours, theirs):
        yield ours, Hand(theirs)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def test_what_the_peer_says_goes_through_the_receiver_to_the_inbox(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    receiver = Echo(SEAT)
    session_on(ours, inbox, receiver=receiver).start()
    peer.say(push(16), bytes(range(16)))
    assert next_event(inbox, MessageReceived) == MessageReceived(SEAT, push(16))
    assert receiver.payloads == [bytes(range(16))]
    peer.leave()
    next_event(inbox, SessionClosed)


def test_heartbeats_are_nobodys_business(ends: tuple[Connection, Hand], inbox: Inbox) -> None:
    ours, peer = ends
    session_on(ours, inbox).start()
    peer.say(Heartbeat(sent_at=1.0))
    peer.say(Pull())
    assert next_event(inbox, MessageReceived).message == Pull()
    peer.leave()
    next_event(inbox, SessionClosed)


def test_messages_arrive_in_the_order_they_were_queued(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    session.start()
    for version in range(50):
        session.send(ACK.model_copy(update={"version": version}))
    assert [peer.hear_a(Ack).version for _ in range(50)] == list(range(50))
    peer.leave()
    next_event(inbox, SessionClosed)


def test_a_held_frame_is_sent_when_it_is_released(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox, heartbeat_timeout_s=DEADLINE_S)
    asked: list[float] = []
    released = threading.Event()

    def later(longest_s: float) -> Frame:
        asked.append(longest_s)
        released.wait(DEADLINE_S)
        return frame_of(ACK)

    session.start()
    session.send_later(later)
    session.send(Goodbye(reason="behind it"))
    time.sleep(0.1)
    assert session.num_sent == 0
    released.set()
    assert isinstance(peer.hear_a(Ack), Ack)
    assert isinstance(peer.hear_a(Goodbye), Goodbye)
    assert asked == [DEADLINE_S / 4], "so that heartbeats go on"
    peer.leave()
    next_event(inbox, SessionClosed)


def test_what_is_wanted_no_more_when_its_turn_comes_is_left_out(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    session.send_later(lambda _: None)
    session.send(ACK)
    session.start()
    assert isinstance(peer.hear_a(Ack), Ack)
    assert session.flush(DEADLINE_S)
    assert session.backlog == 0
    peer.leave()
    next_event(inbox, SessionClosed)


def test_what_is_urgent_overtakes_all_but_the_frame_that_is_being_sent(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    begun, go_on = threading.Event(), threading.Event()

    def first(_: float) -> Frame:
        begun.set()
        go_on.wait(DEADLINE_S)
        return frame_of(ACK)

    session.send_later(first)
    session.send(ACK)
    session.start()
    assert begun.wait(DEADLINE_S)
    session.send_urgent(Goodbye(reason="first"))
    go_on.set()
    heard = [type(peer.hear()[0]) for _ in range(3)]
    assert heard == [Ack, Goodbye, Ack]
    peer.leave()
    next_event(inbox, SessionClosed)


def test_what_is_taken_back_is_not_sent_and_a_frame_that_was_begun_is_whole(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox, max_queued=NUM_FRAMES)
    session.start()
    fill(session)
    session.drop_queued()
    session.send(ACK)
    num_whole = 0
    while isinstance(message := peer.hear()[0], Push):
        num_whole += 1
    assert isinstance(message, Ack)
    assert num_whole == NUM_FRAMES - session.num_dropped < NUM_FRAMES
    assert session.flush(DEADLINE_S)
    assert session.backlog == 0
    peer.leave()
    next_event(inbox, SessionClosed)


def test_gone_comes_once_after_everything_the_peer_said(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    session.start()
    for _ in range(50):
        peer.say(Pull())
    peer.leave()
    events = [inbox.get(DEADLINE_S) for _ in range(51)]
    assert events[:50] == [MessageReceived(SEAT, Pull())] * 50
    assert isinstance(events[50], SessionClosed)
    assert events[50].session_id == SEAT
    assert session.join(DEADLINE_S)
    assert inbox.get(0.0) is None
    assert session_threads() == []
    assert ours.broken, "its socket is closed"


def test_however_often_it_is_cut_it_ends_once_and_the_first_reason_counts(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, _ = ends
    session = session_on(ours, inbox)
    session.start()
    session.cut("the first reason")
    others = [threading.Thread(target=session.cut, args=(f"reason {n}",)) for n in range(8)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(DEADLINE_S)
    assert next_event(inbox, SessionClosed) == SessionClosed(SEAT, "the first reason")
    assert session.join(DEADLINE_S)
    assert inbox.get(0.0) is None
    session.cut("too late")
    session.send(ACK)
    session.finish()
    assert inbox.get(0.0) is None


def test_a_peer_that_does_not_keep_up_is_cut_and_the_sender_never_waits_for_it(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, _ = ends
    session = session_on(ours, inbox, max_queued=8)
    session.start()
    frame = frame_of(FULL_BUCKET, bytes(BUCKET_BYTES))
    deadline = Deadline(DEADLINE_S)
    while not session.join(0.0):  # nobody reads on the other side
        session.send_frame(frame)
        assert not deadline.expired
    assert "does not keep up: 8 frames" in next_event(inbox, SessionClosed).reason
    assert session.join(DEADLINE_S)
    assert session_threads() == []


def test_a_full_queue_is_still_sent_at_the_farewell(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox, max_queued=1)
    session.send(ACK)
    session.finish()
    session.start()
    assert peer.hear_a(Ack) == ACK
    peer.hear_the_end()
    peer.leave()
    next_event(inbox, SessionClosed)


NUM_FRAMES = 1000


def fill(session: Session) -> None:
    """Queue more full buckets than a system takes over for a peer that does not read."""
    frame = frame_of(FULL_BUCKET, bytes(BUCKET_BYTES))
    for _ in range(NUM_FRAMES):
        session.send_frame(frame)


def test_a_flush_waits_until_the_memory_of_all_frames_is_free(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox, max_queued=NUM_FRAMES)
    session.start()
    fill(session)
    assert not session.flush(0.05)
    assert session.num_sent < session.num_queued == NUM_FRAMES
    flushed: list[bool] = []
    flush = threading.Thread(target=lambda: flushed.append(session.flush(DEADLINE_S)))
    flush.start()
    for _ in range(NUM_FRAMES):
        peer.hear_a(Push)
    flush.join(DEADLINE_S)
    assert flushed == [True]
    assert session.num_sent == session.num_queued == NUM_FRAMES
    peer.leave()
    next_event(inbox, SessionClosed)


def test_a_flush_of_an_idle_session_is_over_at_once(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    session.start()
    before = time.monotonic()
    assert session.flush(DEADLINE_S)
    assert time.monotonic() - before < DEADLINE_S / 4, "it does not wait for a heartbeat"
    peer.leave()
    next_event(inbox, SessionClosed)


def test_a_session_that_is_not_started_yet_has_neither_sent_nor_ended(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    session.send(Pull())
    assert not session.flush(0.01)
    assert not session.join(0.01)
    session.start()
    assert session.flush(DEADLINE_S)
    peer.hear_a(Pull)
    peer.leave()
    assert session.join(DEADLINE_S)


def test_a_flush_ends_with_its_session(ends: tuple[Connection, Hand], inbox: Inbox) -> None:
    ours, _ = ends
    session = session_on(ours, inbox, max_queued=NUM_FRAMES)
    session.start()
    fill(session)
    flushed: list[bool] = []
    flush = threading.Thread(target=lambda: flushed.append(session.flush(math.inf)))
    flush.start()
    session.cut("enough")
    flush.join(DEADLINE_S)
    assert flushed == [True], "nothing of it will be sent any more"
    assert session.num_sent < session.num_queued
    assert session.flush(math.inf), "nor later"
    assert next_event(inbox, SessionClosed).reason == "enough"


def test_heartbeats_are_not_counted_as_frames_that_were_queued(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox, heartbeat_timeout_s=0.04)
    session.start()
    for _ in range(3):
        beat, _ = peer.connection.receive(deadline=Deadline(DEADLINE_S))
        assert isinstance(beat, Heartbeat)
    session.send(ACK)
    peer.hear_a(Ack)
    assert session.flush(DEADLINE_S)
    assert (session.num_queued, session.num_sent) == (1, 1)
    peer.leave()
    next_event(inbox, SessionClosed)


def test_an_idle_session_sends_heartbeats(ends: tuple[Connection, Hand], inbox: Inbox) -> None:
    ours, peer = ends
    session_on(ours, inbox, heartbeat_timeout_s=0.04).start()
    for _ in range(5):
        message, _ = peer.connection.receive(deadline=Deadline(DEADLINE_S))
        assert isinstance(message, Heartbeat)
    peer.leave()
    next_event(inbox, SessionClosed)


def test_heartbeats_keep_two_idle_sessions_alive_beyond_the_timeout() -> None:
    """Each side would lose the other after 1 s of silence; a beat comes every 20 ms."""
    one, other = Inbox(), Inbox()
    with connection_pair("tcp", 1.0) as (left, right):
        sessions = [
            session_on(connection, inbox, heartbeat_timeout_s=0.08)
            for connection, inbox in ((left, one), (right, other))
        ]
        for session in sessions:
            session.start()
        assert one.get(1.6) is None, "nothing happens, which is what should"
        assert other.get(0.0) is None
        sessions[0].cut("enough")
        assert next_event(one, SessionClosed).reason == "enough"
        next_event(other, SessionClosed)


def test_a_silent_peer_is_lost(inbox: Inbox) -> None:
    with connection_pair("tcp", 0.2) as (ours, _):
        session_on(ours, inbox, heartbeat_timeout_s=0.2).start()
        assert "silent for 0.2 s" in next_event(inbox, SessionClosed).reason


def test_one_frame_goes_to_many_sessions(inbox: Inbox) -> None:
    weights = bytes(range(64))
    state = State(incarnation="here", version=3, bucket=0, num_buckets=1, tensor=push(64).tensor)
    frame = frame_of(state, weights)
    with connection_pair() as (a, peer_a), connection_pair("tcp") as (b, peer_b):
        for session_id, connection in enumerate((a, b)):
            session = session_on(connection, inbox, session_id=session_id)
            session.start()
            session.send_frame(frame)
        for peer in (Hand(peer_a), Hand(peer_b)):
            assert peer.hear() == (state, weights)
            peer.leave()
        assert {next_event(inbox, SessionClosed).session_id for _ in range(2)} == {0, 1}


def test_a_finished_session_sends_what_is_queued_and_ends_when_the_peer_closes(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    for _ in range(10):
        session.send(ACK)
    session.finish()
    session.start()
    for _ in range(10):
        peer.hear_a(Ack)
    peer.hear_the_end()
    peer.say(Pull())
    assert next_event(inbox, MessageReceived).message == Pull(), "the other direction is still open"
    peer.leave()
    assert "closed the connection" in next_event(inbox, SessionClosed).reason


def test_last_words_are_all_that_is_said_and_what_was_queued_is_free(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    """Half of what belongs together would be worse than nothing."""
    ours, peer = ends
    session = session_on(ours, inbox)
    for _ in range(10):
        session.send(ACK)
        session.send_frame(frame_of(FULL_BUCKET, bytes(BUCKET_BYTES)))
    session.end_with(Goodbye(reason="done"))
    session.start()
    assert peer.hear_a(Goodbye).reason == "done"
    peer.hear_the_end()
    assert (session.num_queued, session.backlog) == (21, 0)
    peer.leave()
    next_event(inbox, SessionClosed)


def test_last_words_are_heard_though_the_queue_is_full(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox, max_queued=3)
    for _ in range(3):
        session.send(ACK)
    session.finish()
    session.end_with(Goodbye(reason="done"))
    session.start()
    assert peer.hear_a(Goodbye).reason == "done"
    peer.hear_the_end()
    peer.leave()
    next_event(inbox, SessionClosed)


class Placing(Echo):
    """A receiver that wants the payloads of pushes in memory of its own."""

    def __init__(self, session_id: int) -> None:
        super().__init__(session_id)
        self.memory = bytearray(16)

    def place_for(self, message: Message) -> memoryview | None:
        return memoryview(self.memory) if isinstance(message, Push) else None


def test_a_payload_is_written_where_the_receiver_wants_it(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    receiver = Placing(SEAT)
    session_on(ours, inbox, receiver=receiver).start()
    peer.say(push(16), bytes(range(16)))
    assert next_event(inbox, MessageReceived) == MessageReceived(SEAT, push(16))
    assert receiver.memory == bytes(range(16))
    assert receiver.payloads == [bytes(range(16))], "and it is told of it as ever"
    peer.say(Pull())
    next_event(inbox, MessageReceived)
    peer.leave()
    next_event(inbox, SessionClosed)


def test_a_receiver_that_refuses_a_message_ends_the_session(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    class Refusing(Echo):
        def place_for(self, _message: Message) -> memoryview | None:
            raise ProtocolError("this bucket is not of the agreed shape")

    ours, peer = ends
    session_on(ours, inbox, receiver=Refusing()).start()
    peer.say(push(16), bytes(16))
    assert "not of the agreed shape" in next_event(inbox, SessionClosed).reason


def test_what_a_worker_must_not_say_ends_the_session(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session_on(ours, inbox).start()
    peer.say(ACK)
    reason = next_event(inbox, SessionClosed).reason
    assert "unexpected Ack" in reason
    assert Ready.__name__ in reason


def test_an_internal_error_in_a_receiver_ends_the_session_and_nothing_else(
    ends: tuple[Connection, Hand], inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Echo):
        def __call__(self, message: Message, payload: memoryview) -> Event | None:
            raise ZeroDivisionError(f"a bug at {message} with {payload.nbytes} bytes")

    errors: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    ours, peer = ends
    session = session_on(ours, inbox, receiver=Broken())
    session.start()
    peer.say(Pull())
    assert "see the log file" in next_event(inbox, SessionClosed).reason
    assert session.join(DEADLINE_S)
    assert errors == [ZeroDivisionError]


def test_a_peer_that_is_gone_before_the_session_begins_is_noticed(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader may end before the writer has begun; it must not fail on that."""
    start = threading.Thread.start

    def start_and_see_it_end(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("reader-"):
            thread.join(DEADLINE_S)

    monkeypatch.setattr(threading.Thread, "start", start_and_see_it_end)
    with connection_pair() as (ours, theirs):
        theirs.close()
        session_on(ours, inbox).start()
        next_event(inbox, SessionClosed)
        assert session_threads() == []


def test_join_says_whether_the_session_has_ended(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    session = session_on(ours, inbox)
    session.start()
    before = time.monotonic()
    assert not session.join(0.05)
    assert time.monotonic() - before < DEADLINE_S
    peer.leave()
    assert session.join(DEADLINE_S)
    next_event(inbox, SessionClosed)


def test_a_report_goes_with_every_heartbeat_and_before_the_last_words(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, peer = ends
    count = itertools.count(1)
    session = session_on(
        ours, inbox, heartbeat_timeout_s=0.04, report=lambda: telemetry(steps=next(count))
    )
    session.start()
    heard: list[Message] = []
    while sum(isinstance(message, Telemetry) for message in heard) < 3:
        heard.append(peer.connection.receive(deadline=Deadline(DEADLINE_S))[0])
    assert [type(message) for message in heard[:4]] == [Heartbeat, Telemetry, Heartbeat, Telemetry]
    session.end_with(Goodbye(reason="done"))
    while not isinstance(heard[-1], Goodbye):
        heard.append(peer.connection.receive(deadline=Deadline(DEADLINE_S))[0])
    assert isinstance(heard[-2], Telemetry)
    steps = [message.steps for message in heard if isinstance(message, Telemetry)]
    assert steps == list(range(1, len(steps) + 1))
    peer.leave()
    next_event(inbox, SessionClosed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_report_ends_the_session_and_says_so(
    ends: tuple[Connection, Hand], inbox: Inbox
) -> None:
    ours, _ = ends

    def report() -> Message:
        raise ZeroDivisionError("a bug")

    session_on(ours, inbox, heartbeat_timeout_s=0.04, report=report).start()
    assert "an internal error in its writer" in next_event(inbox, SessionClosed).reason
