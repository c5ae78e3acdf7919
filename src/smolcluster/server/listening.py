"""Where a server listens."""

import socket
from dataclasses import replace

import psutil

from smolcluster.configs.machines import LOOPBACK
from smolcluster.configs.schema import ClusterConfig, Settings
from smolcluster.errors import ConfigError
from smolcluster.utils.addresses import is_loopback
from smolcluster.wire.connection import is_local_address, listen


def check_port(cluster: ClusterConfig) -> None:
    """See that the server can listen, before anything is written or built.

    Raises:
        PortBusy: another process listens there.
        ConfigError: no address to listen on is this machine's.
    """
    for listener in listen(listening_addresses(cluster), cluster.port):
        listener.close()


def listening_addresses(cluster: ClusterConfig) -> list[str]:
    """Where the server listens: `bind`, or every address in `host_ip` that is this machine's.

    Raises:
        ConfigError: none of them is.
    """
    if cluster.bind is not None:
        return list(cluster.bind)
    stated = list(dict.fromkeys(cluster.host_ip.values()))
    local = [address for address in stated if is_local_address(address)]
    if not local:
        raise ConfigError(
            f"host_ip: none of {', '.join(stated)} is an address of this machine; mend host_ip or set bind, "
            "or add --local to the server's and the workers' commands to try everything on this machine"
        )
    return local


def own_addresses() -> tuple[str, ...]:
    """The IPv4 addresses at which other machines may reach this one."""
    found = [each for interface in psutil.net_if_addrs().values() for each in interface]
    addresses = (each.address for each in found if each.family == socket.AF_INET)
    return tuple(dict.fromkeys(each for each in addresses if not is_loopback(each)))


def opened(settings: Settings) -> Settings:
    """The same settings of a run on this machine, whose server other machines can reach."""
    bind = (LOOPBACK, *own_addresses())
    return replace(settings, cluster=settings.cluster.model_copy(update={"bind": bind}))
