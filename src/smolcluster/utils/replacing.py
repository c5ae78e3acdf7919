"""Files that are replaced whole, so that no reader meets a part of one."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Put what the block writes in the place of `path`, at once and on the disk.

    Without `durable` it reaches the disk when the system likes, and nothing waits for that.

    Yields:
        An empty hidden file beside `path`, to be written, or replaced by another of that name. When the block
        fails it is removed, and what was at `path` is still there.

    Raises:
        OSError: it cannot be made, flushed or renamed, or `path` is a device or the like; it is as it was.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "what is there is no regular file")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.touch()
        mode = draft.stat().st_mode
        yield draft
        draft.chmod(mode)  # a library that replaces it may make it its owner's alone
        if durable:
            with draft.open("rb") as file:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
