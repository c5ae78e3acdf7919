import random
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import smolcluster
from connection_pairs import (
    BUCKET_BYTES,
    DEADLINE_S,
    RUN,
    connection_pair,
    push,
    raw_and_connection,
)
from smolcluster.configs.schema import Encryption
from smolcluster.errors import (
    AuthError,
    PeerLost,
    ProtocolError,
    Rejected,
    SmolclusterError,
    VersionDiffers,
)
from smolcluster.utils.addresses import is_loopback
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import UNPROVED_NBYTES, Connection
from smolcluster.wire.frames import build_frame
from smolcluster.wire.handshake import (
    Authenticated,
    Door,
    Talk,
    accept,
    client_handshake,
    introduce,
    must_encrypt,
    refuse,
    reject,
    server_authenticate,
)
from smolcluster.wire.messages import (
    SESSION,
    SETS,
    Accepted,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Proof,
    Reject,
    Welcome,
    frame_of,
)
from smolcluster.wire.security import Secret, new_nonce
from smolcluster.wire.tls import client_context, new_identity

pytestmark = [pytest.mark.timeout(180)]

SECRET = Secret(Path("/home/me/secret"), b"s" * 64)
OTHER_SECRET = Secret(Path("/home/you/secret"), b"x" * 64)
DOOR = Door("mini2", SECRET, new_identity())
HELLO = introduce("mini1", 1)
SOON_S = 0.1
"""When nothing comes."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


OFFER = Welcome(
    run_id="edp-1",
    incarnation="0123abcd",
    settings=RUN.model_dump(mode="json"),
    model_fingerprint="ab" * 32,
    bucket_bytes=BUCKET_BYTES,
    codec="int8",
    heartbeat_timeout_s=7.0,
)


def serve(connection: Connection, door: Door = DOOR) -> Authenticated:
    client = server_authenticate(connection, door, Deadline(DEADLINE_S))
    accept(client, OFFER)
    return client


def join(
    connection: Connection, secret: Secret = SECRET, encryption: Encryption = "auto"
) -> Welcome:
    return client_handshake(
        connection, HELLO, secret, Deadline(DEADLINE_S), encryption, answer=Welcome
    )


def say_no(connection: Connection) -> Authenticated:
    client = server_authenticate(connection, DOOR, Deadline(DEADLINE_S))
    refuse(client, "busy", "worker 1 is here already", retry_after_s=2.5)
    return client


def error_of(future: Future[Authenticated]) -> BaseException:
    error = future.exception(10.0)
    assert error is not None
    return error


def say(raw: socket.socket, message: Message) -> None:
    raw.sendall(b"".join(frame_of(message).buffers))


def talk_on(connection: Connection, secret: Secret = SECRET) -> Talk:
    """A handshake spoken by hand, its mistakes included."""
    return Talk(connection, secret, Deadline(DEADLINE_S))


def claim(talk: Talk) -> list[bytes]:
    """Say what a client says up to its proof, which is sent as well; the heads of all that was said."""
    talk.say(HELLO)
    talk.hear(Challenge)
    talk.say(Challenge(nonce=new_nonce()))
    heads = list(talk.heads)
    talk.prove("client")
    return heads


def greet(connection: Connection, secret: Secret = SECRET) -> Talk:
    """Hear a client's proof without looking at it."""
    talk = talk_on(connection, secret)
    talk.hear(Hello)
    talk.say(Challenge(nonce=new_nonce()))
    talk.hear(Challenge)
    talk.hear(Proof)
    return talk


@pytest.mark.parametrize(
    ("kind", "encryption"), [("socketpair", "auto"), ("tcp", "auto"), ("tcp", "on")]
)
def test_two_that_share_the_secret_agree(
    pool: ThreadPoolExecutor, kind: str, encryption: Encryption
) -> None:
    with connection_pair(kind, proved=False) as (client, server):
        served = pool.submit(serve, server)
        welcome = join(client, encryption=encryption)
        assert served.result(DEADLINE_S).hello == HELLO
        assert (welcome.run, welcome.bucket_bytes) == (RUN, BUCKET_BYTES)
        assert server.peer.startswith("mini1 (")
        for sender, receiver in ((client, server), (server, client)):
            assert sender.is_encrypted is (encryption == "on")
            assert receiver.stall_timeout_s == 7.0
            sender.send(push(BUCKET_BYTES), b"x" * BUCKET_BYTES)
            assert bytes(receiver.receive()[1]) == b"x" * BUCKET_BYTES


def test_a_client_with_another_secret_is_turned_away(pool: ThreadPoolExecutor) -> None:
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        with pytest.raises(AuthError, match="does not accept the secret in /home/you/secret"):
            join(client, OTHER_SECRET)
        error = error_of(served)
        assert isinstance(error, AuthError)
        assert "calls itself 'mini1' does not know the secret in /home/me/secret" in str(error)
        assert server.is_closed
        assert client.is_closed


def test_a_server_with_another_secret_is_not_believed(pool: ThreadPoolExecutor) -> None:
    def impostor(connection: Connection) -> None:
        accept(Authenticated(HELLO, greet(connection, OTHER_SECRET), SETS), OFFER)

    with connection_pair(proved=False) as (client, server):
        served = pool.submit(impostor, server)
        with pytest.raises(AuthError, match="server does not know the secret in /home/me/secret"):
            join(client)
        served.result(DEADLINE_S)
        assert client.is_closed


def test_the_server_proves_nothing_to_a_client_that_did_not(pool: ThreadPoolExecutor) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        served = pool.submit(serve, server)
        say(raw, HELLO)
        say(raw, Challenge(nonce=new_nonce()))
        say(raw, Proof(mac="00" * 32))
        raw.shutdown(socket.SHUT_WR)
        heard = b"".join(iter(lambda: raw.recv(4096), b""))
        assert b'"sentence":"not accepted"' in heard
        assert b"edp-1" not in heard
        assert heard.count(b"mac") == 0
        assert isinstance(error_of(served), AuthError)


def test_a_replayed_client_is_refused(pool: ThreadPoolExecutor) -> None:
    """All that a client said in one handshake, played to the server again."""
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        talk = talk_on(client)
        claim(talk)
        served.result(DEADLINE_S)
    said = [talk.heads[0], *talk.heads[2:]]
    with raw_and_connection(proved=False) as (raw, server):
        served = pool.submit(serve, server)
        empty_payload_sum = frame_of(HELLO).payload_sum
        raw.sendall(b"".join(head + empty_payload_sum for head in said))
        raw.shutdown(socket.SHUT_WR)
        assert isinstance(error_of(served), AuthError)


def test_a_replayed_server_is_not_believed(pool: ThreadPoolExecutor) -> None:
    """All that a server said in one handshake, played to the same client again."""
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        talk = talk_on(client)
        claim(talk)
        client.max_unproved = None
        talk.hear(Welcome)
        assert talk.is_proved("server")
        served.result(DEADLINE_S)
    said = [talk.heads[1], *talk.heads[4:]]
    with raw_and_connection(proved=False) as (raw, second):
        raw.sendall(b"".join(head + frame_of(HELLO).payload_sum for head in said))
        with pytest.raises(AuthError, match="server does not know the secret"):
            join(second)


def test_a_reflected_proof_is_refused(pool: ThreadPoolExecutor) -> None:
    def reflecting_server(connection: Connection) -> None:
        talk = talk_on(connection)
        talk.hear(Hello)
        talk.say(Challenge(nonce=new_nonce()))
        talk.hear(Challenge)
        answer = talk.hear(Proof)
        talk.say(OFFER, answer)

    with connection_pair(proved=False) as (client, server):
        served = pool.submit(reflecting_server, server)
        with pytest.raises(AuthError, match="server does not know the secret"):
            join(client)
        served.result(DEADLINE_S)


REWRITES: list[tuple[type[Message], dict[str, object]]] = [
    (Hello, {"worker_id": 2}),
    (Hello, {"node": "mini2"}),
    (Hello, {"instance": "f" * 16}),
    (Hello, {"wanted": "mini2"}),
    (Hello, {"version": "9"}),
    (Challenge, {"nonce": "00" * 32}),
    (Welcome, {"settings": RUN.model_dump(mode="json") | {"worker_update_interval": 1000}}),
    (Welcome, {"codec": "fp16"}),
    (Welcome, {"heartbeat_timeout_s": 1e6}),
    (Reject, {"code": "over"}),
    (Reject, {"retry_after_s": None}),
]


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize(("kind", "change"), REWRITES)
def test_who_sits_between_the_two_can_change_nothing_that_is_said(
    pool: ThreadPoolExecutor, kind: type[Message], change: dict[str, object], encrypted: bool
) -> None:
    """Somebody without the secret who speaks the protocol, and TLS, with both sides."""

    with (
        connection_pair(proved=False) as (client, left),
        connection_pair(proved=False) as (right, server),
    ):
        joined = pool.submit(join, client, encryption="on" if encrypted else "auto")
        served = pool.submit(say_no if kind is Reject else serve, server)
        with suppress(SmolclusterError):
            if encrypted:
                left.encrypt(
                    new_identity().context, server_side=True, deadline=Deadline(DEADLINE_S)
                )
                right.encrypt(client_context(), server_side=False, deadline=Deadline(DEADLINE_S))
            pass_on(left, right, kind, change)
        left.close()
        right.close()
        error = joined.exception(10.0)
        assert isinstance(error, AuthError | PeerLost | Rejected)
        assert not (isinstance(error, Rejected) and error.is_proved)
        with suppress(SmolclusterError):
            served.result(DEADLINE_S)


def pass_on(
    left: Connection, right: Connection, kind: type[Message], change: dict[str, object]
) -> None:
    """Pass a handshake on from client to server and back, with one message changed."""
    for end in (left, right):
        end.max_unproved = None
    for source, sink, count in (
        (left, right, 1),
        (right, left, 1),
        (left, right, 2),
        (right, left, 2),
    ):
        for _ in range(count):
            message, _ = source.receive(deadline=Deadline(DEADLINE_S))
            changed = message.model_copy(update=change) if isinstance(message, kind) else message
            sink.send(changed)


def test_a_handshake_that_is_passed_on_unchanged_succeeds_unless_it_is_encrypted(
    pool: ThreadPoolExecutor,
) -> None:
    with (
        connection_pair(proved=False) as (client, left),
        connection_pair(proved=False) as (right, server),
    ):
        joined, served = pool.submit(join, client), pool.submit(serve, server)
        pass_on(left, right, Proof, {})
        assert joined.result(DEADLINE_S).run == RUN
        served.result(DEADLINE_S)


@pytest.mark.parametrize("encryption", ["auto", "on"])
def test_a_server_that_must_encrypt_refuses_plain_clients(
    pool: ThreadPoolExecutor, encryption: Encryption
) -> None:
    with connection_pair(proved=False) as (client, server):
        server.address = "192.168.1.4"
        served = pool.submit(serve, server, Door("mini2", SECRET, DOOR.identity, encryption))
        with pytest.raises(Rejected) as caught:
            join(client, encryption="off")
        assert (caught.value.code, caught.value.is_proved) == ("encryption", False)
        assert isinstance(error_of(served), ProtocolError)


@pytest.mark.parametrize(
    ("encryption", "address", "expected"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "127.8.8.8", False),
        ("auto", "::1", False),
        ("auto", "::ffff:127.0.0.1", False),
        ("auto", "", False),
        ("auto", "192.168.1.4", True),
        ("auto", "fe80::1%eth0", True),
        ("on", "127.0.0.1", True),
        ("off", "192.168.1.4", False),
    ],
)
def test_only_loopback_is_plain_unless_told_otherwise(
    encryption: Encryption, address: str, expected: bool
) -> None:
    assert must_encrypt(encryption, stays_here=is_loopback(address)) == expected


@pytest.mark.parametrize(
    "sets",
    [
        {**HELLO.sets, "session": "00" * 32},
        {**HELLO.sets, "ps": "00" * 32},
        introduce("mini1", 1, (SESSION,)).sets,  # it does not know the server's
    ],
)
def test_another_version_is_named_on_both_sides(
    pool: ThreadPoolExecutor, sets: dict[str, str]
) -> None:
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        other = HELLO.model_copy(update={"version": "0.9", "sets": sets})
        with pytest.raises(Rejected, match=rf"{smolcluster.__version__}.*0\.9") as caught:
            client_handshake(client, other, SECRET, Deadline(DEADLINE_S), answer=Accepted)
        assert (caught.value.code, caught.value.is_proved) == ("version", True)
        error = error_of(served)
        assert isinstance(error, VersionDiffers)
        assert "0.9" in str(error)


def test_another_protocol_is_named_on_both_sides(pool: ThreadPoolExecutor) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        served = pool.submit(serve, server)
        head = frame_of(HELLO).head
        raw.sendall(head[:4] + b"\x07" + head[5:])
        heard, _ = Connection(raw).receive(frozenset({Reject}))
        assert isinstance(heard, Reject)
        assert (heard.code, heard.retry_after_s) == ("protocol", None)
        assert isinstance(error_of(served), VersionDiffers)


def test_refusing_a_client_that_has_gone_is_no_error() -> None:
    with raw_and_connection(proved=False) as (raw, server):
        raw.close()
        reject(server, "busy", "worker 1 is here already")
        assert server.is_closed
        refuse(Authenticated(HELLO, talk_on(server), SETS), "busy", "worker 1 is here already")


@pytest.mark.parametrize(
    "wait",
    [
        lambda server: server_authenticate(server, DOOR, Deadline(SOON_S)),
        lambda client: client_handshake(client, HELLO, SECRET, Deadline(SOON_S), answer=Welcome),
    ],
    ids=["server", "client"],
)
def test_a_peer_that_says_nothing_is_given_up(wait: Callable[[Connection], object]) -> None:
    with raw_and_connection(proved=False) as (_, connection):
        with pytest.raises(PeerLost, match="peer: handshake: did not finish in time"):
            wait(connection)
        assert connection.is_closed


def test_a_peer_that_goes_without_a_word_is_not_blamed_for_more() -> None:
    with raw_and_connection(proved=False) as (raw, server):
        server.address = "192.168.1.4"
        raw.close()
        with pytest.raises(PeerLost, match="closed the connection"):
            server_authenticate(server, DOOR, Deadline(DEADLINE_S))


def never_fits(raw: socket.socket) -> None:
    raw.sendall(build_frame(Hello.KIND, b"{" + b" " * 4096).head)


def several_hellos(raw: socket.socket) -> None:
    say(raw, HELLO)
    say(raw, HELLO)


def announces_much(raw: socket.socket) -> None:
    raw.sendall(b"SMOL\x02\x01\x00\x00" + (0).to_bytes(4, "big") + (2**63).to_bytes(8, "big"))


@pytest.mark.parametrize(
    "talk",
    [
        never_fits,
        several_hellos,
        announces_much,
        lambda raw: raw.sendall(random.Random(1).randbytes(UNPROVED_NBYTES)),  # noqa: S311
        lambda raw: raw.sendall(b"GET / HTTP/1.1\r\n\r\n    "),
        lambda raw: say(raw, Heartbeat(sent_at=1.0)),
        lambda raw: say(raw, Proof(mac="00" * 32)),
        lambda raw: raw.sendall(b"".join(build_frame(1, b"[" * 3000).buffers)),
        lambda raw: raw.sendall(b"".join(frame_of(push(64), bytes(64)).buffers)),
    ],
    ids=["long", "twice", "2^63", "random", "http", "heartbeat", "proof", "deep", "push"],
)
def test_strangers_that_do_not_keep_to_the_protocol_are_cut_off(
    talk: Callable[[socket.socket], object],
) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        talk(raw)
        raw.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match=r"^peer: handshake: "):
                server_authenticate(server, DOOR, Deadline(DEADLINE_S))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 256 * 1024
        assert server.bytes_received <= UNPROVED_NBYTES
        assert server.is_closed
