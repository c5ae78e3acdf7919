"""Log lines: readable text on the console, JSON lines in the run's log file.

A JSON line has `ts`, `level`, `component`, `rank`, `node`, `host` (the log file's stem), `run`,
`message`, then the fields of `extra=` (one that has a name of the first seven gets `_` behind it),
and `exception` with the traceback where there is one. Tracebacks never reach the console.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from smolcluster.observability.terminal import SteadyConsole, displayable, print_line
from smolcluster.runs.files import LineWriter, utc_timestamp
from smolcluster.runs.paths import log_stem, process_title

MAX_KEPT_LINES = 1000
MAX_LOG_NBYTES = 64_000_000
"""A larger log file is rotated; with two old ones a process's log takes three times as much."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SHORT = {"WARNING": "WARN", "CRITICAL": "FATAL"}
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


class NodeLog:
    """One process's log. `logger` is an ordinary `logging.Logger` that nothing else shares.

    The logger is not registered with `logging`, so two of them in one process never mix, and it
    hands nothing to the root logger, whose handlers would print tracebacks.
    """

    def __init__(
        self,
        component: str,
        node: str,
        rank: int | None,
        *,
        level: int = logging.INFO,
        console: Console,
        named: bool = True,
    ) -> None:
        self.logger = logging.Logger("smolcluster", logging.DEBUG)
        self.logger.propagate = False
        self._console = _ConsoleHandler(
            console, f"{process_title(component, node, rank)}  " if named else "", level
        )
        self._file = _FileHandler(component, node, rank, warn=self._warn_on_console)
        self.logger.addHandler(self._console)
        self.logger.addHandler(self._file)

    def file_logs_to(self, path: Path, run_id: str) -> None:
        """File all lines, those of before included, at `path`.

        When the file cannot be written, one line on the console says so and logging to it ends.
        """
        self._file.file_to(path, run_id)

    @property
    def is_filed(self) -> bool:
        """Whether lines go to a file; until then they are kept."""
        return self._file.is_open

    def close(self) -> None:
        """Close the file and take the handlers off; later lines go nowhere."""
        for handler in (self._console, self._file):
            self.logger.removeHandler(handler)
            handler.close()
        self.logger.addHandler(logging.NullHandler())

    def _warn_on_console(self, sentence: str) -> None:
        record = logging.makeLogRecord(
            {"levelno": logging.WARNING, "levelname": "WARNING", "msg": sentence}
        )
        self._console.handle(record)


def setup_logging(
    component: str,
    node: str,
    rank: int | None = None,
    *,
    level: int = logging.INFO,
    console: Console | None = None,
    named: bool = True,
) -> NodeLog:
    """Begin the log of one process: text on the console, lines kept until there is a file.

    `component` is `server`, `worker` and the like; `node` is the machine's name in the cluster
    file; lines below `level` go to the file only. `named`: whether console lines say whose they are.
    The console is standard error unless given; give
    the progress view the same one, so that lines appear above its bar.
    """
    console = console or SteadyConsole(stderr=True)
    return NodeLog(component, node, rank, level=level, console=console, named=named)


class _ConsoleHandler(logging.Handler):
    """Prints `13:42:05 INFO  worker 1 (macbook)  message`, in local time."""

    def __init__(self, console: Console, who: str, level: int) -> None:
        super().__init__(level)
        self._out = console
        self._who = who

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = displayable(self._out, _message(record))
        print_line(self._out, log_line(moment, record.levelname, self._who + message))


def log_line(moment: str, level: str, rest: str) -> Text:
    """A line for the console: the time, the level in its colour, and what is said."""
    head = f"{moment} {_SHORT.get(level, level):<5}"
    line = Text(f"{head} {rest}")
    line.stylize(_STYLES.get(level, ""), len(moment) + 1, len(head))
    return line


class _FileHandler(logging.Handler):
    """Writes JSON lines; keeps the last `MAX_KEPT_LINES` while the run is not known."""

    def __init__(
        self, component: str, node: str, rank: int | None, *, warn: Callable[[str], None]
    ) -> None:
        super().__init__(logging.DEBUG)
        self._labels = {
            "component": component,
            "rank": rank,
            "node": node,
            "host": log_stem(component, node, rank),
        }
        self._warn = warn
        self._kept: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT_LINES)
        self._run_id = ""
        self._writer: LineWriter | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a file."""
        return self._writer is not None

    def file_to(self, path: Path, run_id: str) -> None:
        """File what was kept, and from now on every line, at `path`."""
        self.acquire()
        try:
            if self._writer is not None:
                self._writer.close()
            self._run_id = run_id
            self._writer = LineWriter(path, warn=self._warn, max_nbytes=MAX_LOG_NBYTES)
            while self._kept:
                self._file(self._writer, self._kept.popleft())
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """File or keep one line."""
        line = _fields(record)
        if self._writer is None:
            self._kept.append(line)
        else:
            self._file(self._writer, line)

    def close(self) -> None:
        """Close the file."""
        self.acquire()
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self.release()
        super().close()

    def _file(self, writer: LineWriter, line: dict[str, Any]) -> None:
        head = {
            "ts": line.pop("ts"),
            "level": line.pop("level"),
            **self._labels,
            "run": self._run_id,
        }
        writer.write(
            head
            | {(name if name not in head else f"{name}_"): value for name, value in line.items()}
        )
        writer.flush()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """A record as plain values, so that nothing of its caller is kept alive."""
    line: dict[str, Any] = {
        "ts": utc_timestamp(record.created),
        "level": record.levelname,
        "message": _message(record),
    }
    line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if record.exc_info and record.exc_info[1] is not None:
        line["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
    return line


def _message(record: logging.LogRecord) -> str:
    """The message; where it does not fit its arguments, both: a wrong log line ends no run."""
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args}"
