"""The runs of a folder, as a choice: only small files are read, a few a run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from smolcluster.errors import ConfigError
from smolcluster.observability.view.snapshot import RunSnapshot, read_snapshot
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import LATEST, RunPaths, check_run_id

MAX_LISTED = 200


def listed(root: Path) -> list[dict[str, Any]]:
    """The newest runs of a folder, the newest first: `run_id`, `state` and `algorithm`, or null."""
    newest = sorted(snapshots(root), key=lambda read: read.began, reverse=True)
    return [_described(read) for read in newest[:MAX_LISTED]]


def snapshots(root: Path) -> list[RunSnapshot]:
    """The runs of a folder, in no order."""
    with suppress(OSError):
        return [read_snapshot(RunPaths(path)) for path in root.iterdir() if _is_run(path)]
    return []


def run_of(root: Path, name: str) -> RunPaths | None:
    """The run of that name, or the newest for `latest`; None: there is none.

    Raises:
        ConfigError: the name cannot be a run's.
    """
    if name == LATEST:
        return _latest(root)
    folder = root / check_run_id(name)
    return RunPaths(folder) if _is_run(folder) else None


def _latest(root: Path) -> RunPaths | None:
    with suppress(OSError, ConfigError):
        folder = root / check_run_id((root / LATEST).readlink().name)
        if _is_run(folder):
            return RunPaths(folder)
    known = listed(root)
    return RunPaths(root / known[0]["run_id"]) if known else None


def _is_run(path: Path) -> bool:
    with suppress(ConfigError):
        return check_run_id(path.name) == path.name and not path.is_symlink() and path.is_dir()
    return False


def _described(read: RunSnapshot) -> dict[str, Any]:
    state: str | None = read.state_here()
    if read.is_elsewhere and not read.is_over and not is_held(read.paths.lock):
        state = _last_heard(read.paths)
    return {"run_id": read.paths.run_id, "state": state, "algorithm": read.algorithm}


def _last_heard(paths: RunPaths) -> str | None:
    """What `smolcluster runs` heard of a run of other machines, once it was over; None: it may live."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        heard = json.loads(paths.standing.read_bytes())
        return str(heard["state"]) if heard["is_alive"] is False else None
    return None
