"""Speed of a session on loopback TCP, against a bare pair of sockets.

A push of 70 MB in buckets of 1 MiB goes to another process: with nothing around it through a socket that
sends and a socket that `recv_into`s the same pieces; as Push messages through `Connection`; and through a
`Session` on both sides, whose receiver drops the buckets, or decodes them as EDP's server does; and once more
in TLS. All sockets
have the same options and the same two processes; each transfer ends when the receiver's answer is back.
Round trips are a Pull and an Ack through the sessions. For comparison, a pickled dict of the same size is
read with `data += chunk`.
"""

import argparse
import multiprocessing
import pickle
import socket
import ssl
import struct
import sys
from functools import partial
from multiprocessing.process import BaseProcess

import torch

from common import paired_ratios, report, seconds
from smolcluster.server.push import GradientReceiver, Pushed
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection, accept_next, connect, listen
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    FROM_SERVER,
    FROM_WORKER,
    Ack,
    Heartbeat,
    Kinds,
    LeaseKey,
    Message,
    Pull,
    Push,
    TensorSpec,
)
from smolcluster.wire.node import MAX_QUEUED
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.tls import client_context, new_identity

BUCKET_BYTES = 1024 * 1024
BUCKET_NUMEL = BUCKET_BYTES // 4
STALL_TIMEOUT_S = 60.0
SWITCH_INTERVAL_S = 0.0005
HOST = "127.0.0.1"
LENGTH = struct.Struct("!Q")
LEASE = LeaseKey(incarnation="0123456789abcdef", epoch=1, start=4096, stop=4128, grant=129)


class Dropping(Receiver):
    """A receiver that passes messages on, and of a push only the last bucket's, without its payload."""

    def __call__(self, message: Message, payload: memoryview) -> Event | None:  # noqa: ARG002
        """Take a message in the reader's thread."""
        if isinstance(message, Push) and message.bucket + 1 < message.num_buckets:
            return None
        return MessageReceived(0, message)


class Wires:
    """Three TCP connections between this process and another, which serves the other ends."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        values = [torch.rand(BUCKET_NUMEL) for _ in range(num_buckets)]
        self.buckets = [memoryview(each.numpy().data).cast("B") for each in values]
        with socket.create_server((HOST, 0)) as server:
            (listener,) = listen([HOST], 0)
            context = multiprocessing.get_context("spawn")
            ports = (server.getsockname()[1], listener.getsockname()[1])
            self.process: BaseProcess = context.Process(target=serve, args=(*ports, num_buckets))
            self.process.start()
            self.bare, _ = server.accept()
            tune(self.bare)
            self.connection = proved(accept_next([listener], STALL_TIMEOUT_S))
            self.inbox = Inbox()
            accepted = proved(accept_next([listener], STALL_TIMEOUT_S))
            self.session = start_session(accepted, Dropping(), self.inbox, FROM_SERVER)
            accepted = proved(accept_next([listener], STALL_TIMEOUT_S), new_identity().context)
            self.encrypted = start_session(accepted, Dropping(), self.inbox, FROM_SERVER)
            listener.close()

    def push_bare(self) -> None:
        """Send the buckets with nothing around them."""
        order(self.bare, b"b")
        for bucket in self.buckets:
            self.bare.sendall(bucket)
        self.bare.recv(1)

    def push_connection(self) -> None:
        """Send the buckets as Push messages through a connection."""
        order(self.bare, b"c")
        for number, bucket in enumerate(self.buckets):
            self.connection.send(push_message(number, self.num_buckets), bucket)
        self.connection.receive()

    def push_session(self, *, decode: bool = False, encrypt: bool = False) -> None:
        """Send the buckets as Push messages through a session, whose other end decodes or drops them."""
        order(self.bare, b"g" if decode else b"t" if encrypt else b"s", 1)
        session = self.encrypted if encrypt else self.session
        for number, bucket in enumerate(self.buckets):
            session.send(push_message(number, self.num_buckets), bucket)
        next_event(self.inbox)

    def round_trips(self, count: int) -> None:
        """Exchange a Pull for an Ack through the sessions, one at a time."""
        order(self.bare, b"s", count)
        for _ in range(count):
            self.session.send(Pull())
            next_event(self.inbox)

    def push_pickle(self) -> None:
        """Send the buckets as one pickled dict."""
        data = pickle.dumps({str(i): bytes(bucket) for i, bucket in enumerate(self.buckets)})
        order(self.bare, b"d", len(data))
        self.bare.sendall(data)
        self.bare.recv(1)

    def close(self) -> None:
        """End the other process."""
        self.bare.close()
        self.connection.close()
        self.session.finish()
        self.encrypted.finish()
        self.process.join(10.0)


def proved(
    connection: Connection | None, tls: ssl.SSLContext | None = None, *, server_side: bool = True
) -> Connection:
    """A connection whose peer needs no handshake here, but for that of TLS."""
    if connection is None:
        raise SystemExit("the receiving process did not connect")
    if tls is not None:
        connection.encrypt(tls, server_side=server_side, deadline=Deadline(STALL_TIMEOUT_S))
    connection.proved(BUCKET_BYTES, STALL_TIMEOUT_S)
    return connection


def start_session(
    connection: Connection, receiver: Receiver, inbox: Inbox, kinds: Kinds
) -> Session:
    """Begin a session as the cluster has it."""
    session = Session(
        connection,
        session_id=0,
        receiver=receiver,
        inbox=inbox,
        heartbeat_timeout_s=STALL_TIMEOUT_S,
        max_queued=MAX_QUEUED,
        kinds=kinds,
    )
    session.start()
    return session


def next_event(inbox: Inbox) -> Event:
    """What a session has received."""
    event = inbox.get(STALL_TIMEOUT_S)
    if event is None or isinstance(event, SessionClosed):
        raise SystemExit(f"the session failed: {event}")
    return event


def push_message(bucket: int, num_buckets: int) -> Push:
    """A Push as a worker makes one for each bucket."""
    tensor = TensorSpec(codec="fp32", dtype="float32", shape=(BUCKET_NUMEL,), nbytes=BUCKET_BYTES)
    return Push(
        lease=LEASE,
        base_version=1000,
        bucket=bucket,
        num_buckets=num_buckets,
        num_samples=32,
        num_terms=32,
        loss=0.25,
        compute_s=0.1,
        tensor=tensor,
    )


def tune(bare: socket.socket) -> None:
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def order(control: socket.socket, what: bytes, size: int = 0) -> None:
    """Tell the other process what comes, and wait until it is ready."""
    control.sendall(what + LENGTH.pack(size))
    control.recv(1)


def serve(bare_port: int, port: int, num_buckets: int) -> None:
    """The other process: do what is ordered until the order's socket closes."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bare = socket.create_connection((HOST, bare_port))
    tune(bare)
    connection = proved(connect(HOST, port, STALL_TIMEOUT_S))
    buckets = [slice(i * BUCKET_NUMEL, (i + 1) * BUCKET_NUMEL) for i in range(num_buckets)]
    receivers: dict[bytes, Receiver] = {
        b"s": Dropping(),
        b"g": GradientReceiver(0, "fp32", buckets),
    }
    inbox = Inbox()
    accepted = proved(connect(HOST, port, STALL_TIMEOUT_S))
    session = start_session(accepted, receivers[b"s"], inbox, FROM_WORKER)
    connected = connect(HOST, port, STALL_TIMEOUT_S)
    accepted = proved(connected, client_context(), server_side=False)
    encrypted = start_session(accepted, Dropping(), inbox, FROM_WORKER)
    scratch = memoryview(bytearray(BUCKET_BYTES))
    while len(request := bare.recv(1 + LENGTH.size, socket.MSG_WAITALL)) > LENGTH.size:
        what, size = request[:1], LENGTH.unpack(request[1:])[0]
        session.receiver = receivers.get(what, session.receiver)
        bare.sendall(b"!")
        if what == b"b":
            for _ in range(num_buckets):
                read_bare(bare, scratch)
            bare.sendall(b"!")
        elif what == b"c":
            for _ in range(num_buckets):
                connection.receive()
            connection.send(Heartbeat(sent_at=1.0))
        elif what == b"d":
            read_pickle(bare, size)
            bare.sendall(b"!")
        else:
            for _ in range(size):
                acknowledge(encrypted if what == b"t" else session, next_event(inbox))
    for each in (session, encrypted):
        each.finish()
        each.join(10.0)


def acknowledge(session: Session, event: Event) -> None:
    """Answer a Pull or a whole push, as the server's loop does."""
    if isinstance(event, Pushed):
        event.free()
    session.send(Ack(lease=LEASE, outcome="applied", version=1001))


def read_bare(bare: socket.socket, scratch: memoryview) -> None:
    """Fill the scratch bucket from the socket."""
    filled = 0
    while filled < scratch.nbytes:
        filled += bare.recv_into(scratch[filled:])


def read_pickle(bare: socket.socket, nbytes: int) -> None:
    """Read a message as `data += chunk` and load it; it comes from this program's own process."""
    data = b""
    while len(data) < nbytes:
        data += bare.recv(BUCKET_BYTES)
    pickle.loads(data)  # noqa: S301


def measure(num_buckets: int, rounds: int, round_trips: int) -> dict[str, float]:
    """All figures, in GB/s and round trips a second."""
    wires = Wires(num_buckets)
    push_decoded = partial(wires.push_session, decode=True)
    push_encrypted = partial(wires.push_session, encrypt=True)
    try:
        session = paired_ratios(wires.push_bare, wires.push_session, rounds)
        encrypted = paired_ratios(wires.push_bare, push_encrypted, rounds)
        decoded = paired_ratios(wires.push_bare, push_decoded, rounds)
        connection = paired_ratios(wires.push_bare, wires.push_connection, rounds)
        round_trips_s = min(seconds(lambda: wires.round_trips(round_trips)) for _ in range(3))
        pickle_s = seconds(wires.push_pickle)
    finally:
        wires.close()
    gigabytes = num_buckets * BUCKET_BYTES / 1e9
    return {
        "ratio_to_bare_socket": session.ratio,
        "with_decode_ratio": decoded.ratio,
        "connection_ratio": connection.ratio,
        "encrypted_ratio": encrypted.ratio,
        "encrypted_gb_per_s": gigabytes / encrypted.candidate_s,
        "bare_gb_per_s": gigabytes / session.reference_s,
        "goodput_gb_per_s": gigabytes / session.candidate_s,
        "with_decode_gb_per_s": gigabytes / decoded.candidate_s,
        "connection_gb_per_s": gigabytes / connection.candidate_s,
        "pickle_gb_per_s": gigabytes / pickle_s,
        "round_trips_per_s": round_trips / round_trips_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a session against a bare socket.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--buckets", type=int, default=67, help="buckets of 1 MiB in a push")
    parser.add_argument("--rounds", type=int, default=41, help="paired rounds of each kind")
    parser.add_argument("--round-trips", type=int, default=2000, help="Pulls answered by an Ack")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    results = measure(arguments.buckets, arguments.rounds, arguments.round_trips)
    rows = [("what", "speed", "ratio")]
    for what, speed, ratio in (
        ("bare sockets", "bare_gb_per_s", None),
        ("session", "goodput_gb_per_s", "ratio_to_bare_socket"),
        ("session, encrypted", "encrypted_gb_per_s", "encrypted_ratio"),
        ("session, fp32 decoded", "with_decode_gb_per_s", "with_decode_ratio"),
        ("connection", "connection_gb_per_s", "connection_ratio"),
        ("pickle, data += chunk", "pickle_gb_per_s", None),
    ):
        shown = "" if ratio is None else f"{results[ratio]:.2f}"
        rows.append((what, f"{results[speed]:.3f} GB/s", shown))
    rows.append(("round trips through sessions", f"{results['round_trips_per_s']:.0f} /s", ""))
    report("A push on loopback", rows, results, as_json=arguments.json)


if __name__ == "__main__":
    main()
