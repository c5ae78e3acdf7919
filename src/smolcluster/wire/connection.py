"""A connection: frames over one connected socket, with limits, deadlines and clear errors.

One thread may send while another receives: the two directions share nothing. After a half-done read
or write that direction is broken for good, because nothing tells where the next frame begins: every
further use raises.

This is the only module that sees the operating system's network errors; it translates all of them.
"""

import errno
import os
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from xxhash import xxh3_64

from smolcluster.errors import (
    ConfigError,
    ConnectTimeout,
    NothingSaid,
    PeerLost,
    PortBusy,
    ProtocolError,
    SmolclusterError,
)
from smolcluster.utils.addresses import is_loopback
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_address
from smolcluster.wire.frames import (
    HEADER_SUM_NBYTES,
    MAX_HEADER_NBYTES,
    PAYLOAD_SUM_NBYTES,
    PREFIX_NBYTES,
    Buffer,
    Frame,
    Prefix,
    check_head,
    check_payload,
    parse_prefix,
)
from smolcluster.wire.local import address_of, reach
from smolcluster.wire.messages import (
    ALL_KINDS,
    Kinds,
    Message,
    check_kind,
    decode,
    frame_of,
    payload_nbytes,
)
from smolcluster.wire.tls import FIRST_BYTE, TlsSocket

UNPROVED_NBYTES = 4096
"""All that is received from a peer that has not proved itself, in bytes."""

_BACKLOG = 128
_START_IT = "start the server, or correct host_ip and port (or --server)"
_DRAIN_TIMEOUT_S = 1.0
# Small enough that a checksum finds the bytes still in the processor's cache, large enough that a slow
# link does not wake the process for each packet.
_RECEIVE_NBYTES = 1024 * 1024
# A timeout on MSG_WAITALL does not say when the last byte came; short slices bound the error to a
# quarter.
_SLICES_PER_STALL = 4
# A sender that waits for a reader at each 200 kB, which is usual, changes processes ten times as often.
_LOCAL_BUFFER_NBYTES = 1024 * 1024
_EMPTY = memoryview(b"")
_MOST_IDLE = 4
"""Pieces of scratch memory that are kept while nothing arrives."""

T = TypeVar("T")

PlaceFor = Callable[[Message], memoryview | None]
"""Where the payload of a message shall be written; None: the connection's scratch memory."""


def nowhere(_message: Message) -> None:
    """No message's payload has a place of its own."""


class Scratch:
    """Memory for payloads that have no place of their own, shared by connections. Any thread.

    A connection has a piece of it from a payload's first byte until it waits for the next message, so there
    are as many as payloads arrive at one time, not as many as connections.
    """

    def __init__(self) -> None:
        self._idle: deque[memoryview] = deque(maxlen=_MOST_IDLE)

    def take(self, nbytes: int) -> memoryview:
        """A piece of at least so many bytes, with anything in it."""
        try:
            piece = self._idle.pop()
        except IndexError:
            piece = _EMPTY
        return piece if piece.nbytes >= nbytes else memoryview(bytearray(nbytes))

    def give_back(self, piece: memoryview) -> None:
        self._idle.append(piece)


class ConnectFailed(ConnectTimeout):
    """One attempt to reach a server failed; `reason` tells a caller whether to try again."""

    def __init__(self, message: str, reason: Literal["refused", "no route", "timeout", "name"]):
        super().__init__(message)
        self.reason = reason


class Connection:
    """Messages over one connected stream socket, which it owns.

    Until `proved` is called, at most `max_unproved` bytes are received in all. `peer` and `phase`
    appear in every error and may be set as more becomes known. `address` is the peer's IP address; of a Unix
    socket the one that it stands for, or empty. `bytes_sent` and `bytes_received` count everything said,
    before it is encrypted.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str | None = None,
        stall_timeout_s: float = 10.0,
        scratch: Scratch | None = None,
    ) -> None:
        """Take over a connected socket.

        Args:
            sock: TCP or Unix stream socket; set to blocking mode and tuned here.
            peer: what errors call the other side; None: its address.
            stall_timeout_s: longest time without a single byte of progress, in either direction,
                seconds.
            scratch: for payloads; None: memory of its own.
        """
        own, theirs = _end(sock.getsockname), _end(sock.getpeername)
        local = self._local_address = address_of(sock)
        if peer is None and local is not None:
            peer = f"{local} on this machine"
        self.peer = peer or (format_address(*theirs) if theirs else "a peer that is gone")
        self.address = local or (theirs[0] if theirs else "")
        self.own_address = local or (own[0] if own else "")
        """This side's IP address, also when the connection is gone; of a Unix socket as `address`."""
        self.phase = "handshake"
        self.stall_timeout_s = stall_timeout_s
        self.max_payload = UNPROVED_NBYTES
        self.max_unproved: int | None = UNPROVED_NBYTES
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_byte_at = time.monotonic()
        """When the last byte was received, on the monotonic clock; before the first one: the beginning."""
        self.received_head = b""
        """Prefix, header and header sum of the last message received, exactly as they came."""
        self._socket = sock
        self._channel: socket.socket | TlsSocket = sock
        """What frames go through: the socket, or TLS over it."""
        self._send_broken = False
        self._receive_broken = False
        self._timeouts: dict[int, float] = {}
        self._scratch = scratch or Scratch()
        self._piece = _EMPTY
        """Of the scratch memory: what holds the newest payload, if it is there."""
        sock.settimeout(None)
        _tune(sock)

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def proved(self, max_payload: int, stall_timeout_s: float) -> None:
        """Lift the limits on strangers: the peer has proved itself.

        Args:
            max_payload: largest payload accepted from now on, bytes.
            stall_timeout_s: longest silence from now on, seconds.
        """
        self.max_unproved = None
        self.max_payload = max_payload
        self.stall_timeout_s = stall_timeout_s
        self.phase = "session"
        if isinstance(self._channel, TlsSocket):
            self._channel.widen()

    @property
    def is_encrypted(self) -> bool:
        """Whether frames travel in TLS."""
        return self._channel is not self._socket

    @property
    def stays_here(self) -> bool:
        """Whether nothing that is said leaves this machine."""
        return self._local_address is not None or is_loopback(self.address)

    @property
    def _is_summed(self) -> bool:
        """Whether payloads have checksums: bytes may be damaged on the way, and nothing else finds it."""
        return self._local_address is None and not self.is_encrypted

    def begins_encrypted(self, deadline: Deadline) -> bool:
        """Wait for the peer's first byte, and leave it there: whether it begins TLS, not a frame.

        Raises:
            NothingSaid: the peer closed the connection first.
            PeerLost: the connection broke, or the deadline passed.
        """
        first = self._heard(lambda: self._socket.recv(1, socket.MSG_PEEK), deadline)
        if not first:
            raise NothingSaid(self._says("closed the connection"))
        return first == FIRST_BYTE

    def encrypt(self, context: ssl.SSLContext, *, server_side: bool, deadline: Deadline) -> bytes:
        """Speak TLS from now on; returns the SHA-256 of the certificate that the server has shown.

        Nothing is proved by it: the handshake's proofs must cover this value.

        Raises:
            PeerLost: the peer does not speak TLS 1.3, was lost, or the deadline passed.
        """
        channel = TlsSocket(self._socket, context, server_side=server_side)
        while not self._heard(channel.handshake_step, deadline):
            pass
        self._channel = channel
        return channel.peer_fingerprint()

    def send(
        self, message: Message, payload: Buffer = b"", deadline: Deadline | None = None
    ) -> None:
        """Send one message and the payload that it announces; see `send_frame`."""
        self.send_frame(frame_of(message, payload), deadline)

    def send_frame(self, frame: Frame, deadline: Deadline | None = None) -> None:
        """Send a frame; its payload may be changed again after this returns.

        Raises:
            PeerLost: the connection broke, or took no byte for `stall_timeout_s`, or the deadline
                passed. How much has arrived is unknown.
        """
        if self._send_broken:
            raise PeerLost(self._says("the connection is closed for sending"))
        self._send_broken = True
        self._send_all(frame.buffers if self._is_summed else frame.unsummed_buffers, deadline)
        self._send_broken = False

    def receive(
        self,
        kinds: Kinds = ALL_KINDS,
        deadline: Deadline | None = None,
        place_for: PlaceFor = nowhere,
    ) -> tuple[Message, memoryview]:
        """Wait for one message of the given kinds, and its payload.

        The payload lies where `place_for` wants it, or else in the connection's scratch memory,
        where it is valid until the next call; it is empty for a message without a tensor. Limits,
        kind, checksums and the header are judged before memory is taken for the payload.

        Args:
            kinds: what the peer may say now.
            deadline: for the whole message, however the bytes trickle in; None: only silence is
                bounded.
            place_for: where the payload of a message, whose header is verified, shall be written:
                exactly as many bytes as it has, or None. It is asked about every message, also
                one without a payload, and refuses it by raising; what was written is rubbish then.

        Raises:
            ProtocolError: the peer sent what it must not.
            PeerLost: the connection broke or ended (also within a frame), was silent for
                `stall_timeout_s`, or the deadline passed.
        """
        if self._receive_broken:
            raise PeerLost(self._says("the connection is closed for receiving"))
        self._receive_broken = True
        self._give_back()
        try:
            received = self._receive(kinds, deadline, place_for)
        except ProtocolError as error:
            raise type(error)(self._says(str(error))) from None
        self._receive_broken = False
        return received

    def abort(self) -> None:
        """Cut the connection: threads in `send` or `receive` raise PeerLost. Never raises."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def end_sending(self) -> None:
        """Half-close: the peer reads what was sent, then an orderly end. Never raises."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """Cut the connection and give the socket back; idempotent. Never raises.

        Call it from the thread that receives, or after that thread has ended: `abort` ends it.
        """
        self.abort()
        self._send_broken = self._receive_broken = True
        self._socket.close()

    def finish(self, drain_timeout_s: float = _DRAIN_TIMEOUT_S) -> None:
        """Say no more, let the peer read what was sent, then close. Never raises.

        Closing at once, with unread bytes of the peer in our buffer, would reset the connection and
        could take our last message from the peer's.
        """
        deadline = Deadline(drain_timeout_s)
        limit = self.max_unproved
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while not deadline.expired and (limit is None or self.bytes_received < limit):
                self._arm(socket.SO_RCVTIMEO, deadline)
                received = len(self._socket.recv(UNPROVED_NBYTES))
                if received == 0:
                    break
                self.bytes_received += received
        except (OSError, PeerLost):
            pass
        finally:
            self.close()

    def _heard(self, step: Callable[[], T], deadline: Deadline | None) -> T:
        """What a call returns that reads from the socket."""
        return self._waited(step, socket.SO_RCVTIMEO, deadline, "silent")

    def _waited(
        self, step: Callable[[], T], option: int, deadline: Deadline | None, stalled: str
    ) -> T:
        """What a call returns that waits for the peer, for as long as the kernel's timeout `option` says.

        It is repeated until the peer has been `stalled` for `stall_timeout_s`, or until the deadline.
        """
        silent_s = 0.0
        while True:
            try:
                wait_s = self._arm(option, deadline)
                return step()
            except BlockingIOError:
                silent_s += wait_s
            except InterruptedError:  # something has come
                silent_s = 0.0
            except OSError as error:
                raise PeerLost(self._says(f"connection lost ({_why(error)})")) from error
            if silent_s >= self.stall_timeout_s:
                raise PeerLost(self._says(f"{stalled} for {silent_s:g} s"))

    def _send_all(self, buffers: Sequence[Buffer], deadline: Deadline | None) -> None:
        while buffers:
            send = partial(self._channel.sendmsg, buffers)
            sent = self._waited(send, socket.SO_SNDTIMEO, deadline, "took no byte")
            self.bytes_sent += sent
            buffers = after(buffers, sent)

    def _receive(
        self, kinds: Kinds, deadline: Deadline | None, place_for: PlaceFor
    ) -> tuple[Message, memoryview]:
        prefix, head = self._receive_prefix(kinds, deadline)
        tail_nbytes = 0 if prefix.payload_nbytes else PAYLOAD_SUM_NBYTES
        rest = bytearray(prefix.header_nbytes + HEADER_SUM_NBYTES + tail_nbytes)
        self._fill(memoryview(rest), deadline)
        split = len(rest) - tail_nbytes
        head += rest[:split]
        message = decode(prefix.kind, check_head(head), kinds)
        if payload_nbytes(message) != prefix.payload_nbytes:
            raise ProtocolError(
                f"{type(message).__name__}: header announces a payload of "
                f"{payload_nbytes(message)} bytes, the prefix {prefix.payload_nbytes}"
            )
        self.received_head = head
        place = place_for(message)
        if prefix.payload_nbytes:
            if place is None:
                self._piece = self._scratch.take(prefix.payload_nbytes)
                place = self._piece[: prefix.payload_nbytes]
            return message, self._receive_payload(place, deadline)
        check_payload(xxh3_64(), rest[split:])
        return message, _EMPTY

    def _receive_prefix(self, kinds: Kinds, deadline: Deadline | None) -> tuple[Prefix, bytes]:
        data = bytearray(PREFIX_NBYTES)
        self._fill(memoryview(data), deadline)
        prefix = parse_prefix(data, MAX_HEADER_NBYTES, self.max_payload)
        total = self.bytes_received + prefix.frame_nbytes - PREFIX_NBYTES
        if self.max_unproved is not None and total > self.max_unproved:
            raise ProtocolError(
                f"{total} bytes from a peer that has not proved itself exceed {self.max_unproved}"
            )
        check_kind(prefix.kind, kinds)
        return prefix, bytes(data)

    def _give_back(self) -> None:
        """The newest payload is needed no more."""
        if self._piece.nbytes:
            self._scratch.give_back(self._piece)
            self._piece = _EMPTY

    def _receive_payload(self, payload: memoryview, deadline: Deadline | None) -> memoryview:
        payload_sum = memoryview(bytearray(PAYLOAD_SUM_NBYTES))
        hasher = xxh3_64() if self._is_summed else None
        self._fill(payload, deadline, hasher)
        self._fill(payload_sum, deadline)
        if hasher is not None:
            check_payload(hasher, payload_sum)
        return payload

    def _fill(
        self, view: memoryview, deadline: Deadline | None, hasher: xxh3_64 | None = None
    ) -> None:
        """Read exactly as many bytes as the view holds, and show them to the hasher."""
        # With a deadline every arrival must come back here: elsewhere than on Linux the timeout of
        # a MSG_WAITALL begins anew with each byte, and a trickle would never end.
        flags = socket.MSG_WAITALL if deadline is None else 0
        at_once = view.nbytes if hasher is None else _RECEIVE_NBYTES
        filled = 0
        while filled < view.nbytes:
            piece = view[filled : filled + at_once]
            received = self._heard(partial(self._channel.recv_into, piece, 0, flags), deadline)
            if received == 0:
                raise PeerLost(self._says("closed the connection"))
            if hasher is not None:
                hasher.update(piece[:received])
            filled += received
            self.bytes_received += received
            self.last_byte_at = time.monotonic()

    def _arm(self, option: int, deadline: Deadline | None) -> float:
        """Set the kernel's timeout for the next call; returns it, in seconds."""
        wait_s = self.stall_timeout_s / _SLICES_PER_STALL
        if deadline is not None:
            if deadline.expired:
                raise PeerLost(self._says("did not finish in time"))
            wait_s = min(wait_s, deadline.remaining())
        if self._timeouts.get(option) != wait_s:
            microseconds = max(1, round(wait_s * 1e6))
            timeval = struct.pack("@ll", *divmod(microseconds, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._timeouts[option] = wait_s
        return wait_s

    def _says(self, what: str) -> str:
        return f"{self.peer}: {self.phase}: {what}"


def after(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What is left of `buffers` when their first `sent` bytes are gone."""
    for index, buffer in enumerate(buffers):
        nbytes = len(buffer)
        if sent < nbytes:
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= nbytes
    return []


def connect(host: str, port: int, timeout_s: float) -> Connection:
    """Try once to reach a server; one on this machine by its Unix socket, if it has one.

    Raises:
        ConnectFailed: nobody answered; `reason` is "refused", "no route", "timeout" or "name".
    """
    where = format_address(host, port)
    if (local := reach(host, port)) is not None:
        return Connection(local, where)
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        raise ConnectFailed(
            f"{where} did not answer within {timeout_s:g} s: {_START_IT}", "timeout"
        ) from None
    except ConnectionRefusedError:
        raise ConnectFailed(
            f"{where} refused: no server listens there; {_START_IT}", "refused"
        ) from None
    except socket.gaierror as error:
        raise ConnectFailed(
            f"{where}: the name {host!r} is not known ({_why(error)}): mend host_ip", "name"
        ) from None
    except OSError as error:
        raise ConnectFailed(
            f"{where} cannot be reached ({_why(error)}): check host_ip and the network", "no route"
        ) from None
    # Where the port lies in the ephemeral range (macOS), a socket can be connected to itself.
    if (own := _end(sock.getsockname)) is not None and own == _end(sock.getpeername):
        sock.close()
        raise ConnectFailed(f"{where} refused: no server listens there; {_START_IT}", "refused")
    return Connection(sock, where)


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on every address; the sockets are non-blocking, for `accept_next`.

    Args:
        addresses: IPv4 or IPv6 literals, or names, of this machine.
        port: TCP port; 0 lets the system choose one for each address.

    Raises:
        PortBusy: another process listens there.
        ConfigError: an address is not this machine's, or the port may not be used.
    """
    listeners: list[socket.socket] = []
    try:
        for address in dict.fromkeys(addresses):
            listeners.append(_listen_on(address, port))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def accept_next(
    listeners: Sequence[socket.socket], timeout_s: float, scratch: Scratch | None = None
) -> Connection | None:
    """Wait for the next client; None when none came within `timeout_s` seconds. `scratch`: its memory.

    Raises:
        SmolclusterError: the system can accept no more connections (too many open files, no
            memory).
    """
    with selectors.PollSelector() as selector:  # unlike epoll it takes no file of its own
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ, listener)
        for key, _ in selector.select(timeout_s):
            try:
                sock, _address = key.data.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                raise SmolclusterError(f"cannot accept a connection: {_why(error)}") from error
            return Connection(sock, scratch=scratch)
    return None


def is_local_address(address: str) -> bool:
    """Whether this machine can listen on the address (a literal or a name)."""
    try:
        family, sockaddr = _resolve(address, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr)
    except OSError:
        return False
    return True


def _listen_on(address: str, port: int) -> socket.socket:
    where = format_address(address, port)
    try:
        family, sockaddr = _resolve(address, port)
        listener = socket.create_server(sockaddr, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise _listen_error(where, address, error) from None
    listener.setblocking(False)
    return listener


def _listen_error(where: str, address: str, error: OSError) -> SmolclusterError:
    why = _why(error)
    if error.errno is not None and not isinstance(error, socket.gaierror):
        why = os.strerror(error.errno)  # without what Python adds to it
    if error.errno == errno.EADDRINUSE:
        return PortBusy(
            f"{where} is in use by another process: stop it, or choose another port "
            "(--override port=…)"
        )
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return ConfigError(
            f"{address!r} is not an address of this machine: mend bind or host_ip ({why})"
        )
    return ConfigError(f"cannot listen on {where} ({why}): choose another address or port")


def _resolve(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]:
    """First stream address of a literal or name; raises OSError."""
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, sockaddr = found[0]
    return family, sockaddr


def _tune(sock: socket.socket) -> None:
    """Set TCP's options; the peer may be gone already, which the first use will tell.

    The buffers' sizes are left to the system, which lets them grow with the link: a size set by
    hand ends that on Linux, and was no faster on loopback. Unix sockets' do not grow by themselves.
    """
    if address_of(sock) is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_NBYTES)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:
        return


def _end(find: Callable[[], Any]) -> tuple[str, int] | None:
    """IP address and port of an end of a socket; None: it is gone, or is of another kind."""
    try:
        address = find()
    except OSError:
        return None
    return (str(address[0]), address[1]) if isinstance(address, tuple) else None


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
