"""The door: listens, authenticates, asks who may come in, and turns connections into sessions.

A connection that has not proved itself costs one short-lived thread, 5 seconds and 4 KiB at most, and the
deciding thread never hears of it. There are at most `max_strangers` of them: for one more, one of the address
that has the most is cut, drawn by lot, so that whoever floods the port is in nobody's way but its own.
"""

import itertools
import logging
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NoAnswer

from smolcluster.errors import NothingSaid, ProtocolError, SmolclusterError
from smolcluster.utils.cadence import is_power_of_two
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection, Scratch, accept_next
from smolcluster.wire.handshake import (
    HANDSHAKE_TIMEOUT_S,
    Authenticated,
    Door,
    accept,
    refuse,
    server_authenticate,
)
from smolcluster.wire.inbox import Event, Inbox, JoinRequest, SessionClosed
from smolcluster.wire.local import listen_beside
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import Accepted, Hello, Welcome, from_dialler
from smolcluster.wire.session import Receiver, Session

MAX_ADDRESSES = 1024
"""Addresses whose refusals are counted apart; further ones are counted together."""
ACCEPT_TICK_S = 0.2


class SessionOpened(Event):
    """A client was let in; its session runs from now on."""

    def __init__(self, session: Session, client: Authenticated) -> None:
        self.session_id = session.session_id
        self.session = session
        self.client = client


LetIn = tuple[Accepted, Receiver]
"""What a client is told, and what takes the messages of its session."""
Admit = Callable[[int, Hello], LetIn | Refused]
"""Decides on a client that has proved itself, by its session id; called in a thread of its own."""


def ask_inbox(inbox: Inbox, welcome: Welcome, receiver_for: Callable[[int], Receiver]) -> Admit:
    """Have the thread that takes events decide; `welcome` is what every admitted worker is told."""

    def admit(session_id: int, hello: Hello) -> LetIn | Refused:
        request = JoinRequest(session_id, hello)
        inbox.put(request)
        try:
            answer = request.answer.result(timeout=HANDSHAKE_TIMEOUT_S)
        except NoAnswer:
            raise ProtocolError("the server was too busy to answer") from None
        if isinstance(answer, Refused):
            return answer
        told = welcome.model_copy(update={"worker_id": answer.worker_id})
        return told, receiver_for(session_id)

    return admit


class Reception(ABC):
    """Takes connections from `listeners` until closed; each is greeted in a thread of its own."""

    max_strangers = 64
    """For one more that has not proved itself, one of the address that has the most is cut, drawn by lot."""

    def __init__(
        self, listeners: Sequence[socket.socket], session_ids: Iterator[int] | None = None
    ) -> None:
        self._listeners = listeners
        self._session_ids = session_ids or itertools.count(1)
        self._scratch = Scratch()
        self._strangers: dict[int, Connection] = {}
        """Those that have not proved themselves, by session id."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    @abstractmethod
    def greet(self, session_id: int, connection: Connection) -> None:
        """Talk to whoever has come, and close the connection or keep it."""

    @abstractmethod
    def say(self, trouble: str) -> None:
        """Tell why nobody can come in for the moment; once in a row."""

    @property
    def ports(self) -> list[int]:
        """Of each address, in order."""
        return [each.getsockname()[1] for each in self._listeners if each.family != socket.AF_UNIX]

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take nobody any more, cut those that have not proved themselves, and free the port."""
        self._closed.set()
        self._thread.join()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            for connection in self._strangers.values():
                connection.abort()

    def is_no_stranger(self, session_id: int) -> None:
        """It has proved itself."""
        with self._lock:
            self._strangers.pop(session_id, None)

    def _accept(self) -> None:
        said = ""
        while not self._closed.is_set():
            try:
                connection = accept_next(self._listeners, ACCEPT_TICK_S, self._scratch)
                if connection is not None:
                    self._take(next(self._session_ids), connection)
            except SmolclusterError as error:  # such as no files: they are given back
                if said != str(error):
                    said = str(error)
                    self.say(said)
                self._closed.wait(ACCEPT_TICK_S)

    def _take(self, session_id: int, connection: Connection) -> None:
        """Have a connection greeted.

        Raises:
            SmolclusterError: the system has no thread to give.
        """
        with self._lock:
            if len(self._strangers) >= self.max_strangers:
                addresses = {key: each.address for key, each in self._strangers.items()}
                self._strangers.pop(secrets.choice(crowd(addresses))).abort()
            self._strangers[session_id] = connection
        greet = threading.Thread(
            target=self._meet, args=(session_id, connection), name="greet", daemon=True
        )
        try:
            greet.start()
        except RuntimeError as error:
            connection.close()
            self.is_no_stranger(session_id)
            raise SmolclusterError(f"cannot talk to whoever comes: {error}") from None

    def _meet(self, session_id: int, connection: Connection) -> None:
        try:
            self.greet(session_id, connection)
        finally:
            self.is_no_stranger(session_id)


class Acceptor(Reception):
    """Accepts clients on `listeners` until closed."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        door: Door,
        inbox: Inbox,
        admit: Admit,
        max_queued: int,
        log: logging.Logger,
        session_ids: Iterator[int] | None = None,
    ) -> None:
        super().__init__([*listeners, *listen_beside(listeners)], session_ids)
        self._door = door
        self._inbox = inbox
        self._admit = admit
        self._max_queued = max_queued
        self.trouble: Callable[[], str] = str
        """What the sessions' heartbeats say that this side cannot do."""
        self._log = log
        self._refusals: Counter[tuple[str, type[SmolclusterError]]] = Counter()
        self._connections: dict[int, Connection] = {}
        self._past_bytes = (0, 0)

    def close(self) -> None:
        """Stop accepting, cut every connection that is still open, and free the port."""
        super().close()
        with self._lock:
            for connection in self._connections.values():
                connection.abort()

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes (sent, received) by all connections so far, whole frames and handshakes included."""
        with self._lock:
            self._sweep()
            sent, received = self._past_bytes
            for connection in self._connections.values():
                sent += connection.bytes_sent
                received += connection.bytes_received
        return sent, received

    def _sweep(self) -> None:
        """Keep of connections that are closed only what they sent and received."""
        for session_id in [key for key, each in self._connections.items() if each.is_closed]:
            connection = self._connections.pop(session_id)
            sent, received = self._past_bytes
            self._past_bytes = sent + connection.bytes_sent, received + connection.bytes_received

    def say(self, trouble: str) -> None:
        self._log.warning("%s; trying on, training goes on", trouble)

    def greet(self, session_id: int, connection: Connection) -> None:
        """Let a client in that proves itself; one that does not is closed."""
        with self._lock:
            self._sweep()
            self._connections[session_id] = connection
        proved, session = None, None
        reason = "an internal error, see the log file"
        try:
            proved = server_authenticate(connection, self._door, Deadline(HANDSHAKE_TIMEOUT_S))
            self.is_no_stranger(session_id)
            session = self._open_session(session_id, connection, proved)
            reason = "refused"
        except SmolclusterError as error:
            reason = str(error)
            self._refused(connection, error)
        finally:
            if session is None:
                connection.close()
                if proved is not None:
                    self._inbox.put(SessionClosed(session_id, reason))

    def _open_session(
        self, session_id: int, connection: Connection, proved: Authenticated
    ) -> Session | None:
        """The running session of a client that was let in; None if it was refused, or only asked."""
        decision = self._admit(session_id, proved.hello)
        if isinstance(decision, Refused):
            refuse(proved, decision.code, decision.sentence, decision.retry_after_s)
            return None
        answer, receiver = decision
        accept(proved, answer)
        if isinstance(answer, Welcome) and answer.worker_id is not None:
            connection.finish()
            return None
        session = Session(
            connection,
            session_id=session_id,
            receiver=receiver,
            inbox=self._inbox,
            heartbeat_timeout_s=answer.heartbeat_timeout_s,
            max_queued=self._max_queued,
            kinds=from_dialler(proved.sets),
            trouble=self.trouble,
        )
        self._inbox.put(SessionOpened(session, proved))
        session.start()
        return session

    def _refused(self, connection: Connection, error: SmolclusterError) -> None:
        """Say that somebody was not let in: of each address the 1st, 2nd, 4th, 8th … time.

        Whoever knocks while this door is closed is cut off by that.
        """
        if self._closed.is_set():
            return
        with self._lock:
            address = connection.address
            if (address, type(error)) not in self._refusals and len(self._refusals) > MAX_ADDRESSES:
                address = "further addresses"
            self._refusals[address, type(error)] += 1
            count = self._refusals[address, type(error)]
        if is_power_of_two(count):
            times = f" (time {count} for {address})" if count > 1 else ""
            level = logging.INFO if isinstance(error, NothingSaid) else logging.WARNING
            self._log.log(level, "not let in: %s%s", error, times)


def crowd(addresses: Mapping[int, str]) -> list[int]:
    """The session ids of the address or addresses that have the most; `addresses` is not empty."""
    counts = Counter(addresses.values())
    most = max(counts.values())
    return [session_id for session_id, address in addresses.items() if counts[address] == most]
