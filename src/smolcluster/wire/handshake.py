"""The handshake: both sides prove that they know the cluster's secret before anything else is said.

    dials      TLS, if it shall be encrypted         accepts
               Hello ->             <- Challenge
               Challenge, Proof ->  <- Accepted (of a server: Welcome) or Reject, Proof

The Hello names the sets of messages that the dialling side knows, with a digest of each; the answer names
those that both know. A set of which the two know different versions is refused.

A proof covers every frame that was said before it, in both directions, and the certificate that the dialling
side saw. So nobody in between can change a word, and nobody without the secret can be either side. The side
that dials proves first: until then the other reads at most 4 KiB and says nothing about itself. A Reject
without a proof, which is all that a stranger gets, is `unproved`: anybody may have said it.
"""

import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

from smolcluster.configs.schema import Encryption
from smolcluster.errors import (
    AuthError,
    PeerLost,
    ProtocolError,
    Rejected,
    SmolclusterError,
    VersionDiffers,
    WrongPeer,
)
from smolcluster.utils.retry import Deadline
from smolcluster.version import __version__
from smolcluster.wire.connection import UNPROVED_NBYTES, Connection
from smolcluster.wire.frames import MAX_HEADER_NBYTES, frame_nbytes
from smolcluster.wire.messages import (
    SESSION,
    SETS,
    Accepted,
    Challenge,
    Hello,
    Kinds,
    Message,
    MessageSet,
    Proof,
    Reject,
    digests_of,
    frame_of,
)
from smolcluster.wire.security import (
    PLAIN,
    Role,
    Secret,
    new_nonce,
    proof,
)
from smolcluster.wire.tls import ServerIdentity, client_context

M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Accepted)

AUTH = "auth"
"""A Reject's code: the proof was wrong."""
PROTOCOL = "protocol"
"""A Reject's code: the versions of the protocol differ."""
VERSION = "version"
"""A Reject's code: the versions of smolcluster differ in what they can say to each other."""
ENCRYPTION = "encryption"
"""A Reject's code: the client did not encrypt."""
WRONG_PEER = "wrong-peer"
"""A Reject's code: the client meant another node."""
HANDSHAKE_TIMEOUT_S = 5.0
"""How long a server lets a stranger take to prove itself, in seconds."""


def introduce(node: str, worker_id: int = 0, sets: tuple[MessageSet, ...] = SETS) -> Hello:
    """What a process says of itself, which it keeps as long as it lives."""
    return Hello(
        version=__version__,
        sets=digests_of(sets),
        node=node,
        worker_id=worker_id,
        instance=secrets.token_hex(8),
    )


@dataclass(frozen=True)
class Door:
    """How a node lets clients in: the secret, the certificate it shows, who must encrypt, what is spoken."""

    node: str
    secret: Secret
    identity: ServerIdentity
    encryption: Encryption = "auto"
    sets: tuple[MessageSet, ...] = SETS


@dataclass
class Talk:
    """A handshake over one connection: the frames said so far, and the proofs over them."""

    connection: Connection
    secret: Secret
    deadline: Deadline
    binding: bytes = PLAIN
    """What names the channel: the server's certificate, or that there is none."""
    heads: list[bytes] = field(default_factory=list)

    def say(self, *messages: Message) -> None:
        for message in messages:
            frame = frame_of(message)
            self.heads.append(frame.head)
            self.connection.send_frame(frame, self.deadline)

    def hear(self, kind: type[M]) -> M:
        return cast(M, self._hear(frozenset({kind})))

    def hear_answer(self, kind: type[M]) -> M | Reject:
        return cast(M | Reject, self._hear(frozenset({kind, Reject})))

    def prove(self, role: Role) -> None:
        """Prove that this side knows the secret and said, and heard, what has been said so far."""
        self.say(Proof(mac=self._proof(role).hex()))

    def is_proved(self, role: Role) -> bool:
        """Wait for the other side's proof; returns whether it is right."""
        expected = self._proof(role)
        return hmac.compare_digest(bytes.fromhex(self.hear(Proof).mac), expected)

    def _hear(self, kinds: Kinds) -> Message:
        message, _ = self.connection.receive(kinds, self.deadline)
        self.heads.append(self.connection.received_head)
        return message

    def _proof(self, role: Role) -> bytes:
        return proof(self.secret.key, role, self.heads, binding=self.binding)


@dataclass(frozen=True, slots=True)
class Authenticated:
    """A client that proved itself, the handshake in which it did, and the sets that both sides know."""

    hello: Hello
    talk: Talk
    sets: tuple[MessageSet, ...]


def must_encrypt(encryption: Encryption, *, stays_here: bool) -> bool:
    """Whether what is said to a peer has to be encrypted; `stays_here`: none of it leaves this machine."""
    return encryption == "on" or (encryption == "auto" and not stays_here)


def client_handshake(
    connection: Connection,
    hello: Hello,
    secret: Secret,
    deadline: Deadline,
    encryption: Encryption = "auto",
    *,
    answer: type[A],
) -> A:
    """Prove ourselves to the server and have it prove itself; returns its answer, which must be an `answer`.

    Afterwards the connection has the limits that the Welcome agrees on. The connection is closed
    when this raises.

    Raises:
        AuthError: the two sides' secrets differ, or somebody between them changed what was said.
        WrongPeer: it is not the one that `hello` wants.
        Rejected: the server refused for another reason; `retry_after_s` says when to ask again.
        ProtocolError, PeerLost: the server does not speak the protocol, or was lost.
    """
    try:
        talk = Talk(connection, secret, deadline)
        if must_encrypt(encryption, stays_here=connection.stays_here):
            talk.binding = connection.encrypt(
                client_context(), server_side=False, deadline=deadline
            )
        return _client_handshake(talk, hello, answer)
    except SmolclusterError:
        connection.close()
        raise


def server_authenticate(connection: Connection, door: Door, deadline: Deadline) -> Authenticated:
    """Have a client prove itself; nothing is told to it that it could not know.

    Follow it with `accept` or `refuse`. The connection is closed when this raises.

    Raises:
        AuthError: the client's proof is wrong.
        WrongPeer: the client wants another node.
        ProtocolError: the client does not speak the protocol, or another version of it, or must encrypt.
        PeerLost: the client was lost, or too slow.
    """
    try:
        talk = Talk(connection, door.secret, deadline)
        if connection.begins_encrypted(deadline):
            context = door.identity.context
            connection.encrypt(context, server_side=True, deadline=deadline)
            talk.binding = door.identity.fingerprint
        elif must_encrypt(door.encryption, stays_here=connection.stays_here):
            sentence = "this server takes encrypted connections only: mend encryption on the worker"
            reject(connection, ENCRYPTION, sentence)
            raise ProtocolError(
                f"{connection.peer}: handshake: it does not encrypt (encryption: off?)"
            )
        return _server_authenticate(talk, door)
    except SmolclusterError:
        connection.close()
        raise


def accept(client: Authenticated, answer: Accepted) -> None:
    """Let the client in: send the answer and the server's proof, and lift the limits on strangers.

    `answer` is sent with the names of the sets that both sides know.

    Raises:
        PeerLost: the client was lost.
        VersionDiffers: the answer is of a set that the client does not know.
    """
    if not any(type(answer) in each.in_handshake for each in client.sets):
        sentence = _versions_differ(client.hello)
        refuse(client, VERSION, sentence)
        raise VersionDiffers(f"{client.talk.connection.peer}: handshake: {sentence}")
    talk, names = client.talk, tuple(each.name for each in client.sets)
    talk.say(answer.model_copy(update={"sets": names}))
    talk.prove("server")
    talk.connection.proved(answer.bucket_bytes, answer.heartbeat_timeout_s)


def refuse(
    client: Authenticated, code: str, sentence: str, retry_after_s: float | None = None
) -> None:
    """Refuse a client that proved itself: say why and prove it, and close. Never raises for a lost client.

    Args:
        client: its connection is closed afterwards.
        code: short name of the reason.
        sentence: what differs and where to mend it.
        retry_after_s: when the client may ask again, seconds; None: never.
    """
    talk = client.talk
    with suppress(PeerLost):
        talk.say(Reject(code=code, sentence=sentence, retry_after_s=retry_after_s))
        talk.prove("server")
    talk.connection.finish()


def reject(connection: Connection, code: str, sentence: str) -> None:
    """Refuse a stranger, without a proof. Closes the connection, and never raises for a lost client."""
    with suppress(PeerLost):
        connection.send(Reject(code=code, sentence=sentence))
    connection.finish()


def _client_handshake(talk: Talk, hello: Hello, expected: type[A]) -> A:
    connection = talk.connection
    talk.say(hello)
    first = talk.hear_answer(Challenge)
    if isinstance(first, Reject):
        raise _unproved(talk, first)
    talk.say(Challenge(nonce=new_nonce()))
    talk.prove("client")
    # The server's proof follows its answer, so one whole header must be let through before it.
    connection.max_unproved = UNPROVED_NBYTES + frame_nbytes(MAX_HEADER_NBYTES, 0)
    answer = talk.hear_answer(expected)
    try:
        proved = talk.is_proved("server")
    except (PeerLost, ProtocolError):
        if isinstance(answer, Reject):
            raise _unproved(talk, answer) from None
        raise
    if not proved:
        raise AuthError(
            f"{connection.peer}: handshake: the server does not know the secret in {talk.secret.path}: "
            "is this the right address, and is the file the server's?"
        )
    if isinstance(answer, Reject):
        sentence = f"{connection.peer}: {answer.sentence}"
        if answer.code == WRONG_PEER:
            raise WrongPeer(sentence)
        raise Rejected(sentence, answer.code, answer.retry_after_s)
    connection.proved(answer.bucket_bytes, answer.heartbeat_timeout_s)
    return answer


def _unproved(talk: Talk, message: Reject) -> SmolclusterError:
    """What a Reject means that anybody may have said."""
    peer = talk.connection.peer
    if message.code == AUTH:
        return AuthError(
            f"{peer}: handshake: the server does not accept the secret in {talk.secret.path}: "
            "copy the server's file to this place (chmod 600)"
        )
    return Rejected(f"{peer}: {message.sentence}", message.code, is_proved=False)


def _server_authenticate(talk: Talk, door: Door) -> Authenticated:
    connection = talk.connection
    try:
        hello = talk.hear(Hello)
    except VersionDiffers as error:
        reject(connection, PROTOCOL, f"the server speaks another protocol: {error}")
        raise
    talk.say(Challenge(nonce=new_nonce()))
    talk.hear(Challenge)
    if not talk.is_proved("client"):
        reject(connection, AUTH, "not accepted")
        raise AuthError(
            f"{connection.peer}: handshake: a client that calls itself {hello.node!r} does not "
            f"know the secret in {talk.secret.path}: copy the file to it"
        )
    connection.peer = f"{hello.node} ({connection.peer})"
    agreed = tuple(each for each in door.sets if each.name in hello.sets)
    client = Authenticated(hello, talk, agreed)
    if SESSION not in agreed or any(hello.sets[each.name] != each.digest for each in agreed):
        sentence = _versions_differ(hello)
        refuse(client, VERSION, sentence)
        raise VersionDiffers(f"{connection.peer}: handshake: {sentence}")
    if hello.wanted not in (None, door.node):
        sentence = f"{door.node!r} answers there, not {hello.wanted!r}: is this the right address?"
        refuse(client, WRONG_PEER, sentence, retry_after_s=0.0)
        raise WrongPeer(
            f"{connection.peer}: handshake: it wants {hello.wanted!r}, which this is not"
        )
    return client


def _versions_differ(hello: Hello) -> str:
    ours = __version__
    return (
        f"the server's smolcluster {ours} and this worker's {hello.version} differ in their messages or "
        "configuration keys: install the same on both (git pull, then uv sync)"
    )
