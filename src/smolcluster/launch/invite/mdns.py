"""Invitations on the local network, by mDNS (RFC 6762, 6763).

Each is announced under a random name of its own: of two that invite into runs of the same name neither hides
the other. What is heard comes from anybody: it is checked, and proves nothing.
"""

import platform
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smolcluster.errors import ConfigError
from smolcluster.launch.setup.discover import SECONDS, announced
from smolcluster.runs.paths import check_run_id
from smolcluster.utils.units import format_address

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

SERVICE = "_smolcluster._tcp.local."
MOST_ADDRESSES = 16
"""So many of an invitation are tried, one after the other; more would be an attack."""
LIVES_S = 120
"""So long others remember an invitation that nobody could withdraw, in seconds."""


@dataclass(frozen=True)
class Announced:
    """An invitation as it was heard of; `run_id` None: it was named by its address."""

    run_id: str | None
    addresses: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return " or ".join(format_address(each, self.port) for each in self.addresses)


@contextmanager
def announcing(
    run_id: str, addresses: Sequence[str], port: int, interfaces: Sequence[str] | None = None
) -> Iterator[None]:
    """Announce an invitation while the block lasts, then withdraw it; `interfaces`: addresses; None: all.

    Raises:
        OSError: this machine cannot announce anything.
    """
    from zeroconf import InterfaceChoice, ServiceInfo, Zeroconf  # noqa: PLC0415 - takes 0.1 s

    info = ServiceInfo(
        SERVICE,
        f"{secrets.token_hex(8)}.{SERVICE}",
        port=port,
        properties={"run": run_id},
        server=f"{platform.node().partition('.')[0] or 'smolcluster'}-{secrets.token_hex(4)}.local.",
        parsed_addresses=list(addresses),
        host_ttl=LIVES_S,
        other_ttl=LIVES_S,
    )
    with Zeroconf(list(interfaces) if interfaces else InterfaceChoice.All) as zeroconf:
        zeroconf.register_service(info)
        yield  # closing says goodbye


def find_invitations(
    seconds: float = SECONDS, interfaces: Sequence[str] | None = None
) -> list[Announced]:
    """The invitations that are announced, by the names of their runs.

    Raises:
        LaunchError: this machine cannot listen to announcements.
    """
    remedy = "name the invitation's address with --invitation HOST:PORT"
    return invitations(announced((SERVICE,), seconds, interfaces, remedy=remedy))


def invitations(infos: "Iterable[ServiceInfo]") -> list[Announced]:
    found = set()
    for info in infos:
        run_id = info.decoded_properties.get("run") or ""
        addresses = tuple(sorted(each for each in info.parsed_addresses() if ":" not in each))
        with suppress(ConfigError):  # a name that is none of a run
            if addresses and info.port:
                shown = addresses[:MOST_ADDRESSES]
                found.add(Announced(check_run_id(run_id), shown, info.port))
    return sorted(found, key=lambda each: (str(each.run_id), each.addresses, each.port))
