import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from connection_pairs import BUCKET_BYTES, RUN, connection_pair, push, raw_and_connection
from smolcluster.errors import AuthError, PeerLost, ProtocolError, Rejected, SmolclusterError
from smolcluster.transport.connection import UNPROVED_NBYTES, Connection
from smolcluster.transport.frames import PROTOCOL_VERSION, build_frame
from smolcluster.transport.handshake import (
    Authenticated,
    Offer,
    accept,
    client_handshake,
    reject,
    server_authenticate,
)
from smolcluster.transport.messages import (
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Proof,
    Push,
    Reject,
    Welcome,
    frame_of,
)
from smolcluster.transport.security import Secret, new_nonce, proof
from smolcluster.utils.retry import Deadline

pytestmark = [pytest.mark.timeout(60)]

SECRET = Secret(Path("/home/me/secret"), b"s" * 64)
OTHER_SECRET = Secret(Path("/home/you/secret"), b"x" * 64)
HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    version="0.1.0",
    node="mini1",
    worker_id=1,
    instance="0123456789abcdef",
)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def let_in(connection: Connection, client: Authenticated) -> None:
    accept(
        connection,
        client,
        Offer(
            run_id="edp-1",
            incarnation="0123abcd",
            run=RUN,
            model_fingerprint="ab" * 32,
            bucket_bytes=BUCKET_BYTES,
            codec="int8",
            heartbeat_timeout_s=7.0,
        ),
    )


def serve(connection: Connection, secret: Secret = SECRET, seconds: float = 5.0) -> Authenticated:
    client = server_authenticate(connection, secret, Deadline(seconds))
    let_in(connection, client)
    return client


def join(connection: Connection, secret: Secret = SECRET, hello: Hello = HELLO) -> Welcome:
    return client_handshake(connection, hello, secret, Deadline(5.0))


def error_of(future: Future[Authenticated]) -> BaseException:
    error = future.exception(10.0)
    assert error is not None
    return error


def say(raw: socket.socket, message: Message) -> bytes:
    frame = frame_of(message)
    raw.sendall(b"".join(frame.buffers))
    return frame.head


def prove(hello: bytes, challenge: bytes, nonce: str, secret: Secret = SECRET) -> Proof:
    mac = proof(secret.key, "client", hello, challenge, bytes.fromhex(nonce))
    return Proof(mac=mac.hex(), nonce=nonce)


@pytest.mark.parametrize("kind", ["socketpair", "tcp"])
def test_two_that_share_the_secret_agree(pool: ThreadPoolExecutor, kind: str) -> None:
    with connection_pair(kind, proved=False) as (client, server):
        served = pool.submit(serve, server)
        welcome = join(client)
        assert served.result(10.0).hello == HELLO
        assert (welcome.run, welcome.bucket_bytes) == (RUN, BUCKET_BYTES)
        assert server.peer.startswith("mini1 (")
        for sender, receiver in ((client, server), (server, client)):
            assert receiver.stall_timeout_s == 7.0
            sender.send(push(BUCKET_BYTES), bytes(BUCKET_BYTES))
            assert isinstance(receiver.receive()[0], Push)


def test_a_client_with_another_secret_is_turned_away(pool: ThreadPoolExecutor) -> None:
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        with pytest.raises(AuthError, match="does not accept the secret in /home/you/secret"):
            join(client, OTHER_SECRET)
        error = error_of(served)
        assert isinstance(error, AuthError)
        assert "calls itself 'mini1' does not know the secret in /home/me/secret" in str(error)
        assert server.broken
        assert client.broken


def test_a_reject_before_the_proof_has_no_detail(pool: ThreadPoolExecutor) -> None:
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        client.send(HELLO)
        client.receive({Challenge})
        client.send(Proof(mac="00" * 32, nonce=new_nonce()))
        assert client.receive()[0] == Reject(code="auth", sentence="not accepted")
        client.close()
        assert isinstance(error_of(served), AuthError)


def test_a_server_with_another_secret_is_not_believed(pool: ThreadPoolExecutor) -> None:
    def impostor(connection: Connection) -> None:
        hello, _ = connection.receive({Hello})
        assert isinstance(hello, Hello)
        connection.send(Challenge(nonce=new_nonce()))
        connection.receive({Proof})
        let_in(connection, Authenticated(hello, os.urandom(32)))

    with connection_pair(proved=False) as (client, server):
        served = pool.submit(impostor, server)
        with pytest.raises(AuthError, match="server does not know the secret in /home/me/secret"):
            join(client)
        served.result(10.0)
        assert client.broken


def test_the_server_proves_nothing_to_a_client_that_did_not(pool: ThreadPoolExecutor) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        served = pool.submit(serve, server)
        say(raw, HELLO)
        say(raw, Proof(mac="00" * 32, nonce=new_nonce()))
        raw.shutdown(socket.SHUT_WR)
        heard = b"".join(iter(lambda: raw.recv(4096), b""))
        assert b"Welcome" not in heard
        assert heard.count(b"mac") == 0
        assert isinstance(error_of(served), AuthError)


def test_a_replayed_proof_is_refused(pool: ThreadPoolExecutor) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        listener = Connection(raw)
        served = pool.submit(serve, server)
        hello = say(raw, HELLO)
        listener.receive({Challenge})
        recorded = prove(hello, listener.received_head, new_nonce())
        listener.send(recorded)
        served.result(10.0)
    with raw_and_connection(proved=False) as (raw, server):
        served = pool.submit(serve, server)
        say(raw, HELLO)
        say(raw, recorded)
        raw.shutdown(socket.SHUT_WR)
        assert isinstance(error_of(served), AuthError)


def test_a_replayed_server_is_not_believed(pool: ThreadPoolExecutor) -> None:
    """The server's side of one handshake, recorded and played to the same client again."""
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        client.send(HELLO)
        challenge, _ = client.receive({Challenge})
        hello_head = frame_of(HELLO).head
        client.send(prove(hello_head, client.received_head, new_nonce()))
        client.max_unproved = None
        welcome, _ = client.receive({Welcome})
        served.result(10.0)
    with raw_and_connection(proved=False) as (raw, second):
        say(raw, challenge)
        say(raw, welcome)
        with pytest.raises(AuthError, match="server does not know the secret"):
            join(second)


def test_a_reflected_proof_is_refused(pool: ThreadPoolExecutor) -> None:
    def reflecting_server(connection: Connection) -> None:
        hello, _ = connection.receive({Hello})
        assert isinstance(hello, Hello)
        connection.send(Challenge(nonce=new_nonce()))
        answer, _ = connection.receive({Proof})
        assert isinstance(answer, Proof)
        let_in(connection, Authenticated(hello, bytes.fromhex(answer.mac)))

    with connection_pair(proved=False) as (client, server):
        served = pool.submit(reflecting_server, server)
        with pytest.raises(AuthError, match="server does not know the secret"):
            join(client)
        served.result(10.0)


@pytest.mark.parametrize(
    "changed", [{"worker_id": 2}, {"node": "mini2"}, {"instance": "f" * 16}, {"version": "9"}]
)
def test_a_hello_that_was_tampered_with_is_refused(
    pool: ThreadPoolExecutor, changed: dict[str, object]
) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        listener = Connection(raw)
        served = pool.submit(serve, server)
        say(raw, HELLO.model_copy(update=changed))
        listener.receive({Challenge})
        listener.send(prove(frame_of(HELLO).head, listener.received_head, new_nonce()))
        raw.shutdown(socket.SHUT_WR)
        assert isinstance(error_of(served), AuthError)


def test_a_proof_with_another_nonce_is_refused(pool: ThreadPoolExecutor) -> None:
    with raw_and_connection(proved=False) as (raw, server):
        listener = Connection(raw)
        served = pool.submit(serve, server)
        hello = say(raw, HELLO)
        listener.receive({Challenge})
        right = prove(hello, listener.received_head, new_nonce())
        listener.send(right.model_copy(update={"nonce": new_nonce()}))
        raw.shutdown(socket.SHUT_WR)
        assert isinstance(error_of(served), AuthError)


def test_another_protocol_version_is_named_on_both_sides(pool: ThreadPoolExecutor) -> None:
    with connection_pair(proved=False) as (client, server):
        served = pool.submit(serve, server)
        with pytest.raises(Rejected, match="server speaks protocol 1, this worker 2") as caught:
            join(client, hello=HELLO.model_copy(update={"protocol": 2}))
        assert (caught.value.code, caught.value.retry_after_s) == ("protocol", None)
        error = error_of(served)
        assert isinstance(error, ProtocolError)
        assert "this worker 2" in str(error)


def test_a_refusal_tells_why_and_when_to_ask_again(pool: ThreadPoolExecutor) -> None:
    def refuse(connection: Connection) -> None:
        server_authenticate(connection, SECRET, Deadline(5.0))
        reject(connection, "busy", "worker 1 is here already", retry_after_s=2.5)

    with connection_pair(proved=False) as (client, server):
        served = pool.submit(refuse, server)
        with pytest.raises(Rejected, match="worker 1 is here already") as caught:
            join(client)
        assert (caught.value.code, caught.value.retry_after_s) == ("busy", 2.5)
        assert caught.value.exit_code == 78
        served.result(10.0)


def test_refusing_a_client_that_has_gone_is_no_error() -> None:
    with raw_and_connection(proved=False) as (raw, server):
        raw.close()
        reject(server, "busy", "worker 1 is here already")
        assert server.broken


def test_a_peer_that_says_nothing_is_given_up() -> None:
    with raw_and_connection(proved=False) as (_, server):
        with pytest.raises(PeerLost, match="peer: handshake: did not finish in time"):
            server_authenticate(server, SECRET, Deadline(0.1))
        assert server.broken


def test_a_server_that_says_nothing_is_given_up() -> None:
    with raw_and_connection(proved=False) as (_, client):
        with pytest.raises(PeerLost, match="did not finish in time"):
            client_handshake(client, HELLO, SECRET, Deadline(0.1))
        assert client.broken


def test_a_peer_that_drips_is_given_up_in_the_same_time() -> None:
    with raw_and_connection(proved=False) as (raw, server):
        stop = threading.Event()

        def drip() -> None:
            for byte in b"".join(frame_of(HELLO).buffers):
                raw.sendall(bytes([byte]))
                if stop.wait(0.1):
                    return

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        with pytest.raises(PeerLost, match="did not finish in time"):
            server_authenticate(server, SECRET, Deadline(0.45))
        assert server.bytes_received < 10
        stop.set()
        dripping.join(5.0)


def never_fits(raw: socket.socket) -> None:
    raw.sendall(build_frame(Hello.KIND, b"{" + b" " * 4096).head)


def several_hellos(raw: socket.socket) -> None:
    say(raw, HELLO)
    say(raw, HELLO)


def announces_much(raw: socket.socket) -> None:
    raw.sendall(b"SMOL\x01\x01\x00\x00" + (0).to_bytes(4, "big") + (2**63).to_bytes(8, "big"))


@pytest.mark.parametrize(
    "talk",
    [
        never_fits,
        several_hellos,
        announces_much,
        lambda raw: raw.sendall(os.urandom(UNPROVED_NBYTES)),
        lambda raw: raw.sendall(b"GET / HTTP/1.1\r\n\r\n    "),
        lambda raw: say(raw, Heartbeat(sent_at=1.0)),
        lambda raw: say(raw, Proof(mac="00" * 32, nonce="00" * 32)),
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
                server_authenticate(server, SECRET, Deadline(5.0))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 256 * 1024
        assert server.bytes_received <= UNPROVED_NBYTES
        assert server.broken


def test_every_flipped_bit_of_a_handshake_fails_it(pool: ThreadPoolExecutor) -> None:
    hello = b"".join(frame_of(HELLO).buffers)
    for index in range(len(hello)):
        damaged = bytearray(hello)
        damaged[index] ^= 1 << index % 8
        with raw_and_connection(proved=False) as (raw, server):
            raw.sendall(damaged)
            raw.shutdown(socket.SHUT_WR)
            with pytest.raises(SmolclusterError):
                server_authenticate(server, SECRET, Deadline(5.0))
            assert server.broken
