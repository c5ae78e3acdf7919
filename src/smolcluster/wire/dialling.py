"""The way to a peer: connect, prove, be let in; with back-off and a deadline."""

import logging
import random
import threading
import time
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
from smolcluster.utils.units import format_address, format_duration
from smolcluster.wire.connection import Connection, connect
from smolcluster.wire.handshake import client_handshake
from smolcluster.wire.messages import Accepted, Hello
from smolcluster.wire.security import Secret

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0
LONGEST_DELAY_S = 0.5
LAST_TRY_S = 1.0
WRONG_PEER_RETRY_S = 2.0
"""Each attempt opens a session with the wrong node for a moment."""
SAY_AFTER_S = 3.0
"""A peer that starts at the same time is worth no word."""
LONG_S = 7200.0
"""A longer patience than this one is a launcher's, which ends who waits: no time to be told of."""
SETTLED_S = 4.0
"""A session that lasted so long lets the delays between reconnects begin anew."""

A = TypeVar("A", bound=Accepted)


@dataclass(frozen=True)
class Address:
    """Where a peer listens, as this machine reaches it, and the peer's name; None: it is not known."""

    host: str
    port: int
    node: str | None = None

    def __str__(self) -> str:
        return format_address(self.host, self.port)


class Pauses:
    """The delays between sessions with one peer: longer after each one that did not last."""

    def __init__(self) -> None:
        self._delays = backoff_delays(cap_s=LONGEST_DELAY_S)
        self._began_at = time.monotonic()

    def session_begins(self) -> None:
        self._began_at = time.monotonic()

    def next_s(self) -> float:
        """Seconds to wait, now that it has ended."""
        if time.monotonic() - self._began_at > SETTLED_S:
            self._delays = backoff_delays(cap_s=LONGEST_DELAY_S)
        return next(self._delays)


def dial(
    address: Address,
    hello: Hello,
    secret: Secret,
    answer: type[A],
    *,
    timeout_s: float,
    log: logging.Logger,
    encryption: Encryption = "auto",
    say_after_s: float = SAY_AFTER_S,
    whom: str = "the server",
    stop: threading.Event | None = None,
) -> tuple[Connection, A]:
    """Try until `whom` lets this process in with an `answer`, for at most `timeout_s` seconds.

    What is in the way is logged once it has been there for `say_after_s` seconds, and whenever it changes. A
    refusal that is not proved may be anybody's on the way: it is doubted until then. So is an answer of
    another node than `address` names, to which somebody on the way may have led this process.

    Raises:
        ConnectTimeout: nobody answered in time, or asked to be tried again later until then, or another node
            answered.
        Rejected: refused for good, or without a proof until then.
        VersionDiffers: the other side spoke another version of the protocol until then.
        AuthError: the secrets differed until then.
        PeerLost: `stop` was set.
    """
    deadline = Deadline(timeout_s)
    said = ""
    refusal: SmolclusterError | None = None
    jitter = random.Random()  # noqa: S311 - spreads attempts, hides nothing
    for delay_s in backoff_delays(cap_s=LONGEST_DELAY_S, jitter=jitter):
        try:
            limit_s = max(LAST_TRY_S, deadline.remaining())
            connection = connect(address.host, address.port, min(CONNECT_TIMEOUT_S, limit_s))
            limit = Deadline(min(HANDSHAKE_TIMEOUT_S, limit_s))
            accepted = client_handshake(connection, hello, secret, limit, encryption, answer=answer)
            if address.node in (None, accepted.node):
                return connection, accepted
            connection.close()
            raise WrongPeer(
                f"{accepted.node!r} answers at {address}, not {address.node!r}: is this the right address?"
            )
        except SmolclusterError as error:
            wait_s = max(delay_s, _retry_after_s(error))
            obstacle = str(error)
            refusal = error if isinstance(error, Rejected | AuthError | VersionDiffers) else None
        if deadline.remaining() == 0:
            break
        if obstacle != said and timeout_s - deadline.remaining() >= say_after_s:
            left = deadline.remaining()
            until = f", up to {format_duration(left)}" if left < LONG_S else ""
            log.info("waiting for %s%s: %s", whom, until, obstacle)
            said = obstacle
        (stop.wait if stop else time.sleep)(min(wait_s, deadline.remaining()))
        if stop and stop.is_set():
            raise PeerLost(f"{address}: dialled no more: {obstacle}")
    if refusal and not (isinstance(refusal, Rejected) and refusal.is_proved):
        raise refusal
    raise ConnectTimeout(
        f"{whom} at {address} did not let this process in within {format_duration(timeout_s)}: {obstacle}"
    ) from refusal


def _retry_after_s(error: SmolclusterError) -> float:
    """How many seconds to wait at least before the next attempt; raises what is no reason for one."""
    match error:
        case Rejected(is_proved=True, retry_after_s=float(seconds)):
            return seconds
        case WrongPeer():
            return WRONG_PEER_RETRY_S
        case Rejected(is_proved=False) | AuthError() | VersionDiffers():
            return 0.0
        case ConnectTimeout() | PeerLost() | ProtocolError():
            return 0.0
        case _:
            raise error
