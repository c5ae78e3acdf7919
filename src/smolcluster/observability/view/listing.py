"""The runs of a folder, as a choice: only small files are read, a few a run."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from smolcluster.errors import ConfigError
from smolcluster.observability.view.standing import state_of
from smolcluster.runs.files import or_none
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import LATEST, RunPaths, check_run_id
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary

MAX_LISTED = 200


def listed(root: Path) -> list[dict[str, Any]]:
    """The newest runs of a folder, the newest first: `run_id`, `state`, and `algorithm` where known."""
    found = []
    with suppress(OSError):
        found = [(path.stat().st_mtime, path.name) for path in root.iterdir() if _is_run(path)]
    newest = sorted(found, key=lambda run: _began(root / run[1], run[0]), reverse=True)
    return [_described(root / name) for _, name in newest[:MAX_LISTED]]


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


def _began(folder: Path, otherwise: float) -> float:
    """When a run began, as well as its first file tells; seconds since 1970."""
    paths = RunPaths(folder)
    for path in (paths.launched, paths.config):
        with suppress(OSError):
            return path.stat().st_mtime
    return otherwise


def _described(folder: Path) -> dict[str, Any]:
    paths = RunPaths(folder)
    status, summary = or_none(read_status, paths.status), or_none(read_summary, paths.summary)
    told = status or summary
    return {
        "run_id": folder.name,
        "state": state_of(status, summary, is_held(paths.lock)),
        "algorithm": told and told.algorithm,
    }
