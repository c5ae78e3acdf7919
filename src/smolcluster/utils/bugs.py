"""What a process says of an error that nobody foresaw."""

import tempfile
import traceback

from smolcluster.utils.words import condensed

EXIT_CODE = 70
"""Of a process that met one, as of `sysexits.h`: an internal error."""
MAX_MESSAGE_CHARS = 500
"""An error's text may hold a whole tensor; the file has all of it."""


def describe_bug(error: BaseException) -> str:
    """One sentence that names the file in which the traceback is kept, in the system's folder for such."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="smolcluster-", suffix=".log", delete=False
    ) as file:
        traceback.print_exception(error, file=file)
    reason = condensed(str(error), MAX_MESSAGE_CHARS)
    return f"this is a bug in smolcluster: {type(error).__name__}: {reason}; see {file.name}"
