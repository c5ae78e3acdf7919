"""Connections between processes of one machine that do without TCP: a Unix socket beside each TCP listener.

Its name, in Linux's abstract namespace, is made of the listener's address and port. It is no file, goes with
its process, and is seen in the same network namespace alone, so whoever finds it may use it instead of the
address. A third less of the kernel's time a byte than TCP's loopback; and what passes is never damaged, so
payloads need no checksum. Elsewhere than on Linux there are none, and nobody is the worse for it.

Anybody on the machine may take a name first. So one counts only if its process is of the same user; what can
otherwise be believed is the handshake's matter, as with TCP.
"""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_PREFIX = "\0smolcluster:"
_CREDENTIALS = struct.Struct("3i")
"""Of a peer: process, user, group."""
_BACKLOG = 128


def listen_beside(listeners: Iterable[socket.socket]) -> list[socket.socket]:
    """Listen for processes of this machine beside each TCP listener, where the system can; non-blocking."""
    found: list[socket.socket] = []
    for listener in listeners:
        if sys.platform != "linux" or listener.family == socket.AF_UNIX:
            continue
        host, port, *_ = listener.getsockname()
        beside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            beside.bind(_name(host, port))
            beside.listen(_BACKLOG)
            beside.setblocking(False)
        except OSError:  # somebody has this name: there is TCP
            beside.close()
        else:
            found.append(beside)
    return found


def reach(host: str, port: int) -> socket.socket | None:
    """A socket that is connected to a listener of this user on this machine; None: take TCP."""
    if sys.platform != "linux":
        return None
    literal = "127.0.0.1" if host == "localhost" else host
    with suppress(ValueError):
        ipaddress.ip_address(literal.partition("%")[0])
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # it connects at once, or the listener's queue is full
            sock.connect(_name(literal, port))
            if _user_of_peer(sock) == os.geteuid():
                return sock
        except OSError:
            pass
        sock.close()
    return None


def address_of(sock: socket.socket) -> str | None:
    """The IP address by which a connection of this kind was reached; None: it is of another kind."""
    if sock.family != socket.AF_UNIX:
        return None
    for find in (sock.getsockname, sock.getpeername):
        with suppress(OSError):
            name = find()
            text = name.decode(errors="replace") if isinstance(name, bytes) else ""
            if text.startswith(_PREFIX):
                return text.removeprefix(_PREFIX).rpartition(":")[0]
    return None


def _name(host: str, port: int) -> str:
    return f"{_PREFIX}{host.partition('%')[0]}:{port}"


def _user_of_peer(sock: socket.socket) -> int:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
