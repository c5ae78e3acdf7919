"""A cluster file without some of its machines, as `launch --without NODE` means it (pure)."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from smolcluster.configs.nested import flatten
from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at


def without_nodes(
    content: Mapping[str, Any], stated: ClusterConfig, names: Collection[str], source: str
) -> dict[str, Any]:
    """The cluster file `content`, whose checked form is `stated`, in the flat shape, without these nodes.

    Their addresses and settings stay, so that they can join later. Shares of the others add up to 1 again.

    Raises:
        ConfigError: one is no machine of the file, or has layers of a worker; or no worker would be left.
    """
    for name in names:
        _check(name, stated)
    workers = [each for each in stated.workers if each not in names]
    if not workers:
        raise ConfigError(f"--without {' --without '.join(names)} leaves no worker")
    flat, _ = flatten(content, source)
    flat |= {"workers": workers, "num_workers": len(workers)}
    if stated.servers is not None:
        shares = stated.store_shares or (1.0,) * len(stated.servers)
        kept = [
            (node, share)
            for node, share in zip(stated.servers, shares, strict=True)
            if node == stated.server or node not in names
        ]
        flat["servers"] = [node for node, _ in kept]
        if stated.store_shares is not None:
            flat["store_shares"] = [share for _, share in kept]
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
    owner = next(
        (
            worker
            for worker, node in cluster.nodes.items()
            if node.stages is not None and name in node.stages.host_ip
        ),
        None,
    )
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
