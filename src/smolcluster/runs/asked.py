"""`asked/` in a run's folder: a file for each process that was asked to end.

The server's says why, if that is because the run has failed: its launcher knows what it does not.
"""

from contextlib import suppress
from pathlib import Path

ASKED = "asked"


def why_asked(folder: Path) -> str | None:
    """Why the run in `folder` was ended, as who did it has written; None: it was stopped, or nobody has."""
    for file in sorted(folder.glob(f"{ASKED}/*")):
        with suppress(OSError):
            if said := file.read_text(encoding="utf-8", errors="replace").strip():
                return said
    return None
