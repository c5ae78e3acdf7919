"""Measures the ways from one machine to another; it travels as text and needs only Python 3.9's own library.

    serve PORT SECONDS   listens on all addresses, on PORT if it is free, else on any other; prints `port N`
    measure              connects to addresses and prints a JSON line about each of them

Both read a line from standard input first: `serve` the token that its visitors must know, `measure` a JSON
object with the token, the port and the addresses. `serve` ends with its standard input, so with the
connection that carries it, and after SECONDS at the latest. It answers nobody who does not know the token.

A visit: the token, and the answer READY; single bytes that come back, for the time of a round trip; then as
many bytes as fit into WINDOW_S, which the listener counts.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import statistics
import struct
import sys
import threading
import time

READY = b"smolcluster\n"
TOKEN_LENGTH = 32
ROUND_TRIPS, WARM_UP = 10, 2
WINDOW_S, SLOW_START_S = 0.5, 0.1
"""How long bytes are sent, and how much of that does not count where more came later."""
CONNECT_S, QUIET_S = 2.0, 3.0
BLOCK = bytes(1 << 18)


def serve(port: int, seconds: float) -> None:
    """Be measured by visitors until standard input ends or the time is over."""
    token = sys.stdin.readline().strip().encode()
    listener = listen(port)
    sys.stdout.write(f"port {listener.getsockname()[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=welcome, args=(listener, token), daemon=True).start()
    select.select([sys.stdin], [], [], seconds)


def listen(port: int) -> socket.socket:
    """A socket on all addresses, IPv6 too where there is any."""
    try:
        return listen_on(port)
    except OSError:
        return listen_on(0)


def listen_on(port: int) -> socket.socket:
    """A socket on this port of all addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def welcome(listener: socket.socket, token: bytes) -> None:
    """Answer each visitor in a thread of its own."""
    while True:
        visitor, _ = listener.accept()
        threading.Thread(target=answer, args=(visitor, token), daemon=True).start()


def answer(visitor: socket.socket, token: bytes) -> None:
    """Be measured by one visitor."""
    with visitor:
        try:
            visitor.settimeout(QUIET_S)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(receive(visitor, TOKEN_LENGTH), token):
                return
            visitor.sendall(READY)
            for _ in range(ROUND_TRIPS + WARM_UP):
                visitor.sendall(receive(visitor, 1))
            visitor.sendall(json.dumps(count_bytes(visitor)).encode() + b"\n")
            end = time.monotonic() + QUIET_S
            while time.monotonic() < end and visitor.recv(1 << 16):
                pass  # closing at once would throw away the answer on its way
        except OSError:
            pass  # a visitor who leaves is nobody's loss


def count_bytes(visitor: socket.socket) -> tuple[int, float]:
    """How many bytes came in how many seconds, within the window that their first one opens."""
    buffer = bytearray(1 << 20)
    if not visitor.recv_into(buffer):
        return 0, WINDOW_S
    start = time.monotonic()
    arrivals = [
        (0, start)
    ]  # bytes since the first ones, and when; one entry until the slow start is over
    total, now = 0, start
    while now - start < WINDOW_S:
        visitor.settimeout(max(start + WINDOW_S - now, 0.001))
        try:
            received = visitor.recv_into(buffer)
        except OSError:  # nothing came until the window's end
            break
        now = time.monotonic()
        total += received
        if not received:
            break
        if len(arrivals) == 1 and now - start >= SLOW_START_S:
            arrivals.append((total, now))
    visitor.settimeout(QUIET_S)
    counted, since = arrivals[-1]
    if total == counted:
        counted, since = arrivals[0]
    return total - counted, max(time.monotonic() - since, 1e-3)


def measure() -> None:
    """Print what the way to each address is like."""
    order = json.loads(sys.stdin.readline())
    for address in order["addresses"]:
        try:
            found = visit(address, order["port"], order["token"].encode())
        except OSError as error:
            found = {"failure": failure(error)}
        sys.stdout.write(json.dumps({"address": address, **found}) + "\n")
        sys.stdout.flush()


def visit(address: str, port: int, token: bytes) -> dict[str, float | str]:
    """The median round trip in milliseconds and the bandwidth in megabytes a second."""
    with socket.create_connection((address, port), CONNECT_S) as there:
        there.settimeout(QUIET_S)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there.sendall(token)
        if receive(there, len(READY)) != READY:
            return {"failure": "somebody else answers"}
        trips = [round_trip(there) for _ in range(ROUND_TRIPS + WARM_UP)]
        pour(there)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += receive(there, 1)
        # what is still in this machine's buffers shall not be sent
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    count, seconds = json.loads(answer)
    return {"ms": 1000 * statistics.median(trips[WARM_UP:]), "mb_s": count / seconds / 1e6}


def round_trip(there: socket.socket) -> float:
    """Seconds until a byte is back."""
    start = time.perf_counter()
    there.sendall(b".")
    receive(there, 1)
    return time.perf_counter() - start


def pour(there: socket.socket) -> None:
    """Send as much as the other side takes, until it has counted, or should have."""
    end = time.monotonic() + WINDOW_S + QUIET_S
    there.setblocking(False)
    while time.monotonic() < end:
        answered, free, _ = select.select([there], [there], [], QUIET_S)
        if answered:
            break
        if free:
            there.send(BLOCK)
    there.settimeout(QUIET_S)


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def failure(error: OSError) -> str:
    """Why there was nothing to measure."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "no answer"
    return "broke off" if isinstance(error, ConnectionError) else "no route"


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), float(sys.argv[3]))
    else:
        measure()
