"""What measures the link between a worker's machine and the server's; its text is run there by any Python.

    listen PORT TOKEN SECONDS ADDRESS …  on the server: say where and what is wrong, then listen
    knock ADDRESS PORT TOKEN             on a worker: whether the listener answers
    large ADDRESS PORT TOKEN             on a worker: whether packets of full size pass, both ways
    measure ADDRESS PORT TOKEN           on a worker: the same, then round trips and bandwidth in its turn
    both ADDRESS PORT TOKEN              on a worker: the same, then bandwidth from the server in its turn
    crowd ADDRESS PORT TOKEN NUMBER      on so many workers: bandwidth both ways while all of them send

Each prints one JSON object. Python 3.9 and its standard library are enough. The listener gives turns, so that
workers who share a link do not measure each other. It ends when its standard input does, as it does when
whoever measures is killed, and at the latest after some seconds.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

GREETING = b"smolcluster doctor\n"
NUM_PINGS = 10
BURST_S = 0.5
CONNECT_TIMEOUT_S = 3.0
STALL_TIMEOUT_S = 3.0
TURN_TIMEOUT_S = 60.0
LARGE_NBYTES = 36_000
"""Several packets of any size that is in use: an MTU of 9000 is the largest on ordinary cables."""
LARGE_TIMEOUT_S = 6.0
CHUNK = bytes(65_536)
CROWD_S = 2.0
"""How long all send; long enough for flows that share a link to find their shares."""
MEETING_TIMEOUT_S = 30.0
"""The longest time from the first of a crowd to the last."""
MOST_CROWD = 200
Counted = dict[str, float]
PARTS = {
    "knock": ("knock",),
    "large": ("large",),
    "measure": ("ping", "up"),
    "both": ("ping", "up", "down"),
    "crowd": ("up", "down"),
}
"""What is asked over a connection of its own, one after the other."""


# --- on the server's machine


def listen(port: int, token: str, seconds: int, addresses: list[str]) -> None:
    """Listen on every address that is this machine's, on another port where that one is in use."""
    listeners, places = [], {}
    for address in addresses:
        listener, places[address] = _place(address, port)
        if listener is not None:
            listeners.append(listener)
    _say({"places": places, "own": own_addresses()})
    signal.alarm(seconds)
    gates = _Gates()
    for listener in listeners:
        threading.Thread(target=_accept, args=(listener, token, gates), daemon=True).start()
    if listeners:
        sys.stdin.buffer.read()


def _accept(listener: socket.socket, token: str, gates: _Gates) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock, token, gates), daemon=True).start()


def _place(address: str, port: int) -> tuple[socket.socket | None, dict[str, object]]:
    """Listen on an address; also what came of it: listening, busy, foreign or refused."""
    state, why = "busy", ""
    try:  # macOS lets two listen on one port, if one of them names no address
        if not _answers(address, port):
            return _listener(address, port), {"state": "listening", "port": port, "why": ""}
    except OSError as error:
        state, why = "busy" if error.errno == errno.EADDRINUSE else "refused", _why(error)
    try:
        listener = _listener(address, 0)
    except OSError as error:
        is_foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        return None, {"state": "foreign" if is_foreign else state, "port": 0, "why": _why(error)}
    return listener, {"state": state, "port": listener.getsockname()[1], "why": why}


def _listener(address: str, port: int) -> socket.socket:
    family, kind, proto, _, place = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(place)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=0.3).close()
    except OSError:
        return False
    return True


def own_addresses() -> list[str]:
    """The addresses of this machine at which others may reach it."""
    said = _said(["ip", "-o", "address"]) or _said(["ifconfig"])
    found = re.findall(r"\binet6? (?:addr:)?([0-9a-fA-F.:]+)", said)
    return [each for each in found if not each.startswith(("127.", "fe80:")) and each != "::1"]


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=2, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


class _Gates:
    """Where workers wait: one alone for its turn, several for each other."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._crowds: dict[int, threading.Barrier] = {}

    @contextmanager
    def entered(self, number: int) -> Iterator[None]:
        if not 0 < number <= MOST_CROWD:
            raise ValueError(number)
        if number == 1:
            with self._turn:
                yield
            return
        with self._opening:
            new = threading.Barrier(number, None, MEETING_TIMEOUT_S)
            crowd = self._crowds.setdefault(number, new)
        crowd.wait()
        yield


def _serve(sock: socket.socket, token: str, gates: _Gates) -> None:
    """Greet who knows the token; answer its large packets, and in its turn its pings or a burst."""
    with sock, suppress(OSError, ValueError, threading.BrokenBarrierError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(STALL_TIMEOUT_S)
        if _line(sock) != token.encode():
            return
        sock.sendall(GREETING)
        for line in iter(partial(_line, sock), b""):
            part, number = line.split()
            if part == b"large":
                _answer_large(sock)
                continue
            with gates.entered(int(number)):
                sock.sendall(b"g")
                if part == b"ping":
                    for _ in range(NUM_PINGS):
                        sock.sendall(sock.recv(1))
                elif part == b"up":
                    sock.sendall(json.dumps(_count(sock, _burst_s(int(number)))).encode() + b"\n")
                    while sock.recv(65_536):  # until the worker has cut the connection
                        pass
                elif part == b"down":
                    _pour(sock, _burst_s(int(number)) + STALL_TIMEOUT_S)


def _burst_s(number: int) -> float:
    return BURST_S if number == 1 else CROWD_S


def _pour(sock: socket.socket, seconds: float) -> None:
    """Send until the worker has cut the connection."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sock.sendall(CHUNK)


def _answer_large(sock: socket.socket) -> None:
    sock.settimeout(2 * LARGE_TIMEOUT_S)
    if _arrives(sock, LARGE_NBYTES):
        sock.sendall(b"l")
        sock.sendall(CHUNK[:LARGE_NBYTES])


def _arrives(sock: socket.socket, nbytes: int) -> bool:
    while nbytes:
        got = len(sock.recv(min(nbytes, 65_536)))
        if not got:
            return False
        nbytes -= got
    return True


def _count(sock: socket.socket, seconds: float) -> Counted:
    """Bytes that arrive within the time of a burst, and the seconds from its first to its last."""
    buffer = bytearray(1 << 20)
    count = first = sock.recv_into(buffer)
    begin = last = time.perf_counter()
    while last - begin < seconds:
        got = sock.recv_into(buffer)
        if not got:
            break
        count, last = count + got, time.perf_counter()
    return {"bytes": count - first, "seconds": last - begin}


def _line(sock: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n") and len(said) < 100:
        got = sock.recv(1)
        if not got:
            break
        said += got
    return said.strip()


# --- on a worker's machine


def ask(verb: str, address: str, port: int, token: str, number: int = 1) -> dict[str, object]:
    """What came of it; `error`: an errno's name, name, stranger, large (which has a `way`) or broke."""
    found: dict[str, object] = {}
    for part in PARTS[verb]:
        found |= _ask(part, address, port, token, number)
        if found["error"]:
            break
    return found


def _ask(part: str, address: str, port: int, token: str, number: int) -> dict[str, object]:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not _is_greeted(sock, token):
                return {"error": "stranger"}
            try:
                return {"error": None, **_found(part, sock, number)}
            except (OSError, ValueError) as error:
                return {"error": "broke", "why": str(error)}
    except socket.gaierror as error:
        return {"error": "name", "why": str(error)}
    except socket.timeout:  # noqa: UP041 - another class before Python 3.10
        return {"error": "ETIMEDOUT"}
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, "?"), "why": _why(error)}


def _found(part: str, sock: socket.socket, number: int) -> dict[str, object]:
    if part in ("large", "ping") and (lost := _exchange_large(sock)):
        return lost
    if part in ("knock", "large"):
        return {}
    _wait_for(sock, part, number)
    if part == "ping":
        return {"ms": statistics.median(_ping_s(sock) for _ in range(NUM_PINGS)) * 1e3}
    counted = (_burst if part == "up" else _count)(sock, _burst_s(number))
    # what is still on its way must not fill the link in the next one's turn
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    mb_per_s = counted["bytes"] / counted["seconds"] / 1e6 if counted["seconds"] else 0.0
    return {"mb_per_s" if part == "up" else "down_mb_per_s": mb_per_s}


def _is_greeted(sock: socket.socket, token: str) -> bool:
    try:
        sock.sendall(token.encode() + b"\n")
        return _line(sock) == GREETING.strip()
    except OSError:
        return False


def _exchange_large(sock: socket.socket) -> dict[str, object]:
    """Small packets pass, as the greeting has; large ones may not, where an MTU on the way is smaller."""
    sock.settimeout(LARGE_TIMEOUT_S)
    way = "to"
    try:
        sock.sendall(b"large 1\n")  # a packet of its own, which arrives
        sock.sendall(CHUNK[:LARGE_NBYTES])
        for nbytes in (1, LARGE_NBYTES):
            if not _arrives(sock, nbytes):
                raise _of(errno.ECONNRESET)
            way = "from"
    except socket.timeout:  # noqa: UP041 - another class before Python 3.10
        return {"error": "large", "way": way}
    return {}


def _ping_s(sock: socket.socket) -> float:
    begin = time.perf_counter()
    sock.sendall(b"p")
    sock.recv(1)
    return time.perf_counter() - begin


def _wait_for(sock: socket.socket, part: str, number: int) -> None:
    """Ask for a turn, or for the others, and wait."""
    sock.sendall(b"%s %d\n" % (part.encode(), number))
    sock.settimeout(TURN_TIMEOUT_S)
    if sock.recv(1) != b"g":
        raise _of(errno.ECONNRESET)
    sock.settimeout(STALL_TIMEOUT_S)


def _burst(sock: socket.socket, seconds: float) -> Counted:
    """Send until the listener says what it has counted."""
    sock.setblocking(False)
    end = time.monotonic() + seconds + STALL_TIMEOUT_S
    while time.monotonic() < end:
        readable, writable, _ = select.select([sock], [sock], [], STALL_TIMEOUT_S)
        if readable:
            sock.settimeout(STALL_TIMEOUT_S)
            counted: Counted = json.loads(_line(sock))
            return counted
        if writable:
            sock.send(CHUNK)
    raise _of(errno.ETIMEDOUT)


def _of(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _say(found: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def main(argv: list[str]) -> None:
    verb, *rest = argv
    if verb == "listen":
        listen(int(rest[0]), rest[1], int(rest[2]), rest[3:])
    else:
        _say(ask(verb, rest[0], int(rest[1]), rest[2], *map(int, rest[3:])))


if __name__ == "__main__":
    main(sys.argv[1:])
