"""Folders of the user's that a platform has a custom for."""

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """Where files are kept that can be made or fetched again; it need not exist."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "smolcluster"
    stated = os.environ.get("XDG_CACHE_HOME")
    return (Path(stated) if stated else Path.home() / ".cache") / "smolcluster"
