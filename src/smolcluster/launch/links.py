"""The ways between machines: which there are, what they carry, and which is best.

`link_probe` listens on one machine and asks from the others. Its text goes by standard input to whatever
Python a machine has. A machine may be reached at several addresses: over Ethernet, a Thunderbolt bridge,
Wi-Fi, a VPN. Each of them is measured, and what was measured decides.
"""

import ipaddress
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from smolcluster.errors import LaunchError
from smolcluster.launch import link_probe
from smolcluster.launch.host import HAS_PYTHON3, Done, Host, shell_path
from smolcluster.launch.node_facts import facts_of
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_count, format_rate
from smolcluster.utils.words import one_line

EQUAL = 0.9
"""Bandwidths from here to the highest one count as equal: so much they differ from one time to the next."""
START_S, MEASURE_S = 60.0, 60.0
"""Longest time until a listener listens, and until a way is measured: uv may have to fetch a Python."""
WI_FI = "Wi-Fi"
STATED = "host_ip"
"""The interface of an address of which no more is known than that the cluster file states it."""

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

Say = Callable[[str], None]


# --- the probe on a machine


class Place(BaseModel):
    """What came of an address; `port`: that on which it listens there, 0: none."""

    state: Literal["listening", "busy", "foreign", "refused"]
    port: int
    why: str = ""


class Listener(BaseModel):
    """What the probe says that listens.

    Attributes:
        places: what came of each address.
        own: its machine's addresses.
    """

    places: dict[str, Place]
    own: tuple[str, ...]

    @property
    def ports(self) -> dict[str, int]:
        return {address: place.port for address, place in self.places.items() if place.port}


def probe_source() -> bytes:
    return Path(link_probe.__file__).read_bytes()


def python_lines(own: str = "") -> str:
    """Shell lines that let `python` be any Python there: best the one at `own`, which a run uses too.

    uv may fetch one only where there is no such environment yet.
    """
    python = shell_path(own)
    first = f'if [ -x {python} ]; then python() {{ {python} "$@"; }}\nel' if own else ""
    uv = "uv run --no-project" + " --no-python-downloads" * bool(own)
    return f"""
{first}if {HAS_PYTHON3} &&
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1 </dev/null
then python() {{ python3 "$@"; }}
elif command -v uv >/dev/null 2>&1; then python() {{ {uv} --quiet python "$@"; }}
else echo 'there is neither python3 (3.9 or newer) nor uv' >&2; exit 69; fi"""


def probe_script(own: str, *words: object) -> str:
    """What asks the probe; it reads its text from standard input, which then stays open."""
    read = f"import sys; exec(sys.stdin.buffer.read({len(probe_source())}))"
    return f"{python_lines(own)}\npython -c '{read}' {' '.join(shell_path(str(word)) for word in words)}"


def read_listener(done: Done) -> Listener | None:
    """The listener that was started; None: none was."""
    try:
        return Listener.model_validate_json(done.stdout)
    except ValidationError:
        return None


@contextmanager
def listening(host: Host, script: str, limit_s: float) -> Iterator[Listener]:
    """Let a machine be measured until the block ends; `script` asks the probe to listen.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    with host.holding(script, stdin=probe_source(), timeout_s=limit_s) as done:
        listener = read_listener(done)
        if listener is None:
            raise _unmeasured(host, done)
        yield listener


def ask(host: Host, script: str, limit_s: float) -> dict[str, Any]:
    """What the probe says on a machine: the last line that it prints, after any words of welcome.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    done = host.run(script, stdin=probe_source(), timeout_s=limit_s)
    with suppress(ValueError, IndexError):
        found = json.loads(done.stdout.splitlines()[-1])
        if done.ok and isinstance(found, dict):
            return found
    raise _unmeasured(host, done)


def _unmeasured(host: Host, done: Done) -> LaunchError:
    why = one_line(done.stderr_tail)
    return LaunchError(f"{host.node} ({host.shown}): its links cannot be measured: {why}")


# --- the ways


@dataclass(frozen=True)
class Way:
    """A way to an address of a machine, from a worker once it has been measured.

    Attributes:
        interface: what the address belongs to, such as Wi-Fi, Thunderbolt Bridge or eth0.
        latency_s: median round trip; infinite: there is no such way, or it has not been measured.
        up_mb_s, down_mb_s: megabytes a second from and to the worker while nobody else sends.
        crowd_up_mb_s, crowd_down_mb_s: while all workers send; None: not measured.
        reason: of a way that is closed, why; of the best one, what was measured of it and the others.
    """

    address: str
    interface: str
    latency_s: float = math.inf
    up_mb_s: float = 0.0
    down_mb_s: float = 0.0
    reason: str = ""
    crowd_up_mb_s: float | None = None
    crowd_down_mb_s: float | None = None

    @property
    def is_open(self) -> bool:
        return math.isfinite(self.latency_s)

    @property
    def place(self) -> str:
        return f"{self.address} ({self.interface})"

    @property
    def via(self) -> str:
        """What it shares with others: the server's interface, which may have several addresses."""
        return self.address if self.interface == STATED else self.interface

    @property
    def rank(self) -> int:
        """0: Thunderbolt, 1: another cable, 2: Wi-Fi, what it carries changes with the weather."""
        if self.interface == WI_FI or self.interface.startswith(("wl", "wifi")):
            return 2
        return 0 if self.interface.lower().startswith("thunderbolt") else 1

    @property
    def shown(self) -> str:
        if not self.is_open:
            return self.reason
        trip = f"{1e3 * self.latency_s:.1f} ms" if self.latency_s >= 5e-5 else "under 0.1 ms"
        return f"{format_rate(1e6 * self.up_mb_s)}, {trip}"


def best_of(ways: Sequence[Way]) -> Way:
    """The way with the highest bandwidth, and why it is that one; one that is closed if all are.

    Of equal ones Thunderbolt and cable come before Wi-Fi, then the shortest round trip; of ways that look the
    same the first is taken.
    """
    open_ways = [way for way in ways if way.is_open]
    if not open_ways:
        return replace(ways[0], reason="; ".join(f"{way.place}: {way.shown}" for way in ways))
    highest = max(way.up_mb_s for way in open_ways)
    equal = [way for way in open_ways if way.up_mb_s >= EQUAL * highest]
    best = min(equal, key=lambda way: (way.rank, round(1e3 * way.latency_s, 1)))
    others = sorted((way for way in ways if way is not best), key=lambda way: -way.up_mb_s)
    told = [best.shown, *(f"{way.place}: {way.shown}" for way in others)]
    return replace(best, reason="; ".join(told))


def addresses_of(host: Host) -> list[Way]:
    """The addresses at which other machines may reach this one, as ways that are not measured.

    Raises:
        LaunchError: it cannot be reached, or has no such address.
    """
    found = parse_addresses(facts_of(host, "addresses").text("addresses"))
    if not found:
        raise LaunchError(
            f"{host.node} ({host.shown}) has no address in any network: check its cable or Wi-Fi"
        )
    return found


def parse_addresses(text: str) -> list[Way]:
    """The addresses in a machine's fact of that name, those of IPv4 first.

    Left out are those that no other machine can use (loopback, link-local, of containers), and those that
    change (temporary, deprecated).
    """
    names = {match["device"]: match["name"] for match in _PORT_NAME.finditer(text)}
    names |= {match["interface"]: WI_FI for match in _WIRELESS.finditer(text)}
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, Way] = {}
    for interface, ip, rest in _lines_with_addresses(text):
        if _OF_CONTAINERS.match(interface) or _PASSING.search(rest):
            continue
        with suppress(ValueError):
            address = ipaddress.ip_address(ip)
            if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                found.setdefault(address, Way(str(address), names.get(interface, interface)))
    return [found[address] for address in sorted(found, key=lambda address: address.version)]


def _lines_with_addresses(text: str) -> Iterator[tuple[str, str, str]]:
    """Interface, address and attributes, of `ip -o addr` or `ifconfig`."""
    interface = ""
    for line in text.splitlines():
        if match := _IP_LINE.match(line):
            yield match["interface"], match["ip"], match["rest"]
        elif match := _IFCONFIG_HEAD.match(line):
            interface = match["interface"]
        elif interface and (match := _IFCONFIG_LINE.match(line)):
            yield interface, match["ip"], match["rest"]


def measure_all_ways(
    server: Host, workers: Sequence[Host], stated: Mapping[str, str], port: int, say: Say
) -> dict[str, Way]:
    """The best way from each worker, also while all send; who has none, or does not answer, is left out.

    `stated`: the server's address that each of them was told, if any, which is measured too.

    Raises:
        LaunchError: the server cannot be measured.
    """
    if not workers:
        return {}
    addresses = addresses_of(server)
    known = {way.address for way in addresses}
    told = dict.fromkeys(stated[each.node] for each in workers if each.node in stated)
    addresses += [Way(address, STATED) for address in told if address not in known]

    def lost(error: LaunchError) -> None:
        say(f"{error}; it is left out")

    return measure_ways(server, workers, addresses, port, say, lost=lost, with_crowd=True)


def measure_ways(
    server: Host,
    workers: Sequence[Host],
    addresses: Sequence[Way],
    port: int,
    say: Say,
    *,
    lost: Callable[[LaunchError], None],
    with_crowd: bool = False,
) -> dict[str, Way]:
    """The best way from each worker to one of the server's addresses, one worker after the other.

    `lost` hears why a worker is missing. `with_crowd`: afterwards all send at the same time.

    Raises:
        LaunchError: the server cannot be measured.
    """
    if not workers:
        return {}
    token, each = secrets.token_hex(16), [way.address for way in addresses]
    seconds = int((len(workers) * len(each) + 2) * MEASURE_S)
    listen = probe_script("", "listen", port, token, seconds, *each)
    found: dict[Host, Way] = {}
    with listening(server, listen, START_S) as listener:
        for worker in workers:
            ways = format_count(len(addresses), "way")
            say(f"measuring {ways} from {worker.node} to {server.node} …")
            try:
                measured = [measure(worker, way, listener, token) for way in addresses]
                found[worker] = _open_way(measured, worker, server, port)
            except LaunchError as error:
                lost(error)
        if with_crowd and len(found) > 1:
            say(f"measuring all {len(found)} at the same time …")
            crowd = at_once(
                lambda each: _in_crowd(*each, listener, token, len(found)), found.items()
            )
            found = dict(zip(found, crowd, strict=True))
    return {worker.node: way for worker, way in found.items()}


def _open_way(ways: Sequence[Way], worker: Host, server: Host, port: int) -> Way:
    best = best_of(ways)
    if best.is_open:
        return best
    raise LaunchError(
        f"{worker.node}: no way to {server.node} ({best.reason}): let port {port} through its firewall, or "
        "connect them to one network"
    )


def measure(host: Host, way: Way, listener: Listener, token: str) -> Way:
    """What the way from a machine to an address of the one that listens is like.

    Raises:
        LaunchError: it cannot be reached, or has no Python.
    """
    port = listener.ports.get(way.address)
    if port is None:
        return replace(way, reason="nobody may listen there")
    script = probe_script("", "both", way.address, port, token)
    return read_way(way, ask(host, script, MEASURE_S))


def read_way(way: Way, found: Mapping[str, Any]) -> Way:
    """What `link_probe` says about an address; numbers that are none count as a failure."""
    if found.get("error"):
        return replace(way, reason=_FAILURES.get(str(found["error"]), "broke off"))
    with suppress(KeyError, TypeError, ValueError):
        names = ("ms", "mb_per_s", "down_mb_per_s")
        ms, up, down = numbers = [float(found[name]) for name in names]
        if all(map(math.isfinite, numbers)):
            return replace(way, latency_s=ms / 1e3, up_mb_s=up, down_mb_s=down)
    return replace(way, reason="not measured")


def _in_crowd(worker: Host, way: Way, listener: Listener, token: str, number: int) -> Way:
    """The same way, with what it carries while all workers send, where that can be measured."""
    script = probe_script("", "crowd", way.address, listener.ports[way.address], token, number)
    with suppress(LaunchError):
        said = read_way(way, {"ms": 1e3 * way.latency_s, **ask(worker, script, MEASURE_S)})
        if said.reason == way.reason:
            return replace(way, crowd_up_mb_s=said.up_mb_s, crowd_down_mb_s=said.down_mb_s)
    return way
