"""The server's door: who gets in, who does not, and what a stranger can cost."""

import logging
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from connection_pairs import RUN
from harness import SECRET
from peers import (
    DEADLINE_S,
    IDENTITY,
    Echo,
    Hand,
    hello,
    knock,
    logger,
    next_event,
    session_threads,
    wait_for_threads,
    welcome_of,
)
from smolcluster.errors import AuthError, PeerLost, Rejected, SmolclusterError
from smolcluster.utils.retry import Deadline
from smolcluster.wire import acceptor as room
from smolcluster.wire.acceptor import Acceptor, SessionOpened, ask_inbox, crowd
from smolcluster.wire.connection import Connection, Scratch, accept_next, connect, listen
from smolcluster.wire.handshake import Door
from smolcluster.wire.inbox import Inbox, JoinRequest, MessageReceived, SessionClosed
from smolcluster.wire.membership import Admitted, Refused
from smolcluster.wire.messages import Ack, Challenge, Proof, Pull, Reject
from smolcluster.wire.security import Secret
from waiting import Clock, eventually

OFFER = welcome_of(RUN, codec="int8", bucket_bytes=4096)


class House:
    """A reception whose knocks the test answers."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.lines: list[str] = []
        listeners = listen(["127.0.0.1"], 0)
        self.port: int = listeners[0].getsockname()[1]
        self.acceptor = Acceptor(
            listeners,
            door=Door("mini1", SECRET, IDENTITY),
            inbox=self.inbox,
            admit=ask_inbox(self.inbox, OFFER, Echo),
            max_queued=100,
            log=logger(self.lines),
        )
        self._pool = ThreadPoolExecutor(4)
        self._rooms = ExitStack()

    def __enter__(self) -> "House":
        self.acceptor.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._rooms.close()
        self.acceptor.close()
        self._pool.shutdown()

    def knock(self, secret: Secret = SECRET) -> "Future[Hand]":
        """A worker comes to the door."""

        def come() -> Hand:
            hand = knock(self.port, hello(), secret)
            self._rooms.callback(hand.leave)
            return hand

        return self._pool.submit(come)

    def admit(self) -> tuple[Hand, SessionOpened]:
        """A worker comes and is let in."""
        future = self.knock()
        next_event(self.inbox, JoinRequest).answer.set_result(Admitted())
        seated = next_event(self.inbox, SessionOpened)
        return future.result(DEADLINE_S), seated

    def flood(self, count: int, address: str = "127.0.0.1") -> None:
        """So many connect from this address and say nothing; returns when the server has seen them."""
        for _ in range(count):
            there = ("127.0.0.1", self.port)
            self._rooms.enter_context(socket.create_connection(there, DEADLINE_S, (address, 0)))
        self.stranger().leave()  # which came after them

    def stranger(self) -> Hand:
        """Somebody who has said hello and been challenged, and leaves it at that."""
        connection = connect("127.0.0.1", self.port, DEADLINE_S)
        self._rooms.callback(connection.close)
        hand = Hand(connection)
        hand.say(hello())
        hand.hear_a(Challenge)
        return hand


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(room, "HANDSHAKE_TIMEOUT_S", DEADLINE_S)  # however busy the machine is
    with House() as house:
        yield house


def test_a_worker_that_is_let_in_hears_of_the_run_and_has_a_session(house: House) -> None:
    future = house.knock()
    asked = next_event(house.inbox, JoinRequest)
    assert asked.hello.node == "macbook"
    asked.answer.set_result(Admitted())
    seated = next_event(house.inbox, SessionOpened)
    hand = future.result(DEADLINE_S)
    assert seated.session_id == asked.session_id
    assert hand.welcome.run == RUN
    assert (hand.welcome.run_id, hand.welcome.incarnation) == ("edp-1", "0123abcd")
    assert (hand.welcome.codec, hand.welcome.bucket_bytes) == ("int8", 4096)
    hand.say(Pull())
    assert next_event(house.inbox, MessageReceived) == MessageReceived(seated.session_id, Pull())
    lease = {"incarnation": "a", "epoch": 0, "start": 0, "stop": 1, "grant": 0}
    seated.session.send(Ack.model_validate({"lease": lease, "outcome": "late", "version": 1}))
    assert hand.hear_a(Ack).outcome == "late"


def test_a_worker_that_is_refused_reads_why_and_its_seat_is_free(house: House) -> None:
    future = house.knock()
    asked = next_event(house.inbox, JoinRequest)
    asked.answer.set_result(Refused("busy", "worker id 1 is in use", retry_after_s=2.0))
    with pytest.raises(Rejected, match="worker id 1 is in use") as caught:
        future.result(DEADLINE_S)
    assert (caught.value.code, caught.value.retry_after_s) == ("busy", 2.0)
    assert next_event(house.inbox, SessionClosed).session_id == asked.session_id


def test_who_only_looks_whether_the_port_is_open_is_no_warning(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(house.acceptor._log, "log", lambda level, *_: levels.append(level))
    socket.create_connection(("127.0.0.1", house.port), DEADLINE_S).close()
    eventually(lambda: levels == [logging.INFO])


def test_whoever_is_too_slow_to_prove_itself_is_put_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(room, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(room, "Deadline", partial(Deadline, clock=clock))
    stranger = house.stranger()
    clock.now = 0.3
    stranger.hear_the_end()
    eventually(lambda: any("in time" in line for line in house.lines))
    assert house.inbox.get(0.0) is None, "who decides is not told of strangers"


def test_a_worker_whom_nobody_answers_is_put_out_and_its_seat_is_free(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "Deadline", partial(Deadline, clock=Clock()))  # proving takes no time
    monkeypatch.setattr(room, "HANDSHAKE_TIMEOUT_S", 0.3)
    future = house.knock()
    asked = next_event(house.inbox, JoinRequest)
    with pytest.raises(PeerLost):
        future.result(DEADLINE_S)
    gone = next_event(house.inbox, SessionClosed)
    assert gone.session_id == asked.session_id
    assert "too busy" in gone.reason


def test_a_stranger_makes_room_for_the_newest(house: House) -> None:
    hand, _ = house.admit()
    house.flood(Acceptor.max_strangers + 2)
    eventually(lambda: house.lines != [])
    hand.say(Pull())
    assert next_event(house.inbox, MessageReceived).message == Pull()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of Linux only")
def test_who_floods_the_port_is_in_nobody_s_way_who_comes_from_elsewhere(house: House) -> None:
    slow = house.stranger()
    house.flood(3 * Acceptor.max_strangers, "127.0.0.2")
    slow.say(Challenge(nonce=64 * "0"))
    slow.say(Proof(mac=64 * "0"))
    assert slow.hear_a(Reject).code == "auth", "it was still listened to"


@pytest.mark.parametrize(
    ("addresses", "session_ids"),
    [
        ("a", [0]),
        ("abb", [1, 2]),
        ("aabbc", [0, 1, 2, 3]),
        ("abc", [0, 1, 2]),
        ("babbba", [0, 2, 3, 4]),
    ],
)
def test_who_makes_room_is_of_the_address_that_has_the_most(
    addresses: str, session_ids: list[int]
) -> None:
    assert crowd(dict(enumerate(addresses))) == session_ids


@pytest.mark.parametrize(
    ("most", "counted"), [(room.MAX_ADDRESSES, "127.0.0.1"), (-1, "further addresses")]
)
def test_who_does_not_know_the_secret_is_told_nothing_and_ever_fewer_lines_are_logged(
    house: House, monkeypatch: pytest.MonkeyPatch, most: int, counted: str
) -> None:
    monkeypatch.setattr(room, "MAX_ADDRESSES", most)
    for _ in range(9):
        with pytest.raises(AuthError):
            house.knock(Secret(Path("mine"), b"x" * 64)).result(DEADLINE_S)
    house.stranger().leave()  # another mistake is another count
    eventually(lambda: any("closed the connection" in line for line in house.lines))
    refused = [line for line in house.lines if "does not know the secret" in line]
    assert len(refused) == 4
    assert "not let in" in refused[0]
    assert f"time 8 for {counted}" in refused[-1]
    house.admit()  # whose request is the first event


def test_who_knocks_while_the_door_is_closed_is_not_logged(house: House) -> None:
    """A worker may come back while its server is stopped."""
    house.stranger()
    house.acceptor.close()
    eventually(lambda: not any(each.name == "greet" for each in session_threads()))
    assert house.lines == []


def test_who_has_proved_itself_is_no_stranger_while_it_waits_for_the_answer(house: House) -> None:
    future = house.knock()
    asked = next_event(house.inbox, JoinRequest)
    house.flood(Acceptor.max_strangers)
    asked.answer.set_result(Admitted())
    assert next_event(house.inbox, SessionOpened).session_id == asked.session_id
    future.result(DEADLINE_S).say(Pull())
    assert next_event(house.inbox, MessageReceived) == MessageReceived(asked.session_id, Pull())


def test_bytes_are_counted_and_stay_counted_when_a_seat_is_gone(house: House) -> None:
    hand, _ = house.admit()
    hand.say(Pull())
    next_event(house.inbox, MessageReceived)
    sent, received = house.acceptor.bytes_moved()
    assert received == hand.connection.bytes_sent
    assert sent == hand.connection.bytes_received
    hand.leave()
    next_event(house.inbox, SessionClosed)
    assert house.acceptor.bytes_moved() == (sent, received)
    assert house.acceptor._connections == {}, "it keeps none that is closed"
    assert house.acceptor.bytes_moved() == (sent, received), "nothing is counted twice"


def test_a_passing_failure_to_accept_does_not_close_the_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = iter([True, True])

    def fail_twice(
        listeners: list[socket.socket], timeout_s: float, scratch: Scratch
    ) -> Connection | None:
        if next(failures, False):
            raise SmolclusterError("cannot accept a connection: too many open files")
        return accept_next(listeners, timeout_s, scratch)

    monkeypatch.setattr(room, "accept_next", fail_twice)
    monkeypatch.setattr(room, "ACCEPT_TICK_S", 0.01)
    with House() as house:
        house.admit()
    assert sum("too many open files" in line for line in house.lines) == 1, "it is said once"


def test_a_closed_reception_cuts_everybody_and_frees_the_port() -> None:
    with House() as house:
        hand, _ = house.admit()
        stranger = house.stranger()
        house.acceptor.close()
        hand.hear_the_end()
        stranger.hear_the_end()
        for listener in listen(["127.0.0.1"], house.port):
            listener.close()
        wait_for_threads()
    assert session_threads() == []
