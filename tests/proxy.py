"""A TCP proxy between a worker and the server that can delay, throttle, spoil and break their connection."""

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

TICK_S = 0.05
CHUNK_NBYTES = 1 << 18
MAX_DELAYED = 4096
"""Pieces that may be on the way in one direction, where bytes are delayed; elsewhere it is one."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Flow:
    """One direction of a connection: pieces, each with the moment from which it may be passed on."""

    def __init__(self, source: socket.socket, sink: socket.socket, *, upward: bool) -> None:
        self.source, self.sink, self.upward = source, sink, upward
        self.waiting: deque[tuple[float, memoryview]] = deque()
        self.at_end = self.is_over = False
        """Whether the source has ended, and whether the sink has been told so."""

    def pass_on(self, most: int) -> None:
        """Send what is due; the last piece, an empty one, is the end."""
        due_at, piece = self.waiting.popleft()
        if not piece:
            self.is_over = True
            with suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)
        elif rest := piece[self.sink.send(piece[:most]) :]:
            self.waiting.appendleft((due_at, rest))


class Pair:
    """A connection through the proxy; `cut`: how it shall end, once it shall."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.sockets = (client, server)
        self.cut: Literal["reset", "close"] | None = None

    def close(self, *, reset: bool) -> None:
        """Close both sides, with RST or in order."""
        for sock in self.sockets:
            with suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                sock.close()


class Proxy:
    """Passes bytes on between whoever connects and `target_port` on 127.0.0.1, each `delay_s` later.

    Each connection has one thread, which alone closes its sockets: a RST does not leave while another
    thread waits for the socket.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self._target_port = target_port
        self._delay_s = delay_s
        self._max_waiting = MAX_DELAYED if delay_s else 1
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        """How many there have been."""
        self.corrupted = 0
        """Bytes that have been corrupted."""
        self._pairs: list[Pair] = []
        self._bytes_per_s: float | None = None
        self._corrupt_in = {True: 0, False: 0}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open."""
        with self._lock:
            return bool(self._pairs)

    def cut(self, how: Literal["reset", "close"] = "close") -> None:
        """End all connections soon, in the middle of whatever they carry."""
        with self._lock:
            for pair in self._pairs:
                pair.cut = how

    def throttle(self, bytes_per_s: float | None) -> None:
        """Carry no more than that from now on, in each direction; None: all that comes."""
        self._bytes_per_s = bytes_per_s

    def corrupt(self, after_nbytes: int, *, upward: bool = True) -> None:
        """Flip one bit, on its way to the server or from it, `after_nbytes` bytes from now; at least 1."""
        with self._lock:
            self._corrupt_in[upward] = after_nbytes

    def close(self) -> None:
        """Stop, and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)
            pair = Pair(client, server)
            with self._lock:
                self.connections += 1
                self._pairs.append(pair)
            threading.Thread(target=self._carry, args=(pair,), daemon=True).start()

    def _carry(self, pair: Pair) -> None:
        client, server = pair.sockets
        flows = [Flow(client, server, upward=True), Flow(server, client, upward=False)]
        how = "reset"
        try:
            while pair.cut is None and not all(flow.is_over for flow in flows):
                self._turn(flows)
            how = pair.cut or "close"
        except OSError:
            pass
        finally:
            with self._lock:
                self._pairs.remove(pair)
            pair.close(reset=how == "reset")

    def _turn(self, flows: Sequence[Flow]) -> None:
        """Wait a little for sockets that are ready, and serve them."""
        rate = self._bytes_per_s
        most = CHUNK_NBYTES if rate is None else max(1, round(rate * TICK_S))
        now = time.monotonic()
        waits = [flow.waiting[0][0] - now for flow in flows if flow.waiting]
        sources = [f.source for f in flows if not f.at_end and len(f.waiting) < self._max_waiting]
        sinks = [flow.sink for flow in flows if flow.waiting and flow.waiting[0][0] <= now]
        pause_s = min([TICK_S, *(wait for wait in waits if wait > 0)])
        readable, writable, _ = select.select(sources, sinks, [], pause_s)
        for flow in flows:
            if flow.source in readable:
                piece = self._spoil(flow.source.recv(most), upward=flow.upward)
                flow.at_end = not piece
                flow.waiting.append((time.monotonic() + self._delay_s, memoryview(piece)))
            if flow.sink in writable:
                flow.pass_on(most)
        if rate is not None:
            time.sleep(TICK_S)

    def _spoil(self, data: bytes, *, upward: bool) -> bytes:
        with self._lock:
            left = self._corrupt_in[upward]
            self._corrupt_in[upward] = max(0, left - len(data))
            if not 0 < left <= len(data):
                return data
            self.corrupted += 1
        spoilt = bytearray(data)
        spoilt[left - 1] ^= 0x10
        return bytes(spoilt)
