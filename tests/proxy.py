"""A TCP proxy between a worker and the server that can spoil their connection."""

import socket
import threading
from contextlib import suppress


class Proxy:
    """Passes bytes on between whoever connects and `target_port` on 127.0.0.1."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._corrupt_in = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection that is open now, in the middle of whatever it carries."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def corrupt_upward_byte(self, after_nbytes: int) -> None:
        """Flip one bit on its way to the server, `after_nbytes` from now."""
        with self._lock:
            self._corrupt_in = after_nbytes

    def close(self) -> None:
        """Stop, and cut all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._sockets += [client, server]
            for source, sink, upward in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pump, args=(source, sink, upward), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upward: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(self._spoil(bytearray(data)) if upward else data)
            sink.shutdown(socket.SHUT_WR)

    def _spoil(self, data: bytearray) -> bytearray:
        with self._lock:
            if self._corrupt_in:
                if self._corrupt_in <= len(data):
                    data[self._corrupt_in - 1] ^= 0x10
                    self._corrupt_in = 0
                else:
                    self._corrupt_in -= len(data)
        return data
