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
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Literal

from rich.text import Text

from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.find import find
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.jobs.kubernetes import pod_logs
from smolcluster.launch.sessions import host_of
from smolcluster.launch.watch.probe import look
from smolcluster.launch.watch.tail import PATIENCE_S, Followed, RemoteTail, Told
from smolcluster.observability.logs import log_line
from smolcluster.observability.parsing import LogLine, parse_log_line
from smolcluster.observability.terminal import COLOURS, SteadyConsole, displayable, print_line
from smolcluster.observability.view.lines import level_number
from smolcluster.runs.files import utc_timestamp
from smolcluster.runs.launched import Launched, LaunchedProcess, launched_of
from smolcluster.runs.paths import RunPaths, parse_log_stem, process_title
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import as_command, hint_at, one_line, shortened

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_SHOWN = 4000
"""Characters of a message; the file has the rest."""
LOOK_EVERY_S, LAST_LINES_S = 2.0, 2.0
"""Between two looks whether a run is over, and how long its last lines may take then."""
TOGETHER_S = 0.3
"""Lines that come within so short a time are sorted."""
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


NumberedRole = Literal["worker", "rank"]
Entry = tuple[int, LogLine]
"""A line, and which of the sources has it."""


def logs(
    run: str,
    *,
    node: str | None,
    rank: int | None,
    level: str,
    follow: bool,
    since: str | None,
    role: NumberedRole = "worker",
    as_json: bool = False,
) -> int:
    """Print a run's log lines; returns 1 when those of a machine are missing.

    Args:
        run: its name, latest, or its folder.
        node: only of processes on the machine of this name.
        rank: only of the process of this rank and of `role`.
        level: only of this level and above.
        follow: go on with what is new, until the run is over or Ctrl-C.
        since: only what is newer: `10m`, or a time such as `2026-11-22T10:00`.
        as_json: a JSON object a line, `{ts, node, role, rank, level, message, exception}`: RFC 3339 in UTC;
            null is the rank of a server and the exception of a line without one.

    Raises:
        ConfigError: there is no such run, machine, rank, level or time, or only `kubectl` has them.
        DataError: its list of processes is damaged.
    """
    paths = find(run)
    launched = launched_of(paths)
    if launched is not None and launched.server.scheduler == "kubernetes":
        raise ConfigError(
            f"the logs of run {paths.run_id} are its pods': `{pod_logs(launched.server)}` shows them"
        )
    lowest, start = parse_level(level), since_when(since, datetime.now().astimezone())

    def sources() -> list[LaunchedProcess]:
        return chosen(sources_of(paths), node, rank, role)

    try:
        found = sources()
    except ConfigError as error:
        raise (_out_of_reach(paths, node, rank) if role == "worker" else None) or error from None
    view = LogView(paths, found, lowest, start, as_json=as_json)
    return _follow(view, sources) if follow else _print(view)


def _out_of_reach(paths: RunPaths, node: str | None, rank: int | None) -> ConfigError | None:
    """Where the logs are of a worker that has joined by itself; None: there is no such worker."""
    status = look(paths).status
    for worker in status.workers if status else ():
        if node in (None, worker.node) and rank in (None, worker.rank):
            return ConfigError(
                f"{process_title('worker', worker.node, worker.rank)} has joined by itself, without SSH: its "
                f"logs are on that machine, where {as_command('logs', paths.run_id)} shows them"
            )
    return None


def is_over(paths: RunPaths) -> bool:
    """Whether nothing more will be said of a run that had begun."""
    try:
        read = look(paths)
    except SmolclusterError:
        return False
    alive = {each.process for each in read.seen} - {"ended", "gone"}
    has_begun = read.status or read.summary or read.ended
    return has_begun is not None and not alive


def parse_level(level: str) -> int:
    """A level's number, whatever its case; as lines of the console name it (`WARN`, `FATAL`), too.

    Raises:
        ConfigError: there is no such level.
    """
    if level.upper() in {*LEVELS, "WARN", "FATAL"}:
        return logging.getLevelNamesMapping()[level.upper()]
    hint = hint_at(level, LEVELS)
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
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--since {one_line(text)}: say how long ago, such as 30s, 10m, 2h or 1d, or when, such as "
            f"{now:%Y-%m-%dT%H:%M}"
        ) from error


def sources_of(paths: RunPaths) -> Sequence[LaunchedProcess]:
    """Whose logs a run has: on their machines if it was launched there, else those that are here.

    Raises:
        DataError: its list of processes is damaged.
    """
    launched = launched_of(paths)
    if launched is None:
        return _logs_here(paths)
    if launched.is_group:
        return _logs_here(paths) if launched.is_local else _logs_of_ranks(launched, paths)
    here = [] if launched.has_sessions else _logs_here(paths)
    known = {each.stem for each in launched.processes}
    return [*launched.processes, *(each for each in here if each.stem not in known)]


def _logs_here(paths: RunPaths) -> list[LaunchedProcess]:
    return _processes_of((file.name for file in paths.logs.glob("*.log")), str(paths.root))


def _logs_of_ranks(launched: Launched, paths: RunPaths) -> list[LaunchedProcess]:
    """Those that are on the machines of a group, each of which has several ranks.

    Of a machine that cannot be reached it is the process that started them, and what was fetched before.
    """

    def there(process: LaunchedProcess) -> list[LaunchedProcess] | None:
        try:
            done = host_of(process).run(f"ls {shell_path(process.run_dir)}/logs 2>/dev/null")
        except LaunchError:
            return None
        found = _processes_of(done.stdout.split("\n"), process.run_dir)
        return [each.model_copy(update={"ssh": process.ssh}) for each in found]

    listed = at_once(there, launched.processes)
    lost = [each for each, found in zip(launched.processes, listed, strict=True) if found is None]
    found = [each for some in listed for each in some or ()]
    copies = _logs_here(paths) if lost else []
    return list({each.stem: each for each in (*copies, *found, *lost)}.values())


def _processes_of(names: Iterable[str], run_dir: str) -> list[LaunchedProcess]:
    """Whose logs files of these names are."""
    found = []
    for name in sorted(names):
        process = parse_log_stem(name.removesuffix(".log")) if name.endswith(".log") else None
        if process is not None:
            role, node, rank = process
            found.append(LaunchedProcess(role=role, node=node, rank=rank, run_dir=run_dir))
    return found


def log_of(process: LaunchedProcess) -> str:
    """A process's log file on its machine, a word of a shell."""
    return f"{shell_path(process.run_dir)}/logs/{process.stem}.log"


def chosen(
    sources: Sequence[LaunchedProcess], node: str | None, rank: int | None, role: NumberedRole
) -> list[LaunchedProcess]:
    """The sources of that machine, and of that role and rank.

    Raises:
        ConfigError: there is none.
    """
    of_node = [source for source in sources if node in (None, source.node)]
    if node is not None and not of_node:
        names = ", ".join(dict.fromkeys(source.node for source in sources)) or "none"
        raise ConfigError(
            f"--node {one_line(node)}: the run has no process there; it has some on: {names}"
        )
    if rank is None:
        return of_node
    of_role = [source for source in of_node if source.role == role]
    of_rank = [source for source in of_role if (source.rank or 0) == rank]
    if not of_rank:
        where = "" if node is None else f" on {node}"
        titles = ", ".join(source.title for source in of_role) or "none"
        number = rank + 1 if role == "worker" else rank
        raise ConfigError(f"--{role} {number}: the run's {role}s{where} are: {titles}")
    return of_rank


class LogView:
    """Prints lines; leaves out those that are not wanted."""

    def __init__(
        self,
        paths: RunPaths,
        sources: Sequence[LaunchedProcess],
        lowest: int,
        start: float,
        *,
        as_json: bool = False,
    ) -> None:
        self.paths = paths
        self.sources: list[LaunchedProcess] = []
        self.console = SteadyConsole()
        self.problems = SteadyConsole(stderr=True)
        self._as_json = as_json
        self._lowest = lowest
        self._start = start
        self._before: list[float] = []
        self._prefixes: list[Text] = []
        self.add(sources)

    def add(self, sources: Sequence[LaunchedProcess]) -> list[int]:
        """Take more sources, but those that it has; returns their numbers."""
        known = {source.stem for source in self.sources}
        first = len(self.sources)
        self.sources += [source for source in sources if source.stem not in known]
        self._before += [0.0] * (len(self.sources) - first)
        width = max((len(source.title) for source in self.sources), default=0)
        self._prefixes = [
            Text(displayable(self.console, f"{source.title:<{width}}"), style=colour)
            for source, colour in zip(self.sources, itertools.cycle(COLOURS), strict=False)
        ]
        return list(range(first, len(self.sources)))

    def entries(self, source: int, lines: Iterable[bytes]) -> list[Entry]:
        """What the next lines of a source say that is wanted."""
        wanted = []
        for line in lines:
            said = parse_log_line(line, self._before[source])
            if said is not None:
                self._before[source] = said.seconds
                if said.seconds >= self._start and level_number(said.level) >= self._lowest:
                    wanted.append((source, said))
        return wanted

    def show(self, entries: Iterable[Entry]) -> None:
        """Print them in the order of their times."""
        for source, line in sorted(entries, key=lambda entry: entry[1].seconds):
            if self._as_json:
                self._print_json(self.sources[source], line)
                continue
            moment = time.strftime("%m-%d %H:%M:%S", time.localtime(line.seconds))
            self._print(source, log_line(moment, line.level, self._displayable(line.message)))
            for more in line.exception[: 10 * MAX_SHOWN].splitlines():
                self._print(source, Text(f"    {self._displayable(more)}", style="dim"))

    def _print(self, source: int, text: Text) -> None:
        print_line(self.console, Text.assemble(self._prefixes[source], " | ", text))

    @staticmethod
    def _print_json(source: LaunchedProcess, line: LogLine) -> None:
        is_owner = source.role == "rank" and source.rank is None  # its log has no number
        values = {
            "ts": utc_timestamp(line.seconds),
            "node": source.node,
            "role": source.role,
            "rank": 0 if is_owner else source.rank,
            "level": line.level,
            "message": line.message,
            "exception": line.exception or None,
        }
        sys.stdout.write(json.dumps(values) + "\n")  # in ASCII, which any terminal can show
        sys.stdout.flush()

    def _displayable(self, text: str) -> str:
        return displayable(self.console, shortened(text, MAX_SHOWN))


# --- what is there


def _print(view: LogView) -> int:
    """Print what is there now; 1 when a machine's lines are missing."""
    fetched = at_once(lambda index: _fetched(view, index), range(len(view.sources)))
    view.show(itertools.chain.from_iterable(entries for entries, _ in fetched))
    problems = dict.fromkeys(problem for _, problem in fetched if problem)
    for problem in problems:
        print_line(view.problems, problem)
    return int(bool(problems))


def _fetched(view: LogView, index: int) -> tuple[list[Entry], str]:
    """The lines that a file has now, or its copy here has when the machine cannot be reached, and why not."""
    source, entries = view.sources[index], list[Entry]()

    def take(lines: list[bytes]) -> None:
        entries.extend(view.entries(index, lines))

    try:
        RemoteTail(host_of(source), log_of(source), on_lines=take).read()
    except LaunchError as error:
        copy = view.paths.logs / f"{source.stem}.log"
        if not copy.is_file():
            return [], str(error)
        entries.clear()
        with suppress(LaunchError):
            RemoteTail(Host(source.node), shlex.quote(str(copy)), on_lines=take).read()
        return entries, f"{error}; its lines are those that were fetched before"
    return entries, ""


# --- what comes


News = queue.Queue[tuple[int, list[bytes] | None, str]]
"""Of a source: lines; None: all that was there has come, or cannot, of which there may be a word to say."""


def _follow(view: LogView, sources: Callable[[], list[LaunchedProcess]]) -> int:
    """Print what is there and what comes, until the run is over or Ctrl-C.

    `sources` are asked for again and again: the ranks of a group begin their logs by and by.
    """
    news, over = News(), threading.Event()
    more = queue.SimpleQueue[list[LaunchedProcess]]()

    def wait_for_end() -> None:
        has_ended = False
        while not has_ended:
            has_ended = is_over(view.paths)
            with suppress(SmolclusterError):
                more.put(sources())
            if over.wait(LAST_LINES_S if has_ended else LOOK_EVERY_S):
                return
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    followed = Followed()
    for index in range(len(view.sources)):
        followed.add(*_tail(view, index, news))
    if not view.sources:
        print_line(view.problems, f"no process of run {view.paths.run_id} has a log yet: waiting")
    try:
        _show_first(view, news)
        while not view.console.quiet and not (over.is_set() and news.empty()):
            _show_next(view, news)
            while not more.empty():
                for index in view.add(more.get()):
                    followed.add(*_tail(view, index, news))
    except KeyboardInterrupt:
        return 0
    finally:
        followed.close()
        over.set()
    return 0  # the run is over, or nobody reads it any more


def _tail(view: LogView, index: int, news: News) -> tuple[RemoteTail, Told, Callable[[], None]]:
    """What reads a source, and what is done when its machine is lost and when it is found again."""
    source = view.sources[index]
    host, is_first = host_of(source), all(each.ssh != source.ssh for each in view.sources[:index])
    tail = RemoteTail(
        host,
        log_of(source),
        on_lines=lambda lines: news.put((index, lines, "")),
        on_whole=lambda: news.put((index, None, "")),
    )
    return (
        tail,
        lambda problem: news.put((index, None, f"{problem}; trying again" if is_first else "")),
        lambda: news.put((index, None, f"{host.node}: connected again" if is_first else "")),
    )


def _show_first(view: LogView, news: News) -> None:
    """Print what is there, as soon as each source has said all or that it cannot."""
    entries: list[Entry] = []
    missing = set(range(len(view.sources)))
    end = time.monotonic() + PATIENCE_S
    while missing and (left := end - time.monotonic()) > 0:
        with suppress(queue.Empty):
            source, lines, word = news.get(timeout=left)
            entries += _taken(view, source, lines, word)
            if lines is None:
                missing.discard(source)
    view.show(entries)


def _show_next(view: LogView, news: News) -> None:
    """Wait for something new, and print it with what comes soon after it."""
    entries: list[Entry] = []
    with suppress(queue.Empty):
        entries += _taken(view, *news.get(timeout=1.0))
        end = time.monotonic() + TOGETHER_S
        while (left := end - time.monotonic()) > 0:
            entries += _taken(view, *news.get(timeout=left))
    view.show(entries)


def _taken(view: LogView, source: int, lines: list[bytes] | None, word: str) -> list[Entry]:
    if word:
        print_line(view.problems, word)
    return view.entries(source, lines or ())
