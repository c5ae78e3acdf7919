"""What a request of a user means: the settings of each process."""

from pathlib import Path

from smolcluster.configs.resolve import Settings, load_settings
from smolcluster.launch.plan import Request

DEFAULT_TRAINING = "digits"
"""What a launch trains that names nothing: it needs no download."""


def cluster_source(stated: str | None, algorithm: str) -> str:
    """The cluster file that is meant: the named one, else the one in this folder, else the shipped one."""
    return stated or written_here(algorithm) or algorithm


def written_here(algorithm: str) -> str | None:
    file = Path(f"cluster_config_{algorithm}.yaml")
    return str(file) if file.is_file() else None


def settings_of(request: Request, local: bool, node: str | None = None) -> Settings:
    """What a process on `node` (None: the server's) is told by this request.

    Raises:
        ConfigError: one line with what is wrong.
    """
    return load_settings(
        cluster_source(request.config, request.algorithm.name),
        request.train_config or DEFAULT_TRAINING,
        node,
        request.overrides,
        local_workers=request.num_workers,
        local=local,
    )
