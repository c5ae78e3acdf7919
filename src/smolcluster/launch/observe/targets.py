"""`logging/targets/<run id>.json`: where Prometheus finds `/metrics` of a run's processes.

The format is that of Prometheus' file-based service discovery. A file is there as long as its run.
"""

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import SmolclusterError
from smolcluster.launch.host import run_here
from smolcluster.launch.observe.stack import EVERYWHERE
from smolcluster.observability.exporter import LOOPBACK, metrics_address
from smolcluster.runs.files import write_whole
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_address

FOLDER = "targets"
STALE_AFTER_S = 3600.0
"""A file that is younger is of a run that may still be starting."""
CONNECT_S = 0.5
SSH_S = 5.0
_IS_OURS = re.compile(r"[a-z]+-\d{8}-\d{6}-[0-9a-f]+")
"""The names of runs as a launch makes them; other files in the folder are their user's."""
READABLE = 0o644
"""Prometheus is another user; the files say nothing that others may not know."""

Json = dict[str, Any]


def targets_of(
    run_id: str, processes: Iterable[LaunchedProcess], cluster: ClusterConfig
) -> list[Json]:
    """What Prometheus is told of a run: an entry a process that serves `/metrics`."""
    targets = []
    for process in processes:
        if process.is_helper:  # it serves none
            continue
        served = metrics_address(cluster, None if process.rank is None else process.rank + 1)
        if served is not None:
            labels = {"run": run_id, "role": process.role, "node": process.node}
            where = format_address(address_of(process, cluster), served[1])
            targets.append({"targets": [where], "labels": labels})
    return targets


def address_of(process: LaunchedProcess, cluster: ClusterConfig) -> str:
    """Where a process is reached."""
    if process.ssh is not None:
        return ssh_address(process.ssh)
    bound = cluster.metrics_bind
    return LOOPBACK if bound is None or bound in EVERYWHERE else bound


def ssh_address(destination: str) -> str:
    """The address behind a destination of `ssh`, as the user's `~/.ssh/config` has it.

    A container knows neither that file nor names such as `pi5.local`; so names become addresses where this
    machine can tell.
    """
    name = _hostname(destination)
    # /metrics listens on IPv4 unless told otherwise.
    for family in (socket.AF_INET, socket.AF_UNSPEC):
        with suppress(OSError, UnicodeError):
            return str(socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)[0][4][0])
    return name


def write_targets(stack: Path, run_id: str, targets: list[Json]) -> None:
    """Tell Prometheus of a run.

    Raises:
        SmolclusterError: the file cannot be written.
    """
    path = file_of(stack, run_id)
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(targets, indent=2) + "\n", durable=False)
        path.chmod(READABLE)
    except OSError as error:
        raise SmolclusterError(f"cannot write {path}: {error.strerror or error}") from error


def remove_stale(stack: Path, *, now: Callable[[], float] = time.time) -> None:
    """Remove the files of runs that ended while nobody looked: none of their processes answers."""
    for path in sorted((stack / FOLDER).glob("*.json")):
        if not _IS_OURS.fullmatch(path.stem):
            continue
        with suppress(OSError, ValueError, TypeError, KeyError):
            if now() - path.stat().st_mtime > STALE_AFTER_S:
                entries = json.loads(path.read_bytes())
                addresses = [address for entry in entries for address in entry["targets"]]
                if not any(at_once(listens, addresses, most=16)):
                    path.unlink(missing_ok=True)


def file_of(stack: Path, run_id: str) -> Path:
    return stack / FOLDER / f"{run_id}.json"


def _hostname(destination: str) -> str:
    """What `ssh` itself says it would connect to."""
    with suppress(OSError, subprocess.TimeoutExpired):
        said = run_here(["ssh", "-G", "--", destination], timeout_s=SSH_S).stdout
        for line in said.splitlines():
            word, _, name = line.partition(" ")
            if word == "hostname":
                return name.strip()
    return destination.rpartition("@")[2]


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True
