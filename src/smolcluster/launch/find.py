"""Which run a command means. Imports nothing that takes time."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from smolcluster.errors import ConfigError
from smolcluster.runs.paths import LATEST, RunPaths, all_runs, find_run, latest_of


def find(run: str, *, acts: bool = False) -> RunPaths:
    """The run of that name in the folder of runs, or the run whose folder that is.

    `latest` is the run that lives, and where none does the newest that has begun. Of several that live a
    command that only looks takes the newest and says so; one that `acts` asks, or refuses where nobody can
    answer.

    Raises:
        ConfigError: there is neither, or it is not clear which is meant.
    """
    if run != LATEST:
        return in_folder(run) or find_run(all_runs(), run)
    from smolcluster.launch.watch.listing import living  # noqa: PLC0415 - takes time

    root = all_runs()
    found = living(root)[::-1]
    if not found:
        return find_run(root)
    if len(found) > 1:
        return _asked(found) if acts else _told(found)
    [newest] = found
    if newest.run_id != latest_of(root):
        _say(f"run {newest.run_id}, the one that is running")
    return newest


def _told(living: Sequence[RunPaths]) -> RunPaths:
    newest, *others = living
    rest = ", ".join(each.run_id for each in others)
    _say(f"run {newest.run_id}, the newest of those that are running; there is also: {rest}")
    return newest


def _asked(living: Sequence[RunPaths]) -> RunPaths:
    names = [each.run_id for each in living]
    unclear = f"{len(names)} runs are running, name one of them: {', '.join(names)}"
    return living[names.index(asked(names, unclear))]


def asked(names: Sequence[str], unclear: str) -> str:
    """The run that the user names, or chooses by its number.

    Raises:
        ConfigError: it is none of them, or nobody can answer, which `unclear` says.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(unclear)
    for place, name in enumerate(names, start=1):
        _say(f"  {place}  {name}")
    sys.stderr.write(f"which run (1 to {len(names)})? ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip()
    if answer.isdecimal() and 1 <= int(answer) <= len(names):
        return names[int(answer) - 1]
    if answer in names:
        return answer
    raise ConfigError(f"{answer!r} is none of them: {', '.join(names)}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def in_folder(run: str) -> RunPaths | None:
    """The run whose folder that is; None: it is a name.

    Raises:
        ConfigError: it is another folder.
    """
    with suppress(RuntimeError, OSError):  # no such user; a name that is too long
        folder = Path(run).expanduser()
        if folder.name != run and folder.is_dir():
            paths = RunPaths(folder.resolve())
            if not (paths.config.is_file() or paths.launched.is_file()):
                raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
            return paths
    return None
