"""The worker's way to the server: connect, prove, be welcomed; with back-off and a deadline."""

import logging
import random
import time
from dataclasses import dataclass

from smolcluster.configs.schema import Encryption
from smolcluster.errors import (
    AuthError,
    ConnectTimeout,
    PeerLost,
    ProtocolError,
    Rejected,
    RunFailed,
    SmolclusterError,
    VersionDiffers,
)
from smolcluster.transport.connection import Connection, connect
from smolcluster.transport.handshake import client_handshake, introduce
from smolcluster.transport.messages import Hello, Welcome
from smolcluster.transport.security import Secret
from smolcluster.utils.retry import Deadline, backoff_delays
from smolcluster.utils.units import format_address, format_duration

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0
LONGEST_DELAY_S = 0.5
LAST_TRY_S = 1.0
UNPROVED_PATIENCE_S = 5.0
"""How long a refusal is doubted at first that anybody between worker and server may have said."""
SAY_AFTER_S = 3.0
"""A server that starts at the same time is worth no word."""


class RunOver(Exception):
    """The server says that the run has ended well."""


@dataclass(frozen=True)
class ServerAddress:
    """Where the server is, as this machine reaches it."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)


def join(
    address: ServerAddress,
    hello: Hello,
    secret: Secret,
    *,
    timeout_s: float,
    log: logging.Logger,
    encryption: Encryption = "auto",
    unproved_patience_s: float = UNPROVED_PATIENCE_S,
    say_after_s: float = SAY_AFTER_S,
) -> tuple[Connection, Welcome]:
    """Try until the server welcomes this worker, for at most `timeout_s` seconds.

    What is in the way is logged once it has been there for `say_after_s` seconds, and whenever it changes. A
    refusal that the server has not proved is doubted for `unproved_patience_s` seconds.

    Raises:
        RunOver: the run has ended well in the meantime.
        RunFailed: it has ended badly.
        ConnectTimeout: nobody answered in time, or the worker id stayed in use.
        Rejected: the server refused for good.
        VersionDiffers: it speaks another version of the protocol.
        AuthError: the secrets differ.
    """
    deadline, doubt = Deadline(timeout_s), Deadline(min(unproved_patience_s, timeout_s))
    said = ""
    refusal: Rejected | None = None
    jitter = random.Random()  # noqa: S311 - spreads attempts, hides nothing
    for delay_s in backoff_delays(first_s=0.1, cap_s=LONGEST_DELAY_S, jitter=jitter):
        try:
            limit_s = max(LAST_TRY_S, deadline.remaining())
            return _join_once(address, hello, secret, limit_s, encryption)
        except SmolclusterError as error:
            wait_s = max(delay_s, _retry_after_s(error, is_doubted=not doubt.expired))
            obstacle = str(error)
            refusal = error if isinstance(error, Rejected) else None
        if deadline.remaining() == 0:
            break
        if obstacle != said and timeout_s - deadline.remaining() >= say_after_s:
            left = format_duration(deadline.remaining())
            log.info("waiting for the server, up to %s: %s", left, obstacle)
            said = obstacle
        time.sleep(min(wait_s, deadline.remaining()))
    raise ConnectTimeout(
        f"no server welcomed this worker at {address} within {format_duration(timeout_s)}: {obstacle}"
    ) from refusal


def ask(
    address: ServerAddress, node: str, secret: Secret, *, timeout_s: float, log: logging.Logger
) -> Welcome:
    """What the run at an address is, and a worker id for this node, which it comes in under later.

    Raises:
        Rejected: the server refuses, at last; a name may stay that of a live worker.
        RunOver, RunFailed, ConnectTimeout, VersionDiffers, AuthError: see `join`.
    """
    try:
        connection, welcome = join(
            address, introduce(node, 0), secret, timeout_s=timeout_s, log=log
        )
    except ConnectTimeout as error:
        if isinstance(error.__cause__, Rejected):
            raise error.__cause__ from None
        raise
    connection.close()
    return welcome


def _retry_after_s(error: SmolclusterError, *, is_doubted: bool) -> float:
    """How many seconds to wait at least before the next attempt; raises what is no reason for one."""
    match error:
        case Rejected(is_proved=True, code="over"):
            raise RunOver(str(error)) from None
        case Rejected(is_proved=True, code="failed"):
            raise RunFailed(str(error)) from None
        case Rejected(is_proved=True, retry_after_s=float(seconds)):
            return seconds
        case Rejected(is_proved=True):
            raise error
        case Rejected() | AuthError() | VersionDiffers():
            if not is_doubted:
                raise error
        case ConnectTimeout() | PeerLost() | ProtocolError():
            pass
        case _:
            raise error
    return 0.0


def _join_once(
    address: ServerAddress, hello: Hello, secret: Secret, limit_s: float, encryption: Encryption
) -> tuple[Connection, Welcome]:
    connection = connect(address.host, address.port, min(CONNECT_TIMEOUT_S, limit_s))
    try:
        deadline = Deadline(min(HANDSHAKE_TIMEOUT_S, limit_s))
        welcome = client_handshake(connection, hello, secret, deadline, encryption, answer=Welcome)
    except BaseException:
        connection.close()
        raise
    return connection, welcome
