"""The machines of a cluster file, changed: all workers on this one, or without some of them (pure).

With `--local` the workers of a cluster file are called worker1, worker2, …, and its own names stand for them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count, islice, pairwise
from typing import Any

from smolcluster.configs.keys import KeyPath
from smolcluster.configs.schema import ClusterConfig, NodeConfig, config_of
from smolcluster.configs.spec import algorithms
from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at

LOOPBACK = "127.0.0.1"
LOCAL_NAMES = "local_names"

_LISTS = frozenset({"workers", "servers"})
_SECTIONS = frozenset({"host_ip", "nodes", "servers", "stages"})
"""Top-level keys below which nodes are named, besides those of algorithms."""


def rename_in_path(path: KeyPath, rename: Callable[[str], str]) -> KeyPath:
    """The same key, such as `nodes.pi5.device`, of the nodes' new names."""
    if path[0] not in _SECTIONS | _keys_of_algorithms():
        return path
    keys = _keys_by_node()
    return (
        path[0],
        *(rename(part) if above in keys else part for above, part in pairwise(path)),
    )


def rename_in_value(path: KeyPath, value: Any, rename: Callable[[str], str]) -> Any:
    """The value of a key, with the nodes' new names in it; `()` is the path of a whole cluster file."""
    if path == ("server",) and isinstance(value, str):
        return rename(value)
    if len(path) == 1 and path[0] in _LISTS and isinstance(value, list | tuple):
        return [rename(name) if isinstance(name, str) else name for name in value]
    if path and path[0] not in _SECTIONS | _keys_of_algorithms():
        return value
    if not isinstance(value, dict):
        return value
    is_by_node = bool(path) and path[-1] in _keys_by_node()
    return {
        rename(name) if is_by_node and isinstance(name, str) else name: rename_in_value(
            (*path, str(name)), below, rename
        )
        for name, below in value.items()
    }


def _keys_by_node() -> frozenset[str]:
    """Keys that hold a mapping of nodes, wherever they stand."""
    return frozenset({"host_ip", "nodes", "servers"}) | _keys_of_algorithms()


def _keys_of_algorithms() -> frozenset[str]:
    return frozenset().union(*(config_of(spec).by_node for spec in algorithms().values()))


def localise(cluster: ClusterConfig, num_workers: int | None) -> ClusterConfig:
    """The same cluster on this machine alone, with `num_workers` workers (None: as many as it lists).

    Every address is the loopback's, each pipeline has a port of its own, and an algorithm's keys are as its
    `local` has them. Workers are called worker1, worker2, …; their names in the file stand for them, see
    `ClusterConfig.node_of`. A localised cluster stays as it is.

    Raises:
        ConfigError: `num_workers` is below 1.
    """
    wanted = cluster.num_workers if num_workers is None else num_workers
    if wanted < 1:
        raise ConfigError(f"--workers is {wanted}, must be a whole number above 0")
    cluster = _with_local_names(cluster)
    numbered = (f"worker{number}" for number in count(cluster.num_workers + 1))
    free = (name for name in numbered if name not in cluster.machines)
    workers = (*cluster.workers, *islice(free, max(0, wanted - cluster.num_workers)))[:wanted]
    own = {
        key: value for spec in algorithms().values() for key, value in config_of(spec).local.items()
    }
    return cluster.model_copy(
        update=own
        | {
            "host_ip": dict.fromkeys((*cluster.host_ip, *workers), LOOPBACK),
            "bind": (LOOPBACK,),
            "workers": workers,
            "num_workers": wanted,
            "min_workers": min(cluster.min_workers, wanted),
            "nodes": _localised(cluster, workers),
        }
    )


def _with_local_names(cluster: ClusterConfig) -> ClusterConfig:
    """The same with the workers' names on one machine: worker1, worker2, … by their places.

    A worker on the server's node keeps its name; where another node has one of these names, all do.
    """
    places = enumerate(cluster.workers, 1)
    names = {name: f"worker{number}" for number, name in places if name != cluster.server}
    if any(name in cluster.host_ip for name in names.values()):
        return cluster
    addresses = {new: cluster.host_ip[old] for old, new in names.items()}
    values = rename_in_value(
        (), cluster.model_dump(exclude_unset=True), lambda name: names.get(name, name)
    )
    values |= {"host_ip": cluster.host_ip | addresses, LOCAL_NAMES: cluster.local_names | names}
    return type(cluster).model_validate(values)


def _localised(cluster: ClusterConfig, workers: Sequence[str]) -> dict[str, NodeConfig]:
    """The nodes of a cluster on this machine, of whose workers these are left."""
    nodes, taken = dict(cluster.nodes), {cluster.port}
    for name, stages in cluster.pipelines.items():
        own = None
        if name in workers:
            port = next(each for each in count(stages.port) if each not in taken)
            taken.add(port)
            host_ip = dict.fromkeys(stages.host_ip, LOOPBACK)
            own = stages.model_copy(update={"host_ip": host_ip, "port": port})
        nodes[name] = nodes[name].model_copy(update={"stages": own})
    return nodes


def without_nodes(
    flat: Mapping[str, Any], stated: ClusterConfig, names: Collection[str]
) -> dict[str, Any]:
    """A cluster file in the flat shape, whose checked form is `stated`, without these nodes.

    Their addresses and settings stay, so that they can join later. Shares of the others add up to 1 again.

    Raises:
        ConfigError: one is no machine of the file, or has layers of a worker; or no worker would be left.
    """
    for name in names:
        _check(name, stated)
    workers = [each for each in stated.workers if each not in names]
    if not workers:
        raise ConfigError(f"--without {' --without '.join(names)} leaves no worker")
    flat = {**flat, "workers": workers, "num_workers": len(workers)}
    if stated.servers not in (None, "auto"):
        kept = [each for each in stated.store_nodes if each == stated.server or each not in names]
        shares = stated.servers
        flat["servers"] = (
            {each: shares[each] for each in kept} if isinstance(shares, dict) else kept
        )
    if flat.get("batch_share"):
        flat["batch_share"] = _shares_without(flat["batch_share"], names)
    flat["nodes"] = {
        name: {key: value for key, value in (node or {}).items() if key != "stages"}
        if name in names
        else node
        for name, node in (flat.get("nodes") or {}).items()
    }
    return flat


def check_server(cluster: ClusterConfig, names: Collection[str]) -> None:
    """Refuse to leave out what the rest of the configuration still wants.

    Raises:
        ConfigError: it is the server's machine, or an override lists it.
    """
    if cluster.server in names:
        raise ConfigError(
            f"--without {cluster.server}: the server is there, and cannot be left out: move it with "
            "--override server=NODE, and set host_ip to addresses at which NODE is reached"
        )
    left = next((name for name in names if name in cluster.machines), None)
    if left is not None:
        raise ConfigError(f"--without {left}: an override or the environment lists {left}")


def _check(name: str, cluster: ClusterConfig) -> None:
    pipelines = cluster.pipelines.items()
    owner = next((worker for worker, stages in pipelines if name in stages.host_ip), None)
    if owner is not None:
        raise ConfigError(
            f"--without {name}: it has layers of the worker {owner}: leave that out, --without {owner}"
        )
    if name not in cluster.machines:
        known = cluster.machines
        raise ConfigError(
            f"--without {name}: the cluster file starts nothing there, only on {', '.join(known)}"
            f"{hint_at(name, known)}"
        )


def _shares_without(shares: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    kept = {name: share for name, share in shares.items() if name not in names}
    total = math.fsum(kept.values()) or 1.0
    return {name: share / total for name, share in kept.items()}
