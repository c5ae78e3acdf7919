"""A node: a process that has authenticated sessions with peers, whichever side dialled.

    node = Node("macbook", secret, sets=[RING])
    here = node.listen("10.0.0.2")
    peer = node.dial(Address("10.0.0.3", 6000), timeout_s=30)
    peer.send(Token(value=1), payload)
    match node.next_event(timeout_s=30):
        case Received(peer, message, payload): ...

Sessions, encryption and back-off are those of a server and its workers. A peer that was dialled is dialled
again when its session ends; one that dialled is another `Peer` when it comes back.
"""

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from smolcluster.configs.schema import Encryption
from smolcluster.errors import ProtocolError, SmolclusterError
from smolcluster.utils.retry import Deadline
from smolcluster.wire.acceptor import Acceptor, SessionOpened
from smolcluster.wire.connection import listen
from smolcluster.wire.dialling import Address, Pauses, dial
from smolcluster.wire.frames import Buffer
from smolcluster.wire.handshake import Door, introduce
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    SESSION,
    Accepted,
    Goodbye,
    Kinds,
    Message,
    MessageSet,
    from_dialler,
    from_listener,
)
from smolcluster.wire.security import Secret
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.tls import new_identity

CLOSING_TIMEOUT_S = 5.0
"""How long a node that closes waits for its peers to close as well, before it cuts their sessions."""


class Peer:
    """Another process. One thread may send; the session, and with it the agreed sets, may be replaced."""

    def __init__(self, name: str, address: Address | None = None) -> None:
        """`address`: where it was dialled; None: it has dialled."""
        self.name = name
        self.address = address
        self.sayable: Kinds = frozenset()
        """What may be said to it."""
        self.session: Session

    def __str__(self) -> str:
        return self.name

    @property
    def is_connected(self) -> bool:
        return not self.session.is_cut

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Queue a message; never blocks. `payload` must not change until it has been sent.

        Whether it arrives is unknown: what is sent to a peer that is lost is dropped.

        Raises:
            ProtocolError: it is of no set that this peer has agreed on, or not this side's to say.
        """
        if type(message) not in self.sayable:
            raise ProtocolError(f"{self} has not agreed to hear {type(message).__name__}")
        self.session.send(message, payload)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was sent has left. Returns whether it has, or the session has ended."""
        return self.session.flush(timeout_s)


@dataclass(frozen=True)
class Connected(Event):
    """A session with a peer begins: it has dialled, or has been reached, perhaps again."""

    peer: Peer


@dataclass(frozen=True)
class Received(Event):
    """A peer has sent a message; the payload is a copy of the receiver's own."""

    peer: Peer
    message: Message
    payload: bytes


@dataclass(frozen=True)
class Disconnected(Event):
    """The session with a peer has ended; unless `is_final` it is being dialled again."""

    peer: Peer
    reason: str
    is_final: bool


class Node:
    """Listens and dials under one name; one thread takes the events of all peers."""

    def __init__(
        self,
        name: str,
        secret: Secret,
        sets: Sequence[MessageSet],
        *,
        encryption: Encryption = "auto",
        bucket_bytes: int = 1 << 20,
        heartbeat_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 60.0,
        max_queued: int = 1024,
        log: logging.Logger | None = None,
    ) -> None:
        """Connects to nobody yet.

        Args:
            name: what this process is called in its peers' events.
            secret: the cluster's, which every peer must know.
            sets: the protocols that it speaks.
            encryption: who must encrypt, as in a cluster file.
            bucket_bytes: largest payload of those who dial this node.
            heartbeat_timeout_s: silence after which these are lost, seconds.
            reconnect_timeout_s: how long a lost peer is dialled, seconds.
            max_queued: frames that may wait for a peer; at the next one its session is cut.
            log: told of refused clients and of peers that are waited for.
        """
        self.name = name
        self._sets = (SESSION, *sets)
        self._hello = introduce(name, sets=self._sets)
        self._door = Door(secret, new_identity(), encryption, self._sets)
        self._answer = Accepted(
            node=name, bucket_bytes=bucket_bytes, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._reconnect_timeout_s = reconnect_timeout_s
        self._max_queued = max_queued
        self._log = log or logging.getLogger("smolcluster")
        self._inbox = Inbox()
        self._session_ids = itertools.count(1)
        self._accepted: dict[int, Peer] = {}
        self._dialled: dict[int, Peer] = {}
        self._acceptors: list[Acceptor] = []
        self._keepers: list[threading.Thread] = []
        self._closed = threading.Event()

    def listen(self, host: str, port: int = 0) -> Address:
        """Let peers in from now on that dial this address of this machine; returns it with port and name.

        Raises:
            PortBusy: another process listens there.
            ConfigError: it is not this machine's.
        """
        listeners = listen([host], port)
        acceptor = Acceptor(
            listeners,
            door=self._door,
            inbox=self._inbox,
            admit=lambda *_: self._answer,
            receiver_for=_PassOn,
            max_queued=self._max_queued,
            log=self._log,
            session_ids=self._session_ids,
        )
        acceptor.open()
        self._acceptors.append(acceptor)
        return Address(host, listeners[0].getsockname()[1], self.name)

    def dial(self, address: Address, timeout_s: float) -> Peer:
        """Try for `timeout_s` seconds to reach a peer, which is dialled again whenever it is lost.

        Raises:
            ConnectTimeout: nobody answered in time, or another node than the address names.
            AuthError: the secrets differ.
            Rejected, VersionDiffers: it speaks another version.
        """
        peer = Peer(str(address), address)
        self._connect(peer, address, timeout_s)
        keeper = threading.Thread(
            target=self._keep, args=(peer, address), name=f"keeper-{address}", daemon=True
        )
        self._keepers.append(keeper)
        keeper.start()
        return peer

    def next_event(self, timeout_s: float) -> Event | None:
        """What happened next: Connected, Received or Disconnected; None: nothing in `timeout_s` seconds."""
        deadline = Deadline(timeout_s)
        while (event := self._inbox.get(deadline.remaining())) is not None:
            if (named := self._named(event)) is not None:
                return named
        return None

    def close(self) -> None:
        """Let nobody in any more, and end all sessions after what is queued for them; idempotent."""
        self._closed.set()
        peers = dict.fromkeys([*list(self._accepted.values()), *list(self._dialled.values())])
        for peer in peers:
            peer.session.send(Goodbye(reason="it is closing"))
            peer.session.finish()
        deadline = Deadline(CLOSING_TIMEOUT_S)
        for peer in peers:
            if not peer.session.join(deadline.remaining()):
                peer.session.cut("it did not close in time")
        for acceptor in self._acceptors:
            acceptor.close()
        for keeper in self._keepers:
            keeper.join()

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, peer: Peer, address: Address, timeout_s: float) -> None:
        connection, answer = dial(
            address,
            self._hello,
            self._door.secret,
            Accepted,
            timeout_s=timeout_s,
            log=self._log,
            encryption=self._door.encryption,
            whom="the peer",
            stop=self._closed,
        )
        peer.name = answer.node
        sets = [each for each in self._sets if each.name in answer.sets]
        session_id = next(self._session_ids)
        peer.sayable = from_dialler(sets)
        peer.session = Session(
            connection,
            session_id=session_id,
            receiver=_PassOn(session_id),
            inbox=self._inbox,
            heartbeat_timeout_s=answer.heartbeat_timeout_s,
            max_queued=self._max_queued,
            kinds=from_listener(sets),
        )
        self._dialled[session_id] = peer
        self._inbox.put(Connected(peer))
        peer.session.start()

    def _keep(self, peer: Peer, address: Address) -> None:
        """Dial the peer again whenever its session has ended, until this node closes or it is given up."""
        pauses = Pauses()
        try:
            while not self._closed.is_set():
                pauses.session_begins()
                peer.session.join(None)
                if not self._closed.wait(pauses.next_s()):
                    self._connect(peer, address, self._reconnect_timeout_s)
        except SmolclusterError as error:
            self._inbox.put(Disconnected(peer, str(error), is_final=True))
        if self._closed.is_set():  # while it was dialling
            peer.session.cut("the node is closed")
            peer.session.join(None)

    def _named(self, event: Event) -> Event | None:
        """The event with its peer; None: it concerns none."""
        match event:
            case SessionOpened(session_id=session_id, session=session, client=client):
                peer = Peer(client.hello.node)
                peer.session, peer.sayable = session, from_listener(client.sets)
                self._accepted[session_id] = peer
                return Connected(peer)
            case MessageReceived(session_id=session_id, message=message, payload=payload):
                peer = self._accepted.get(session_id) or self._dialled[session_id]
                return Received(peer, message, payload)
            case SessionClosed(session_id=session_id, reason=reason):
                for acceptor in self._acceptors:
                    acceptor.forget(session_id)
                if (gone := self._accepted.pop(session_id, None)) is not None:
                    return Disconnected(gone, reason, is_final=True)
                if (lost := self._dialled.pop(session_id, None)) is not None:
                    return Disconnected(lost, reason, is_final=False)
                return None
        return event


class _PassOn(Receiver):
    """Passes every message on, with a copy of its payload."""

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        return MessageReceived(self._session_id, message, bytes(payload))
