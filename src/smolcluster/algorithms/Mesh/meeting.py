"""How the ranks of a mesh find each other: over a key-value store, before a backend connects them.

What a backend would say by a broken connection is looked at first: ranks that are missing, two that call
themselves rank 0, other versions and configurations, an address that leads elsewhere.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from smolcluster.algorithms.Mesh.groups import STEP_TIMEOUT
from smolcluster.algorithms.Mesh.ranks import DEFAULT_PORT, Ranks, has_agent_store
from smolcluster.algorithms.Mesh.watch import FAILED, Store
from smolcluster.errors import ConfigError, ConnectTimeout, PortBusy
from smolcluster.utils.addresses import is_loopback

QUIET_END_S = 10.0
ONE_A_NODE_S = 15.0
"""After so long without another rank, ranks 0 and 8 of 16 are all that were started."""
ANSWER_S = 10.0
"""How long the store of a group may take to answer, of which it is not known whether it is there."""
PLACE, NAME = "smolcluster/store", "name"
"""Rank 0's port and the name of its store, in torchrun's; and the latter again, in rank 0's."""


def open_store(rank: int, ranks: Ranks, timeout_s: float) -> TCPStore:
    """Rank 0's store, which ends with it; under torchrun its own says where that is.

    Raises:
        ConnectTimeout: rank 0 is not there.
        PortBusy: another process listens on the port.
        ConfigError: the address is not rank 0's machine.
    """
    port, has_agent = ranks.port or DEFAULT_PORT, has_agent_store(os.environ)
    is_master = rank == 0 and not has_agent
    try:
        found = _store_at(ranks.address, port, timeout_s, is_master=is_master)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if is_master and is_elsewhere(ranks.address):
            raise ConfigError(
                f"rank 0 is on {socket.gethostname()}, but MASTER_ADDR or --master-addr is {ranks.address}, "
                "which is another machine: name the one of rank 0"
            ) from error
        if is_master:
            raise PortBusy(
                f"rank 0 cannot listen on port {port}: {reason}; choose another --master-port"
            ) from error
        raise ConnectTimeout(
            f"rank {rank} cannot reach rank 0 at {ranks.address}{_loopback_hint(ranks.address)}, port "
            f"{port}: {reason}; start rank 0 there, and check --master-addr"
        ) from error
    if has_agent:
        return _group_store(found, rank, ranks.address, timeout_s)
    if rank == 0 and not _is_first(found, rank):
        raise ConfigError(
            f"two processes are rank 0 of {ranks.address}, port {port}: give each node the --rank of its "
            "first process and the same --world-size, or another --master-port to another mesh"
        )
    return found


def _group_store(agent: TCPStore, rank: int, address: str, timeout_s: float) -> TCPStore:
    """The store of this group, which rank 0 opens on a free port and tells torchrun's.

    torchrun's is there as long as torchrun is, and so are the keys of groups before; its agents do not count
    alike how often the group was formed again.

    Raises:
        ConnectTimeout: rank 0 has not told its port.
    """
    if rank == 0:
        own, name = _store_at(address, 0, timeout_s, is_master=True), secrets.token_hex(8)
        own.set(NAME, name)
        agent.set(PLACE, json.dumps([own.port, name]))
        return own
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if agent.check([PLACE]):
            port, name = json.loads(agent.get(PLACE))
            if (found := _store_of_now(address, port, name, rank)) is not None:
                found.set_timeout(timedelta(seconds=timeout_s))
                return found
        time.sleep(0.1)
    raise ConnectTimeout(
        f"rank {rank} has waited {timeout_s:.0f} s for rank 0 at {address}: its log says why it has not come"
    )


def _store_of_now(address: str, port: int, name: str, rank: int) -> TCPStore | None:
    """Rank 0's store, if it is there, and not that of a group in which this rank was or any has failed."""
    try:
        with socket.create_connection((address, port), ANSWER_S):  # a store's own attempt is loud
            pass
        found = _store_at(address, port, ANSWER_S)
        is_named = found.check([NAME]) and found.get(NAME).decode() == name
        return found if is_named and not found.check([FAILED]) and _is_first(found, rank) else None
    except (OSError, RuntimeError):
        return None


def _store_at(address: str, port: int, timeout_s: float, *, is_master: bool = False) -> TCPStore:
    return TCPStore(
        *(address, port),
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _is_first(store: TCPStore, rank: int) -> bool:
    """Whether no other process has come as this rank."""
    mark = secrets.token_hex(8)
    return store.compare_set(f"rank {rank}", "", mark).decode() == mark


def meet(
    rank: int,
    ranks: Ranks,
    store: Store,
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
    missing = set(range(ranks.world_size))
    num_missing, since = len(missing), time.monotonic()
    while missing := {each for each in missing if not store.check([f"here/{each}"])}:
        if len(missing) != num_missing:
            num_missing, since = len(missing), time.monotonic()
        elif time.monotonic() > since + ONE_A_NODE_S + (rank == 0):  # the store ends with rank 0
            _check_not_one_a_node(ranks.world_size, missing)
        if time.monotonic() > end:
            names = ", ".join(map(str, sorted(missing)))
            raise ConnectTimeout(
                f"after {timeout_s:.0f} s ranks {names} of {ranks.world_size} are missing: start them, "
                "with --rank R for one process, --rank R --nproc-per-node K for ranks R to R+K-1, or no "
                "--rank for all on this machine"
            )
        check()
        time.sleep(0.05)
    compare(rank, told, json.loads(store.get("here/0")))


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


def compare(rank: int, own: Mapping[str, str], first: Mapping[str, str]) -> None:
    """See to it that this rank has rank 0's values.

    Raises:
        ConfigError: one differs.
    """
    for name in {**first, **own}:
        here, there = (each.get(name, "not known") for each in (own, first))
        if here != there:
            raise ConfigError(
                f"{name} is {there} on rank 0 and {here} on rank {rank}: start all ranks with the same code "
                "and configuration"
            )


def connect(rank: int, ranks: Ranks, store: TCPStore, backend: str) -> None:
    """Make the process group, over the interface on which this rank reaches the others."""
    store.set(f"at/{rank}", json.dumps(_ways_to(ranks)))
    ways = [json.loads(store.get(f"at/{each}")) for each in range(ranks.world_size)]
    name = interface_of(_addresses(), rank, ways)
    if name is not None:
        use_interface(name)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks.world_size, timeout=STEP_TIMEOUT
    )


def use_interface(name: str) -> None:
    """Have the backends use this network interface, where the environment names none."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without = any that begins so


def part(rank: int, world_size: int, store: Store) -> None:
    """End quietly after a good end: the store goes with rank 0, so that rank 0 goes last."""
    dist.destroy_process_group()
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


def _ways_to(ranks: Ranks) -> tuple[str, str]:
    try:
        with socket.create_connection((ranks.address, ranks.port or DEFAULT_PORT), 10) as way:
            return way.getsockname()[0], way.getpeername()[0]
    except OSError:  # the store was reached: what is left is that any interface may do
        return "127.0.0.1", "127.0.0.1"


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
