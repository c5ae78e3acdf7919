"""How fast machines train: one probe a machine, JSON back. Who does not answer is left out."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from smolcluster.errors import LaunchError, SmolclusterError
from smolcluster.launch.advise.speed import CODE_FOLDER, Speed
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.links import Say
from smolcluster.launch.plan import MODULE
from smolcluster.runs.model_file import ModelFile
from smolcluster.utils.at_once import at_once
from smolcluster.utils.words import one_line

SPEED_S = 300.0
"""Longest time in which a machine loads PyTorch and the data, and is measured; steps may be long."""
UNSTEADY = 1.3
"""Rounds that differ by more are of a machine that has other things to do."""

R = TypeVar("R")


@dataclass(frozen=True)
class Computer:
    """A machine on which it is measured how fast it trains.

    Attributes:
        python: the interpreter there, relative to `folder` or absolute.
        folder: the project's.
        question: what it is asked, with what it needs to know of the run, as an archive.
    """

    host: Host
    python: str
    folder: str
    question: bytes


def measure_all(computers: Sequence[Computer], say: Say, answer: ModelFile[R]) -> dict[str, R]:
    """What each machine finds, all at once; who cannot be measured is left out, with one line."""
    names = ", ".join(computer.host.node for computer in computers)
    say(f"measuring real steps on {names}; loading PyTorch takes some seconds …")

    def one(computer: Computer) -> R | None:
        try:
            return _measure(computer, answer)
        except SmolclusterError as error:
            say(f"{error}; it is left out")
            return None

    found = dict(zip((each.host.node for each in computers), at_once(one, computers), strict=True))
    return {node: each for node, each in found.items() if each is not None}


def _measure(computer: Computer, answer: ModelFile[R]) -> R:
    """What `speed`, run on a machine, prints there.

    Raises:
        LaunchError: it cannot be reached, has no environment, or cannot train this.
    """
    host, python = computer.host, shell_path(computer.python)
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
[ -x {python} ] || {{ echo 'the project has no environment there' >&2; exit 9; }}
{python} {shlex.join(MODULE)} smolcluster.launch.advise.speed "$dir" </dev/null""",
        stdin=computer.question,
        timeout_s=SPEED_S,
    )
    with suppress(IndexError):
        found = answer.parse(done.stdout.splitlines()[-1])
        if done.ok and found is not None:
            return found
    raise LaunchError(
        f"{host.node} ({host.shown}): its speed cannot be measured: {one_line(done.stderr_tail)}"
    )


def busy(node: str, speed: Speed) -> str | None:
    """A line about a machine whose speed jumps from one round to the next; None: it does not."""
    jumps = max(speed.compute_s) / min(speed.compute_s)
    if jumps <= UNSTEADY:
        return None
    return (
        f"{node} is busy: the same batch took {jumps:.1f} times as long from one second to the next; what it "
        "has to do besides makes the prediction worse"
    )
