"""Addresses and ports of this machine's loopback."""

import socket
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


def name_of(host: str) -> str:
    """The name or address in a request's `Host`, such as `localhost:8265` or `[::1]:8265`, lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def is_address(name: str) -> bool:
    """Whether it is an IP address, which nobody can make to mean another machine."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
