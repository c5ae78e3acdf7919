"""Log lines: readable text on the console, JSON lines in the run's log file.

A JSON line has `ts`, `level`, `component`, `rank`, `node`, `host` (the log file's stem), `run`,
`message`, then the fields of `extra=` (one that has a name of the first seven gets `_` behind it),
and `exception` with the traceback where there is one. Tracebacks never reach the console.

Who logs waits neither for the terminal nor for the disk: each has a queue and a thread of its own.
"""

import contextlib
import copy
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from smolcluster.errors import UserCodeError
from smolcluster.observability.terminal import (
    HANGING,
    SteadyConsole,
    displayable,
    print_line,
)
from smolcluster.runs.files import FLUSH_EVERY_S, LineWriter, utc_timestamp
from smolcluster.runs.paths import log_stem, process_title
from smolcluster.utils.units import format_count

MAX_KEPT_LINES = 1000
MAX_LOG_NBYTES = 64_000_000
"""A larger log file is rotated; with two old ones a process's log takes three times as much."""
MAX_QUEUED = 10_000
"""Lines that wait for a terminal or a disk that hangs."""
CLOSE_S = 2.0
"""How long the end of a process waits for a terminal that hangs."""
SPACE_S = 10.0
"""How long it waits for space on the log's disk."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SHORT = {"WARNING": "WARN", "CRITICAL": "FATAL"}
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


class NodeLog:
    """One process's log: text on the console, lines kept until there is a file.

    `logger` is an ordinary `logging.Logger` that nothing else shares. It is not registered with `logging`, so
    two of them in one process never mix, and it hands nothing to the root logger, whose handlers would print
    tracebacks.
    """

    def __init__(
        self,
        component: str,
        node: str,
        rank: int | None = None,
        *,
        level: int = logging.INFO,
        console: Console | None = None,
        named: bool = True,
    ) -> None:
        """`component` is `server`, `worker` and the like; `node` is the machine's name in the cluster file.

        Lines below `level` go to the file only. `named`: whether console lines say whose they are. The
        console is standard error unless given; give the progress view the same one, so that lines appear
        above its bar.
        """
        console = console or SteadyConsole(stderr=True)
        self.logger = logging.Logger("smolcluster", logging.DEBUG)
        self.logger.propagate = False
        shown = _ConsoleHandler(
            console, f"{process_title(component, node, rank)}  " if named else "", level
        )
        self._filed = _FileHandler(component, node, rank, warn=self.logger.warning)
        self._to_console = _Queued(shown, "the terminal")
        self._to_file = _Queued(self._filed, "the log's disk", every=self._filed.tick)
        self.logger.addHandler(self._to_console)
        self.logger.addHandler(self._to_file)

    def file_logs_to(self, path: Path, run_id: str) -> None:
        """File all lines, those of before included, at `path`.

        While the file cannot be written, which one line on the console says, the lines are kept.
        """
        self._to_file.drain(CLOSE_S)
        self._filed.file_to(path, run_id)

    def print(self, console: Console, shown: RenderableType) -> None:
        """Print something on a console after the lines of before, without waiting for the terminal."""
        self._to_console.put(partial(console.print, shown))

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all lines are on the console and in the file; whether they are."""
        is_filed = self._to_file.drain(timeout_s)  # it may have something to say on the console
        return self._to_console.drain(timeout_s) and is_filed

    @property
    def is_filed(self) -> bool:
        """Whether lines go to a file; until then they are kept."""
        return self._filed.is_open

    def close(self) -> None:
        """Close the file and take the handlers off; later lines go nowhere.

        A file that cannot be written, or a terminal that hangs, is given up after some seconds.
        """
        self.logger.removeHandler(self._to_file)
        self._to_file.close_within(SPACE_S + CLOSE_S)
        self.logger.removeHandler(self._to_console)
        self._to_console.close_within(CLOSE_S)
        if self._to_console.thread.is_alive():
            self._to_console.thread.name = HANGING
        self.logger.addHandler(logging.NullHandler())


def console_logger() -> logging.Logger:
    """A logger for a command that ends soon: lines go to standard error at once, and nowhere else."""
    logger = logging.Logger("smolcluster")
    logger.propagate = False
    logger.addHandler(_ConsoleHandler(SteadyConsole(stderr=True), "", logging.INFO))
    return logger


class _Queued(QueueHandler):
    """Hands records to a handler in a thread of its own; those that find the queue full are counted.

    `logging.handlers.QueueListener` would wait without end for a handler that hangs when it is stopped.
    """

    def __init__(
        self, handler: logging.Handler, whose: str, *, every: Callable[[], None] = lambda: None
    ) -> None:
        """`whose`: what is to blame when it hangs; `every`: called about once a second."""
        self._items = queue.Queue[logging.LogRecord | Callable[[], None] | None](MAX_QUEUED)
        super().__init__(self._items)
        self.setLevel(handler.level)
        self._handler = handler
        self._whose = whose
        self._every = every
        self._num_dropped = 0
        self._is_closing = False
        self.thread = threading.Thread(target=self._serve, name="log", daemon=True)
        self.thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A record as plain text, so that nothing of its caller is kept alive."""
        plain = copy.copy(record)
        plain.msg, plain.args = _message(record), None
        if record.exc_info and record.exc_info[1] is not None:
            plain.exc_text = traceback_of(record.exc_info[1])
        plain.exc_info = None
        return plain

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, and before it how many found no place."""
        if self._num_dropped and self.put(self._loss()):
            self._num_dropped = 0
        if not self.put(record):
            self._num_dropped += 1

    def put(
        self, item: logging.LogRecord | Callable[[], None] | None, timeout_s: float = 0.0
    ) -> bool:
        """Queue a record, or something to do; whether there was a place."""
        try:
            self._items.put(item, block=timeout_s > 0, timeout=timeout_s)
        except queue.Full:
            return False
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that is queued now is handled; whether it is."""
        end, reached = time.monotonic() + timeout_s, threading.Event()
        return self.put(reached.set, timeout_s) and reached.wait(max(0.0, end - time.monotonic()))

    def close_within(self, timeout_s: float) -> None:
        """Handle what is queued and close the handler, unless that takes too long."""
        end = time.monotonic() + timeout_s
        self._is_closing = True
        if self._num_dropped:
            self.put(self._loss(), timeout_s)
        if self.put(None, end - time.monotonic()):
            self.thread.join(max(0.0, end - time.monotonic()))
        self.close()

    def _loss(self) -> logging.LogRecord:
        """What is said where records are missing."""
        num, whose = self._num_dropped, self._whose
        sentence = f"missing here: {format_count(num, 'line')}, which {whose} did not take in time"
        return logging.makeLogRecord(
            {"levelno": logging.WARNING, "levelname": "WARNING", "msg": sentence}
        )

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, logging.LogRecord):
                self._handler.handle(item)
            else:
                item()
        self._handler.close()

    def _next(self) -> logging.LogRecord | Callable[[], None] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._items.get(timeout=FLUSH_EVERY_S)
            if self._is_closing:  # its end found no place in the queue
                return None
            self._every()


class _ConsoleHandler(logging.Handler):
    """Prints `13:42:05 INFO  worker 1 (macbook)  message`, in local time."""

    def __init__(self, console: Console, who: str, level: int) -> None:
        super().__init__(level)
        self._out = console
        self._who = who

    def emit(self, record: logging.LogRecord) -> None:
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
        self._former: list[LineWriter] = []
        self._switching = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def file_to(self, path: Path, run_id: str) -> None:
        """File what was kept, and from now on every line, at `path`. Any thread; does not wait."""
        writer = LineWriter(path, warn=self._warn, max_nbytes=MAX_LOG_NBYTES)
        with self._switching:
            self._former += [self._writer] if self._writer else []
            self._writer, self._run_id = writer, run_id
            while self._kept:
                self._write(writer, self._kept.popleft())

    def emit(self, record: logging.LogRecord) -> None:
        line = _fields(record)
        with self._switching:
            if self._writer is None:
                self._kept.append(line)
            else:
                self._write(self._writer, line)
        self.tick()

    def tick(self) -> None:
        with self._switching:
            former, self._former = self._former, []
        for writer in former:
            writer.close()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        self.tick()
        if self._writer is not None:
            self._writer.close(SPACE_S)
        super().close()

    def _write(self, writer: LineWriter, line: dict[str, Any]) -> None:
        head = {
            "ts": line.pop("ts"),
            "level": line.pop("level"),
            **self._labels,
            "run": self._run_id,
        }
        writer.append(
            head
            | {(name if name not in head else f"{name}_"): value for name, value in line.items()}
        )


def traceback_of(error: BaseException) -> str:
    """The traceback; of an error in the user's code, the user's part of it."""
    if isinstance(error, UserCodeError) and error.frames:
        return error.frames
    return "".join(traceback.format_exception(error))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    exception = {"exception": record.exc_text} if record.exc_text else {}
    return {
        "ts": utc_timestamp(record.created),
        "level": record.levelname,
        "message": _message(record),
        **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        **exception,
    }


def _message(record: logging.LogRecord) -> str:
    """The message; where it does not fit its arguments, both: a wrong log line ends no run."""
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args}"
