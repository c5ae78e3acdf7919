"""A node: a process as its peers meet it. It listens and dials under one name and with one secret.

    node = Node(hello=introduce("macbook"), secret=secret, log=log)
    acceptor = node.listen(["10.0.0.2"], 6000, sets=(SESSION, RING), inbox=inbox, ...)
    session = node.dial_session(Address("10.0.0.3", 6000), (RING,), ...)

Servers, workers, stores, stages and ranks all let others in, and are let in, by these methods.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from smolcluster.configs.schema import Encryption
from smolcluster.errors import (
    AuthError,
    ConnectTimeout,
    PeerLost,
    ProtocolError,
    Rejected,
    SmolclusterError,
    VersionDiffers,
    WrongPeer,
)
from smolcluster.utils.retry import Deadline, backoff_delays
from smolcluster.utils.units import format_duration
from smolcluster.wire.acceptor import Acceptor, Admit
from smolcluster.wire.connection import Connection, connect, listen
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import Door, client_handshake
from smolcluster.wire.inbox import Inbox
from smolcluster.wire.messages import (
    SESSION,
    Accepted,
    Heartbeat,
    Hello,
    MessageSet,
    digests_of,
    from_listener,
)
from smolcluster.wire.security import Secret
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.tls import new_identity

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0
LAST_TRY_S = 1.0
LONGEST_DELAY_S = 0.5
SAY_AFTER_S = 3.0
"""A peer that starts at the same time is worth no word."""
LONG_S = 7200.0
"""A longer patience than this one is a launcher's, which ends who waits: no time to be told of."""
MAX_QUEUED = 100_000
"""Frames of one's own that wait for a peer that was dialled. Their number is bounded by what is asked for;
this only bounds mistakes."""

A = TypeVar("A", bound=Accepted)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Who this process is to its peers.

    Attributes:
        hello: its name, and the `instance` by which peers know this very process.
        secret: the cluster's, which every peer must know.
        log: told of refused clients and of peers that are waited for.
        encryption: who must encrypt, as in a cluster file.
    """

    hello: Hello
    secret: Secret
    log: logging.Logger
    encryption: Encryption = "auto"

    def listen(
        self,
        addresses: Sequence[str],
        port: int,
        *,
        sets: tuple[MessageSet, ...],
        inbox: Inbox,
        admit: Admit,
        max_queued: int,
        session_ids: Iterator[int] | None = None,
    ) -> Acceptor:
        """Listen at these addresses of this machine. Nobody is let in before the acceptor is opened.

        Args:
            addresses: literals or names.
            port: 0 lets the system choose one for each address.
            sets: what is spoken with those who come.
            inbox: hears of their sessions.
            admit: decides who may come in, and what takes the messages of the session.
            max_queued: frames that may wait for a peer; at the next one its session is cut.
            session_ids: numbers the sessions; None: from 1.

        Raises:
            PortBusy: another process listens there.
            ConfigError: an address is not this machine's.
        """
        return Acceptor(
            listen(addresses, port),
            door=Door(self.hello.node, self.secret, new_identity(), self.encryption, sets),
            inbox=inbox,
            admit=admit,
            max_queued=max_queued,
            log=self.log,
            session_ids=session_ids,
        )

    def dial_session(
        self,
        address: Address,
        sets: Sequence[MessageSet],
        *,
        session_id: int,
        receiver: Receiver,
        inbox: Inbox,
        timeout_s: float,
        whom: str,
        stop: threading.Event | None = None,
    ) -> Session:
        """A session with a peer in which both speak these sets; it is to be started.

        The peer cannot end what this process takes part in: only its server can.

        Raises:
            SmolclusterError: as `dial`.
        """
        connection, answer = self.dial(
            address,
            Accepted,
            timeout_s=timeout_s,
            whom=whom,
            stop=stop,
            digests=digests_of((SESSION, *sets)),
        )
        return Session(
            connection,
            session_id=session_id,
            receiver=receiver,
            inbox=inbox,
            heartbeat_timeout_s=answer.heartbeat_timeout_s,
            max_queued=MAX_QUEUED,
            kinds=from_listener(sets) | {Heartbeat},
        )

    def dial(
        self,
        address: Address,
        answer: type[A],
        *,
        timeout_s: float,
        whom: str = "the server",
        stop: threading.Event | None = None,
        digests: dict[str, str] | None = None,
    ) -> tuple[Connection, A]:
        """Try until `whom` lets this process in with an `answer`, for at most `timeout_s` seconds.

        What is in the way is logged once it has been there for `SAY_AFTER_S` seconds, and whenever it
        changes. A refusal that is not proved may be anybody's on the way: it is doubted until then. So is
        that of another node than `address` names, to which somebody on the way may have led this process.
        `digests`: of the sets that are offered; None: the hello's.

        Raises:
            ConnectTimeout: nobody answered in time, or asked to be tried again later until then, or another
                node answered.
            Rejected: refused for good, or without a proof until then.
            VersionDiffers: the other side spoke another version of the protocol until then.
            AuthError: the secrets differed until then.
            PeerLost: `stop` was set.
        """
        offered = {} if digests is None else {"sets": digests}
        hello = self.hello.model_copy(update={"wanted": address.node, **offered})
        deadline = Deadline(timeout_s)
        said = ""
        refusal: SmolclusterError | None = None
        jitter = random.Random()  # noqa: S311 - spreads attempts, hides nothing
        for delay_s in backoff_delays(cap_s=LONGEST_DELAY_S, jitter=jitter):
            try:
                return self._try(address, hello, answer, max(LAST_TRY_S, deadline.remaining()))
            except SmolclusterError as error:
                wait_s = max(delay_s, _retry_after_s(error))
                obstacle = str(error)
                refusal = (
                    error if isinstance(error, Rejected | AuthError | VersionDiffers) else None
                )
            if deadline.remaining() == 0:
                break
            if obstacle != said and timeout_s - deadline.remaining() >= SAY_AFTER_S:
                left = deadline.remaining()
                until = f", up to {format_duration(left)}" if left < LONG_S else ""
                self.log.info("waiting for %s%s: %s", whom, until, obstacle)
                said = obstacle
            (stop.wait if stop else time.sleep)(min(wait_s, deadline.remaining()))
            if stop and stop.is_set():
                raise PeerLost(f"{address}: dialled no more: {obstacle}")
        if refusal and not (isinstance(refusal, Rejected) and refusal.is_proved):
            raise refusal
        raise ConnectTimeout(
            f"{whom} at {address} did not let this process in within {format_duration(timeout_s)}: {obstacle}"
        ) from refusal

    def _try(
        self, address: Address, hello: Hello, answer: type[A], limit_s: float
    ) -> tuple[Connection, A]:
        connection = connect(address.host, address.port, min(CONNECT_TIMEOUT_S, limit_s))
        limit = Deadline(min(HANDSHAKE_TIMEOUT_S, limit_s))
        accepted = client_handshake(
            connection, hello, self.secret, limit, self.encryption, answer=answer
        )
        return connection, accepted


def _retry_after_s(error: SmolclusterError) -> float:
    """How many seconds to wait at least before the next attempt; raises what is no reason for one."""
    match error:
        case Rejected(is_proved=True, retry_after_s=float(seconds)):
            return seconds
        case Rejected(is_proved=False) | AuthError() | VersionDiffers() | WrongPeer():
            return 0.0
        case ConnectTimeout() | PeerLost() | ProtocolError():
            return 0.0
        case _:
            raise error
