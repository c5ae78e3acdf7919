"""Speed of a connection on loopback TCP, against a bare pair of sockets.

A push of 70 MB in buckets of 1 MiB goes to another process, with headers and checksums through
`Connection`, and with nothing around it through a socket that sends and a socket that `recv_into`s the
same pieces. Both pairs have the same options and the same two processes; each transfer ends when the
receiver's answer is back. Round trips are Heartbeats. For comparison, a pickled dict of the same size is
read with `data += chunk`.
"""

import argparse
import multiprocessing
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from common import Paired, paired_ratios, report, seconds
from smolcluster.transport.connection import accept_next, connect, listen
from smolcluster.transport.messages import Heartbeat, LeaseKey, Push, TensorSpec

BUCKET_BYTES = 1024 * 1024
STALL_TIMEOUT_S = 60.0
SWITCH_INTERVAL_S = 0.0005
HOST = "127.0.0.1"
LENGTH = struct.Struct("!Q")


class Wires:
    """Two TCP connections between this process and another, which serves the other ends."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self.buckets = [memoryview(os.urandom(BUCKET_BYTES)) for _ in range(num_buckets)]
        with socket.create_server((HOST, 0)) as server:
            (listener,) = listen([HOST], 0)
            context = multiprocessing.get_context("spawn")
            ports = (server.getsockname()[1], listener.getsockname()[1])
            self.process: BaseProcess = context.Process(target=serve, args=(*ports, num_buckets))
            self.process.start()
            self.bare, _ = server.accept()
            accepted = accept_next([listener], STALL_TIMEOUT_S)
            listener.close()
        if accepted is None:
            raise SystemExit("the receiving process did not connect")
        self.connection = accepted
        self.connection.proved(BUCKET_BYTES, STALL_TIMEOUT_S)
        tune(self.bare)

    def push_bare(self) -> None:
        """Send the buckets with nothing around them."""
        order(self.bare, b"b")
        for bucket in self.buckets:
            self.bare.sendall(bucket)
        self.bare.recv(1)

    def push(self) -> None:
        """Send the buckets as Push messages."""
        order(self.bare, b"c")
        for number, bucket in enumerate(self.buckets):
            self.connection.send(push_message(number, self.num_buckets), bucket)
        self.connection.receive()

    def ping_pong(self, count: int) -> None:
        """Exchange `count` Heartbeats, one at a time."""
        order(self.bare, b"p", count)
        for _ in range(count):
            self.connection.send(Heartbeat())
            self.connection.receive()

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
        self.process.join(10.0)


def push_message(bucket: int, num_buckets: int) -> Push:
    """A Push as a worker makes one for each bucket."""
    lease = LeaseKey(incarnation="0123456789abcdef", epoch=1, start=4096, stop=4128, grant=129)
    numel = BUCKET_BYTES // 4
    tensor = TensorSpec(codec="fp32", dtype="float32", shape=(numel,), nbytes=BUCKET_BYTES)
    return Push(
        lease=lease,
        base_version=1000,
        bucket=bucket,
        num_buckets=num_buckets,
        num_samples=32,
        loss=0.25,
        tensor=tensor,
    )


def tune(bare: socket.socket) -> None:
    """Give the bare socket the options of a connection's."""
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def order(control: socket.socket, what: bytes, size: int = 0) -> None:
    """Tell the other process what comes, and wait until it is ready."""
    control.sendall(what + LENGTH.pack(size))
    control.recv(1)


def serve(bare_port: int, connection_port: int, num_buckets: int) -> None:
    """The other process: do what is ordered until the order's socket closes."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bare = socket.create_connection((HOST, bare_port))
    tune(bare)
    connection = connect(HOST, connection_port, STALL_TIMEOUT_S)
    connection.proved(BUCKET_BYTES, STALL_TIMEOUT_S)
    scratch = memoryview(bytearray(BUCKET_BYTES))
    while len(request := bare.recv(1 + LENGTH.size, socket.MSG_WAITALL)) > LENGTH.size:
        what, size = request[:1], LENGTH.unpack(request[1:])[0]
        bare.sendall(b"!")
        if what == b"b":
            for _ in range(num_buckets):
                read_bare(bare, scratch)
            bare.sendall(b"!")
        elif what == b"c":
            for _ in range(num_buckets):
                connection.receive()
            connection.send(Heartbeat())
        elif what == b"p":
            for _ in range(size):
                connection.receive()
                connection.send(Heartbeat())
        else:
            read_pickle(bare, size)
            bare.sendall(b"!")


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


def best(call: Callable[[], object], rounds: int = 3) -> float:
    """Shortest of some runs, in seconds."""
    return min(seconds(call) for _ in range(rounds))


def measure(num_buckets: int, rounds: int, round_trips: int) -> dict[str, float]:
    """All figures, in GB/s and round trips a second."""
    wires = Wires(num_buckets)
    try:
        paired: Paired = paired_ratios(wires.push_bare, wires.push, rounds)
        round_trip_s = best(lambda: wires.ping_pong(round_trips)) / round_trips
        pickle_s = best(wires.push_pickle, 1)
    finally:
        wires.close()
    gigabytes = num_buckets * BUCKET_BYTES / 1e9
    return {
        "ratio_to_bare_socket": paired.ratio,
        "goodput_gb_per_s": gigabytes / paired.candidate_s,
        "bare_gb_per_s": gigabytes / paired.reference_s,
        "round_trips_per_s": 1 / round_trip_s,
        "pickle_gb_per_s": gigabytes / pickle_s,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Speed of a connection against a bare socket.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--buckets", type=int, default=67, help="buckets of 1 MiB in a push")
    parser.add_argument("--rounds", type=int, default=41, help="paired rounds")
    parser.add_argument("--round-trips", type=int, default=2000, help="Heartbeats there and back")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    results = measure(arguments.buckets, arguments.rounds, arguments.round_trips)
    rows = [
        ("what", "speed", "ratio"),
        ("bare sockets", f"{results['bare_gb_per_s']:.2f} GB/s", "1"),
        (
            "connection",
            f"{results['goodput_gb_per_s']:.2f} GB/s",
            f"{results['ratio_to_bare_socket']:.2f}",
        ),
        ("pickle, data += chunk", f"{results['pickle_gb_per_s']:.3f} GB/s", ""),
        ("round trips of a Heartbeat", f"{results['round_trips_per_s']:.0f} /s", ""),
    ]
    report("A push on loopback", rows, results, as_json=arguments.json)


if __name__ == "__main__":
    main()
