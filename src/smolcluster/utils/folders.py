"""The checkout that this is, and folders of the user's that a platform has a custom for."""

import os
import sys
from pathlib import Path


def checkout() -> Path | None:
    """The project's folder; None: the package is installed without one."""
    root = Path(__file__).resolve().parents[3]
    is_project = (root / "pyproject.toml").is_file() and (root / "src" / "smolcluster").is_dir()
    return root if is_project else None


def user_cache() -> Path:
    """Where files are kept that can be made or fetched again; it need not exist."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "smolcluster"
    stated = os.environ.get("XDG_CACHE_HOME")
    return (Path(stated) if stated else Path.home() / ".cache") / "smolcluster"


def user_state() -> Path:
    """Where is kept what outlives runs and is nobody else's business; it need not exist."""
    stated = os.environ.get("XDG_STATE_HOME")
    return (Path(stated) if stated else Path.home() / ".local" / "state") / "smolcluster"
