"""Where a configuration names nodes, and how they are renamed there (pure).

With `--local` the workers of a cluster file are called worker1, worker2, …, and its own names stand for them.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from smolcluster.configs.keys import KeyPath
from smolcluster.configs.schema import config_of
from smolcluster.configs.spec import algorithms

_LISTS = frozenset({"workers", "servers"})
_SECTIONS = frozenset({"host_ip", "nodes", "stages"})
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
    return frozenset({"host_ip", "nodes"}) | _keys_of_algorithms()


def _keys_of_algorithms() -> frozenset[str]:
    return frozenset().union(*(config_of(spec).by_node for spec in algorithms().values()))
