"""Which network interface leads to rank 0.

Gloo and NCCL otherwise take an address of their own choice; on many machines the name of the host resolves to
its loopback, at which no other machine finds it.
"""

import os
import socket
from collections.abc import Mapping, MutableMapping

import psutil

from smolcluster.transport.tls import is_loopback_name

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ELSEWHERE = "192.0.2.1"
"""An address that is no machine's (RFC 5737), for the way out of this one."""


def choose_interface(
    address: str,
    port: int,
    environ: MutableMapping[str, str] = os.environ,
    *,
    is_spread: bool = False,
) -> None:
    """Let both backends use the interface that leads to `address`, unless the user has said another one.

    `is_spread`: over several machines, which do not find each other by their loopbacks.
    """
    own = own_address(address, port)
    if (
        is_spread and own is not None and is_loopback_name(own)
    ):  # its own name resolves to that on many
        own = own_address(ELSEWHERE, port)
    name = interface_of(own, interfaces())
    for variable in VARIABLES:
        if name is not None:
            environ.setdefault(variable, name)


def own_address(address: str, port: int) -> str | None:
    """This machine's address on the way there; None: there is no way, or none that is known."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.connect(there)  # of a datagram socket: nothing is sent
            own: str = asked.getsockname()[0]
            return own
    except OSError:
        return None


def interfaces() -> dict[str, str]:
    """This machine's interfaces by their addresses."""
    return {
        each.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
    }


def interface_of(own: str | None, by_address: Mapping[str, str]) -> str | None:
    return None if own is None else by_address.get(own.partition("%")[0])
