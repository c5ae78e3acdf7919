"""A lock on a run's folder, so that two servers cannot write the same run, nor two launchers start it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smolcluster.errors import ConfigError, RunBusy
from smolcluster.utils import locks


def is_held(path: Path) -> bool | None:
    """Whether a process of this machine writes the run whose lock file that is; None: none ever did."""
    with suppress(OSError):
        return locks.is_taken(path)
    return None


@contextmanager
def run_lock(path: Path, what: str = "written") -> Iterator[None]:
    """Hold the lock file `path`, which lies in the run's folder, while the block lasts.

    Raises:
        RunBusy: somebody else holds it; the message names the run, the process and `what` that does to it.
        ConfigError: the file cannot be made or locked.
    """

    def refuse(holder: str) -> None:
        raise RunBusy(
            f"run {path.parent.name} is being {what} by {holder}: "
            "wait until that ends, or stop it, then try again"
        )

    def unlockable(reason: str) -> ConfigError:
        return ConfigError(
            f"cannot lock {path}: {reason}; "
            "set runs_dir to a place on this machine that can be written"
        )

    with locks.held(path, refuse, unlockable):
        yield
