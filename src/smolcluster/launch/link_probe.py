"""What measures the link between a worker's machine and the server's; its text is run there by any Python.

    listen PORT TOKEN SECONDS ADDRESS …  on the server: listen in the background, say where and what is wrong
    release PORT                         on the server: end a listener whose launcher could not
    knock ADDRESS PORT TOKEN             on a worker: whether the listener answers
    large ADDRESS PORT TOKEN             on a worker: whether packets of full size pass, both ways
    measure ADDRESS PORT TOKEN           on a worker: the same, then round trips and bandwidth in its turn
    both ADDRESS PORT TOKEN              on a worker: the same, then bandwidth from the server in its turn
    crowd ADDRESS PORT TOKEN NUMBER      on so many workers: bandwidth both ways while all of them send

Each prints one JSON object. Python 3.9 and its standard library are enough. The listener gives turns, so that
workers who share a link do not measure each other, and ends by itself. Who is cut while it measures leaves it
behind for that long: a launch that wants the port ends it, another measurement leaves it alone.
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
from pathlib import Path

GREETING = b"smolcluster doctor\n"
NUM_PINGS = 10
BURST_NBYTES = 64_000_000
BURST_S = 0.5
CONNECT_TIMEOUT_S = 3.0
STALL_TIMEOUT_S = 3.0
TURN_TIMEOUT_S = 60.0
LARGE_NBYTES = 36_000
"""Several packets of any size that is in use: an MTU of 9000 is the largest on ordinary cables."""
LARGE_TIMEOUT_S = 6.0
CHUNK = bytes(65_536)
GONE_S = 2.0
"""How long a listener that was told to end may take."""
CROWD_S = 2.0
"""How long all send; long enough for flows that share a link to find their shares."""
MEETING_TIMEOUT_S = 30.0
"""The longest time from the first of a crowd to the last."""
MOST_CROWD = 200
PARTS = {"both": ("measure", "down"), "crowd": ("crowd-up", "crowd-down")}
"""What takes a connection for each direction."""


# --- on the server's machine


def listen(port: int, token: str, seconds: int, addresses: list[str]) -> None:
    """Listen on every address that is this machine's, on another port where that one is in use."""
    places: dict[str, dict[str, object]] = {}
    listeners = []
    for address in addresses:
        listener, places[address] = _place(address, port)
        if listener is not None:
            listeners.append(listener)
    is_busy = any(place["state"] == "busy" for place in places.values())
    found = {
        "places": places,
        "own": own_addresses(),
        "holder": _holder(port) if is_busy else "",
        "free": _next_free(port, [a for a in addresses if places[a]["state"] == "busy"]),
    }
    child = os.fork() if listeners else 0
    if child or not listeners:
        _say({**found, "pid": child})
        return
    _leave_the_terminal()
    signal.alarm(seconds)
    gates = _Gates()
    while True:
        ready, _, _ = select.select(listeners, [], [])
        for listener in ready:
            sock, _ = listener.accept()
            threading.Thread(target=_serve, args=(sock, token, gates), daemon=True).start()


def release(port: int) -> bool:
    """End the listeners of this port that others have started as this user; whether there were any."""
    ended = set()
    for pid in listeners_of(port):
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError:
            continue  # it has ended by itself
        ended.add(pid)
    deadline = time.monotonic() + GONE_S
    while ended & listeners_of(port) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(ended)


def listeners_of(port: int) -> set[int]:
    """The process ids of this user's listeners of a port; a small Linux has no `ps`, a Mac no /proc."""
    if not Path("/proc/self").is_dir():
        shown = _said(["ps", "-U", str(os.getuid()), "-ww", "-o", "pid=,args="])
        return listeners_shown(port, shown)
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            argv = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if is_listener(argv, port):
            found.add(int(folder.name))
    return found


def is_listener(argv: list[str], port: int) -> bool:
    is_python = os.path.basename(argv[0]).lower().startswith("python")  # noqa: PTH119 - no Path of any word
    return is_python and argv[1:4] == ["-", "listen", str(port)]


def listeners_shown(port: int, commands: str) -> set[int]:
    """The listeners among lines of a process id and its arguments; one whose path has a space is not found.

    A space may also be where the next argument begins: `ssh mini1 python3 - listen …` is no listener here.
    """
    named = rf"^ *(\d+) (?:/\S*/)?[Pp]ython[\d.]* - listen {port} \S+ \d+(?: [\w.:%-]+)*$"
    return {int(pid) for pid in re.findall(named, commands, re.MULTILINE)}


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


def _next_free(port: int, addresses: list[str]) -> int:
    """The first port above in which nobody listens on these addresses; 0: none near."""
    for candidate in range(port + 1, min(port + 100, 65536)):
        try:
            for address in addresses:
                _listener(address, candidate).close()
        except OSError:
            continue
        return candidate
    return 0


def _holder(port: int) -> str:
    """Who listens on a port, as far as this user may know: `python3 (process 4711)`."""
    said = _said(["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"])
    found = re.search(r"^p(\d+)\nc(.+)$", said, re.MULTILINE)
    if found:
        return f"{found[2]} (process {found[1]})"
    said = _said(["ss", "-Hltnp", f"sport = :{port}"])
    found = re.search(r'\(\("([^"]+)",pid=(\d+)', said)
    return f"{found[1]} (process {found[2]})" if found else ""


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


def _leave_the_terminal() -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


class _Gates:
    """Where workers wait: for their turn, or for each other."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._opening = threading.Lock()
        self._crowds: dict[int, threading.Barrier] = {}

    def crowd(self, number: int) -> threading.Barrier:
        with self._opening:
            return self._crowds.setdefault(
                number, threading.Barrier(number, None, MEETING_TIMEOUT_S)
            )


def _serve(sock: socket.socket, token: str, gates: _Gates) -> None:
    """Greet who knows the token; answer its large packets, and in its turn its pings and its bursts."""
    with sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(STALL_TIMEOUT_S)
            if _line(sock) != token.encode():
                return
            sock.sendall(GREETING)
            request = sock.recv(1)
            if request == b"l":
                _answer_large(sock)
                request = sock.recv(1)
            if request in (b"m", b"d"):
                with gates.turn:
                    sock.sendall(b"g")
                    if request == b"m":
                        for _ in range(NUM_PINGS):
                            sock.sendall(sock.recv(1))
                        _tell_count(sock, BURST_S, BURST_NBYTES)
                    else:
                        _pour(sock, BURST_S + STALL_TIMEOUT_S)
            elif request in (b"u", b"w"):
                number = int(_line(sock))
                if 0 < number <= MOST_CROWD:
                    gates.crowd(number).wait()
                    sock.sendall(b"g")
                    if request == b"u":
                        _tell_count(sock, CROWD_S, sys.maxsize)
                    else:
                        _pour(sock, CROWD_S + STALL_TIMEOUT_S)
        except (OSError, ValueError, threading.BrokenBarrierError):
            return


def _tell_count(sock: socket.socket, seconds: float, most: int) -> None:
    sock.sendall(json.dumps(_count(sock, seconds, most)).encode() + b"\n")
    while sock.recv(65_536):  # until the worker has cut the connection
        pass


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


def _count(
    sock: socket.socket, seconds: float = BURST_S, most: int = BURST_NBYTES
) -> dict[str, float]:
    """Bytes that arrive within the time of a burst, and the seconds from its first to its last."""
    buffer = bytearray(1 << 20)
    count = sock.recv_into(buffer)
    begin = last = time.perf_counter()
    first = count
    while count < most and last - begin < seconds:
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


def ask(verb: str, address: str, port: int, token: str, number: int = 0) -> dict[str, object]:
    """What came of it; `error`: an errno's name, name, stranger, large (which has a `way`) or broke."""
    found: dict[str, object] = {}
    for part in PARTS.get(verb, (verb,)):
        found |= _ask(part, address, port, token, number)
        if found["error"]:
            break
    return found


def _ask(verb: str, address: str, port: int, token: str, number: int) -> dict[str, object]:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not _is_greeted(sock, token):
                return {"error": "stranger"}
            try:
                return {"error": None, **_found(verb, sock, number)}
            except (OSError, ValueError) as error:
                return {"error": "broke", "why": str(error)}
    except socket.gaierror as error:
        return {"error": "name", "why": str(error)}
    except socket.timeout:  # noqa: UP041 - another class before Python 3.10
        return {"error": "ETIMEDOUT"}
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, "?"), "why": _why(error)}


def _found(verb: str, sock: socket.socket, number: int) -> dict[str, object]:
    if verb == "down":
        return _received(sock, b"d", BURST_S, BURST_NBYTES)
    if verb == "crowd-up":
        _wait_for(sock, b"u%d\n" % number, MEETING_TIMEOUT_S)
        return {"mb_per_s": _sent(sock, CROWD_S)}
    if verb == "crowd-down":
        return _received(sock, b"w%d\n" % number, CROWD_S, sys.maxsize)
    lost = {} if verb == "knock" else _exchange_large(sock)
    return _measure(sock) if verb == "measure" and not lost else lost


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
        sock.sendall(b"l")  # a packet of its own, which arrives
        sock.sendall(CHUNK[:LARGE_NBYTES])
        for nbytes in (1, LARGE_NBYTES):
            if not _arrives(sock, nbytes):
                raise _of(errno.ECONNRESET)
            way = "from"
    except socket.timeout:  # noqa: UP041 - another class before Python 3.10
        return {"error": "large", "way": way}
    return {}


def _measure(sock: socket.socket) -> dict[str, object]:
    _wait_for(sock, b"m", TURN_TIMEOUT_S)
    pings = []
    for _ in range(NUM_PINGS):
        begin = time.perf_counter()
        sock.sendall(b"p")
        sock.recv(1)
        pings.append(time.perf_counter() - begin)
    return {"ms": statistics.median(pings) * 1e3, "mb_per_s": _sent(sock, BURST_S)}


def _wait_for(sock: socket.socket, request: bytes, seconds: float) -> None:
    """Ask for a turn, or for the others, and wait."""
    sock.sendall(request)
    sock.settimeout(seconds)
    if sock.recv(1) != b"g":
        raise _of(errno.ECONNRESET)
    sock.settimeout(STALL_TIMEOUT_S)


def _received(sock: socket.socket, request: bytes, seconds: float, most: int) -> dict[str, object]:
    """Megabytes a second that the listener sends."""
    _wait_for(sock, request, TURN_TIMEOUT_S)
    counted = _count(sock, seconds, most)
    _cut(sock)
    return {"down_mb_per_s": _mb_per_s(counted)}


def _sent(sock: socket.socket, seconds: float) -> float:
    """Megabytes a second that arrive of what is sent for some seconds."""
    counted = json.loads(_burst(sock, seconds))
    _cut(sock)
    return _mb_per_s(counted)


def _cut(sock: socket.socket) -> None:
    """Close it so that what is still on its way does not fill the link in the next one's turn."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _mb_per_s(counted: dict[str, float]) -> float:
    return counted["bytes"] / counted["seconds"] / 1e6 if counted["seconds"] else 0.0


def _burst(sock: socket.socket, seconds: float) -> bytes:
    """Send until the listener says what it has counted."""
    sock.setblocking(False)
    end = time.monotonic() + seconds + STALL_TIMEOUT_S
    while time.monotonic() < end:
        readable, writable, _ = select.select([sock], [sock], [], STALL_TIMEOUT_S)
        if readable:
            sock.settimeout(STALL_TIMEOUT_S)
            return _line(sock)
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
    elif verb == "release":
        _say({"released": release(int(rest[0]))})
    else:
        _say(ask(verb, rest[0], int(rest[1]), rest[2], int(rest[3]) if rest[3:] else 0))


if __name__ == "__main__":
    main(sys.argv[1:])
