"""Looking at the processes of a run: on their machines if it was launched there, else on this one.

Each machine is asked once, all at the same time, and each has a time limit. The server's machine also tells
what the server wrote, and its time: all ages are by its clock.
"""

import os
import platform
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host, TookTooLong, Unreachable, shell_path
from smolcluster.launch.sessions import (
    FULL_BELOW_NBYTES,
    free_script,
    host_of,
    is_full_disk,
    look_script,
    words_of,
)
from smolcluster.observability.parsing import parse_log_line
from smolcluster.observability.view.snapshot import Liveness, ProcessReport, Snapshot, read_snapshot
from smolcluster.runs.launched import Launched, LaunchedProcess, Process, launched_of
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import STATUS, instant
from smolcluster.runs.summary import SUMMARY
from smolcluster.utils.at_once import at_once

LIMIT_S = 5.0
MAX_FILE_NBYTES, MAX_LOG_NBYTES = 1_000_000, 100_000
NUM_LAST_LINES = 20
"""Of what a server had on its screen at its end."""
FILES, SERIES = ("status.json", "summary.json"), "series.json"
"""What a server's machine is asked for, and now and then as well."""
MARK = "::"
"""Begins the lines that say what comes next; no line of a JSON document begins so."""

Ask = Callable[[Host, str], str]


def look(paths: RunPaths, ask: Ask | None = None, *, with_series: bool = False) -> Snapshot:
    """Look at a run; `with_series`: its server's machine is asked for its curves as well.

    Raises:
        DataError: what says which processes it has is damaged.
    """
    launched = launched_of(paths)
    if launched is None:
        return _look_at_owner(paths)
    machines = list(dict.fromkeys(map(host_of, launched.processes)))
    names = (*FILES, SERIES) if with_series else FILES

    def look_at(host: Host) -> Snapshot:
        return _look_at(host, paths, launched, ask or ask_host, names)

    found = at_once(look_at, machines)
    seen = {each.stem: each for part in found for each in part.seen}
    server = found[0]
    if server.seen[0].process == "unreachable":  # there may be a copy from before
        copy = read_snapshot(paths)
        server = replace(server, status=copy.status, summary=copy.summary)
    ordered = [seen[each.stem] for each in launched.processes]
    if not launched.has_sessions and server.status is not None and server.status.is_over:
        # A launcher that was killed has noted no exit codes.
        ordered = [_found(each, "ended") if each.process == "gone" else each for each in ordered]
    words = server.stderr_tail or _last_error(paths, ordered[0])
    return replace(server, seen=tuple(ordered), stderr_tail=words)


def ask_host(host: Host, script: str) -> str:
    """What a script prints on a machine.

    Raises:
        LaunchError: the machine cannot be asked.
    """
    return host.run(script, timeout_s=LIMIT_S).stdout


def _look_at(
    host: Host, paths: RunPaths, launched: Launched, ask: Ask, names: Sequence[str]
) -> Snapshot:
    """What a machine says of its processes and, if it is the server's, of these files."""
    own = [each for each in launched.processes if host_of(each) == host]
    try:
        said = sections(ask(host, look_at_script(own, launched.server, names)))
    except LaunchError as error:
        seen = [_found(each, "unreachable", why=_reason(error), fix=str(error)) for each in own]
        return Snapshot(paths, launched, seen=tuple(seen))
    return Snapshot(
        paths,
        launched,
        STATUS.parse(said.get("status.json", "")),
        SUMMARY.parse(said.get("summary.json", "")),
        seen=tuple(_seen(each, said.get(f"process {at}", "")) for at, each in enumerate(own)),
        now=instant(_seconds(said.get("now", "")) or time.time()),
        stderr_tail=words_of(said.get("console", "")),
        is_full=is_full_disk(said.get("free", "")),
        series=said.get(SERIES, ""),
    )


def _reason(error: LaunchError) -> str:
    if isinstance(error, Unreachable):
        return error.what
    return f"no answer within {LIMIT_S:g} s" if isinstance(error, TookTooLong) else str(error)


def look_at_script(
    own: Sequence[LaunchedProcess], server: LaunchedProcess, names: Sequence[str] = FILES
) -> str:
    """What is run on a machine: how its processes are, and, on the server's, what it wrote into files."""
    lines = []
    for index, process in enumerate(own):
        lines += [f"echo '{MARK}process {index}'", look_script(process)]
    if server in own:
        lines += [f"echo '{MARK}now'", "date +%s.%N"]
        run = shell_path(server.run_dir)
        for name in names:
            lines += [
                f"echo; echo '{MARK}{name}'",
                f"head -c {MAX_FILE_NBYTES} {run}/{name} 2>/dev/null",
            ]
        lines += [f"echo; echo '{MARK}free'", free_script(server)]
        console = f"{run}/logs/{shlex.quote(server.stem)}.console.txt"
        lines += [f"echo; echo '{MARK}console'", f"tail -n {NUM_LAST_LINES} {console} 2>/dev/null"]
    return "\n".join([*lines, "true"])


def sections(text: str) -> dict[str, str]:
    """What a machine said, by the marks before it; what comes before the first mark is left out."""
    parts = f"\n{text}".split(f"\n{MARK}")[1:]
    pairs = (part.partition("\n") for part in parts)
    return {name.strip(): rest.strip() for name, _, rest in pairs}


def _seen(process: Process, said: str) -> ProcessReport:
    match said.split():
        case ["running"]:
            return _found(process, "running")
        case ["ended", code] if re.fullmatch(r"[0-9]{1,3}", code):
            return _found(process, "ended", exit_code=int(code))
        case ["gone" | "ended", *_]:
            return _found(process, "gone")
    return _found(process, "unreachable", why="its answer makes no sense")


def _found(
    process: Process,
    liveness: Liveness,
    *,
    exit_code: int | None = None,
    why: str | None = None,
    fix: str | None = None,
) -> ProcessReport:
    return ProcessReport(
        node=process.node,
        role=process.role,
        rank=process.rank,
        process=liveness,
        exit_code=exit_code,
        why=why,
        fix=fix,
    )


def _seconds(text: str) -> float | None:
    """What `date` printed; where it knows no %N, the middle of that second."""
    found = re.match(r"(\d{1,11})(\.\d+)?", text)
    if found is None:
        return None
    return float(found[0]) if found[2] else int(found[1]) + 0.5


def _look_at_owner(paths: RunPaths) -> Snapshot:
    """Look at a run that nobody launched: at the process that holds it."""
    read, is_written = read_snapshot(paths), is_held(paths.lock)
    if read.is_alive and not is_written:  # it has just been begun: nobody knows by whom
        return read
    started = read.started
    node = platform.node() if started is None else started.node
    owner = Process(node=node, role="trainer" if started is None else started.owner_role)
    if is_written:
        seen = _found(owner, "running")
    else:
        has_said_so = read.is_over or read.ended is not None
        seen = _found(owner, "ended" if has_said_so else "gone")
    words = _last_error(paths, seen)
    is_full = False
    with suppress(OSError):
        is_full = shutil.disk_usage(paths.root).free < FULL_BELOW_NBYTES
    return replace(read, seen=(seen,), stderr_tail=words, is_full=is_full)


def _last_error(paths: RunPaths, server: ProcessReport) -> str | None:
    """The newest error in the log of a server of this machine that has ended."""
    if server.process == "running":
        return None
    with suppress(OSError), paths.log_file(server.role, server.node).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_NBYTES))
        said = filter(None, (parse_log_line(line, 0.0) for line in file))
        errors = [each.message for each in said if each.level in ("ERROR", "CRITICAL")]
        return errors[-1] if errors else None
    return None
