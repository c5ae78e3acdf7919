"""Machines and links are measured: one probe a machine, JSON back. Who does not answer is left out."""

import io
import math
import secrets
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from smolcluster.errors import LaunchError, SmolclusterError
from smolcluster.launch.advise.speed import (
    ASKED,
    ASKED_FILE,
    CLUSTER_FILE,
    CODE_FOLDER,
    SPEED,
    TRAIN_FILE,
    Asked,
    Speed,
)
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.probing import Listener, ask, listening, probe_script
from smolcluster.launch.setup.links import (
    MEASURE_S,
    START_S,
    Interface,
    MeasuredLink,
    choose,
    interfaces_of,
    measure,
)
from smolcluster.launch.workload_code import WorkloadCode
from smolcluster.runs.model_file import ModelFile
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import one_line

SPEED_S = 300.0
"""Longest time in which a machine loads PyTorch and the data, and is measured; steps may be long."""
UNSTEADY = 1.3
"""Rounds that differ by more are of a machine that has other things to do."""
STATED = "host_ip"
"""The name of an interface of which only the address is known, which the cluster file states."""

Say = Callable[[str], None]
R = TypeVar("R")


@dataclass(frozen=True)
class Computer:
    """A machine on which it is measured how fast it trains.

    Attributes:
        python: the interpreter there, relative to `folder` or absolute.
        folder: the project's.
    """

    host: Host
    python: str
    folder: str


@dataclass(frozen=True)
class Files:
    """What a machine needs to know of the run."""

    cluster: bytes
    train: bytes
    code: WorkloadCode | None = None

    def packed(self, asked: Asked) -> bytes:
        """All of it, with what is asked of one machine, as an archive."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            contents = {
                ASKED_FILE: ASKED.text(asked),
                CLUSTER_FILE: self.cluster,
                TRAIN_FILE: self.train,
            }
            if self.code is not None:
                contents[f"{CODE_FOLDER}.tgz"] = self.code.packed
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o600
                tar.addfile(member, io.BytesIO(content))
        return archive.getvalue()


def measure_speed(computer: Computer, files: Files, asked: Asked) -> Speed:
    """How fast a machine trains.

    Raises:
        LaunchError: it cannot be reached, has no environment, or cannot train this.
    """
    return run_probe(computer, files, asked, "speed", SPEED)


def run_probe(
    computer: Computer, files: Files, asked: Asked, module: str, answer: ModelFile[R]
) -> R:
    """What a module of this package, run on a machine, prints there.

    Raises:
        LaunchError: it cannot be reached, has no environment, or cannot train this.
    """
    host, python = computer.host, computer.python
    done = host.run(
        f"""
umask 077
dir=$(mktemp -d) || exit 9
trap 'rm -rf "$dir"' EXIT
trap 'exit 9' HUP INT TERM
tar -xf - -C "$dir" || exit 9
if [ -e "$dir/{CODE_FOLDER}.tgz" ]; then
  mkdir "$dir/{CODE_FOLDER}" && tar -xzf "$dir/{CODE_FOLDER}.tgz" -C "$dir/{CODE_FOLDER}" || exit 9
fi
cd {shell_path(computer.folder)} || exit 9
[ -x {shell_path(python)} ] || {{ echo 'the project has no environment there' >&2; exit 9; }}
{shell_path(python)} -m smolcluster.launch.advise.{module} "$dir" </dev/null""",
        stdin=files.packed(asked),
        timeout_s=SPEED_S,
    )
    with suppress(IndexError):
        found = answer.parse(done.stdout.splitlines()[-1])
        if done.ok and found is not None:
            return found
    raise LaunchError(
        f"{host.node} ({host.shown}): its speed cannot be measured: {one_line(done.stderr_tail)}"
    )


def unsteadiness(speed: Speed) -> float:
    """How many times as long a batch took in the slowest round as in the fastest."""
    return max(speed.compute_s) / min(speed.compute_s)


def busy(node: str, speed: Speed) -> str | None:
    """A line about a machine whose speed jumps; None: it does not."""
    jumps = unsteadiness(speed)
    if jumps <= UNSTEADY:
        return None
    return (
        f"{node} is busy: the same batch took {jumps:.1f} times as long from one second to the next; what it "
        "has to do besides makes the prediction worse"
    )


@dataclass(frozen=True)
class Way:
    """The best way from a worker to the server.

    Attributes:
        up_mb_s, down_mb_s: megabytes a second while nobody else sends.
        crowd_up_mb_s, crowd_down_mb_s: while all workers send; None: not measured.
        reason: what was measured of this address of the server, and of the others.
    """

    address: str
    interface: str
    latency_s: float
    up_mb_s: float
    down_mb_s: float
    reason: str
    crowd_up_mb_s: float | None = None
    crowd_down_mb_s: float | None = None

    @property
    def via(self) -> str:
        """What it shares with others: the server's interface, which may have several addresses."""
        return self.address if self.interface == STATED else self.interface


def measure_ways(
    server: Host, workers: Sequence[Host], stated: Mapping[str, str], port: int, say: Say
) -> dict[str, Way]:
    """The best way from each worker to the server; who has none, or does not answer, is left out.

    `stated`: the server's address that each of them was told, if any, which is measured too.

    Raises:
        LaunchError: the server cannot be measured.
    """
    if not workers:
        return {}
    interfaces = interfaces_of(server)
    known = {interface.ip for interface in interfaces}
    extra = [
        ip
        for ip in dict.fromkeys(stated[each.node] for each in workers if each.node in stated)
        if ip not in known
    ]
    interfaces += [Interface(ip, STATED) for ip in extra]
    token = secrets.token_hex(16)
    seconds = int((len(workers) * len(interfaces) + 2) * MEASURE_S)
    listen = probe_script(
        "", "listen", port, token, seconds, *(interface.ip for interface in interfaces)
    )
    with listening(server, listen, START_S) as listener:
        ways = {}
        for worker in workers:
            say(f"measuring the ways from {worker.node} to {server.node} …")
            try:
                ways[worker.node] = _best_way(worker, server, interfaces, listener, token)
            except LaunchError as error:
                say(f"{error}; it is left out")
        crowd = [worker for worker in workers if worker.node in ways]
        return _together(crowd, ways, listener, token, say) if crowd[1:] else ways


def _best_way(
    worker: Host, server: Host, interfaces: Sequence[Interface], listener: Listener, token: str
) -> Way:
    links = [measure(worker, each, listener, token, "both") for each in interfaces]
    choice = choose(links)
    if choice is None:
        why = "; ".join(f"{link.interface.shown}: {link.failure}" for link in links)
        raise LaunchError(f"{worker.node} has no way to {server.node} ({why})")
    address, reason = choice
    return _way(next(link for link in links if link.interface.ip == address), reason)


def _way(link: MeasuredLink, reason: str) -> Way:
    down = link.mb_s if link.down_mb_s is None else link.down_mb_s
    name = link.interface.name
    return Way(link.interface.ip, name, link.ms / 1e3, link.mb_s, down, reason)


def _together(
    workers: Sequence[Host],
    ways: Mapping[str, Way],
    listener: Listener,
    token: str,
    say: Say,
) -> dict[str, Way]:
    """The same ways, with what they carry while all workers send."""
    say(f"measuring all {len(workers)} at the same time …")

    def share(worker: Host) -> Way:
        way = ways[worker.node]
        words = (way.address, listener.ports[way.address], token, len(workers))
        try:
            found = ask(worker, probe_script("", "crowd", *words), MEASURE_S)
            up, down = float(found["mb_per_s"]), float(found["down_mb_per_s"])
        except (LaunchError, KeyError, TypeError, ValueError):
            return way
        if not (math.isfinite(up) and math.isfinite(down)):
            return way
        return replace(way, crowd_up_mb_s=up, crowd_down_mb_s=down)

    return dict(zip((each.node for each in workers), at_once(share, workers), strict=True))


def measure_all(
    computers: Sequence[Computer], files: Files, asked: Mapping[str, Asked], say: Say
) -> dict[str, Speed]:
    """How fast each machine trains, all at once; who cannot be measured is left out, with one line."""
    speeds = probe_all(computers, files, asked, say, measure_speed)
    for node, speed in speeds.items():
        if (line := busy(node, speed)) is not None:
            say(line)
    return speeds


def probe_all(
    computers: Sequence[Computer],
    files: Files,
    asked: Mapping[str, Asked],
    say: Say,
    probe: Callable[[Computer, Files, Asked], R],
) -> dict[str, R]:
    """What `probe` finds on each machine, all at once; who cannot be measured is left out, with one line."""
    names = ", ".join(computer.host.node for computer in computers)
    say(f"measuring real steps on {names}; loading PyTorch takes some seconds …")

    def one(computer: Computer) -> R | None:
        try:
            return probe(computer, files, asked[computer.host.node])
        except SmolclusterError as error:
            say(f"{error}; it is left out")
            return None

    found = dict(zip((each.host.node for each in computers), at_once(one, computers), strict=True))
    return {node: each for node, each in found.items() if each is not None}


def this_machine(node: str, folder: str) -> Computer:
    return Computer(Host(node), sys.executable, folder)
