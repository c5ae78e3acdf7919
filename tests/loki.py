"""A receiver that follows Loki's documented push API, and can fail in every way that a test needs.

As a program, `python loki.py ADDRESS PORT FILE`, it writes what it accepts into a file, a JSON line an entry.
"""

import gzip
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_LINE_NBYTES = 256 * 1024
MAX_AHEAD_NS = 600 * 10**9
MAX_BEHIND_NS = 12 * 3600 * 10**9
"""Half of `max_chunk_age`: how much older than the newest of its stream a line may be."""
PUSH = "/loki/api/v1/push"
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Fault:
    """How a request is answered instead: a status with headers and a body, raw bytes, or not at all.

    `before` is called first. `takes_it`: what it brings is accepted all the same, and the sender does not
    hear of it.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes = b""
    before: Callable[[], object] = lambda: None
    takes_it: bool = False


HANGS_UP = Fault()


class Invalid(Exception):
    """What Loki answers with 400."""


class Received:
    """What was accepted, by stream; a line that comes twice with one time is one, as in Loki."""

    def __init__(self) -> None:
        self.streams: dict[Labels, list[tuple[int, str]]] = defaultdict(list)
        self.num_requests = 0
        self.num_repeated = 0
        self.largest_nbytes = 0
        self.largest_lines = 0

    def take(self, streams: list[tuple[Labels, list[tuple[int, str]]]], nbytes: int) -> int:
        """Accept the streams of one request, but for lines that are too far behind; returns how many are."""
        num_behind = 0
        self.largest_nbytes = max(self.largest_nbytes, nbytes)
        self.largest_lines = max(self.largest_lines, sum(len(each) for _, each in streams))
        for labels, values in streams:
            known = set(self.streams[labels])
            newest = max((ns for ns, _ in known), default=0)
            kept = [value for value in values if value[0] >= newest - MAX_BEHIND_NS]
            num_behind += len(values) - len(kept)
            new = [value for value in kept if value not in known]
            self.num_repeated += len(kept) - len(new)
            self.streams[labels] += new
        return num_behind

    def texts(self, **labels: str) -> list[str]:
        """The lines of all streams with these labels, in the order in which they came."""
        wanted = set(labels.items())
        found = (values for stream, values in self.streams.items() if wanted <= set(stream))
        return [text for values in found for _, text in values]

    def messages(self, **labels: str) -> list[Any]:
        """The messages of such lines of JSON."""
        return [json.loads(text)["message"] for text in self.texts(**labels)]

    @property
    def is_in_order(self) -> bool:
        """Whether in each stream no time is before the one that came before it."""
        return all(
            earlier[0] <= later[0]
            for values in self.streams.values()
            for earlier, later in itertools.pairwise(values)
        )


def parsed(body: bytes, headers: Any) -> tuple[list[tuple[Labels, list[tuple[int, str]]]], int]:
    """The streams of a request, and its bytes.

    Raises:
        Invalid: it does not follow the API.
    """
    if headers["Content-Type"] != "application/json" or headers["Content-Encoding"] != "gzip":
        raise Invalid("headers")
    try:
        text = gzip.decompress(body)
        streams = json.loads(text.decode("utf-8"))["streams"]
        return [_stream(each) for each in streams], len(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Invalid(repr(error)) from error


def _stream(stream: Any) -> tuple[Labels, list[tuple[int, str]]]:
    if set(stream) != {"stream", "values"} or not stream["stream"]:
        raise Invalid("a stream has labels and values")
    for name, value in stream["stream"].items():
        if not LABEL.fullmatch(name) or not isinstance(value, str) or not value:
            raise Invalid(f"label {name}={value!r}")
    values = [_value(*value) for value in stream["values"]]
    return tuple(sorted(stream["stream"].items())), values


def _value(ns: Any, line: Any) -> tuple[int, str]:
    if not isinstance(ns, str) or not ns.isdigit() or not isinstance(line, str):
        raise Invalid(f"value {ns!r}")
    if len(line.encode()) > MAX_LINE_NBYTES:
        raise Invalid("max entry size exceeded")
    if int(ns) > time.time_ns() + MAX_AHEAD_NS:
        raise Invalid("timestamp too new")
    return int(ns), line


class Receiver:
    """A receiver at `address`; the next requests are answered as `faults` say, one each."""

    def __init__(self, port: int = 0, address: str = "127.0.0.1") -> None:
        self.received = Received()
        self.faults: deque[Fault] = deque()
        self.invalid: list[str] = []
        self.authorizations: list[str] = []
        self.changed = threading.Condition()
        self._address, self.port = address, port
        self._server: _Server | None = None
        self.up()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{self._address}:{self.port}"

    def up(self) -> None:
        """Listen."""
        server = _Server((self._address, self.port), _Handler)
        server.receiver = self
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self._server = server

    def down(self) -> None:
        """Listen no more, and break all connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            for connection in self._server.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._server = None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Wait until something holds of what was received."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), vars(self.received)

    def accept(self, body: bytes, headers: Any) -> tuple[int, bytes]:
        """Take a request; returns the status and the answer's body."""
        try:
            streams, nbytes = parsed(body, headers)
        except Invalid as error:
            self.invalid.append(str(error))
            return 400, b""
        with self.changed:
            num_behind = self.received.take(streams, nbytes)
        return (
            (400, f"entry too far behind, ignored: {num_behind}".encode())
            if num_behind
            else (204, b"")
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    receiver: Receiver

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, which `down` will break."""
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of senders that hang up."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 240

    def do_POST(self) -> None:
        receiver = self.server.receiver
        receiver.authorizations += self.headers.get_all("Authorization", [])
        nbytes = int(self.headers["Content-Length"] or 0)
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:  # `down` has broken the connection
            self.close_connection = True
            return
        try:
            self._answer(receiver, body)
        finally:
            with receiver.changed:
                receiver.received.num_requests += 1
                receiver.changed.notify_all()

    def do_GET(self) -> None:
        """Say which version it is, as Loki does."""
        self._say(200, body=b'{"version": "test"}')

    def _answer(self, receiver: Receiver, body: bytes) -> None:
        with receiver.changed:
            fault = receiver.faults.popleft() if receiver.faults else None
            receiver.changed.notify_all()
        if fault is None:
            status, said = (404, b"") if self.path != PUSH else receiver.accept(body, self.headers)
            self._say(status, body=said)
            return
        fault.before()
        if fault.takes_it:
            receiver.accept(body, self.headers)
        if fault.status is not None:
            self._say(fault.status, fault.headers, fault.body)
            return
        self.wfile.write(fault.raw)
        self.close_connection = True

    def _say(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver for as long as the block lasts."""
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.down()


def _main(address: str, port: str, file: str) -> None:
    receiver = Receiver(int(port), address)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    seen: dict[Labels, int] = defaultdict(int)
    with Path(file).open("a") as sink, receiver.changed:
        while True:
            for labels, values in receiver.received.streams.items():
                for ns, text in values[seen[labels] :]:
                    sink.write(json.dumps({"labels": dict(labels), "ns": ns, "text": text}) + "\n")
                seen[labels] = len(values)
            sink.flush()
            receiver.changed.wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
