"""The handshake: both sides prove that they know the cluster's secret before anything else is said.

    client  Hello ->            <- Challenge        server
            Proof ->            <- Welcome (with the server's proof), or Reject

The client proves first. Until then the server reads at most 4 KiB and says nothing about itself but
the protocol's version. The server proves only to a client that has proved itself.
"""

from dataclasses import dataclass, field
from typing import TypeVar, cast

from smolcluster.configs.schema import RunConfig
from smolcluster.errors import (
    AuthError,
    PeerLost,
    Rejected,
    SmolclusterError,
    VersionDiffers,
)
from smolcluster.transport.connection import UNPROVED_NBYTES, Connection
from smolcluster.transport.frames import MAX_HEADER_NBYTES, PROTOCOL_VERSION, frame_nbytes
from smolcluster.transport.messages import (
    Challenge,
    Hello,
    Message,
    Proof,
    Reject,
    ServedData,
    Welcome,
    frame_of,
)
from smolcluster.transport.security import Secret, new_nonce, proof, proofs_match
from smolcluster.utils.retry import Deadline

M = TypeVar("M", bound=Message)

AUTH = "auth"
"""A Reject's code: the proof was wrong."""
PROTOCOL = "protocol"
"""A Reject's code: the versions of the protocol differ."""
HANDSHAKE_TIMEOUT_S = 5.0
"""How long a server lets a stranger take to prove itself, in seconds."""


@dataclass(frozen=True, slots=True)
class Authenticated:
    """A client that proved itself, and the proof that the server owes it."""

    hello: Hello
    server_mac: bytes = field(repr=False)


@dataclass(frozen=True)
class Offer:
    """What an admitted worker is told of the run."""

    run_id: str
    incarnation: str
    run: RunConfig
    model_fingerprint: str
    bucket_bytes: int
    codec: str
    heartbeat_timeout_s: float
    data: ServedData | None = None


def client_handshake(
    connection: Connection, hello: Hello, secret: Secret, deadline: Deadline
) -> Welcome:
    """Prove ourselves to the server and have it prove itself.

    Afterwards the connection has the limits that the Welcome agrees on. The connection is closed
    when this raises.

    Raises:
        AuthError: the two sides' secrets differ.
        Rejected: the server refused for another reason; `retry_after_s` says when to ask again.
        ProtocolError, PeerLost: the server does not speak the protocol, or was lost.
    """
    try:
        return _client_handshake(connection, hello, secret, deadline)
    except SmolclusterError:
        connection.close()
        raise


def server_authenticate(
    connection: Connection, secret: Secret, deadline: Deadline
) -> Authenticated:
    """Have a client prove itself; nothing is told to it that it could not know.

    Follow it with `accept` or `reject`. The connection is closed when this raises.

    Raises:
        AuthError: the client's proof is wrong.
        ProtocolError: the client does not speak the protocol, or another version of it.
        PeerLost: the client was lost, or too slow.
    """
    try:
        return _server_authenticate(connection, secret, deadline)
    except SmolclusterError:
        connection.close()
        raise


def accept(
    connection: Connection, client: Authenticated, offer: Offer, deadline: Deadline | None = None
) -> None:
    """Let the client in: send the Welcome with the server's proof and lift the limits on strangers.

    Raises:
        PeerLost: the client was lost.
    """
    connection.send(Welcome(mac=client.server_mac.hex(), **vars(offer)), deadline=deadline)
    connection.proved(offer.bucket_bytes, offer.heartbeat_timeout_s)


def reject(
    connection: Connection, code: str, sentence: str, retry_after_s: float | None = None
) -> None:
    """Refuse the client: say why, let it read that, and close. Never raises for a lost client.

    Args:
        connection: closed afterwards.
        code: short name of the reason; "auth" and "protocol" are used here.
        sentence: what differs and where to mend it.
        retry_after_s: when the client may ask again, seconds; None: never.
    """
    try:
        connection.send(Reject(code=code, sentence=sentence, retry_after_s=retry_after_s))
    except PeerLost:
        connection.close()
    else:
        connection.finish()


def _client_handshake(
    connection: Connection, hello: Hello, secret: Secret, deadline: Deadline
) -> Welcome:
    greeting = frame_of(hello)
    connection.send_frame(greeting, deadline)
    _answer(connection, Challenge, secret, deadline)
    nonce = new_nonce()
    transcript = (greeting.head, connection.received_head, bytes.fromhex(nonce))
    mac = proof(secret.key, "client", *transcript)
    connection.send(Proof(mac=mac.hex(), nonce=nonce), deadline=deadline)
    # The server's proof is in the Welcome, so one whole header must be let through before it is
    # known.
    connection.max_unproved = UNPROVED_NBYTES + frame_nbytes(MAX_HEADER_NBYTES, 0)
    welcome = _answer(connection, Welcome, secret, deadline)
    if not proofs_match(bytes.fromhex(welcome.mac), proof(secret.key, "server", *transcript)):
        raise AuthError(
            f"{connection.peer}: handshake: the server does not know the secret in {secret.path}: "
            "is this the right address, and is the file the server's?"
        )
    connection.proved(welcome.bucket_bytes, welcome.heartbeat_timeout_s)
    return welcome


def _server_authenticate(
    connection: Connection, secret: Secret, deadline: Deadline
) -> Authenticated:
    try:
        hello = _receive(connection, Hello, deadline)
    except VersionDiffers as error:
        reject(connection, PROTOCOL, f"the server speaks another protocol: {error}")
        raise
    hello_head = connection.received_head
    if hello.protocol != PROTOCOL_VERSION:
        difference = (
            f"the server speaks protocol {PROTOCOL_VERSION}, this worker {hello.protocol}: "
            "install the same smolcluster on both"
        )
        reject(connection, PROTOCOL, difference)
        raise VersionDiffers(f"{connection.peer}: handshake: {difference}")
    challenge = frame_of(Challenge(nonce=new_nonce()))
    connection.send_frame(challenge, deadline)
    answer = _receive(connection, Proof, deadline)
    transcript = (hello_head, challenge.head, bytes.fromhex(answer.nonce))
    if not proofs_match(bytes.fromhex(answer.mac), proof(secret.key, "client", *transcript)):
        reject(connection, AUTH, "not accepted")
        raise AuthError(
            f"{connection.peer}: handshake: a client that calls itself {hello.node!r} does not "
            f"know the secret in {secret.path}: copy the file to it"
        )
    connection.peer = f"{hello.node} ({connection.peer})"
    return Authenticated(hello, proof(secret.key, "server", *transcript))


def _receive(connection: Connection, kind: type[M], deadline: Deadline) -> M:
    message, _ = connection.receive({kind}, deadline)
    return cast(M, message)


def _answer(connection: Connection, kind: type[M], secret: Secret, deadline: Deadline) -> M:
    """The server's next message, unless it is a Reject."""
    message, _ = connection.receive({kind, Reject}, deadline)
    if not isinstance(message, Reject):
        return cast(M, message)
    if message.code == AUTH:
        raise AuthError(
            f"{connection.peer}: handshake: the server does not accept the secret in "
            f"{secret.path}: copy the server's file to this place (chmod 600)"
        )
    raise Rejected(f"{connection.peer}: {message.sentence}", message.code, message.retry_after_s)
