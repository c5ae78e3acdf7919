"""Nodes that listen and dial each other: protocols of their own between any two processes."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from harness import SECRET, free_port
from peers import DEADLINE_S, Echo, next_event
from proxy import Proxy
from smolcluster.errors import ConnectTimeout
from smolcluster.wire import node as room
from smolcluster.wire.acceptor import Acceptor, SessionOpened
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.inbox import Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    PS,
    SESSION,
    Accepted,
    Count,
    Goodbye,
    Message,
    MessageSet,
    frame_of,
)
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret
from smolcluster.wire.session import Session

HOST = "127.0.0.1"


class Token(Message, kind=91):
    """A number that each node adds one to."""

    value: Count


class Word(Message, kind=92):
    """Something that only the newer version says."""


RING = MessageSet("ring", from_dialler=frozenset({Token}), from_listener=frozenset({Token}))


class Place:
    """A node with its inbox, that speaks some sets."""

    def __init__(self, name: str, stack: ExitStack, secret: Secret, sets: tuple[MessageSet, ...]):
        hello = introduce(name, sets=(SESSION, *sets))
        log = logging.getLogger("test")
        self.node = Node(hello=hello, secret=secret, log=log, encryption="on")
        self.inbox, self.sets, self._stack = Inbox(), sets, stack
        self.acceptor: Acceptor

    def listen(self) -> Address:
        answer = Accepted(bucket_bytes=4096, heartbeat_timeout_s=DEADLINE_S)
        self.acceptor = self.node.listen(
            [HOST],
            0,
            sets=(SESSION, *self.sets),
            inbox=self.inbox,
            admit=lambda number, _: (answer, Echo(number)),
            max_queued=10,
        )
        self.acceptor.open()
        self._stack.callback(self.acceptor.close)
        return Address(HOST, self.acceptor.ports[0], self.node.hello.node)

    def dial(self, address: Address, timeout_s: float = DEADLINE_S) -> Session:
        session = self.node.dial_session(
            address,
            self.sets,
            session_id=0,
            receiver=Echo(),
            inbox=self.inbox,
            timeout_s=timeout_s,
            whom="the peer",
        )
        self._stack.callback(session.cut, "the test is over")
        session.start()
        return session

    def heard(self) -> Message:
        return next_event(self.inbox, MessageReceived).message


MakePlace = Callable[..., Place]


@pytest.fixture
def place() -> Iterator[MakePlace]:
    """Makes nodes whose sessions end with the test."""
    with ExitStack() as stack:

        def make(name: str, *sets: MessageSet, secret: Secret = SECRET) -> Place:
            return Place(name, stack, secret, sets or (RING,))

        yield make


def test_either_side_may_begin(place: MakePlace) -> None:
    left, right = place("left"), place("right")
    to_right = left.dial(right.listen())
    opened = next_event(right.inbox, SessionOpened)
    assert opened.client.hello.node == "left"
    opened.session.send(Token(value=1))
    assert left.heard() == Token(value=1)
    to_right.send(Token(value=2))
    assert right.heard() == Token(value=2)
    assert to_right.connection.is_encrypted


def test_a_message_of_a_set_that_was_not_agreed_closes_the_session(place: MakePlace) -> None:
    ring, other = place("ring"), place("other", PS)
    session = ring.dial(other.listen())
    next_event(other.inbox, SessionOpened)
    session.send_frame(frame_of(Token(value=1)))
    assert "message kind 91" in next_event(other.inbox, SessionClosed).reason


@pytest.mark.parametrize("message", [Goodbye(reason="it was stopped"), Token(value=1)])
def test_a_peer_that_was_dialled_cannot_speak_as_a_server(
    place: MakePlace, message: Message
) -> None:
    silent = MessageSet("ring", from_dialler=frozenset({Token}), from_listener=frozenset())
    left, right = place("left", silent), place("right", silent)
    left.dial(right.listen())
    next_event(right.inbox, SessionOpened).session.send(message)
    assert "unexpected" in (reason := next_event(left.inbox, SessionClosed).reason) or (
        "unknown" in reason
    )


def test_a_peer_that_dials_cannot_say_what_only_the_listener_may(place: MakePlace) -> None:
    told = MessageSet("ring", from_dialler=frozenset(), from_listener=frozenset({Token}))
    left, right = place("left", told), place("right", told)
    session = left.dial(right.listen())
    next_event(right.inbox, SessionOpened)
    session.send(Token(value=1))
    reason = next_event(right.inbox, SessionClosed).reason
    assert "unexpected" in reason or "unknown" in reason


def test_nobody_there_and_who_says_nothing_are_an_error_in_time(
    place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake's own limit is longer."""
    monkeypatch.setattr(room, "HANDSHAKE_TIMEOUT_S", 10 * DEADLINE_S)
    with socket.create_server((HOST, 0)) as silent:
        for port in (free_port(), silent.getsockname()[1]):
            with pytest.raises(ConnectTimeout):
                place("left").dial(Address(HOST, port), 0.2)


def test_who_sits_in_between_can_only_cut(place: MakePlace) -> None:
    left, right = place("left"), place("right")
    proxy = Proxy(right.listen().port)
    try:
        to_right = left.dial(Address(HOST, proxy.port))
        next_event(right.inbox, SessionOpened)
        proxy.corrupt(1)
        to_right.send(Token(value=1))
        next_event(right.inbox, SessionClosed)  # and nothing before that was believed
        proxy.cut()
        next_event(left.inbox, SessionClosed)
    finally:
        proxy.close()
