"""The runs of a folder, as a choice: only small files are read, a few a run."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from smolcluster.errors import ConfigError
from smolcluster.observability.view.standing import state_of
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import read_launched
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import LATEST, RunPaths, check_run_id
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary

MAX_LISTED = 200
STARTING_S = 60.0
"""So long a run may take to load PyTorch and its data before it writes anything."""


def listed(root: Path) -> list[dict[str, Any]]:
    """The newest runs of a folder, the newest first: `run_id`, `state` and `algorithm`, or null."""
    found = []
    with suppress(OSError):
        found = [path for path in root.iterdir() if _is_run(path)]
    newest = sorted(found, key=lambda path: began(RunPaths(path)), reverse=True)
    return [_described(path) for path in newest[:MAX_LISTED]]


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


def began(paths: RunPaths) -> float:
    """When a run began, as well as its files tell, which are written in this order; seconds since 1970."""
    for path in (paths.launched, paths.config, paths.processes):
        with suppress(OSError):
            return path.stat().st_mtime
    status = or_none(read_status, paths.status)
    if status is not None:
        return status.started_at.timestamp()
    with suppress(OSError):
        return paths.root.stat().st_mtime
    return 0.0


def _described(folder: Path) -> dict[str, Any]:
    paths = RunPaths(folder)
    status, summary = or_none(read_status, paths.status), or_none(read_summary, paths.summary)
    launched = or_none(read_launched, paths.launched)
    told = status or summary or launched
    is_over = status.is_over if status is not None else summary is not None
    is_held_here = is_held(paths.lock)
    if is_over or is_held_here:
        state: str | None = state_of(status, summary, is_held_here)
    elif paths.launched.is_file() and (launched is None or launched.server.ssh is not None):
        state = _last_heard(paths)
    else:
        is_new = status is None and time.time() - began(paths) < STARTING_S
        state = "starting" if is_new else "broken off"
    return {"run_id": folder.name, "state": state, "algorithm": told and told.algorithm}


def _last_heard(paths: RunPaths) -> str | None:
    """What `smolcluster runs` heard of a run of other machines, once it was over; None: it may live."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        heard = json.loads(paths.standing.read_bytes())
        return str(heard["state"]) if heard["is_alive"] is False else None
    return None
