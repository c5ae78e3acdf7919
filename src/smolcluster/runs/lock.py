"""A lock on a run's folder, so that two servers cannot write the same run.

The system holds it for the process and lets it go when the process ends, however that happens: a lock
file that was left behind locks nothing.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from smolcluster.errors import ConfigError, RunBusy

_MAX_PID_NBYTES = 20


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
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the lock go. The file stays: removing it could take it from under the next holder."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            raise self._busy(descriptor) from None
        except OSError as error:
            raise self._cannot(error) from error

    def _busy(self, descriptor: int) -> RunBusy:
        text = os.pread(descriptor, _MAX_PID_NBYTES, 0).strip()
        who = f"process {text.decode()}" if text.isdigit() else "another process"
        return RunBusy(
            f"run {self._path.parent.name} is being written by {who}: "
            "wait until that ends, or stop it, then try again"
        )

    def _cannot(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot lock {self._path}: {error.strerror or error}; "
            "set runs_dir to a place on this machine that can be written"
        )
