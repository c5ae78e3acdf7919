"""The worker's way to the server: connect, prove, be welcomed; with back-off and a deadline."""

import logging
import random
import time
from dataclasses import dataclass

from smolcluster.errors import (
    ConnectTimeout,
    PeerLost,
    ProtocolError,
    Rejected,
    RunFailed,
    VersionDiffers,
)
from smolcluster.transport.connection import Connection, connect
from smolcluster.transport.handshake import client_handshake
from smolcluster.transport.messages import Hello, Welcome
from smolcluster.transport.security import Secret
from smolcluster.utils.retry import Deadline, backoff_delays
from smolcluster.utils.units import format_address, format_duration

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0
LONGEST_DELAY_S = 0.5
LAST_TRY_S = 1.0
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
    say_after_s: float = SAY_AFTER_S,
) -> tuple[Connection, Welcome]:
    """Try until the server welcomes this worker, for at most `timeout_s` seconds.

    What is in the way is logged once it has been there for `say_after_s` seconds, and whenever it changes.

    Raises:
        RunOver: the run has ended well in the meantime.
        RunFailed: it has ended badly.
        ConnectTimeout: nobody answered in time, or the worker id stayed in use.
        Rejected: the server refused for good.
        VersionDiffers: it speaks another version of the protocol.
        AuthError: the secrets differ.
    """
    deadline = Deadline(timeout_s)
    said = ""
    jitter = random.Random()  # noqa: S311 - spreads attempts, hides nothing
    for delay_s in backoff_delays(first_s=0.1, cap_s=LONGEST_DELAY_S, jitter=jitter):
        try:
            return _join_once(address, hello, secret, max(LAST_TRY_S, deadline.remaining()))
        except VersionDiffers:
            raise
        except (ConnectTimeout, PeerLost, ProtocolError) as error:
            obstacle, wait_s = str(error), delay_s
        except Rejected as error:
            if error.code == "over":
                raise RunOver(str(error)) from None
            if error.code == "failed":
                raise RunFailed(str(error)) from None
            if error.retry_after_s is None:
                raise
            obstacle, wait_s = str(error), max(delay_s, error.retry_after_s)
        if deadline.remaining() == 0:
            break
        if obstacle != said and timeout_s - deadline.remaining() >= say_after_s:
            left = format_duration(deadline.remaining())
            log.info("waiting for the server, up to %s: %s", left, obstacle)
            said = obstacle
        time.sleep(min(wait_s, deadline.remaining()))
    raise ConnectTimeout(
        f"no server welcomed this worker at {address} within {format_duration(timeout_s)}: {obstacle}"
    )


def _join_once(
    address: ServerAddress, hello: Hello, secret: Secret, limit_s: float
) -> tuple[Connection, Welcome]:
    connection = connect(address.host, address.port, min(CONNECT_TIMEOUT_S, limit_s))
    try:
        deadline = Deadline(min(HANDSHAKE_TIMEOUT_S, limit_s))
        return connection, client_handshake(connection, hello, secret, deadline)
    except BaseException:
        connection.close()
        raise
