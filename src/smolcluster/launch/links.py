"""The ways from a cluster's workers to its server: which there are, what they carry, and which is best.

A server may be reached at several addresses: over Ethernet, a Thunderbolt bridge, Wi-Fi, a VPN. `ways_probe`
measures each of them from each worker; what was measured decides.
"""

import ipaddress
import json
import math
import re
import secrets
import select
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from smolcluster.errors import LaunchError
from smolcluster.launch import ways_probe
from smolcluster.launch.host import SSH_FAILED, Host

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
START_S, ADDRESS_S = 60.0, 8.0
"""Longest time until a listener listens (uv may have to fetch a Python), and for a visit to an address."""
WI_FI = "Wi-Fi"

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

    Attributes:
        ip: the address.
        name: what it belongs to, such as Wi-Fi, Thunderbolt Bridge or eth0.
    """

    ip: str
    name: str

    @property
    def shown(self) -> str:
        """The address and what it belongs to."""
        return f"{self.ip} ({self.name})"


@dataclass(frozen=True)
class Link:
    """What one way from a worker to the server is like.

    Attributes:
        interface: the server's end of it.
        ms: median round trip in milliseconds.
        mb_s: megabytes a second, from the worker to the server.
        failure: why there is nothing to measure; empty: there is.
    """

    interface: Interface
    ms: float = math.inf
    mb_s: float = 0.0
    failure: str = ""

    @property
    def shown(self) -> str:
        """What it is like, for people."""
        trip = f"{self.ms:.1f} ms" if self.ms >= 0.05 else "under 0.1 ms"
        return self.failure or f"{format_rate(self.mb_s)}, {trip}"


@dataclass(frozen=True)
class Choice:
    """The address at which a worker reaches the server best, and why."""

    ip: str
    reason: str


@dataclass(frozen=True)
class Listener:
    """Where workers may be measured, and the token that they must know."""

    port: int
    token: str


def choose(links: Sequence[Link]) -> Choice | None:
    """The way with the highest bandwidth; of equal ones that with the shortest round trip.

    None when no way leads there. Of ways that look the same the first one is taken.
    """
    open_ways = [link for link in links if not link.failure]
    if not open_ways:
        return None
    highest = max(link.mb_s for link in open_ways)
    equal = [link for link in open_ways if link.mb_s >= EQUAL * highest]
    best = min(equal, key=lambda link: round(link.ms, 1))
    others = sorted((link for link in links if link is not best), key=lambda link: -link.mb_s)
    told = [best.shown, *(f"{link.interface.shown}: {link.shown}" for link in others)]
    return Choice(best.interface.ip, "; ".join(told))


def format_rate(mb_s: float) -> str:
    """A bandwidth as networks are labelled: `9.4 Gbit/s`, `940 Mbit/s`, `7.9 Mbit/s`."""
    mbit_s = 8 * mb_s
    if round(mbit_s) >= 1000:
        return f"{mbit_s / 1000:.1f} Gbit/s"
    return f"{mbit_s:.0f} Mbit/s" if mbit_s >= 9.95 else f"{mbit_s:.1f} Mbit/s"


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


def python_script(*arguments: str) -> str:
    """A shell script that runs `ways_probe` with a Python that is there, or else with uv's."""
    code = shlex.quote(Path(ways_probe.__file__).read_text(encoding="utf-8"))
    words = shlex.join(arguments)
    return (
        f"code={code}\n"
        "if python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1 </dev/null\n"
        f'then exec python3 -c "$code" {words}\n'
        "elif command -v uv >/dev/null 2>&1\n"
        f'then exec uv run --no-project --quiet python -c "$code" {words}\n'
        "else echo 'there is neither python3 (3.9 or newer) nor uv' >&2; exit 69\n"
        "fi"
    )


@contextmanager
def listening(host: Host, port: int, seconds: float) -> Iterator[Listener]:
    """Let a machine be measured, on `port` if that is free there, until the block or the time ends.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    token = secrets.token_hex(ways_probe.TOKEN_LENGTH // 2)
    argv = host.argv(python_script("serve", str(port), str(seconds)))
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:  # noqa: S603 - quoted
        try:
            yield Listener(_port_of(process, host, token), token)
        finally:
            process.terminate()


def _port_of(process: "subprocess.Popen[bytes]", host: Host, token: str) -> int:
    """Where the process listens, as soon as it does."""
    assert process.stdin is not None  # noqa: S101 - for mypy: they are pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    with suppress(BrokenPipeError):  # then it says why
        process.stdin.write(token.encode() + b"\n")
    said, end = b"", time.monotonic() + START_S
    while not (match := re.search(rb"^port (\d+)\n", said, re.MULTILINE)):
        if not select.select([process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
            raise LaunchError(f"{host.node} ({host.shown}): no Python started within {START_S:g} s")
        part = process.stdout.read(1 << 12)
        if not part:
            complaint = process.stderr.read().decode("utf-8", "replace")
            raise _cannot_measure(host, process.wait(), complaint)
        said += part
    return int(match[1])


def measure(host: Host, interfaces: Sequence[Interface], listener: Listener) -> list[Link]:
    """What the ways from a machine to each address of the one that listens are like.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    order = {
        "addresses": [interface.ip for interface in interfaces],
        "port": listener.port,
        "token": listener.token,
    }
    done = host.run(
        python_script("measure"),
        stdin=json.dumps(order).encode() + b"\n",
        timeout_s=measuring_s(interfaces),
    )
    if not done.ok:
        raise _cannot_measure(host, done.code, done.stderr)
    return parse_links(done.stdout, interfaces)


def measuring_s(interfaces: Sequence[Interface]) -> float:
    """The longest time that `measure` takes."""
    return START_S + ADDRESS_S * len(interfaces)


def parse_links(text: str, interfaces: Iterable[Interface]) -> list[Link]:
    """What `ways_probe` says about each address; what it does not say failed."""
    said: dict[str, Link] = {}
    known = {interface.ip: interface for interface in interfaces}
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            link = _link(json.loads(line), known)
            said[link.interface.ip] = link
    return [
        said.get(ip, Link(interface, failure="not measured")) for ip, interface in known.items()
    ]


def _link(found: Mapping[str, str | float], known: Mapping[str, Interface]) -> Link:
    interface = known[str(found["address"])]
    if "failure" in found:
        words = re.sub(r"[^a-z ]", "", str(found["failure"]))
        return Link(interface, failure=words or "failed")
    link = Link(interface, float(found["ms"]), float(found["mb_s"]))
    if not (math.isfinite(link.ms) and math.isfinite(link.mb_s)):
        raise ValueError
    return link


def _cannot_measure(host: Host, code: int, complaint: str) -> LaunchError:
    if host.destination is not None and code == SSH_FAILED:
        return host.unreachable(complaint)
    lines = complaint.strip().splitlines()
    why = lines[-1].strip() if lines else f"exit code {code}"
    return LaunchError(f"{host.node} ({host.shown}): its links cannot be measured: {why}")
