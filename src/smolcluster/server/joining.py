"""A worker's way into a run: it dials the server, and hears how a run ended that it comes too late for."""

import logging

from smolcluster.configs.schema import Encryption
from smolcluster.errors import ConnectTimeout, Rejected, RunFailed, VersionDiffers
from smolcluster.wire.connection import Connection
from smolcluster.wire.dialling import SAY_AFTER_S, Address, dial
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import Hello, Welcome
from smolcluster.wire.security import Secret


class RunOver(Exception):
    """The server says that the run has ended well."""


def join(
    address: Address,
    hello: Hello,
    secret: Secret,
    *,
    timeout_s: float,
    log: logging.Logger,
    encryption: Encryption = "auto",
    say_after_s: float = SAY_AFTER_S,
    whom: str = "the server",
) -> tuple[Connection, Welcome]:
    """Try until the server, or `whom` this worker follows, welcomes this worker; see `dial`.

    Raises:
        RunOver: the run has ended well in the meantime.
        RunFailed: it has ended badly.
        VersionDiffers: this version does not understand the run's settings, or see `dial`.
        ConnectTimeout, Rejected, AuthError: see `dial`.
    """
    try:
        connection, welcome = dial(
            address,
            hello,
            secret,
            Welcome,
            timeout_s=timeout_s,
            log=log,
            encryption=encryption,
            say_after_s=say_after_s,
            whom=whom,
        )
    except Rejected as error:
        if error.is_proved and error.code == "over":
            raise RunOver(str(error)) from None
        if error.is_proved and error.code == "failed":
            raise RunFailed(str(error)) from None
        raise
    try:
        welcome.run  # noqa: B018 - says what this version does not understand
    except VersionDiffers:
        connection.close()
        raise
    return connection, welcome


def ask(
    address: Address,
    node: str,
    secret: Secret,
    *,
    timeout_s: float,
    log: logging.Logger,
    encryption: Encryption = "auto",
) -> Welcome:
    """What the run at an address is, and a worker id for this node, which it comes in under later.

    Raises:
        Rejected: the server refuses, at last; a name may stay that of a live worker.
        RunOver, RunFailed, ConnectTimeout, VersionDiffers, AuthError: see `join`.
    """
    try:
        hello = introduce(node, 0)
        connection, welcome = join(
            address, hello, secret, timeout_s=timeout_s, log=log, encryption=encryption
        )
    except ConnectTimeout as error:
        if isinstance(error.__cause__, Rejected):
            raise error.__cause__ from None
        raise
    connection.close()
    return welcome
