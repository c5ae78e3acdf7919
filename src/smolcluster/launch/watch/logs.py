"""`smolcluster logs`: the log lines of all processes of a run, merged by time, wherever they lie."""

import itertools
import json
import logging
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from rich.text import Text

from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.find import find
from smolcluster.launch.host import shell_path
from smolcluster.launch.jobs.kubernetes import pod_logs
from smolcluster.launch.sessions import host_of
from smolcluster.launch.watch.probe import look
from smolcluster.launch.watch.tail import PATIENCE_S, Copies
from smolcluster.observability.logs import log_line
from smolcluster.observability.parsing import LogLine, parse_log_line
from smolcluster.observability.terminal import COLOURS, SteadyConsole, displayable, print_line
from smolcluster.observability.view.lines import level_number
from smolcluster.runs.files import rotations, utc_timestamp
from smolcluster.runs.launched import Launched, LaunchedProcess, launched_of
from smolcluster.runs.paths import RunPaths, parse_log_stem, process_title
from smolcluster.runs.tail import Tail
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import as_command, hint_at, one_line

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_SHOWN = 4000
"""Characters of a message; the file has the rest."""
LOOK_EVERY_S, LAST_LINES_S = 2.0, 2.0
"""Between two looks whether a run is over, and how long its last lines may take then."""
TOGETHER_S = 0.3
"""So often it is looked for new lines; those that come within so short a time are sorted."""
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
    with tempfile.TemporaryDirectory(prefix="smolcluster-") as folder:
        view = LogView(paths, Path(folder), lowest, start, as_json=as_json)
        with closing(view.copies):
            view.add(found)
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
    has_begun = read.status is not None or read.summary is not None
    return has_begun and not alive


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
        moment = datetime.fromisoformat(text.strip())
        return moment.replace(tzinfo=moment.tzinfo or now.tzinfo).timestamp()
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
    """Prints lines, wherever they are; leaves out those that are not wanted.

    Args:
        paths: the run.
        folder: where the logs are copied to, as they grow.
        lowest: the number of the lowest level that is wanted.
        start: only what is newer, seconds since 1970.
        as_json: a JSON object a line.
    """

    def __init__(
        self, paths: RunPaths, folder: Path, lowest: int, start: float, *, as_json: bool = False
    ) -> None:
        self.paths = paths
        self.sources: list[LaunchedProcess] = []
        self.console = SteadyConsole()
        self.problems = SteadyConsole(stderr=True)
        self.copies = Copies()
        self._folder = folder
        self._as_json = as_json
        self._lowest = lowest
        self._start = start
        self._tails: list[Tail] = []
        self._before: list[float] = []
        self._prefixes: list[Text] = []
        self._told: set[str] = set()
        """Machines that are known to be out of reach."""

    def add(self, sources: Sequence[LaunchedProcess]) -> None:
        """Take more sources, but those that it has."""
        for source in sources:
            copy = self.copy_of(source)
            if copy not in self.copies:
                self.sources.append(source)
                self._tails.append(Tail(copy))
                self._before.append(0.0)
                self.copies.follow(host_of(source), log_of(source), copy)
        width = max((len(source.title) for source in self.sources), default=0)
        self._prefixes = [
            Text(displayable(self.console, f"{source.title:<{width}}"), style=colour)
            for source, colour in zip(self.sources, itertools.cycle(COLOURS), strict=False)
        ]

    def copy_of(self, source: LaunchedProcess) -> Path:
        return self._folder / f"{source.stem}.log"

    def show_new(self) -> None:
        """Print what has come since the last time."""
        entries: list[Entry] = []
        for index, tail in enumerate(self._tails):
            while lines := tail.poll():
                entries += self.entries(index, (line.data for line in lines))
        self.show(entries)

    def tell_problems(self) -> None:
        """Say which machines have been lost since the last time, and which were found again."""
        lost = self.copies.lost
        for node in lost:
            if node not in self._told:
                print_line(self.problems, f"{lost[node]}; trying again")
        for node in self._told - set(lost):
            print_line(self.problems, f"{node}: connected again")
        self._told = set(lost)

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
        values = {
            "ts": utc_timestamp(line.seconds),
            **{"node": source.node, "role": source.role, "rank": source.rank},
            **{"level": line.level, "message": line.message, "exception": line.exception or None},
        }
        sys.stdout.write(json.dumps(values) + "\n")  # in ASCII, which any terminal can show
        sys.stdout.flush()

    def _displayable(self, text: str) -> str:
        left_out = len(text) - MAX_SHOWN
        more = f" … ({left_out:,} characters more)" if left_out > 0 else ""
        return displayable(self.console, text[:MAX_SHOWN] + more)


def _print(view: LogView) -> int:
    """Print what is there now; 1 when a machine's lines are missing.

    Of a machine that cannot be reached these are the lines that were fetched before.
    """
    view.copies.wait()
    lost, fetched = view.copies.lost, set[str]()
    for source in view.sources:
        own = view.paths.logs / f"{source.stem}.log"
        if source.node in lost and own.is_file():
            fetched.add(source.node)
            parts = [each.read_bytes() for each in rotations(own)[::-1] if each.is_file()]
            view.copy_of(source).write_bytes(b"".join(parts) + b"\n")
    view.show_new()
    for node, problem in lost.items():
        before = "; its lines are those that were fetched before" * (node in fetched)
        print_line(view.problems, problem + before)
    return int(bool(lost))


def _follow(view: LogView, sources: Callable[[], list[LaunchedProcess]]) -> int:
    """Print what is there and what comes, until the run is over or Ctrl-C.

    `sources` are asked for again and again: the ranks of a group begin their logs by and by.
    """
    over, more = threading.Event(), queue.SimpleQueue[list[LaunchedProcess]]()

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
    if not view.sources:
        print_line(view.problems, f"no process of run {view.paths.run_id} has a log yet: waiting")
    try:
        view.copies.wait(PATIENCE_S)
        is_last = False
        while not (is_last or view.console.quiet):
            is_last = over.wait(TOGETHER_S)
            view.show_new()
            view.tell_problems()
            while not more.empty():
                view.add(more.get())
    except KeyboardInterrupt:
        return 0
    finally:
        over.set()
    return 0  # the run is over, or nobody reads it any more
