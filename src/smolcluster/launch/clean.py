"""`smolcluster clean`: remove failed starts, old runs and old code, here and on the machines of runs.

Nothing goes that was not shown before. On other machines, which need no checkout for it, a small script does
both, the looking and the removing: right before it removes a folder it looks again whether a process there
has to do with it. A run's folder here goes last, because it says where the others are.
"""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import psutil
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from smolcluster.configs.begun import forget
from smolcluster.errors import ConfigError, DataError, LaunchError, SmolclusterError
from smolcluster.launch.clean_projects import Old, old_projects, remove_projects
from smolcluster.launch.host import Host
from smolcluster.launch.watch.fetch import files_in, is_here
from smolcluster.launch.watch.listing import listed
from smolcluster.launch.watch.probe import ask_host
from smolcluster.observability.terminal import SteadyConsole, displayable
from smolcluster.observability.view.listing import ListedRun
from smolcluster.runs.launched import launched_of
from smolcluster.runs.lock import is_held, run_lock
from smolcluster.runs.paths import LATEST, RunPaths, all_runs, check_run_id, latest_of, point_latest
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_bytes, format_count, format_duration
from smolcluster.utils.words import as_command, one_line, say

TIMEOUT_S = 120.0
"""How long a machine may take: checkpoints are large, and a Pi's card is slow."""
LAUNCHED_NAME = re.compile(r"[a-z]+-\d{8}-\d{6}-[0-9a-f]+")
MARKS = (".lock", "launch.json", "processes.json", "status.json", "events.jsonl")
"""A folder with one of these is a run's; so is one named by a launch that has logs."""
HERE = "here"
OURS = ("server.py", "worker.py", "smolcluster")
"""One of these is in the command line of each of our processes."""
FAILED_START = "never took a step"
UNUSED = "no run uses it"

SCRIPT = r"""
ps=$(ps -A -ww -o args=)
while IFS= read -r folder; do
  case $folder in \~/*) folder=$HOME/${folder#??} ;; esac
  id=${folder##*/} root=${folder%/*}
  if [ -L "$folder" ] || [ ! -d "$folder" ]; then echo "absent 0"; continue; fi
  known=
  for mark in .lock pids launch launch.json; do [ -e "$folder/$mark" ] && known=1; done
  if [ -z "$known" ]; then echo "strange 0"; continue; fi
  case $ps in *"$id/launch/"*|*"--run-id $id"*) echo "living 0"; continue ;; esac
  pid=$(cat "$folder/.lock" 2>/dev/null)
  if [ -n "$pid" ] && ps -ww -o args= -p "$pid" 2>/dev/null | grep -q -e server.py -e smolcluster; then
    echo "living 0"; continue
  fi
  if [ "$mode" = remove ]; then
    if rm -rf -- "$folder" 2>/dev/null; then echo "removed 0"; else echo "stays 0"; fi
    [ "$(readlink "$root/latest" 2>/dev/null)" = "$id" ] && rm -f -- "$root/latest"
    continue
  fi
  kilobytes=$(du -sk "$folder" 2>/dev/null | cut -f 1)
  if [ -n "$(ls "$folder/checkpoints" 2>/dev/null)" ]; then echo "trained ${kilobytes:-0}"
  else echo "untrained ${kilobytes:-0}"; fi
done
"""
"""Reads folders, one a line, and prints of each a word and its size in kB.

`rm -r` follows no link. The runs' names come by standard input, so no command of ours has them.
"""


@dataclass
class Removal:
    """A run that is proposed, and why; `elsewhere`: its other folders that are there, with their size."""

    run: ListedRun
    paths: RunPaths
    why: str
    age_s: float
    elsewhere: dict[tuple[Host, str], int] = field(default_factory=dict)
    is_whole: bool = True
    """Whether every machine that may have a folder of it has answered."""


def clean(
    runs: Sequence[str] = (),
    *,
    older_than_s: float | None = None,
    keep: int | None = None,
    here: bool = False,
    yes: bool = False,
) -> int:
    """Show what would go, ask, and remove it; 1 when a machine did not answer or something stays.

    Args:
        runs: names of those that are to go; empty: failed starts, and those that are old by both measures.
        older_than_s: seconds since their end; None: any.
        keep: so many of the newest stay, failed starts not counted; None: any number.
        here: ask no other machine, and leave what is there.
        yes: ask nobody; without a terminal nothing goes otherwise.

    Raises:
        ConfigError: there is no such run.
    """
    root = all_runs()
    troubles: list[str] = []
    removals = _chosen(root, runs, troubles, older_than_s=older_than_s, keep=keep, here=here)
    if not here:
        removals = _looked_up(removals, troubles)
    for trouble in troubles:
        say(trouble)
    projects = {} if here or runs else old_projects(root)
    if not removals and not projects:
        say(f"nothing to remove in {root}")
        return int(bool(troubles))
    _show(removals, projects)
    if not yes and not _confirmed():
        return int(bool(troubles))
    failures = _remove(root, removals) if removals else []
    if projects:
        stay, num = remove_projects(projects), sum(map(len, projects.values()))
        say(f"removed {num - len(stay)} of {format_count(num, 'folder')} of code or environments")
        failures += stay
    for failure in failures:
        say(failure)
    return int(bool(troubles or failures))


def parse_age(text: str | None) -> float | None:
    """Seconds of an age such as `12h`, `30d` or `8w`.

    Raises:
        ConfigError: it is none.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})(h|d|w)", text.strip())
    if found is None:
        raise ConfigError(f"--older-than {one_line(text)}: must be an age such as 12h, 30d or 8w")
    return int(found[1]) * {"h": 3600.0, "d": 86400.0, "w": 604800.0}[found[2]]


# --- which runs


def _chosen(
    root: Path,
    names: Sequence[str],
    troubles: list[str],
    *,
    older_than_s: float | None,
    keep: int | None,
    here: bool,
) -> list[Removal]:
    """The runs that are to go, the newest last; what cannot be told of others is added to `troubles`.

    Raises:
        ConfigError: a run that was named is not there, or lives.
    """
    latest = latest_of(root)
    named = {latest or name if name == LATEST else check_run_id(name) for name in names}
    runs = [
        each for each in listed(root, _ask_here if here else None) if is_run(root / each.run_id)
    ]
    if missing := sorted(named - {run.run_id for run in runs}):
        raise ConfigError(
            f"no run {', '.join(missing)} under {root}; {as_command('runs')} lists them"
        )
    in_use = _in_use(root)
    trained = [run.run_id for run in runs if not _never_began(RunPaths(root / run.run_id), run)]
    kept = {latest, *(trained[-keep:] if keep else ())}
    removals = []
    for run in runs:
        paths = RunPaths(root / run.run_id)
        age_s = _age_s(paths, run)
        if named:
            why = "named" if run.run_id in named else None
        else:
            why = None if run.run_id in kept else _why(paths, run, age_s, older_than_s, keep)
        if why is None:
            continue
        if run.is_alive or run.state == "starting" or run.run_id in in_use or is_held(paths.lock):
            if named:
                raise ConfigError(f"run {run.run_id} is running: {as_command('stop', run.run_id)}")
        elif run.is_alive is None:
            if not here:
                nodes = ", ".join(run.nodes)
                troubles.append(f"run {run.run_id} is left: not all of {nodes} say if it lives")
        else:
            removals.append(Removal(run, paths, why, age_s))
    return removals


def is_run(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    is_named = LAUNCHED_NAME.fullmatch(folder.name) is not None
    return any((folder / mark).is_file() for mark in MARKS) or (
        is_named and (folder / "logs").is_dir()
    )


def _why(
    paths: RunPaths, run: ListedRun, age_s: float, older_than_s: float | None, keep: int | None
) -> str | None:
    if _never_began(paths, run):
        return FAILED_START
    if older_than_s is not None:
        return f"older than {format_duration(older_than_s)}" if age_s > older_than_s else None
    return None if keep is None else f"not of the newest {keep}"


def _never_began(paths: RunPaths, run: ListedRun) -> bool:
    """Whether its start failed. A worker's folder does not tell how far its run came, so is none."""
    if run.steps or not any((paths.root / mark).is_file() for mark in MARKS):
        return False
    with suppress(OSError):
        if any(paths.checkpoints.iterdir()):
            return False
    with suppress(OSError):
        return run.steps == 0 or paths.metrics.stat().st_size == 0
    return True


def _age_s(paths: RunPaths, run: ListedRun) -> float:
    """Seconds since the run's end; of a worker's folder, which does not tell it, since its newest file."""
    ended = run.began_at.timestamp() + (run.wall_s or 0.0)
    if run.algorithm is None:
        newest = max((changed_ns for _, changed_ns in files_in(paths.root).values()), default=0)
        ended = max(ended, newest / 1e9)
    return max(0.0, time.time() - ended)


def _in_use(root: Path) -> set[str]:
    """The runs in whose folders processes of ours have files open, as workers started by hand have."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            if not any(word in line for word in OURS):
                continue
            for file in process.open_files():
                with suppress(ValueError):
                    found.add(Path(file.path).relative_to(root.resolve()).parts[0])
    return found


def _ask_here(host: Host, script: str) -> str:
    if host.destination is not None:
        raise LaunchError(f"{host.node} is not asked")
    return ask_host(host, script)


# --- on the machines


def _looked_up(removals: Sequence[Removal], troubles: list[str]) -> list[Removal]:
    """The same with their folders on other machines, without those that live or may have trained there."""
    places = {each.run.run_id: list(_places(each.paths)) for each in removals}
    answers = _each(chain.from_iterable(places.values()), "look", troubles)
    left = []
    for each in removals:
        said = {place: answers.get(place) for place in places[each.run.run_id]}
        words = {answer[0] for answer in said.values() if answer is not None}
        if "living" in words or (each.why == FAILED_START and "trained" in words):
            continue
        if each.why == FAILED_START and (missing := _missing(each, said)):
            troubles.append(missing)
            continue
        each.is_whole = None not in said.values()
        each.elsewhere = {
            place: answer[1]
            for place, answer in said.items()
            if answer is not None and answer[0] in ("trained", "untrained")
        }
        if each.is_whole or each.elsewhere:
            left.append(each)
    return left


def _missing(
    removal: Removal, said: Mapping[tuple[Host, str], tuple[str, int] | None]
) -> str | None:
    """Why a run of which no step is known may have trained: its server's machine lacks the run's folder.

    A launch makes that folder before it notes the run's processes here.
    """
    if removal.run.steps is not None:
        return None
    run_id = removal.run.run_id
    for host, folder in _places(removal.paths, server_only=True):
        answer = said[host, folder]
        if answer is not None and answer[0] == "absent":
            return (
                f"run {run_id} is left: {host.node} has no folder {folder}, whose disk may not be mounted; "
                f"{as_command('clean', run_id)} removes the run all the same"
            )
    return None


def _places(paths: RunPaths, *, server_only: bool = False) -> Iterator[tuple[Host, str]]:
    """The folders of a run besides the one here, each once; only those that bear its name."""
    launched = None
    with suppress(DataError):
        launched = launched_of(paths)
    processes = () if launched is None else launched.processes
    for process in processes[:1] if server_only else processes:
        folder = process.run_dir.rstrip("/")
        is_its = folder.rpartition("/")[2] == paths.run_id and "\n" not in folder
        if is_its and not is_here(process, paths):
            yield Host(process.node, process.ssh), folder


def _each(
    places: Iterable[tuple[Host, str]], mode: str, troubles: list[str]
) -> dict[tuple[Host, str], tuple[str, int]]:
    """Run the script on all machines at once; of each folder of those that answer its word and bytes."""
    answers: dict[tuple[Host, str], tuple[str, int]] = {}
    asked: dict[Host, list[str]] = {}
    for host, folder in dict.fromkeys(places):
        asked.setdefault(host, []).append(folder)

    def ask(host: Host) -> str | list[tuple[str, int]]:
        lines = asked[host]
        try:
            done = host.run(
                f"mode={shlex.quote(mode)}\n{SCRIPT}",
                stdin="".join(f"{line}\n" for line in lines).encode(),
                timeout_s=TIMEOUT_S,
            )
        except LaunchError as error:
            return str(error)
        pairs = [line.split() for line in done.stdout.splitlines()]
        if len(pairs) != len(lines) or any(len(pair) != 2 for pair in pairs):
            return f"{host.node} ({host.shown}): its answer makes no sense: {done.stderr_tail}"
        return [(word, 1024 * int(size)) for word, size in pairs]

    for host, said in zip(asked, at_once(ask, asked), strict=True):
        if isinstance(said, str):
            troubles.append(f"{said}; what is there is left")
        else:
            answers |= {(host, at): word for at, word in zip(asked[host], said, strict=True)}
    return answers


# --- showing and removing


def _show(removals: Sequence[Removal], projects: Old) -> None:
    console = SteadyConsole()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("run", "machine", "age", "size", "why"):
        table.add_column(name, no_wrap=name == "run", justify="right" if name == "size" else "left")
    rows: list[tuple[str, str, str, int, str]] = []
    for each in removals:
        sizes = [(host.node, size) for (host, _), size in each.elsewhere.items()]
        if each.is_whole:
            sizes.insert(0, (HERE, sum(size for size, _ in files_in(each.paths.root).values())))
        age = format_duration(each.age_s)
        rows += [(each.run.run_id, machine, age, size, each.why) for machine, size in sizes]
    for host, found in projects.items():
        rows += [(path, host.node, "", size, UNUSED) for path, size in found.items()]
    for *first, size, why in rows:
        cells = (*first, format_bytes(size), why)
        table.add_row(*(Text(displayable(console, str(cell))) for cell in cells))
    total = sum(row[3] for row in rows)
    console.print(table)
    say(f"{format_count(len(removals), 'run')}, {format_bytes(total)}")


def _confirmed() -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        say("nothing was removed: --yes removes them")
        return False
    sys.stdout.write("remove them (y/N)? ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say("nothing was removed")
    return False


def _remove(root: Path, removals: Sequence[Removal]) -> list[str]:
    """Remove them, elsewhere first; returns what stays, in words."""
    failures: list[str] = []
    answers = _each((place for each in removals for place in each.elsewhere), "remove", failures)
    removed = []
    for each in removals:
        words = {place: answers.get(place, ("unknown", 0))[0] for place in each.elsewhere}
        stays = [place for place, word in words.items() if word not in ("removed", "absent")]
        failures += [
            f"{host.node}: {folder} stays: {words[host, folder]}" for host, folder in stays
        ]
        if stays or not each.is_whole:
            say(f"run {each.run.run_id} stays here, because it says where the rest of it is")
            continue
        try:
            remove_here(each.paths)
            removed.append(each.run.run_id)
        except (SmolclusterError, OSError) as error:
            failures.append(f"{each.paths.root} stays: {error}")
    if latest_of(root) in removed:
        begun = [
            run
            for run in listed(root, _ask_here)
            if not _never_began(RunPaths(root / run.run_id), run)
        ]
        newest = max(begun, key=lambda run: run.began_at).run_id if begun else None
        with suppress(OSError):
            point_latest(root, newest)
    say(f"removed {len(removed)} of {format_count(len(removals), 'run')}")
    return failures


def remove_here(paths: RunPaths) -> None:
    """Remove a run's folder of this machine, links in it as links, and what is noted of it elsewhere.

    Raises:
        RunBusy: a process has begun to write it.
        OSError: not all of it can be removed.
    """
    if paths.lock.is_symlink():  # to lock is to write
        paths.lock.unlink()
    with run_lock(paths.lock):
        shutil.rmtree(paths.root)
    forget(paths.run_id)
