"""What every connection must do, over a Unix socket pair, TCP and TLS alike."""

import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest

from connection_pairs import (
    BUCKET_BYTES,
    DEADLINE_S,
    connection_pair,
    dripping,
    one_of_each,
    push,
    raw_and_connection,
    speak_when_waited_for,
    tensor,
)
from smolcluster.errors import PeerLost, ProtocolError, SmolclusterError
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import UNPROVED_NBYTES, Connection, PlaceFor, nowhere
from smolcluster.wire.frames import build_frame, frame_nbytes
from smolcluster.wire.messages import (
    FROM_WORKER,
    Heartbeat,
    Hello,
    Message,
    Pull,
    Push,
    Reject,
    State,
    encode,
    frame_of,
)
from smolcluster.wire.tls import TlsSocket
from waiting import Clock

pytestmark = [pytest.mark.timeout(300)]

HEARTBEAT = b"".join(frame_of(Heartbeat(sent_at=1.0)).buffers)
PUSH = b"".join(frame_of(push(16), bytes(range(16))).buffers)
PAYLOAD_AT = len(PUSH) - 16 - 8
PREFIX = struct.Struct("!4sBBHIQ")
LENGTH_FIELDS = range(8, 20)


@pytest.fixture(params=["socketpair", "tcp", "tls"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_all_messages_arrive_in_order(kind: str) -> None:
    with connection_pair(kind) as (one, other):
        for message in one_of_each():
            spec = getattr(message, "tensor", None)
            payload = bytes(spec.nbytes) if spec else b""
            one.send(message, payload)
        for message in one_of_each():
            received, payload_view = other.receive()
            spec = getattr(message, "tensor", None)
            assert received == message
            assert bytes(payload_view) == (bytes(spec.nbytes) if spec else b"")
        assert other.bytes_received == one.bytes_sent > 0


def test_both_directions_carry_full_buckets_at_once(kind: str) -> None:
    content = bytes(range(256)) * (BUCKET_BYTES // 256)
    rounds = 100

    def send_all(connection: Connection) -> Callable[[], None]:
        def run() -> None:
            for _ in range(rounds):
                connection.send(push(BUCKET_BYTES), content)

        return run

    with connection_pair(kind) as pair:
        senders = [in_thread(send_all(connection)) for connection in pair]
        for _ in range(rounds):
            for connection in pair:
                assert connection.receive()[1] == content
        for sender in senders:
            sender.join(DEADLINE_S)


class Places:
    """Memory of the test's own for the payloads of pushes, with something else around it."""

    def __init__(self, nbytes: int, at: int = 0) -> None:
        self.memory = bytearray(b"." * (at + nbytes + 8))
        self.place = memoryview(self.memory)[at : at + nbytes]
        self.asked: list[Message] = []

    def __call__(self, message: Message) -> memoryview | None:
        self.asked.append(message)
        return self.place if isinstance(message, Push) else None


def test_a_payload_is_written_where_its_receiver_wants_it(kind: str) -> None:
    content = bytes(range(256)) * (BUCKET_BYTES // 256)
    places = Places(BUCKET_BYTES, at=3)
    with connection_pair(kind) as (one, other):
        sender = in_thread(lambda: one.send(push(BUCKET_BYTES), content))
        message, payload = other.receive(place_for=places)
        sender.join(DEADLINE_S)
        assert message == push(BUCKET_BYTES)
        assert payload.obj is places.memory
        assert payload == content
        assert bytes(places.memory) == b"..." + content + b"." * 8, "and nowhere else"
        assert places.asked == [message]


def test_who_wants_a_payload_nowhere_gets_it_in_the_scratch_memory(kind: str) -> None:
    places = Places(16)
    state = next(each for each in one_of_each() if isinstance(each, State))
    with connection_pair(kind) as (one, other):
        one.send(state, b"w" * 64)
        one.send(push(16), b"g" * 16)
        one.send(Pull())
        message, weights = other.receive(place_for=places)
        assert message == state
        assert weights.obj is not places.memory
        _, gradient = other.receive(place_for=places)
        assert (bytes(weights), bytes(gradient)) == (b"w" * 64, b"g" * 16), "both are still there"
        assert other.receive(place_for=places)[0] == Pull()
        assert places.asked == [state, push(16), Pull()]


def test_nothing_is_placed_before_its_header_is_judged(kind: str) -> None:
    places = Places(16)
    damaged = bytearray(PUSH)
    damaged[PREFIX.size + 5] ^= 1
    lying = b"".join(build_frame(8, encode(push(16)), b"1234").buffers)
    for frame in (damaged, lying):
        with raw_and_connection(kind) as (raw, connection):
            raw.sendall(frame)
            with pytest.raises(ProtocolError):
                connection.receive(place_for=places)
    with raw_and_connection(kind) as (raw, connection):
        raw.sendall(PUSH)
        with pytest.raises(ProtocolError, match="unexpected Push"):
            connection.receive(frozenset({Pull}), place_for=places)
    assert places.asked == []


@pytest.mark.parametrize("kind", ["socketpair", "tcp"])
def test_a_damaged_payload_is_not_handed_out_wherever_it_lies(kind: str) -> None:
    frame = bytearray(PUSH)
    frame[-12] ^= 1
    for place_for in (Places(16), nowhere):
        with raw_and_connection(kind) as (raw, connection):
            raw.sendall(frame)
            with pytest.raises(ProtocolError, match="payload damaged"):
                connection.receive(place_for=place_for)
            with pytest.raises(PeerLost, match="closed for receiving"):
                connection.receive()


@pytest.mark.parametrize("place_for", [Places(16), nowhere])
def test_of_a_payload_in_tls_a_damaged_record_is_not_handed_out(place_for: PlaceFor) -> None:
    """Its own checksum is not looked at: what is authenticated needs none."""
    with connection_pair("tls") as (one, other):
        channel = one._channel
        assert isinstance(channel, TlsSocket)
        channel._encrypt(frame_of(push(16), bytes(range(16))).buffers)
        records = bytearray(channel._unsent)
        records[-30] ^= 1
        one._socket.sendall(records)
        with pytest.raises(SmolclusterError):
            other.receive(place_for=place_for)
        with pytest.raises(PeerLost, match="closed for receiving"):
            other.receive()


def test_a_message_for_which_there_is_no_place_ends_the_connection(kind: str) -> None:
    def refuse(message: Message) -> memoryview | None:
        raise ProtocolError(f"no {type(message).__name__} is expected now")

    with connection_pair(kind) as (one, other):
        one.send(push(16), bytes(16))
        one.send(Heartbeat(sent_at=1.0))
        with pytest.raises(ProtocolError, match=r"session: no Push is expected now"):
            other.receive(place_for=refuse)
        with pytest.raises(PeerLost, match="closed for receiving"):
            other.receive()


@pytest.mark.parametrize("frame", [HEARTBEAT, PUSH], ids=["heartbeat", "push"])
def test_a_frame_cut_anywhere_loses_the_peer(kind: str, frame: bytes) -> None:
    step = 5 if kind == "tls" else 1  # a handshake each
    for length in range(0, len(frame), step):
        with raw_and_connection(kind) as (raw, connection):
            raw.sendall(frame[:length])
            raw.close()
            with pytest.raises(PeerLost, match="peer: session: "):
                connection.receive(place_for=Places(16))
            with pytest.raises(PeerLost, match="closed for receiving"):
                connection.receive()


def test_every_flipped_bit_ends_the_connection(kind: str) -> None:
    step, stop = (21, PAYLOAD_AT) if kind == "tls" else (1, len(PUSH))  # a handshake each
    for bit in range(0, 8 * stop, step):  # within TLS nothing damages a payload
        damaged = bytearray(PUSH)
        damaged[bit // 8] ^= 1 << bit % 8
        with raw_and_connection(kind) as (raw, connection):
            raw.sendall(damaged)
            raw.shutdown(socket.SHUT_WR)
            # A larger length within the limits can only be told from the truth by waiting for it.
            expected = SmolclusterError if bit // 8 in LENGTH_FIELDS else ProtocolError
            with pytest.raises(expected):
                connection.receive()
            with pytest.raises(PeerLost, match="closed for receiving"):
                connection.receive()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: mini1\r\n\r\n", "not a smolcluster peer"),
        (bytes(range(256)), "not a smolcluster peer"),
        (PREFIX.pack(b"SMOL", 9, 12, 0, 2, 0), "version 9"),
        (PREFIX.pack(b"SMOL", 2, 12, 7, 2, 0), "reserved"),
        (PREFIX.pack(b"SMOL", 2, 0, 0, 2, 0), "unknown message kind 0"),
        (PREFIX.pack(b"SMOL", 2, 200, 0, 2, 0), "unknown message kind 200"),
        (PREFIX.pack(b"SMOL", 2, 12, 0, 2**32 - 1, 0), "header of 4294967295"),
        (PREFIX.pack(b"SMOL", 2, 8, 0, 300, 2**63), "payload of 9223372036854775808"),
        (PREFIX.pack(b"SMOL", 2, 8, 0, 300, BUCKET_BYTES + 1), "exceeds the limit of 65536"),
        (b"".join(build_frame(12, b"[" * 10_000).buffers), "Invalid JSON: recursion limit"),
        (b"".join(build_frame(13, b'{"reason":"","x":NaN}').buffers), "field 'x'"),
        (b"".join(build_frame(10, b"{}", b"1234").buffers), "announces a payload of 0 bytes"),
        (b"".join(build_frame(8, encode(push(16)), b"1234").buffers), "a payload of 16 bytes"),
        (b"".join(build_frame(8, encode(push(16))).buffers), "a payload of 16 bytes"),
    ],
)
def test_what_the_protocol_forbids_ends_the_connection(
    kind: str, data: bytes, complaint: str
) -> None:
    with raw_and_connection(kind) as (raw, connection):
        raw.sendall(data)
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match=f"^peer: session: .*({complaint})"):
                connection.receive()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 256 * 1024
        with pytest.raises(PeerLost, match="closed for receiving"):
            connection.receive()


def test_only_the_expected_kinds_are_heard(kind: str) -> None:
    with connection_pair(kind) as (one, other):
        one.send(Reject(code="busy", sentence="no"))
        with pytest.raises(
            ProtocolError, match="unexpected Reject, expected Buffers, CopyPiece, Delta, DeltaSent"
        ):
            other.receive(FROM_WORKER)


def test_a_stranger_may_send_four_kilobytes_in_all(kind: str) -> None:
    hello = frame_of(one_of_each()[0])
    with raw_and_connection(kind, proved=False) as (raw, connection):
        fitting = UNPROVED_NBYTES // hello.nbytes
        for _ in range(fitting):
            raw.sendall(b"".join(hello.buffers))
            connection.receive(frozenset({Hello}))
        raw.sendall(hello.head[:20])
        with pytest.raises(ProtocolError, match="has not proved itself exceed 4096"):
            connection.receive(frozenset({Hello}))
        assert connection.bytes_received <= UNPROVED_NBYTES


def test_a_stranger_cannot_announce_more_than_it_may_send(kind: str) -> None:
    for prefix in (
        PREFIX.pack(b"SMOL", 2, 1, 0, 4096, 0),
        PREFIX.pack(b"SMOL", 2, 8, 0, 300, 4000),
        PREFIX.pack(b"SMOL", 2, 8, 0, 300, 4097),
    ):
        with raw_and_connection(kind, proved=False) as (raw, connection):
            raw.sendall(prefix)
            with pytest.raises(ProtocolError, match="exceed"):
                connection.receive()


def test_the_limit_ends_with_the_proof(kind: str) -> None:
    with connection_pair(kind, proved=False) as (one, other):
        other.proved(BUCKET_BYTES, DEADLINE_S)
        one.send(push(8192), bytes(8192))
        assert len(other.receive()[1]) == 8192
        assert other.bytes_received == frame_nbytes(len(encode(push(8192))), 8192)


def test_a_silent_peer_is_lost_before_or_within_a_frame(kind: str) -> None:
    for length in (0, 3, 20, 30, len(PUSH) - 12, len(PUSH) - 1):
        with raw_and_connection(kind, stall_timeout_s=0.05) as (raw, connection):
            raw.sendall(PUSH[:length])
            began = time.monotonic()
            with pytest.raises(PeerLost, match=r"peer: session: silent for 0\.05 s"):
                connection.receive()
            assert time.monotonic() - began >= 0.05
            with pytest.raises(PeerLost, match="closed for receiving"):
                connection.receive()


def test_a_slow_peer_is_not_a_silent_one(kind: str) -> None:
    """Each piece comes when the one before is half of the timeout ago."""
    size = len(PUSH) // 5
    pieces = (PUSH[start : start + size] for start in range(0, len(PUSH), size))
    with raw_and_connection(kind, stall_timeout_s=0.1) as (raw, connection):
        speak_when_waited_for(connection, lambda: raw.sendall(next(pieces)))
        began = time.monotonic()
        message, payload = connection.receive()
        assert (message, bytes(payload)) == (push(16), bytes(range(16)))
        assert time.monotonic() - began > connection.stall_timeout_s


def test_a_trickle_does_not_outlast_a_deadline(kind: str) -> None:
    clock = Clock()
    with raw_and_connection(kind) as (raw, connection):
        deadline = Deadline(0.35, clock)
        with dripping(raw, PUSH, connection, clock), pytest.raises(PeerLost, match="in time"):
            connection.receive(deadline=deadline)
        assert connection.bytes_received in {3, 4}


def test_a_peer_that_does_not_read_is_lost(kind: str) -> None:
    """What it has said can still be read."""
    with raw_and_connection(kind, stall_timeout_s=0.1) as (raw, connection):
        raw.sendall(HEARTBEAT)
        with pytest.raises(PeerLost, match=r"took no byte for 0\.1 s"):
            for _ in range(1000):
                connection.send(push(BUCKET_BYTES), bytes(BUCKET_BYTES))
        with pytest.raises(PeerLost, match="closed for sending"):
            connection.send(Heartbeat(sent_at=1.0))
        assert connection.receive()[0] == Heartbeat(sent_at=1.0)


def test_a_partial_send_goes_on_where_it_stopped(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel soon returns what it could send so far, long before the peer is lost."""
    monkeypatch.setattr("smolcluster.wire.connection._SLICES_PER_STALL", 1000)
    size = 4 * 1024 * 1024
    content = bytes(range(256)) * (size // 256)
    message = State(incarnation="ab", version=1, bucket=0, num_buckets=1, tensor=tensor(size))
    with connection_pair(kind) as (one, other):
        other.proved(size, DEADLINE_S)
        sender = in_thread(lambda: one.send(message, content))
        threading.Event().wait(0.3)
        assert other.receive()[1] == content
        sender.join(DEADLINE_S)


def test_abort_wakes_a_waiting_reader(kind: str) -> None:
    with connection_pair(kind) as (one, _):
        problems: list[str] = []

        def read() -> None:
            try:
                one.receive()
            except PeerLost as error:
                problems.append(str(error))

        reader = in_thread(read)
        one.abort()
        reader.join(DEADLINE_S)
        assert len(problems) == 1


def test_closing_twice_and_using_after_is_safe(kind: str) -> None:
    with connection_pair(kind) as (one, other):
        one.close()
        one.close()
        one.abort()
        one.end_sending()
        one.finish()
        with pytest.raises(PeerLost):
            one.send(Heartbeat(sent_at=1.0))
        with pytest.raises(PeerLost):
            one.receive()
        with pytest.raises(PeerLost, match="closed the connection"):
            other.receive()


def test_last_words_are_heard_although_the_peer_is_still_talking(kind: str) -> None:
    with connection_pair(kind) as (one, other):
        for _ in range(20):
            one.send(push(64), bytes(64))
        other.send(Reject(code="busy", sentence="come back later"))
        finishing = in_thread(other.finish)
        message, _ = one.receive()
        assert isinstance(message, Reject)
        assert message.sentence == "come back later"
        one.close()
        finishing.join(DEADLINE_S)
        assert not finishing.is_alive()


def test_draining_a_peer_that_never_stops_is_bounded(kind: str) -> None:
    """It is not the silence that ends it."""
    with raw_and_connection(kind, proved=False) as (raw, connection):
        raw.sendall(bytes(3 * UNPROVED_NBYTES))
        connection.finish(drain_timeout_s=30.0)
        assert connection.bytes_received <= 2 * UNPROVED_NBYTES
    with raw_and_connection(kind, stall_timeout_s=1e4) as (raw, connection):
        connection.finish(drain_timeout_s=0.1)
