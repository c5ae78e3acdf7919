"""Code and environments of before on the machines of launched runs, which no process uses any more.

What a launch wanted last, or within the hour, stays.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from smolcluster.errors import DataError, LaunchError
from smolcluster.launch.host import Host
from smolcluster.runs.launched import launched_of
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.at_once import at_once

TIMEOUT_S = 120.0
"""How long a machine may take: an environment is many files, and a Pi's card is slow."""
SCRIPT = r"""shown=$(cat)
cd ~/.cache/smolcluster 2>/dev/null || exit 0
used=$({ ls -l projects/latest /proc/[0-9]*/cwd; [ -d /proc/self ] || lsof -w -d cwd -Fn; } 2>/dev/null)
is_old() { [ -n "$(find "$1" -prune -mmin +60 2>/dev/null)" ]; }
goes() {
  if [ -z "$shown" ]; then echo "$1 $(du -sk "$1" | cut -f 1)"; return; fi
  case $shown in *"$1"*) rm -rf "$1" || echo "$1 stays"; esac
}
kept=
for each in projects/*; do
  case $used in *"${each##*/}"*) is_used=1 ;; *) is_used= ;; esac
  if [ "$each" != projects/latest ] && [ -z "$is_used" ] && is_old "$each"; then goes "$each"
  else kept="$kept $(readlink "$each/.venv")"; fi
done
for each in environments/*; do
  case $kept in *"${each##*/}"*) ;; *) ! is_old "$each" || goes "$each" ;; esac
done"""
"""Prints paths that may go, with their kilobytes; removes those that it reads, unless they are in use now."""

Old = Mapping[Host, Mapping[str, int]]
"""By machines, the paths below ~/.cache/smolcluster that may go, and their bytes."""


def old_projects(root: Path) -> Old:
    """Look at the machines of the runs in `root`; one that does not answer has none."""

    def found_on(host: Host) -> list[tuple[str, str]]:
        with suppress(LaunchError):
            return _ask(host)
        return []

    hosts = list(dict.fromkeys(_hosts(root)))
    found = zip(hosts, at_once(found_on, hosts), strict=True)
    return {
        host: {path: 1024 * int(size) for path, size in pairs} for host, pairs in found if pairs
    }


def remove_projects(old: Old) -> list[str]:
    """Remove them, but for what is in use by now; returns what stays, in words."""

    def remove(host: Host) -> list[str]:
        try:
            return [f"{host.node}: {path} stays" for path, _ in _ask(host, "\n".join(old[host]))]
        except LaunchError as error:
            return [f"{host.node}: {path} stays: {error}" for path in old[host]]

    return [line for lines in at_once(remove, list(old)) for line in lines]


def _ask(host: Host, shown: str = "") -> list[tuple[str, str]]:
    said = host.run(SCRIPT, stdin=shown.encode(), timeout_s=TIMEOUT_S).stdout
    lines = (line.rpartition(" ") for line in said.splitlines())
    return [(path, word) for path, _, word in lines]


def _hosts(root: Path) -> Iterator[Host]:
    for folder in root.iterdir() if root.is_dir() else ():
        with suppress(DataError):
            launched = launched_of(RunPaths(folder))
            for process in launched.processes if launched else ():
                if process.ssh is not None and process.scheduler is None:
                    yield Host(process.node, process.ssh)
