"""What an algorithm says of itself, and which algorithms there are.

An algorithm is one folder, a Python package, whose module `spec` holds an `AlgorithmSpec`. It is found by
the entry-point group `smolcluster.algorithms`, in this distribution or in any other that is installed.
Neither this module nor an algorithm's `spec` imports pydantic or torch: the command line reads them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Literal

from smolcluster.errors import ConfigError

GROUP = "smolcluster.algorithms"
Role = Literal["server", "worker", "store", "stage"]
"""Of a process that looks for a server, or is one."""
SINGLE = "single"
"""What training in one process is called where an algorithm is named."""
STALENESS = "staleness"
"""The column of how old the weights were that a worker's pushes were computed on."""


@dataclass(frozen=True)
class LaunchCommand:
    """`smolcluster launch NAME`, and what it fills in where the user says nothing.

    Attributes:
        local_workers: number of workers with --local; None: as many as the cluster file lists.
        local_overrides: `key=value` texts with --local, below the user's own and the environment's.
        train_overrides: the same wherever it runs, where the training file is this one; `num_steps` among
            them gives way to epochs that the user sets.
        cluster_overrides: the same on the machines of a cluster, where the training file is this one.
    """

    name: str
    help: str
    train_config: str | None = None
    local_workers: int | None = None
    local_overrides: tuple[str, ...] = ()
    train_overrides: tuple[str, ...] = ()
    cluster_overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class AlgorithmSpec:
    """All that the rest of the house knows of an algorithm.

    Attributes:
        name: what users type; of its cluster file `cluster_config_<name>.yaml` and of its runs, too.
        title: what people read.
        costs: the module that predicts what a run will cost, a `CostModel` of `algorithms/planning`; None:
            nobody does.
        config: `module:Class` of what it alone understands, an `AlgorithmConfig` of `configs/schema.py`.
        roles: the file in the folder that is the process of each role.
        messages: the names of the sets of messages that its processes speak besides every session's.
        columns: what is worth a column of the tables of workers.
        serves_loops: whether its workers may be loops of a user's own, which attach.
        is_synchronous: whether workers wait for each other, so that the slowest sets the pace.
        has_local_steps: whether a worker's own optimizer steps its copy of the weights, and only what came of
            several steps is sent.
        has_whole_model: whether server and workers have the whole model each, and not only its outline.
        is_group: whether its processes are one group of `torch.distributed`, so that all must be there before
            anything begins, and are started by the node instead of as server and workers.
        is_default: whether it is meant where no algorithm is named.
    """

    name: str
    title: str
    package: str
    folder: Path
    commands: tuple[LaunchCommand, ...]
    costs: str | None = None
    config: str = "smolcluster.configs.schema:AlgorithmConfig"
    roles: Mapping[str, str] = field(
        default_factory=lambda: {"server": "server.py", "worker": "worker.py"}
    )
    messages: frozenset[str] = frozenset({"ps"})
    columns: frozenset[str] = frozenset()
    serves_loops: bool = True
    is_synchronous: bool = False
    has_local_steps: bool = False
    has_whole_model: bool = True
    is_group: bool = False
    is_default: bool = False

    @property
    def server(self) -> Path:
        return self.folder / self.roles["server"]

    @property
    def worker(self) -> Path:
        return self.folder / self.roles["worker"]

    def module(self, role: str) -> ModuleType:
        """The module of a role's process: with `serve` (server), `Worker` (worker) or `Held` (store)."""
        return import_module(f"{self.package}.{Path(self.roles[role]).stem}")

    @property
    def has_pushes(self) -> bool:
        """Whether workers push, each for itself: those of stages and of groups do not."""
        return self.has_whole_model and not self.is_group


_USUAL = AlgorithmSpec(name="", title="", package="", folder=Path(), commands=())


@cache
def algorithms() -> Mapping[str, AlgorithmSpec]:
    """The algorithms that are installed, by name; the default one first.

    Raises:
        ConfigError: one cannot be imported, or there is none.
    """
    found: dict[str, AlgorithmSpec] = {}
    points = list(entry_points(group=GROUP))
    installed = {point.name for point in points}
    points += [point for point in _of_checkout() if point.name not in installed]
    for point in points:
        try:
            spec = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the algorithm {point.name} ({point.value}) cannot be imported: {error}"
            ) from error
        found[spec.name] = spec
    if not found:
        raise ConfigError(
            "no algorithm is installed: this environment is older than the code; run `uv sync`"
        )
    order = sorted(found.values(), key=lambda spec: (not spec.is_default, spec.name))
    return MappingProxyType({spec.name: spec for spec in order})


def _of_checkout() -> list[EntryPoint]:
    """The entry points of a checkout, whose environment may be older than some of them."""
    file = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if not file.is_file():
        return []
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    stated = project.get("entry-points", {})
    return [EntryPoint(name, value, GROUP) for name, value in stated.get(GROUP, {}).items()]


def get_algorithm(name: str) -> AlgorithmSpec:
    """Look an algorithm up.

    Raises:
        ConfigError: there is none of that name.
    """
    known = algorithms()
    if name not in known:
        raise ConfigError(f"unknown algorithm {name!r} (known: {', '.join(known)})")
    return known[name]


def spec_of(name: str | None) -> AlgorithmSpec:
    """What is known of an algorithm; one that is not installed here, or None, passes for the usual kind.

    That is a server, and workers that have the whole model each.
    """
    return algorithms().get(name or "", _USUAL)


def algorithm_of_stages() -> AlgorithmSpec:
    """The one whose workers have some of a model's layers each.

    Raises:
        ConfigError: none is installed.
    """
    found = next((spec for spec in algorithms().values() if "stages" in spec.messages), None)
    if found is None:
        raise ConfigError("no algorithm is installed that spreads a model's layers over machines")
    return found


def algorithm_of_groups() -> AlgorithmSpec:
    """The one whose processes are a group of `torch.distributed`.

    Raises:
        ConfigError: none is installed.
    """
    found = next((spec for spec in algorithms().values() if spec.is_group), None)
    if found is None:
        raise ConfigError("no algorithm is installed that trains on torch.distributed")
    return found


def default_algorithm() -> AlgorithmSpec:
    return next(iter(algorithms().values()))


def title_of(name: str) -> str:
    """The algorithm's name as people read it; training in a single process has one too."""
    return "Single" if name == SINGLE else get_algorithm(name).title
