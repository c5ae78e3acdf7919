"""A lock on a run's folder, so that two servers cannot write the same run."""

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from smolcluster.errors import ConfigError, RunBusy
from smolcluster.utils import locks


def is_held(path: Path) -> bool | None:
    """Whether a process of this machine writes the run whose lock file that is; None: none ever did."""
    with suppress(OSError):
        return locks.is_taken(path)
    return None


class RunLock:
    """Holds the lock file `path`, which lies in the run's folder, while the `with` block lasts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock, at once or not at all.

        Raises:
            RunBusy: somebody else holds it; the message names the run and the process.
            ConfigError: the file cannot be made or locked.
        """
        try:
            self._descriptor = locks.take(self._path, self._refuse)
        except OSError as error:
            raise ConfigError(
                f"cannot lock {self._path}: {error.strerror or error}; "
                "set runs_dir to a place on this machine that can be written"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the lock go."""
        if self._descriptor is not None:
            locks.release(self._descriptor)
            self._descriptor = None

    def _refuse(self, holder: str) -> None:
        raise RunBusy(
            f"run {self._path.parent.name} is being written by {holder}: "
            "wait until that ends, or stop it, then try again"
        )
