"""How the ranks of a mesh find each other: over a key-value store, before a backend connects them.

What a backend would say by a broken connection is looked at first: ranks that are missing, two that call
themselves rank 0, other versions and configurations, an address that leads elsewhere.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated

import psutil
import torch
import torch.distributed as dist
from pydantic import Field, StringConstraints, TypeAdapter
from torch._C._distributed_c10d import TCPStore

from smolcluster.algorithms.Mesh.config import MeshConfig, pick_backend
from smolcluster.algorithms.Mesh.groups import STEP_TIMEOUT, Groups, compare, lost_named
from smolcluster.algorithms.Mesh.ranks import DEFAULT_PORT, Ranks, has_agent_store
from smolcluster.algorithms.Mesh.store import GroupStore, Host, Way
from smolcluster.algorithms.Mesh.watch import FAILED, TAKES_LONGER, Failure, Watch
from smolcluster.configs.checks import check_unencrypted
from smolcluster.configs.schema import Encryption
from smolcluster.errors import ConfigError, ConnectTimeout, PortBusy, SmolclusterError
from smolcluster.utils.addresses import is_loopback, is_loopback_name
from smolcluster.wire.dialling import Address
from smolcluster.wire.security import Secret

QUIET_END_S = 10.0
ONE_A_NODE_S = 15.0
"""After so long without another rank, ranks 0 and 8 of 16 are all that were started."""
ANSWER_S = 10.0
"""How long the store of a group may take to answer, of which it is not known whether it is there."""
IPAddress = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-fA-F.:]{2,45}(%[0-9A-Za-z._-]{1,15})?$")
]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, StringConstraints(max_length=100_000)]
PLACES = TypeAdapter(tuple[Port, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]])
TOLD = TypeAdapter(Annotated[dict[Text, Text], Field(max_length=1000)])
WAYS = TypeAdapter(tuple[IPAddress, IPAddress])
PLACE, NAME = "smolcluster/store", "name"
"""Rank 0's port and the name of its store, in torchrun's; and the latter again, in rank 0's."""


def open_store(
    rank: int, ranks: Ranks, secret: Secret, timeout_s: float, log: logging.Logger
) -> GroupStore:
    """Rank 0's store, which ends with it; under torchrun its own says where that is.

    Raises:
        ConnectTimeout: rank 0 is not there.
        PortBusy: another process listens on the port.
        ConfigError: the address is not rank 0's machine.
        AuthError: the secret is not rank 0's.
    """
    port, has_agent = ranks.port or DEFAULT_PORT, has_agent_store(os.environ)
    if rank != 0:
        if has_agent:
            return _store_of_group(rank, ranks.address, port, secret, timeout_s, log)
        try:
            return reached(ranks.address, port, secret, timeout_s, log)
        except ConnectTimeout as error:
            raise ConnectTimeout(
                f"rank {rank} cannot reach rank 0 at {ranks.address}{_loopback_hint(ranks.address)}, port "
                f"{port}: {error}; start rank 0 there, and check --master-addr"
            ) from error
    if is_elsewhere(ranks.address):
        raise ConfigError(
            f"rank 0 is on {socket.gethostname()}, but MASTER_ADDR or --master-addr is {ranks.address}, "
            "which is another machine: name the one of rank 0"
        )
    try:
        host = Host(own_addresses(ranks.address), 0 if has_agent else port, secret, log)
    except PortBusy as error:
        raise PortBusy(
            f"rank 0 cannot listen on port {port}: {error}; is another rank 0 there? Give each node the "
            "--rank of its first process, or choose another --master-port"
        ) from error
    store = GroupStore(host, timeout_s)
    if has_agent:
        name = secrets.token_hex(8)
        store.set(NAME, name)
        _agent_at(ranks.address, port, timeout_s).set(PLACE, json.dumps([host.port, name]))
    return store


def own_addresses(address: str) -> list[str]:
    """Where rank 0 listens: at the address by which the others know it.

    A machine's own name may lead to its loopback there, and to its network elsewhere: then also at the
    address that its default route has.
    """
    if is_loopback_name(address) or not all(map(is_loopback, _resolved(address))):
        return [address]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # nothing is sent: the system says which way it would take
        return [address, str(probe.getsockname()[0])]
    return [address]


def reached(
    address: str, port: int, secret: Secret, timeout_s: float, log: logging.Logger
) -> GroupStore:
    """Rank 0's store at this address.

    Raises:
        ConnectTimeout, AuthError: as `open_store`.
    """
    return GroupStore(Way(Address(address, port), secret, timeout_s, log), timeout_s)


def _store_of_group(  # noqa: PLR0917 - as `open_store`
    rank: int, address: str, agent_port: int, secret: Secret, timeout_s: float, log: logging.Logger
) -> GroupStore:
    """The store of this group, which rank 0 opens on a free port and tells torchrun's.

    torchrun's is there as long as torchrun is, and so are the keys of groups before; its agents do not count
    alike how often the group was formed again. Anybody may write to it: it says where to ask, no more.

    Raises:
        ConnectTimeout: rank 0 has not told its port.
    """
    try:
        agent = _agent_at(address, agent_port, timeout_s)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConnectTimeout(
            f"rank {rank} cannot reach torchrun's store at {address}, port {agent_port}: {reason}"
        ) from error
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        place = _place(agent.get(PLACE)) if agent.check([PLACE]) else None
        found = place and _store_of_now(address, place, rank, secret, timeout_s, log)
        if found:
            return found
        time.sleep(0.1)
    raise ConnectTimeout(
        f"rank {rank} has waited {timeout_s:.0f} s for rank 0 at {address}: its log says why it has not come"
    )


def _place(told: bytes) -> tuple[int, str] | None:
    """Rank 0's port and its store's name, if that is what it says."""
    try:
        return PLACES.validate_json(told)
    except ValueError:
        return None


def _store_of_now(  # noqa: PLR0917 - as `open_store`
    address: str,
    place: tuple[int, str],
    rank: int,
    secret: Secret,
    timeout_s: float,
    log: logging.Logger,
) -> GroupStore | None:
    """Rank 0's store, if it is there, and not that of a group in which this rank was or any has failed."""
    port, name = place
    try:
        with socket.create_connection(
            (address, port), ANSWER_S
        ):  # who is not there is not waited for
            pass
        found = reached(address, port, secret, ANSWER_S, log)
    except (OSError, SmolclusterError):
        return None
    try:
        is_named = found.check([NAME]) and found.get(NAME).decode() == name
        if is_named and not found.check([FAILED]) and _is_first(found, rank):
            found.timeout_s = timeout_s
            return found
    except RuntimeError:
        pass
    found.close()
    return None


def _agent_at(address: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(
        address,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _is_first(store: GroupStore, rank: int) -> bool:
    """Whether no other process has come as this rank."""
    mark = secrets.token_hex(8)
    return store.compare_set(f"rank {rank}", "", mark).decode() == mark


def meet(
    rank: int,
    world_size: int,
    store: GroupStore,
    told: Mapping[str, str],
    timeout_s: float,
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until all ranks are there, and see to it that they are of one mind.

    Args:
        told: what must be the same on all ranks, by what it is.
        check: raises what ends the waiting.

    Raises:
        ConnectTimeout: some never came; names them.
        ConfigError: this rank has another value than rank 0; names the first one.
    """
    store.set(f"here/{rank}", json.dumps(dict(told)))
    end = time.monotonic() + timeout_s
    missing = set(range(world_size))
    num_missing, since = len(missing), time.monotonic()
    while missing := {each for each in missing if not store.check([f"here/{each}"])}:
        if len(missing) != num_missing:
            num_missing, since = len(missing), time.monotonic()
        elif time.monotonic() > since + ONE_A_NODE_S + (rank == 0):  # the store ends with rank 0
            _check_not_one_a_node(world_size, missing)
        if time.monotonic() > end:
            names = ", ".join(map(str, sorted(missing)))
            raise ConnectTimeout(
                f"after {timeout_s:.0f} s ranks {names} of {world_size} are missing: start them, "
                "with --rank R for one process, --rank R --nproc-per-node K for ranks R to R+K-1, or no "
                "--rank for all on this machine"
            )
        check()
        time.sleep(0.05)
    compare(rank, told, _told(store.get("here/0")))


def joined(
    watch: Watch,
    told: Mapping[str, str],
    config: MeshConfig,
    *,
    device: torch.device,
    encryption: Encryption = "auto",
    check: Callable[[], None] = lambda: None,
) -> Groups:
    """The groups of the rank that is watched, once all ranks are there and connected.

    Raises:
        ConnectTimeout: some never came; names them.
        ConfigError: this rank has `told` another value than rank 0, or as `connect`.
    """
    rank, size, store = watch.rank, watch.world_size, watch.store
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meet(rank, size, store, told, store.timeout_s, check=check)
    connect(rank, size, store, pick_backend(config.backend, device.type), encryption)
    return Groups(config.sizes_for(size), device, watch)


@contextmanager
def together(
    ranks: Ranks,
    store: GroupStore,
    told: Mapping[str, str],
    config: MeshConfig,
    log: logging.Logger,
    *,
    node: str,
    device: torch.device,
    encryption: Encryption = "auto",
    look: Callable[[], Failure | None] = lambda: None,
    on_failure: Callable[[Failure], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Groups]:
    """This rank's groups, once all ranks are there; they watch each other within the block.

    `node` is this machine's name, by which others name it; `look` and `on_failure` are as of a `Watch`, and
    `check` raises what ends the waiting for others.

    Raises:
        ConnectTimeout, ConfigError: as `joined`.
        PeerLost: another rank failed first, which is named.
    """
    rank, size = ranks.here.start, ranks.world_size
    watch = Watch(
        store,
        rank,
        size,
        log,
        node=node,
        hang_timeout_s=config.hang_timeout_s,
        hang_remedy=TAKES_LONGER,
        look=look,
        on_failure=on_failure,
    )
    with watch.watched(), lost_named():
        yield joined(watch, told, config, device=device, encryption=encryption, check=check)
    part(rank, size, store)


def _told(text: bytes) -> dict[str, str]:
    """What a rank has told.

    Raises:
        ConfigError: that is not what ranks tell.
    """
    try:
        return TOLD.validate_json(text)
    except ValueError:
        raise ConfigError(
            "rank 0 says what no rank says: start all ranks with the same code"
        ) from None


def _check_not_one_a_node(world_size: int, missing: set[int]) -> None:
    """Refuse ranks 0 and 8 of 16: the first ones of nodes, the rest of which nobody has started.

    Raises:
        ConfigError: those that are there divide the ranks equally among them.
    """
    found = [each for each in range(world_size) if each not in missing]
    share = world_size // len(found)
    if len(found) > 1 and share > 1 and found == list(range(0, world_size, share)):
        names = ", ".join(map(str, found))
        raise ConfigError(
            f"only ranks {names} of {world_size} have come, one a node: give each node --nproc-per-node "
            f"{share} to start the {share} ranks from its --rank on"
        )


def connect(
    rank: int, world_size: int, store: GroupStore, backend: str, encryption: Encryption
) -> None:
    """Make the process group: over the loopback, or the interface on which this rank reaches the others.

    Raises:
        ConfigError: ranks are on several machines, between which a backend encrypts nothing, and the
            configuration does not say that this is right.
    """
    store.set(f"at/{rank}", json.dumps(store.addresses))
    ways = [WAYS.validate_json(store.get(f"at/{each}")) for each in range(world_size)]
    is_local = all(stays_here(way) for way in ways)
    if not is_local:
        check_unencrypted(encryption)
    name = _addresses().get("127.0.0.1") if is_local else interface_of(_addresses(), rank, ways)
    if name is not None:
        use_interface(name, is_only=is_local)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=STEP_TIMEOUT
    )


def stays_here(way: tuple[str, str]) -> bool:
    """Whether a rank that reaches rank 0 from one address at another one is on its machine."""
    here, there = way
    return here == there or (is_loopback(here) and is_loopback(there))


def use_interface(name: str, *, is_only: bool = True) -> None:
    """Have the backends use this network interface; `is_only`: even where the environment names another."""
    for key, value in (("GLOO_SOCKET_IFNAME", name), ("NCCL_SOCKET_IFNAME", f"={name}")):
        if is_only or key not in os.environ:
            os.environ[key] = value  # NCCL: without = any that begins so


def part(rank: int, world_size: int, store: GroupStore) -> None:
    """End quietly after a good end: the store goes with rank 0, so that rank 0 goes last."""
    dist.destroy_process_group()
    with suppress(dist.DistStoreError):  # all is done: rank 0 need not hear it
        store.set(f"gone/{rank}", "1")
    end = time.monotonic() + QUIET_END_S
    while rank == 0 and time.monotonic() < end:
        if store.check([f"gone/{each}" for each in range(world_size)]):
            return
        time.sleep(0.02)


def interface_of(
    addresses: Mapping[str, str], rank: int, ways: list[tuple[str, str]]
) -> str | None:
    """The network interface to take; None: any will do, as all ranks are on one machine.

    Args:
        addresses: the name of each of this machine's addresses.
        ways: of each rank, the address from which it reaches rank 0's, and the latter.
    """
    own, _ = ways[rank]
    if all(is_loopback(each) for each, _ in ways):
        return None
    if rank == 0 or is_loopback(own):  # on rank 0's machine: as the others see it
        own = next(there for here, there in ways if not is_loopback(here))
    return addresses.get(own)


def is_elsewhere(address: str) -> bool:
    """Whether it leads to no address of this machine."""
    return not any(each in _addresses() or is_loopback(each) for each in _resolved(address))


def _addresses() -> dict[str, str]:
    return {
        each.address.partition("%")[0]: name
        for name, all_ in psutil.net_if_addrs().items()
        for each in all_
    }


def _resolved(address: str) -> set[str]:
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(address, None)}
    except OSError:
        return set()


def _loopback_hint(address: str) -> str:
    found = next((each for each in _resolved(address) if is_loopback(each)), None)
    if found is None:
        return ""
    return f" ({found}: on this machine that leads to itself; name an address that all nodes can reach)"
