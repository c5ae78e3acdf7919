"""How a user's functions are called: an exception in one becomes a `UserCodeError` that says where.

with user_code("loss"):
    result = loss(model, batch)
"""

import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import TracebackType
from typing import Any, NamedTuple

from smolcluster.errors import SmolclusterError, UserCodeError
from smolcluster.utils.device_errors import device_error, is_out_of_memory

MAX_MESSAGE_CHARS = 500
_ELSEWHERE = "Original Traceback (most recent call last):"
"""Before the traceback of another process, in the message of an error that PyTorch raises again here."""
_OURS = f"{Path(__file__).resolve().parents[1]}/"
_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Where Python keeps its standard library and packages."""


class _Frame(NamedTuple):
    summary: FrameSummary
    function: str
    """Qualified, such as `Model.forward`."""


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Name `what` was called, and the function and line, in place of any exception of the block.

    Errors of smolcluster and a device that is out of memory pass through.

    Raises:
        UserCodeError: the block raised an exception.
        DeviceFailed: it was the device's driver that reported an error.
    """
    try:
        yield
    except SmolclusterError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise device_error(error) or _user_error(what, error) from error


def wrong_result(what: str, function: Callable[..., Any], problem: str) -> UserCodeError:
    """An error about what a user's function returned; it names where the function is defined."""
    plain: Any = inspect.unwrap(function)
    while isinstance(plain, partial):
        plain = inspect.unwrap(plain.func)
    code = getattr(plain, "__code__", None)
    if code is None:
        return UserCodeError(f"{what}: {problem}")
    where = _place(what, code.co_qualname, code.co_filename, code.co_firstlineno)
    return UserCodeError(f"{where}: {problem}")


def _user_error(what: str, error: Exception | SystemExit) -> UserCodeError:
    own, frames = _users_frames(error.__traceback__)
    message, elsewhere = " ".join(str(error).split()), str(error).partition(_ELSEWHERE)[2]
    if elsewhere:  # a process of a DataLoader sends its traceback as text
        message = elsewhere.strip().rpartition("\n")[2].removeprefix(f"{type(error).__name__}: ")
        own = [_Frame(each, each.name) for each in _frames_in(elsewhere)] or own
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 1] + "…"
    told = f"{type(error).__name__}: {message}" if message else type(error).__name__
    shown = StackSummary.from_list([frame.summary for frame in frames]).format()
    text = "".join([*shown, *traceback.format_exception_only(error)])
    where = what
    if own:
        last = own[-1]
        where = _place(what, last.function, last.summary.filename, last.summary.lineno)
    return UserCodeError(
        f"{where}: {told}", f"Traceback of your code (most recent call last):\n{text}"
    )


def _place(what: str, function: str, file: str, line: int | None) -> str:
    name = function.rpartition("<locals>.")[2]
    is_said = name in (what.rpartition(" ")[2], "<lambda>", "<module>")
    named = what if is_said else f"{what}, in {name}"
    return f"{named} ({Path(file).name}:{line})"


def _frames_in(text: str) -> list[FrameSummary]:
    """The user's own frames in a traceback that is text."""
    found = [
        FrameSummary(file, int(line), name)
        for file, line, name in re.findall(r'File "(.+?)", line (\d+), in (\S+)', text)
    ]
    return [frame for frame in found if not frame.filename.startswith((_OURS, *_INSTALLED))]


def _users_frames(raised: TracebackType | None) -> tuple[list[_Frame], list[_Frame]]:
    """The frames of which the last is where it happened, and those to be shown.

    They are the user's own. Where there are none it happened in a package that is not PyTorch, or nobody
    knows where, and all are shown that are not smolcluster's.
    """
    frames = []
    for frame, line in traceback.walk_tb(raised):
        code = frame.f_code
        if not code.co_filename.startswith("<frozen"):
            summary = FrameSummary(code.co_filename, line, code.co_name)
            frames.append(_Frame(summary, code.co_qualname))
    theirs = [frame for frame in frames if not _lies_in(frame, _OURS)]
    own = [frame for frame in theirs if not _lies_in(frame, _INSTALLED)]
    if own:
        return own, own
    import torch  # noqa: PLC0415 - only once something has gone wrong

    pytorch = f"{Path(torch.__file__).parent}/"
    return [frame for frame in theirs if not _lies_in(frame, pytorch)], theirs or frames


def _lies_in(frame: _Frame, folders: str | tuple[str, ...]) -> bool:
    return frame.summary.filename.startswith(folders)
