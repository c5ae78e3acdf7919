"""`smolcluster logs`: the log lines of all processes of a run, merged by time, wherever they lie."""

import itertools
import json
import logging
import queue
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from smolcluster.errors import ConfigError, DataError, LaunchError, SmolclusterError
from smolcluster.launch.find import find
from smolcluster.launch.host import CONNECT_TIMEOUT_S, Host, shell_path
from smolcluster.launch.watch.probe import look
from smolcluster.launch.watch.tail import END_S, RemoteTail
from smolcluster.observability.logs import log_line
from smolcluster.observability.parsing import parse_log_line
from smolcluster.observability.terminal import (
    COLOURS,
    SteadyConsole,
    displayable,
    print_line,
)
from smolcluster.runs.files import utc_timestamp
from smolcluster.runs.launched import LaunchedProcess, read_launched
from smolcluster.runs.paths import RunPaths, log_stem, parse_log_stem, process_title
from smolcluster.runs.processes import read_processes
from smolcluster.utils.words import nearest, one_line

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_SHOWN = 4000
"""Characters of a message; the file has the rest."""
PATIENCE_S = CONNECT_TIMEOUT_S + 1.0
"""How long the lines of one machine wait for those of the others, before the first is shown."""
LOOK_EVERY_S, LAST_LINES_S = 2.0, 2.0
"""Between two looks whether a run is over, and how long its last lines may take then."""
TOGETHER_S = 0.3
"""Lines that come within so short a time are sorted."""
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class LogFile:
    """The log file of one process.

    Attributes:
        host: the machine that has it.
        file: its path there, a word of a shell.
        copy: where it is here when it was fetched.
    """

    node: str
    role: str
    rank: int | None
    host: Host
    file: str
    copy: Path

    @property
    def title(self) -> str:
        """The process in messages: `server mini1`, `worker 1 (pi5)`."""
        return process_title(self.role, self.node, self.rank)


@dataclass(frozen=True)
class LogLine:
    """One line: when it was written, in seconds since 1970, and by which process."""

    seconds: float
    source: int
    level: str
    message: str
    exception: str = ""


def logs(
    run: str,
    *,
    node: str | None,
    rank: int | None,
    level: str,
    follow: bool,
    since: str | None,
    as_json: bool = False,
) -> int:
    """Print a run's log lines; returns 1 when those of a machine are missing.

    Args:
        run: its name, latest, or its folder.
        node: only of processes on the machine of this name.
        rank: only of the worker of this rank.
        level: only of this level and above.
        follow: go on with what is new, until the run is over or Ctrl-C.
        since: only what is newer: `10m`, or a time such as `2026-11-22T10:00`.
        as_json: a JSON object a line, `{ts, node, role, rank, level, message, exception}`: RFC 3339 in UTC;
            null is the rank of a server and the exception of a line without one.

    Raises:
        ConfigError: there is no such run, machine, rank, level or time.
        DataError: its list of processes is damaged.
    """
    paths = find(run)
    lowest, start = level_number(level), since_when(since, datetime.now().astimezone())
    sources = chosen(sources_of(paths), node, rank)
    view = LogView(SteadyConsole(), sources, lowest, start, as_json=as_json)
    return _follow(view, lambda: is_over(paths)) if follow else _print(view)


def is_over(paths: RunPaths) -> bool:
    """Whether nothing more will be said of a run that had begun."""
    try:
        probed = look(paths)
    except SmolclusterError:
        return False
    alive = {each.liveness for each in probed.processes} - {"ended", "gone"}
    has_begun = probed.status is not None or probed.summary is not None
    return has_begun and not alive


def level_number(level: str) -> int:
    """A level's number, whatever its case.

    Raises:
        ConfigError: there is no such level.
    """
    if level.upper() in LEVELS:
        return logging.getLevelNamesMapping()[level.upper()]
    meant = nearest(level, LEVELS)
    hint = f"; did you mean {meant}?" if meant else ""
    raise ConfigError(f"--level {one_line(level)}: there are {', '.join(LEVELS)}{hint}")


def since_when(text: str | None, now: datetime) -> float:
    """The moment that `--since` means, in seconds since 1970.

    Raises:
        ConfigError: it is no moment.
    """
    if text is None:
        return 0.0
    if found := re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?(s|min|m|h|d)", text.strip()):
        ago = timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
        return now.timestamp() - ago.total_seconds()
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment.replace(tzinfo=moment.tzinfo or now.tzinfo).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--since {one_line(text)}: say how long ago, such as 30s, 10m, 2h or 1d, or when, such as "
            f"{now:%Y-%m-%dT%H:%M}"
        ) from error


def sources_of(paths: RunPaths) -> list[LogFile]:
    """The log files of a run: on their machines if it was launched there, else those that are here.

    Raises:
        DataError: its list of processes is damaged.
    """
    if paths.launched.is_file():
        return [_launched(each, paths) for each in read_launched(paths.launched).processes]
    return _sources_here(paths)


def _launched(process: LaunchedProcess, paths: RunPaths) -> LogFile:
    return LogFile(
        process.node,
        process.role,
        process.rank,
        Host(process.node, process.ssh),
        f"{shell_path(process.run_dir)}/logs/{shlex.quote(process.stem)}.log",
        paths.logs / f"{process.stem}.log",
    )


def _sources_here(paths: RunPaths) -> list[LogFile]:
    here = Host("this machine")
    stems: dict[str, tuple[str, str, int | None]] = {}
    if paths.processes.is_file():
        with suppress(DataError):
            for each in read_processes(paths.processes):
                stem = log_stem(each.role, each.node, each.rank)
                stems[stem] = (each.role, each.node, each.rank)
    for file in sorted(paths.logs.glob("*.log")):
        if process := parse_log_stem(file.stem):
            stems.setdefault(file.stem, process)
    files = {stem: paths.logs / f"{stem}.log" for stem in stems}
    return [
        LogFile(node, role, rank, here, shlex.quote(str(files[stem])), files[stem])
        for stem, (role, node, rank) in stems.items()
    ]


def chosen(sources: Sequence[LogFile], node: str | None, rank: int | None) -> list[LogFile]:
    """The sources of that machine and rank.

    Raises:
        ConfigError: there is none.
    """
    of_node = [source for source in sources if node in (None, source.node)]
    if node is not None and not of_node:
        names = ", ".join(dict.fromkeys(source.node for source in sources)) or "none"
        raise ConfigError(
            f"--node {one_line(node)}: the run has no process there; it has some on: {names}"
        )
    of_rank = [source for source in of_node if rank in (None, source.rank)]
    if rank is not None and not of_rank:
        workers = ", ".join(source.title for source in of_node if source.rank is not None)
        where = "" if node is None else f" on {node}"
        raise ConfigError(f"--worker {rank + 1}: the run's workers{where} are: {workers or 'none'}")
    return of_rank


def entry_of(line: bytes, source: int, before: float) -> LogLine | None:
    """What a line of a file says; what is no JSON object is shown as it is. None: it is empty.

    `before` is the time of the line before it, for a line that has none.
    """
    said = parse_log_line(line, before)
    if said is None:
        return None
    return LogLine(said.seconds, source, said.level, said.message, said.exception)


class LogView:
    """Prints entries; leaves out those that are not wanted."""

    def __init__(
        self,
        console: Console,
        sources: Sequence[LogFile],
        lowest: int,
        start: float,
        *,
        as_json: bool = False,
    ) -> None:
        self._as_json = as_json
        self.console = console
        self.problems = SteadyConsole(stderr=True)
        self.sources = sources
        self._lowest = lowest
        self._start = start
        self._before = [0.0] * len(sources)
        width = max((len(source.title) for source in sources), default=0)
        self._prefixes = [
            Text(displayable(console, f"{source.title:<{width}}"), style=colour)
            for source, colour in zip(sources, itertools.cycle(COLOURS), strict=False)
        ]

    def entries(self, source: int, lines: Iterable[bytes]) -> list[LogLine]:
        """What the next lines of a source say that is wanted."""
        wanted = []
        for line in lines:
            entry = entry_of(line, source, self._before[source])
            if entry is not None:
                self._before[source] = entry.seconds
                if self._wants(entry):
                    wanted.append(entry)
        return wanted

    def _wants(self, entry: LogLine) -> bool:
        number = logging.getLevelNamesMapping().get(entry.level, logging.INFO)
        return entry.seconds >= self._start and number >= self._lowest

    def show(self, entries: Iterable[LogLine]) -> None:
        """Print them in the order of their times."""
        for entry in sorted(entries, key=lambda each: each.seconds):
            if self._as_json:
                self._print_json(entry)
                continue
            moment = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.seconds))
            self._print(entry, log_line(moment, entry.level, self._displayable(entry.message)))
            for line in entry.exception[: 10 * MAX_SHOWN].splitlines():
                self._print(entry, Text(f"    {self._displayable(line)}", style="dim"))

    def _print(self, entry: LogLine, text: Text) -> None:
        print_line(self.console, Text.assemble(self._prefixes[entry.source], " | ", text))

    def _print_json(self, entry: LogLine) -> None:
        source = self.sources[entry.source]
        values = {
            "ts": utc_timestamp(entry.seconds),
            "node": source.node,
            "role": source.role,
            "rank": source.rank,
            "level": entry.level,
            "message": entry.message,
            "exception": entry.exception or None,
        }
        sys.stdout.write(json.dumps(values) + "\n")  # in ASCII, which any terminal can show
        sys.stdout.flush()

    def _displayable(self, text: str) -> str:
        left_out = len(text) - MAX_SHOWN
        more = f" … ({left_out:,} characters more)" if left_out > 0 else ""
        return displayable(self.console, text[:MAX_SHOWN] + more)


# --- what is there


def _print(view: LogView) -> int:
    """Print what is there now; 1 when a machine's lines are missing."""
    with ThreadPoolExecutor(max(1, len(view.sources))) as pool:
        fetched = list(pool.map(lambda index: _fetched(view, index), range(len(view.sources))))
    view.show(itertools.chain.from_iterable(entries for entries, _ in fetched))
    problems = dict.fromkeys(problem for _, problem in fetched if problem)
    for problem in problems:
        print_line(view.problems, problem)
    return int(bool(problems))


def _fetched(view: LogView, index: int) -> tuple[list[LogLine], str]:
    """The lines that a file has now, or its copy here has when the machine cannot be reached, and why not."""
    source, entries = view.sources[index], list[LogLine]()

    def take(lines: list[bytes]) -> None:
        entries.extend(view.entries(index, lines))

    try:
        RemoteTail(source.host, source.file, on_lines=take).read()
    except LaunchError as error:
        if not source.copy.is_file():
            return [], str(error)
        entries.clear()
        with suppress(LaunchError):
            here = Host(source.host.node)
            RemoteTail(here, shlex.quote(str(source.copy)), on_lines=take).read()
        return entries, f"{error}; its lines are those that were fetched before"
    return entries, ""


# --- what comes


@dataclass(frozen=True)
class _News:
    """Something of a source: lines, that all that was there has come, or a word of what became of it."""

    source: int
    kind: Literal["lines", "whole", "word"]
    lines: tuple[bytes, ...] = ()
    word: str = ""


def _follow(view: LogView, is_over: Callable[[], bool]) -> int:
    """Print what is there and what comes, until the run is over or Ctrl-C."""
    news: queue.Queue[_News] = queue.Queue()
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(is_over, over), daemon=True).start()
    tails = [_tail(view, index, news) for index in range(len(view.sources))]
    threads = [threading.Thread(target=run, daemon=True) for _, run in tails]
    try:
        for thread in threads:
            thread.start()
        _show_first(view, news)
        while not view.console.quiet and not (over.is_set() and news.empty()):
            _show_next(view, news)
    except KeyboardInterrupt:
        return 0
    finally:
        for tail, _ in tails:
            tail.stop()
        end = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        for tail, _ in tails:
            tail.kill()
        for thread in threads:
            thread.join(END_S)
        over.set()
    return 0  # the run is over, or nobody reads it any more


def _wait_for_end(is_over: Callable[[], bool], over: threading.Event) -> None:
    """Set `over` when a run is, and its last lines have had time to come."""
    while not is_over():
        if over.wait(LOOK_EVERY_S):
            return
    over.wait(LAST_LINES_S)
    over.set()


def _tail(
    view: LogView, index: int, news: "queue.Queue[_News]"
) -> tuple[RemoteTail, Callable[[], None]]:
    source = view.sources[index]
    is_first = all(each.host != source.host for each in view.sources[:index])

    def say(sentence: str) -> None:
        news.put(_News(index, "word", word=sentence if is_first else ""))

    tail = RemoteTail(
        source.host,
        source.file,
        on_lines=lambda lines: news.put(_News(index, "lines", tuple(lines))),
        on_whole=lambda: news.put(_News(index, "whole")),
    )
    return tail, lambda: tail.follow(
        lambda problem: say(f"{problem}; trying again"),
        lambda: say(f"{source.host.node}: connected again"),
    )


def _show_first(view: LogView, news: "queue.Queue[_News]") -> None:
    """Print what is there, as soon as each source has said all or that it cannot."""
    entries: list[LogLine] = []
    missing = set(range(len(view.sources)))
    end = time.monotonic() + PATIENCE_S
    while missing and (left := end - time.monotonic()) > 0:
        with suppress(queue.Empty):
            each = news.get(timeout=left)
            entries += _taken(view, each)
            if each.kind != "lines":
                missing.discard(each.source)
    view.show(entries)


def _show_next(view: LogView, news: "queue.Queue[_News]") -> None:
    """Wait for something new, and print it with what comes soon after it."""
    entries: list[LogLine] = []
    with suppress(queue.Empty):
        entries += _taken(view, news.get(timeout=1.0))
        end = time.monotonic() + TOGETHER_S
        while (left := end - time.monotonic()) > 0:
            entries += _taken(view, news.get(timeout=left))
    view.show(entries)


def _taken(view: LogView, news: _News) -> list[LogLine]:
    if news.word:
        print_line(view.problems, news.word)
    return view.entries(news.source, news.lines)
