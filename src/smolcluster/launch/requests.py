"""What a user asks for, filled in where little is said, and the settings of each process that follow."""

from collections.abc import Sequence
from pathlib import Path

from smolcluster.algorithms.registry import get_algorithm
from smolcluster.configs.resolve import Settings, load_settings
from smolcluster.launch.plan import Request

DEFAULT_TRAINING = "digits"
"""What a launch trains that names nothing: it needs no download."""
SMALL_GPT = "stdlib"
"""A GPT that needs no download."""


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


def request_of(
    name: str,
    algorithm: str,
    *,
    local: bool,
    num_workers: int | None,
    config: str | None,
    train_config: str | None,
    overrides: Sequence[str],
) -> Request:
    if name == "edp-gpt":
        if train_config is None and not local:  # each Python has another library
            overrides = ["dataset.source=server", *overrides]
        train_config = train_config or SMALL_GPT
        if local:  # old gradients harm a GPT, and two cores compute no faster with three workers
            num_workers = 2 if num_workers is None else num_workers
            overrides = ["worker_update_interval=1", *overrides]
    if local and train_config == "gpt":
        train_config = SMALL_GPT
    return Request(
        algorithm=get_algorithm(algorithm),
        config=config,
        train_config=train_config,
        overrides=tuple(overrides),
        num_workers=num_workers,
    )
