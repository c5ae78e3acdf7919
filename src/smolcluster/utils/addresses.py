"""Addresses and ports of this machine's loopback."""

import socket
from collections.abc import Container
from ipaddress import ip_address


def is_loopback(address: str) -> bool:
    """Whether an IP address never leaves this machine; so does the empty one of a Unix socket.

    Raises:
        ValueError: it is a name.
    """
    if not address:
        return True
    found = ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def is_loopback_name(address: str) -> bool:
    """Whether an address or name means this machine to itself, and nothing to others."""
    try:
        return is_loopback(address)
    except ValueError:
        return address == "localhost"


def means_this_machine(host: str, names: Container[str], *, takes_addresses: bool = True) -> bool:
    """Whether a request's `Host` is one of these names, or an address: `localhost:8265`, `[::1]:8265`.

    Nobody can make an address mean another machine, as a name can be made to (DNS rebinding).
    """
    in_brackets, before_port = host[1:].partition("]")[0], host.rpartition(":")[0]
    name = (in_brackets if host.startswith("[") else before_port or host).lower()
    try:
        ip_address(name)
    except ValueError:
        return name in names
    return takes_addresses or name in names


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
