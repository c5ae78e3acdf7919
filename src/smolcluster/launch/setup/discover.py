"""Machines in the neighbourhood that say of themselves, by mDNS, that one can log in to them.

macOS with Remote Login announces `_ssh._tcp` and `_sftp-ssh._tcp`, Debian's Avahi `_workstation._tcp`.
What they say comes from the network: names that are none of a node, or of a host, are not passed on.
"""

import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smolcluster.errors import LaunchError
from smolcluster.utils.retry import Deadline

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

SERVICES = ("_ssh._tcp.local.", "_sftp-ssh._tcp.local.", "_workstation._tcp.local.")
SECONDS = 3.0
ANSWER_S, ANSWERS_S = 0.5, 5.0
"""How long what is missing of an announcement is asked for: of one, and of all together, in seconds."""
MOST = 100
"""So many machines are listed; more would be an attack."""

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")


@dataclass(frozen=True)
class Neighbour:
    """A machine that was found: its name, such as pi5, and its address."""

    name: str
    address: str

    @property
    def destination(self) -> str:
        """What `ssh` is told: its name where this machine can look it up, which outlives an address."""
        local = f"{self.name}.local"
        return local if _has_address(local) else self.address


def discover(seconds: float = SECONDS, interfaces: Sequence[str] | None = None) -> list[Neighbour]:
    """The machines that announce themselves within some seconds.

    Raises:
        LaunchError: as `announced`.
    """
    remedy = "leave --discover out and name the machines"
    return machines(announced(SERVICES, seconds, interfaces, remedy=remedy))


def announced(
    services: Sequence[str],
    seconds: float = SECONDS,
    interfaces: Sequence[str] | None = None,
    *,
    remedy: str,
) -> "list[ServiceInfo]":
    """What is announced of these services within some seconds.

    `interfaces`: addresses; None: all. `remedy`: what the user may do instead.

    Raises:
        LaunchError: this machine cannot listen to such announcements.
    """
    # Imported here because it takes 0.1 s, and hardly anybody needs it.
    from zeroconf import Error, InterfaceChoice, ServiceBrowser, Zeroconf  # noqa: PLC0415

    seen: dict[tuple[str, str], None] = {}

    def note(*_: object, service_type: str, name: str, **__: object) -> None:
        if len(seen) < MOST:
            seen[service_type, name] = None

    try:
        zeroconf = Zeroconf(list(interfaces) if interfaces else InterfaceChoice.All)
    except (OSError, RuntimeError) as error:  # the second one without any interface
        why = getattr(error, "strerror", None) or str(error).partition(",")[0]
        raise LaunchError(f"this machine cannot listen for mDNS ({why}): {remedy}") from error
    found = []
    with zeroconf, ServiceBrowser(zeroconf, list(services), handlers=[note]):
        time.sleep(seconds)
        asking = Deadline(ANSWERS_S)
        for each in list(seen):
            timeout_ms = int(1000 * min(ANSWER_S, asking.remaining()))
            with suppress(Error):  # a name that breaks the rules
                found.append(zeroconf.get_service_info(*each, timeout=timeout_ms))
    return [each for each in found if each is not None]


def machines(announced: "Iterable[ServiceInfo]") -> list[Neighbour]:
    found: dict[str, Neighbour] = {}
    for info in announced:
        name = (info.server or "").partition(".")[0]
        addresses = sorted(info.parsed_addresses(), key=lambda address: ":" in address)
        usable = [address for address in addresses if not address.startswith("fe80")]
        if usable and _HOST_NAME.fullmatch(name):
            found.setdefault(name.lower(), Neighbour(name, usable[0]))
    return [found[name] for name in sorted(found)]


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, 22))
    except OSError:
        return False
