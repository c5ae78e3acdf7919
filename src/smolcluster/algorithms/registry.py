"""The algorithms by name, and where their processes are. The name is that of the shipped cluster file too."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from smolcluster.configs.schema import AlgorithmName
from smolcluster.errors import ConfigError


@dataclass(frozen=True)
class Algorithm:
    """An algorithm's name as users type it, as they read it, and its folder with server.py and worker.py."""

    name: AlgorithmName
    title: str
    folder: Path

    @property
    def server(self) -> Path:
        """The file that is the server."""
        return self.folder / "server.py"

    @property
    def worker(self) -> Path:
        """The file that is a worker."""
        return self.folder / "worker.py"


_HERE = Path(__file__).resolve().parent
ALGORITHMS = MappingProxyType(
    {
        "edp": Algorithm("edp", "EDP", _HERE / "EDP"),
        "syncps": Algorithm("syncps", "SyncPS", _HERE / "SynchronousPS"),
    }
)


def get_algorithm(name: str) -> Algorithm:
    """Look an algorithm up.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r} (known: {', '.join(ALGORITHMS)})")
    return ALGORITHMS[name]


def title_of(name: AlgorithmName) -> str:
    """The algorithm's name as people read it; training in a single process has one too."""
    return "Single" if name == "single" else get_algorithm(name).title
