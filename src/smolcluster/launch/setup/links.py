"""The ways from a cluster's workers to its server: which there are, what they carry, and which is best.

A server may be reached at several addresses: over Ethernet, a Thunderbolt bridge, Wi-Fi, a VPN. `link_probe`
measures each of them from each worker; what was measured decides.
"""

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host
from smolcluster.launch.probing import Listener, ask, probe_script
from smolcluster.utils.units import format_rate

ADDRESSES_SCRIPT = """
PATH="$PATH:/usr/sbin:/sbin"
if command -v ip >/dev/null 2>&1; then
  ip -o addr
  for folder in /sys/class/net/*/wireless; do [ -e "$folder" ] && echo "wireless: $folder"; done
else
  ifconfig -a
  command -v networksetup >/dev/null 2>&1 && networksetup -listallhardwareports
fi
true
"""
EQUAL = 0.9
"""Bandwidths from here to the highest one count as equal: so much they differ from one time to the next."""
START_S, MEASURE_S = 60.0, 60.0
"""Longest time until a listener listens, and until a way is measured: uv may have to fetch a Python."""
WI_FI = "Wi-Fi"

_FAILURES = {
    "ECONNREFUSED": "refused",
    "ETIMEDOUT": "no answer",
    "EHOSTUNREACH": "no route",
    "ENETUNREACH": "no route",
    "EADDRNOTAVAIL": "no route",
    "EAFNOSUPPORT": "no route",
    "stranger": "somebody else answers",
    "large": "large packets are lost (MTU)",
}
_IP_LINE = re.compile(
    r"^\d+:\s+(?P<interface>\S+?)(?:@\S+)?\s+inet6?\s+(?P<ip>[^\s/]+)(?P<rest>.*)$"
)
_IFCONFIG_HEAD = re.compile(r"^(?P<interface>[\w.-]+?):?\s+(?:flags=|Link )")
_IFCONFIG_LINE = re.compile(r"^\s+inet6?\s+(?:addr: ?)?(?P<ip>[^\s/%]+)(?P<rest>.*)$")
_PORT_NAME = re.compile(r"^Hardware Port: (?P<name>[\w .()/-]+)\nDevice: (?P<device>\w+)$", re.M)
_WIRELESS = re.compile(r"^wireless: /sys/class/net/(?P<interface>[^/]+)/wireless$", re.M)
_PASSING = re.compile(r"\b(?:deprecated|temporary|tentative|dadfailed|detached|duplicated)\b")
_OF_CONTAINERS = re.compile(
    r"(?:docker|br-[0-9a-f]{12}$|veth|virbr|vmnet|vboxnet|cni|flannel|cali|podman|lxc|lxd|kube)"
)


@dataclass(frozen=True)
class Interface:
    """An address of a machine.

    Of ways that are as fast a cable's is taken: what Wi-Fi carries changes with the weather.

    Attributes:
        ip: the address.
        name: what it belongs to, such as Wi-Fi, Thunderbolt Bridge or eth0.
    """

    ip: str
    name: str

    @property
    def shown(self) -> str:
        return f"{self.ip} ({self.name})"

    @property
    def rank(self) -> int:
        """0: Thunderbolt, 1: another cable, 2: Wi-Fi."""
        if self.name == WI_FI or self.name.startswith(("wl", "wifi")):
            return 2
        return 0 if self.name.lower().startswith("thunderbolt") else 1


@dataclass(frozen=True)
class MeasuredLink:
    """What one way from a worker to the server is like.

    Attributes:
        interface: the server's end of it.
        ms: median round trip in milliseconds.
        mb_s: megabytes a second, from the worker to the server.
        down_mb_s: from the server to the worker; None: not measured.
        failure: why there is nothing to measure; empty: there is.
    """

    interface: Interface
    ms: float = math.inf
    mb_s: float = 0.0
    failure: str = ""
    down_mb_s: float | None = None

    @property
    def shown(self) -> str:
        trip = f"{self.ms:.1f} ms" if self.ms >= 0.05 else "under 0.1 ms"
        return self.failure or f"{format_rate(1e6 * self.mb_s)}, {trip}"


def choose(links: Sequence[MeasuredLink]) -> tuple[str, str] | None:
    """The server's address at the way with the highest bandwidth, and why it is that one.

    Of equal ones Thunderbolt and cable come before Wi-Fi, then the shortest round trip; of ways that look the
    same the first is taken; None when no way leads there.
    """
    open_ways = [link for link in links if not link.failure]
    if not open_ways:
        return None
    highest = max(link.mb_s for link in open_ways)
    equal = [link for link in open_ways if link.mb_s >= EQUAL * highest]
    best = min(equal, key=lambda link: (link.interface.rank, round(link.ms, 1)))
    others = sorted((link for link in links if link is not best), key=lambda link: -link.mb_s)
    told = [best.shown, *(f"{link.interface.shown}: {link.shown}" for link in others)]
    return best.interface.ip, "; ".join(told)


def interfaces_of(host: Host) -> list[Interface]:
    """The addresses at which other machines may reach this one.

    Raises:
        LaunchError: it cannot be reached, or has no such address.
    """
    found = parse_interfaces(host.run(ADDRESSES_SCRIPT).stdout)
    if not found:
        raise LaunchError(
            f"{host.node} ({host.shown}) has no address in any network: check its cable or Wi-Fi"
        )
    return found


def parse_interfaces(text: str) -> list[Interface]:
    """The addresses in what ADDRESSES_SCRIPT prints, those of IPv4 first.

    Left out are those that no other machine can use (loopback, link-local, of containers), and those that
    change (temporary, deprecated).
    """
    names = {match["device"]: match["name"] for match in _PORT_NAME.finditer(text)}
    names |= {match["interface"]: WI_FI for match in _WIRELESS.finditer(text)}
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, Interface] = {}
    for interface, ip, rest in _addresses(text):
        if _OF_CONTAINERS.match(interface) or _PASSING.search(rest):
            continue
        with suppress(ValueError):
            address = ipaddress.ip_address(ip)
            if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                found.setdefault(address, Interface(str(address), names.get(interface, interface)))
    return [found[address] for address in sorted(found, key=lambda address: address.version)]


def _addresses(text: str) -> Iterator[tuple[str, str, str]]:
    """Interface, address and attributes, of `ip -o addr` or `ifconfig`."""
    interface = ""
    for line in text.splitlines():
        if match := _IP_LINE.match(line):
            yield match["interface"], match["ip"], match["rest"]
        elif match := _IFCONFIG_HEAD.match(line):
            interface = match["interface"]
        elif interface and (match := _IFCONFIG_LINE.match(line)):
            yield interface, match["ip"], match["rest"]


def measure(
    host: Host, interface: Interface, listener: Listener, token: str, verb: str = "measure"
) -> MeasuredLink:
    """What the way from a machine to an address of the one that listens is like.

    `verb`: `both` measures the way back, too.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    port = listener.ports.get(interface.ip)
    if port is None:
        return MeasuredLink(interface, failure="nobody may listen there")
    script = probe_script("", verb, interface.ip, port, token)
    return read_link(interface, ask(host, script, MEASURE_S))


def read_link(interface: Interface, found: Mapping[str, Any]) -> MeasuredLink:
    """What `link_probe` says about an address; numbers that are none count as a failure."""
    if found.get("error"):
        return MeasuredLink(interface, failure=_FAILURES.get(str(found["error"]), "broke off"))
    with suppress(KeyError, TypeError, ValueError):
        down = float(found["down_mb_per_s"]) if "down_mb_per_s" in found else None
        link = MeasuredLink(interface, float(found["ms"]), float(found["mb_per_s"]), down_mb_s=down)
        if all(map(math.isfinite, (link.ms, link.mb_s, link.down_mb_s or 0.0))):
            return link
    return MeasuredLink(interface, failure="not measured")
