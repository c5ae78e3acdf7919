"""Which run a command means. Imports nothing that takes time."""

import os
from contextlib import suppress
from pathlib import Path

from smolcluster.errors import ConfigError
from smolcluster.runs.paths import RunPaths, find_run, runs_root

RUNS_DIR = "SMOLCLUSTER_RUNS_DIR"


def find(run: str) -> RunPaths:
    """The run of that name in the folder of runs, or the run whose folder that is.

    Raises:
        ConfigError: there is neither.
    """
    return in_folder(run) or find_run(all_runs(), run)


def all_runs() -> Path:
    """The folder of runs: that of the environment, else the usual one."""
    stated = os.environ.get(RUNS_DIR)
    return runs_root(Path(stated) if stated else None)


def in_folder(run: str) -> RunPaths | None:
    """The run whose folder that is; None: it is a name.

    Raises:
        ConfigError: it is another folder.
    """
    with suppress(RuntimeError, OSError):  # no such user; a name that is too long
        folder = Path(run).expanduser()
        if folder.name != run and folder.is_dir():
            paths = RunPaths(folder.resolve())
            if not (paths.config.is_file() or paths.launched.is_file()):
                raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
            return paths
    return None
