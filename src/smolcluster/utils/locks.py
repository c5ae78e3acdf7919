"""Lock files that say who holds them.

The system holds a lock for a process and lets it go when the process ends, however that happens: a file that
was left behind locks nothing.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smolcluster.errors import SmolclusterError

_MAX_PID_NBYTES = 20
_NUM_TRIES, _BETWEEN_TRIES_S = 5, 0.02
"""Who only asks `is_taken` has the lock for a moment."""


@contextmanager
def held(
    path: Path,
    on_busy: Callable[[str], None],
    unlockable: Callable[[str], SmolclusterError] | None = None,
) -> Iterator[None]:
    """Lock a file, which is made if need be and says this process's id, while the block lasts.

    The file stays: removing it could take it from under the next holder.

    Args:
        path: the file.
        on_busy: hears who holds the lock, such as `process 4711`; when it returns, that one is waited for.
        unlockable: what is raised, by the system's reason, if it cannot be made, locked or written.

    Raises:
        OSError: that, without `unlockable`.
    """
    try:
        descriptor = _take(path, on_busy)
    except OSError as error:
        if unlockable is None:
            raise
        raise unlockable(error.strerror or str(error)) from error
    try:
        yield
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _take(path: Path, on_busy: Callable[[str], None]) -> int:
    # what a link leads to is somebody's file
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _lock(descriptor, on_busy)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, on_busy: Callable[[str], None]) -> None:
    for _ in range(_NUM_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_BETWEEN_TRIES_S)
    text = os.pread(descriptor, _MAX_PID_NBYTES, 0).strip()
    on_busy(f"process {text.decode()}" if text.isdigit() else "another process")
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_taken(path: Path) -> bool:
    """Whether a process holds the lock of a file, which must be there.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
