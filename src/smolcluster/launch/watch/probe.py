"""Looking at the processes of a run: on their machines if it was launched there, else on this one.

Each machine is asked once, all at the same time, and each has a time limit. The server's machine also tells
what the server wrote, and its time: all ages are by its clock.
"""

import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from smolcluster.errors import LaunchError
from smolcluster.launch.children import STOP_ON_STDIN_EOF
from smolcluster.launch.host import Host, TookTooLong, Unreachable, shell_path
from smolcluster.launch.sessions import look_script, words_of
from smolcluster.observability.parsing import parse_log_line
from smolcluster.observability.view.snapshot import RunSnapshot, read_snapshot
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched
from smolcluster.runs.paths import RunPaths, log_stem
from smolcluster.runs.processes import ProcessEntry, read_processes
from smolcluster.runs.series import MAX_NBYTES
from smolcluster.runs.status import RunStatus, instant
from smolcluster.runs.summary import Summary

LIMIT_S = 5.0
MAX_FILE_NBYTES, MAX_LOG_NBYTES = 1_000_000, 100_000
OURS = ("server.py", "worker.py", "smolcluster")
"""One of these is in the command line of each of our processes: process ids are used again."""
NUM_LAST_LINES = 20
"""Of what a server had on its screen at its end."""
MARK = "::"
"""Begins the lines that say what comes next; no line of a JSON document begins so."""

Liveness = Literal["running", "ended", "gone", "unreachable", "unknown"]
File = TypeVar("File", bound=BaseModel)


@dataclass(frozen=True)
class Seen:
    """What was found of one process.

    Attributes:
        liveness: ended: of itself or when asked to; gone: nobody knows how it ended.
        code: its exit code, where it is known.
        why: why its machine cannot be asked.
        fix: the same with what mends it.
    """

    node: str
    role: str
    rank: int | None
    liveness: Liveness
    code: int | None = None
    why: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class ProbeResult:
    """What was found of a run: its processes, the server first, and what the server wrote.

    `stderr_tail`: the server's, where it has ended and left some.
    """

    processes: tuple[Seen, ...]
    status: RunStatus | None
    summary: Summary | None
    now: datetime
    stderr_tail: str | None = None


Ask = Callable[[Host, str], str]


def look(paths: RunPaths, ask: Ask | None = None) -> ProbeResult:
    """Look at a run.

    Raises:
        DataError: what says which processes it has is damaged.
    """
    if not paths.launched.is_file():
        return _look_here(paths)
    launched = read_launched(paths.launched)
    machines = list(dict.fromkeys((each.node, each.ssh) for each in launched.processes))
    with ThreadPoolExecutor(len(machines)) as pool:
        asked = [
            pool.submit(_look_at, Host(node, ssh), launched, ask or ask_host)
            for node, ssh in machines
        ]
        found = [each.result() for each in asked]
    seen = {(each.role, each.rank): each for part in found for each in part.processes}
    server = found[0]
    if server.processes[0].liveness == "unreachable":  # there may be a copy from before
        copy = read_snapshot(paths)
        server = replace(server, status=copy.status, summary=copy.summary)
    ordered = tuple(seen[each.role, each.rank] for each in launched.processes)
    return replace(server, processes=ordered)


def ask_host(host: Host, script: str) -> str:
    """What a script prints on a machine.

    Raises:
        LaunchError: the machine cannot be asked.
    """
    return host.run(script, timeout_s=LIMIT_S).stdout


class AskMore:
    """Asks machines for more in the same command; `said` has the sections of each machine's last answer."""

    def __init__(self, ask: Ask | None, script: Callable[[Host], str]) -> None:
        self._ask = ask or ask_host
        self._script = script
        self.said: dict[Host, dict[str, str]] = {}

    def __call__(self, host: Host, script: str) -> str:
        """What the machine prints."""
        answer = self._ask(host, f"{script}\n{self._script(host)}\ntrue")
        self.said[host] = sections(answer)
        return answer


def series_script(folder: str) -> str:
    """What prints a run's `series.json` as a section; `folder` is a word of a shell."""
    return f"echo; echo '{MARK}series'; head -c {2 * MAX_NBYTES} {folder}/series.json 2>/dev/null"


def _look_at(host: Host, launched: Launched, ask: Ask) -> ProbeResult:
    """Look at what a run has on one machine."""
    own = [each for each in launched.processes if (each.node, each.ssh) == _key(host)]
    try:
        said = sections(ask(host, look_at_script(own, launched.server)))
    except LaunchError as error:
        why, fix = _reason(error), str(error)
        seen = [_found(each, "unreachable", why, fix) for each in own]
        return ProbeResult(tuple(seen), None, None, instant(time.time()))
    return ProbeResult(
        tuple(_seen(each, said.get(f"process {index}", "")) for index, each in enumerate(own)),
        _parsed(RunStatus, said.get("status.json", "")),
        _parsed(Summary, said.get("summary.json", "")),
        instant(_seconds(said.get("now", "")) or time.time()),
        words_of(said.get("console", "")),
    )


def _key(host: Host) -> tuple[str, str | None]:
    return host.node, host.destination


def _reason(error: LaunchError) -> str:
    if isinstance(error, Unreachable):
        return error.what
    return f"no answer within {LIMIT_S:g} s" if isinstance(error, TookTooLong) else str(error)


def look_at_script(own: Sequence[LaunchedProcess], server: LaunchedProcess) -> str:
    """What is run on a machine: how its processes are, and, on the server's, what the server wrote."""
    lines = []
    for index, process in enumerate(own):
        lines += [f"echo '{MARK}process {index}'", look_script(process)]
    if server in own:
        lines += [f"echo '{MARK}now'", "date +%s.%N"]
        run = shell_path(server.run_dir)
        for name in ("status.json", "summary.json"):
            lines += [
                f"echo; echo '{MARK}{name}'",
                f"head -c {MAX_FILE_NBYTES} {run}/{name} 2>/dev/null",
            ]
        console = f"{run}/logs/{shlex.quote(server.stem)}.console.txt"
        lines += [f"echo; echo '{MARK}console'", f"tail -n {NUM_LAST_LINES} {console} 2>/dev/null"]
    return "\n".join([*lines, "true"])


def sections(text: str) -> dict[str, str]:
    """What a machine said, by the marks before it; what comes before the first mark is left out."""
    parts = f"\n{text}".split(f"\n{MARK}")[1:]
    pairs = (part.partition("\n") for part in parts)
    return {name.strip(): rest.strip() for name, _, rest in pairs}


def _seen(process: LaunchedProcess, said: str) -> Seen:
    match said.split():
        case ["running"]:
            return _found(process, "running")
        case ["ended", code] if re.fullmatch(r"[0-9]{1,3}", code):
            return replace(_found(process, "ended"), code=int(code))
        case ["gone" | "ended", *_]:
            return _found(process, "gone")
    return _found(process, "unreachable", why="its answer makes no sense")


def _found(
    process: LaunchedProcess, liveness: Liveness, why: str | None = None, fix: str | None = None
) -> Seen:
    return Seen(process.node, process.role, process.rank, liveness, None, why, fix)


def _seconds(text: str) -> float | None:
    """What `date` printed; where it knows no %N, the middle of that second."""
    found = re.match(r"(\d{1,11})(\.\d+)?", text)
    if found is None:
        return None
    return float(found[0]) if found[2] else int(found[1]) + 0.5


def _parsed(kind: type[File], text: str) -> File | None:
    with suppress(ValidationError):
        return kind.model_validate_json(text)
    return None


def _look_here(paths: RunPaths) -> ProbeResult:
    """Look at a run all of whose processes are on this machine."""
    read = read_snapshot(paths)
    seen = [
        replace(who, liveness=_liveness(is_alive, read.is_over))
        for who, is_alive in _processes_here(read)
    ]
    seen = [_with_code(each, paths) for each in seen]
    words = _last_error(paths, seen[0])
    return ProbeResult(tuple(seen), read.status, read.summary, instant(time.time()), words)


def _with_code(seen: Seen, paths: RunPaths) -> Seen:
    """The same with its exit code, where its launcher has written that down."""
    file = paths.root / "exits" / log_stem(seen.role, seen.node, seen.rank)
    if seen.liveness != "running":
        with suppress(OSError, ValueError):
            return replace(seen, liveness="ended", code=int(file.read_text()))
    return seen


def _last_error(paths: RunPaths, server: Seen) -> str | None:
    """The newest error in the log of a server of this machine that has ended."""
    if server.liveness == "running":
        return None
    with suppress(OSError), paths.log_file(server.role, server.node).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_NBYTES))
        said = filter(None, (parse_log_line(line, 0.0) for line in file))
        errors = [each.message for each in said if each.level in ("ERROR", "CRITICAL")]
        return errors[-1] if errors else None
    return None


def _liveness(is_alive: bool, is_over: bool) -> Liveness:
    if is_alive:
        return "running"
    return "ended" if is_over else "gone"


def _processes_here(read: RunSnapshot) -> list[tuple[Seen, bool]]:
    """The processes that were launched, else the one that holds the run, and whether each lives."""
    paths, started = read.paths, read.started
    if paths.processes.is_file():
        entries = read_processes(paths.processes)
        alive = alive_of(entries)
        return [
            (Seen(each.node, each.role, each.rank, "unknown"), each.pid in alive)
            for each in entries
        ]
    is_single = started is None or started.num_workers == 0 or started.algorithm == "single"
    node = platform.node() if started is None else started.node
    holder = _holder(paths)
    is_alive = holder is not None and holder in ours_alive([holder])
    return [(Seen(node, "trainer" if is_single else "server", None, "unknown"), is_alive)]


def alive_of(entries: Sequence[ProcessEntry]) -> set[int]:
    """The ids of those that live."""
    unsure = ours_alive([each.pid for each in entries if each.started is None])
    return {each.pid for each in entries if each.is_itself} | unsure


def _holder(paths: RunPaths) -> int | None:
    with suppress(OSError):
        text = paths.lock.read_text(errors="replace").strip()
        return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
    return None


def ours_alive(pids: Sequence[int]) -> set[int]:
    """Those of the processes that live and are of this project."""
    found = command_lines(pids)
    return {pid for pid, line in found.items() if any(word in line for word in OURS)}


def is_server_of(command_line: str, run_id: str) -> bool:
    """Whether this is the launched server of a run."""
    return f" --run-id {run_id} " in f"{command_line} "


def is_launched_worker(command_line: str) -> bool:
    """Whether this is a worker that a launcher of this project has started."""
    return "/algorithms/" in command_line and STOP_ON_STDIN_EOF in command_line.split()


def command_lines(pids: Sequence[int]) -> dict[int, str]:
    """The command line of each of these processes that lives."""
    if not pids:
        return {}
    command = ["ps", "-ww", "-o", "pid=,command=", "-p", ",".join(map(str, pids))]
    try:
        listed = subprocess.run(  # noqa: S603 - numbers
            command, capture_output=True, timeout=LIMIT_S, check=False
        ).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.split(None, 1) for line in listed.splitlines())
    return {
        int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and "<defunct>" not in pair[1]
    }
