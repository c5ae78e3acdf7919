"""The server's door: listens, authenticates, asks the deciding thread, and turns connections into sessions.

A connection that has not proved itself costs one short-lived thread, 5 seconds and 4 KiB at most, and there
are at most `MAX_UNPROVED` of them: the oldest makes room for the newest.
"""

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NoAnswer

from smolcluster.cluster.inbox import Event, Gone, Inbox, Knock
from smolcluster.cluster.membership import Refused
from smolcluster.cluster.session import Receiver, Session
from smolcluster.errors import ProtocolError, SmolclusterError
from smolcluster.transport.connection import Connection, accept_next
from smolcluster.transport.handshake import (
    HANDSHAKE_TIMEOUT_S,
    Door,
    Offer,
    accept,
    refuse,
    server_authenticate,
)
from smolcluster.transport.messages import FROM_WORKER
from smolcluster.utils.retry import Deadline

MAX_UNPROVED = 32
ACCEPT_TICK_S = 0.2


class Seated(Event):
    """A worker was let in; its session runs from now on."""

    def __init__(self, session: Session) -> None:
        self.seat = session.seat
        self.session = session


class Reception:
    """Accepts workers on `listeners` until closed.

    `offer` is what every admitted worker is told; `receiver_for(seat)`
    makes the function that takes a seat's messages.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        door: Door,
        inbox: Inbox,
        offer: Offer,
        receiver_for: Callable[[int], Receiver],
        max_queued: int,
        log: logging.Logger,
    ) -> None:
        self._listeners = listeners
        self._door = door
        self._inbox = inbox
        self._offer = offer
        self._receiver_for = receiver_for
        self._max_queued = max_queued
        self._log = log
        self._seats = itertools.count(1)
        self._unproved: dict[int, Connection] = {}
        self._connections: dict[int, Connection] = {}
        self._past_bytes = (0, 0)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    def open(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, cut every connection that is still open, and free the port."""
        self._closed.set()
        self._thread.join()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            for connection in self._connections.values():
                connection.abort()

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes (sent, received) by all connections so far, whole frames and handshakes included."""
        with self._lock:
            sent, received = self._past_bytes
            for connection in self._connections.values():
                sent += connection.bytes_sent
                received += connection.bytes_received
        return sent, received

    def _accept(self) -> None:
        said = ""
        while not self._closed.is_set():
            try:
                connection = accept_next(self._listeners, ACCEPT_TICK_S)
            except SmolclusterError as error:
                if said != str(error):
                    said = str(error)
                    self._log.warning("%s; trying on, training goes on", said)
                self._closed.wait(ACCEPT_TICK_S)
                continue
            if connection is not None:
                self._start_greeting(connection)

    def _start_greeting(self, connection: Connection) -> None:
        greet = threading.Thread(target=self._greet, args=(connection,), name="greet", daemon=True)
        try:
            greet.start()
        except RuntimeError as error:  # the system has no thread to give
            self._log.warning("cannot talk to %s: %s", connection.peer, error)
            connection.close()

    def _greet(self, connection: Connection) -> None:
        seat = next(self._seats)
        self._hold(seat, connection)
        reason = "an internal error, see the log file"
        session = None
        try:
            session = self._admit(seat, connection)
            reason = "refused"
        except SmolclusterError as error:
            reason = str(error)
            self._log.warning("not let in: %s", error)
        finally:
            with self._lock:
                self._unproved.pop(seat, None)
            if session is None:
                connection.close()
                self._inbox.put(Gone(seat, reason))

    def _admit(self, seat: int, connection: Connection) -> Session | None:
        """The running session of a worker that was let in; None if it was refused."""
        deadline = Deadline(HANDSHAKE_TIMEOUT_S)
        proved = server_authenticate(connection, self._door, deadline)
        with self._lock:
            self._unproved.pop(seat, None)
        knock = Knock(seat, proved.hello)
        self._inbox.put(knock)
        try:
            answer = knock.answer.result(timeout=HANDSHAKE_TIMEOUT_S)
        except NoAnswer:
            raise ProtocolError("the server was too busy to answer") from None
        if isinstance(answer, Refused):
            refuse(proved, answer.code, answer.sentence, answer.retry_after_s)
            return None
        accept(proved, self._offer)
        session = Session(
            connection,
            seat=seat,
            receiver=self._receiver_for(seat),
            inbox=self._inbox,
            heartbeat_timeout_s=self._offer.heartbeat_timeout_s,
            max_queued=self._max_queued,
            kinds=FROM_WORKER,
        )
        self._inbox.put(Seated(session))
        session.start()
        return session

    def _hold(self, seat: int, connection: Connection) -> None:
        with self._lock:
            self._connections[seat] = connection
            self._unproved[seat] = connection
            if len(self._unproved) > MAX_UNPROVED:
                self._unproved.pop(min(self._unproved)).abort()

    def forget(self, seat: int) -> None:
        """Keep of a seat that has gone only what it sent and received."""
        with self._lock:
            connection = self._connections.pop(seat, None)
            if connection is not None:
                sent, received = self._past_bytes
                self._past_bytes = (
                    sent + connection.bytes_sent,
                    received + connection.bytes_received,
                )
