"""`smolcluster fetch`: bring the files of a launched run to the machine that launched it.

Everything of the server's run folder, and the logs of all others; then the report is written anew. Files that
are here are replaced by newer ones and never removed. What a shell's quoting could spoil never passes through
rsync's own hands: the folder is named in the command that starts the other rsync, and the destination in the
one that starts ssh.
"""

import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smolcluster.errors import LaunchError, SmolclusterError
from smolcluster.launch.find import find
from smolcluster.launch.host import (
    PREAMBLE,
    SSH_FAILED,
    Host,
    run_here,
    shell_path,
    ssh_options,
)
from smolcluster.launch.sessions import host_of
from smolcluster.observability.report.page import write_report
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.launched import Launched, LaunchedProcess, launched_of
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.units import format_bytes, format_count
from smolcluster.utils.words import as_command, condensed, one_line, say

NOT_FETCHED = (
    *("/.lock", "/pids", "/exits", "/asked", "/launch", "/launch.json"),
    *(".shipped.*", ".*.tmp"),
)
"""Of a server's run folder; in rsync's words."""
VANISHED = 24
"""rsync's code when a file was removed while it looked, as old checkpoints are."""
NO_COMMAND = 127
STALLED = 30
"""rsync's code when nothing came for `STALL_TIMEOUT_S`."""
STALL_TIMEOUT_S = 60
"""rsync here or there gives up when nothing has come for so long: a disk may hang for ever."""
STREAM_BROKE = 12
"""rsync's code when the other one went away, whatever the cause."""
NO_FOLDER = "no folder"
MISSING = "sudo apt install rsync, or brew install rsync"


@dataclass(frozen=True)
class RemoteFiles:
    """Files in a folder of a machine, absolute or from `~/`; `left_out` are patterns in rsync's words."""

    host: Host
    folder: str
    to: Path
    left_out: tuple[str, ...] = ()


def fetch(run: str, *, checkpoints: bool = True) -> int:
    """Bring the files of a launched run here; returns 1 when those of a machine did not come.

    Raises:
        ConfigError: there is no such run.
        DataError: its list of processes is damaged.
        LaunchError: rsync is not installed here.
    """
    paths = find(run)
    launched = launched_of(paths)
    parts = list(parts_of(launched, paths, checkpoints=checkpoints)) if launched else []
    if not parts:
        say(f"run {paths.run_id} ran on this machine: its files are in {paths.root}")
        return 0
    _check_rsync()
    failures = 0
    for part in parts:
        before = files_in(paths.root)
        try:
            _bring(part)
        except LaunchError as error:
            failures += 1
            say(f"error: {error}")
        came = changed(before, files_in(paths.root))
        say(f"{part.host.node}: {_count(came)}, {format_bytes(sum(came.values()))}")
    try:
        write_report(paths)  # with the logs of all machines
    except SmolclusterError as error:
        say(f"no report: {error}")
    say(f"files of the run: {paths.root}")
    return int(failures > 0)


def brought(run: str, *, checkpoints: bool) -> RunPaths:
    """A run, with what its server's machine has of it brought here, for commands that read it.

    Nothing is brought of a run that is over and was fetched, unless `checkpoints` are needed, which may be
    those of before. Where the machine cannot be reached, what is here is taken, and that is said.

    Raises:
        ConfigError: there is no such run.
        LaunchError: nothing of it is here, and it cannot be brought.
    """
    paths = find(run)
    launched = launched_of(paths)
    if launched is None or is_here(launched.server, paths):
        return paths
    status = read_snapshot(paths).status
    if not checkpoints and status is not None and status.is_over and paths.metrics.is_file():
        return paths
    part = next(parts_of(launched, paths, checkpoints=checkpoints))
    sys.stderr.write(f"bringing run {paths.run_id} from {part.host.node} …\n")
    try:
        _check_rsync()
        _bring(part)
    except LaunchError as error:
        is_usable = paths.checkpoints.is_dir() if checkpoints else paths.config.is_file()
        if not is_usable:
            command = as_command("fetch", paths.run_id)
            raise LaunchError(f"{error}; {command} brings the run when that is mended") from error
        sys.stderr.write(f"{one_line(str(error))}; what was fetched before is taken\n")
    return paths


def _check_rsync() -> None:
    if shutil.which("rsync") is None:
        raise LaunchError(f"rsync is not installed here: {MISSING}")


def parts_of(launched: Launched, paths: RunPaths, *, checkpoints: bool) -> Iterator[RemoteFiles]:
    """What is to be brought: the server's run folder, and the logs that are in none of those before."""
    server, *workers = launched.processes
    left_out = NOT_FETCHED if checkpoints else (*NOT_FETCHED, "/checkpoints")
    if not is_here(server, paths):
        yield RemoteFiles(host_of(server), server.run_dir, paths.root, left_out)
    done = {(server.ssh, server.run_dir)}
    for worker in workers:
        if (worker.ssh, worker.run_dir) not in done and not is_here(worker, paths):
            logs = f"{worker.run_dir}/logs"
            yield RemoteFiles(host_of(worker), logs, paths.logs, NOT_FETCHED[-2:])
        done.add((worker.ssh, worker.run_dir))


def is_here(process: LaunchedProcess, paths: RunPaths) -> bool:
    """Whether its run folder is the one to which everything comes."""
    return (
        process.ssh is None and Path(process.run_dir).expanduser().resolve() == paths.root.resolve()
    )


def rsync_command(part: RemoteFiles) -> list[str]:
    """The command that brings a part.

    To rsync the machine is called `env`, which our `ssh` takes as the first word of the remote command, where
    it does nothing: so no form of destination can confuse rsync.
    """
    excludes = [f"--exclude={pattern}" for pattern in part.left_out]
    command = ["rsync", "-rlt", "--safe-links", f"--timeout={STALL_TIMEOUT_S}", *excludes]
    if part.host.destination is None:
        return [*command, "--", f"{Path(part.folder).expanduser()}/", f"{part.to}/"]
    folder = shell_path(part.folder)
    enter = f"cd {folder} 2>/dev/null || {{ echo {NO_FOLDER} {folder} >&2; exit 1; }}"
    there = f'{PREAMBLE}{enter}; exec rsync "$@"'
    ssh = ["ssh", *ssh_options(), "--", part.host.destination]
    return [
        *command,
        "--compress",
        "-e",
        shlex.join(ssh),
        f"--rsync-path={shlex.join(['sh', '-c', there, 'sh'])}",
        "--",
        "env:./",
        f"{part.to}/",
    ]


def _bring(part: RemoteFiles) -> None:
    """Bring a part.

    Raises:
        LaunchError: not all of it came.
    """
    part.to.mkdir(parents=True, exist_ok=True)
    try:
        done = run_here(rsync_command(part), timeout_s=None)
    except OSError as error:
        raise LaunchError(f"rsync cannot be run: {error.strerror or error}") from error
    if done.code not in (0, VANISHED):
        raise failure(part.host, done.code, done.stderr.strip())


def failure(host: Host, code: int, said: str) -> LaunchError:
    """Why rsync failed, from its code and what it, ssh and the shell over there said."""
    lines = said.splitlines() or [f"exit code {code}"]
    first = lines[0]
    if first.startswith(NO_FOLDER):
        return LaunchError(f"{host.node}: there is {first} there")
    if code == NO_COMMAND or "rsync: not found" in said:
        return LaunchError(f"{host.node}: rsync is not installed there: {MISSING}")
    if code == STALLED:
        return LaunchError(
            f"{host.node}: nothing came for {STALL_TIMEOUT_S} s: look at its disk and network, and try again"
        )
    if host.destination is not None and code in (SSH_FAILED, STREAM_BROKE):
        unreachable = host.unreachable(said)
        if code == SSH_FAILED or unreachable.cause != "closed":
            return unreachable
        return LaunchError(f"{host.node} ({host.shown}): the connection broke: try again")
    reasons = [line for line in lines if line.startswith(("rsync: ", "rsync(", "@ERROR"))]
    told = condensed("; ".join(reasons or lines))
    return LaunchError(f"{host.node}: rsync failed: {told}")


def files_in(root: Path) -> dict[str, tuple[int, int]]:
    """The regular files below a folder: their size in bytes and time of change in nanoseconds."""
    found = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                found[str(path.relative_to(root))] = (facts.st_size, facts.st_mtime_ns)
    return found


def changed(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> dict[str, int]:
    """The files that came or changed, with their sizes in bytes."""
    return {name: facts[0] for name, facts in after.items() if before.get(name) != facts}


def _count(files: Mapping[str, int]) -> str:
    if not files:
        return "nothing new"
    shown = ", ".join(sorted({name.split("/")[0] for name in files}))
    return f"{format_count(len(files), 'file')} ({shown})"
