"""Before a run begins on a cluster: look at each machine, bring the project there, hand over the secret.

All machines at once; a failure of one is told as one line, with those of the others.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.host import Host, Unreachable
from smolcluster.launch.node_facts import facts_of, secret_path
from smolcluster.launch.plan import Machine
from smolcluster.launch.project import Project, bring, look_at_clone
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_count

M = TypeVar("M")
T = TypeVar("T")

MIN_FREE_NBYTES = 200 << 20
FORWARDED = (
    *("WANDB_MODE", "WANDB_DISABLED", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT"),
    "HF_HUB_OFFLINE",
)
"""What processes on other machines get of this one's environment, besides keys and the run's settings."""
NODE_ENV = re.compile(r"SMOLCLUSTER_NODES__.+__ENV(__.+)?", re.IGNORECASE)
"""A setting that only its node may see: it may hold secrets."""
WANDB_KEY, HUB_KEY = "WANDB_API_KEY", "HF_TOKEN"


class NotFit(LaunchError):
    """Machines are not fit for a run, or cannot be asked.

    Attributes:
        unreached: the nodes that cannot be reached.
    """

    def __init__(self, failures: Sequence[SmolclusterError]) -> None:
        self.unreached = tuple(each.node for each in failures if isinstance(each, Unreachable))
        super().__init__("; ".join(_said_once(failures)))


def _said_once(failures: Sequence[SmolclusterError]) -> list[str]:
    """Their sentences; what is the same of several nodes but for their names is said once, of the first."""
    nodes_of: dict[str, list[str]] = {}
    for failure in map(str, failures):
        node = failure.partition(": ")[0] if ": " in failure else ""
        said = failure.removeprefix(node).replace(f"nodes.{node}.", "nodes.{node}.")
        nodes_of.setdefault(said, []).append(node)
    return [
        ", ".join(nodes) + said.replace("nodes.{node}.", f"nodes.{nodes[0]}.")
        for said, nodes in nodes_of.items()
    ]


def examine(machines: Collection[Machine], say: Callable[..., None], *, sync: bool) -> list[str]:
    """See that all machines are fit for a run; with `sync` also for making environments.

    Returns their operating systems, as `uname -s` says them, in the machines' order.

    Raises:
        LaunchError: one is not; the message says what to do.
    """
    say(f"looking at {', '.join(machine.host.node for machine in machines)}")

    def examine_one(machine: Machine) -> str:
        needs_uv = sync and not (machine.is_here or machine.is_own)
        return check(machine.host, machine.project_dir, ["uv", "tmux"] if needs_uv else ["tmux"])

    return run_on_all(machines, examine_one)


def make_ready(
    machines: Collection[Machine],
    secret: bytes,
    say: Callable[..., None],
    *,
    project: Project,
    sync: bool,
) -> None:
    """Bring machines code, environment and the secret.

    Raises:
        LaunchError: it cannot be done, or without `sync` one lacks the project; the message says what to do.
    """
    bring_project(machines, say, project=project, sync=sync)

    def give_secret(machine: Machine) -> None:
        if machine.is_here and machine.secret_file is None:
            return  # it is where it comes from
        if hand_over_secret(machine.host, machine.secret_file, secret):
            node = machine.host.node
            say(f"{node}: had another secret, which this machine's replaces", "yellow")

    run_on_all(machines, give_secret)


def bring_project(
    machines: Collection[Machine], say: Callable[..., None], *, project: Project, sync: bool
) -> None:
    """Bring code and environment to those machines that are not this one; see `make_ready`.

    Raises:
        LaunchError: it cannot be done; the message says what to do.
    """

    def bring_to(machine: Machine) -> None:
        host, folder, began = machine.host, machine.project_dir, time.monotonic()
        if machine.is_own:
            num_other = look_at_clone(host, folder, project)
            other = f", which differs in {format_count(num_other, 'file')}" * bool(num_other)
            say(f"{host.node}: uses its own {folder}{other}", *["yellow"] * bool(num_other))
        elif bring(host, project, machine.torch, machine.env, is_allowed=sync):
            took_s = time.monotonic() - began
            say(f"{host.node}: code and environment are in {folder} ({took_s:.1f} s)")

    run_on_all([machine for machine in machines if not machine.is_here], bring_to)


def run_on_all(machines: Collection[M], task: Callable[[M], T]) -> list[T]:
    """Do a task for all machines at once; what came of it, in their order.

    Raises:
        LaunchError: it failed for at least one; the message has a sentence of each.
    """

    def attempt(machine: M) -> T | SmolclusterError:
        try:
            return task(machine)
        except SmolclusterError as error:
            return error

    results = at_once(attempt, machines)
    if failures := [each for each in results if isinstance(each, SmolclusterError)]:
        raise NotFit(failures)
    return [each for each in results if not isinstance(each, SmolclusterError)]


def check_systems(systems: Mapping[str, str]) -> None:
    """Refuse machines of several operating systems, by their names.

    Raises:
        ConfigError: two differ: Gloo's transports on Linux and macOS do not understand each other.
    """
    (first_node, first), *others = systems.items()
    for node, system in others:
        if system != first:
            raise ConfigError(
                f"{first_node} runs {first} and {node} {system}, between which torch.distributed does not "
                "work: launch a parameter server (edp, syncps, diloco) or a pipeline"
            )


def check(host: Host, project_dir: str, tools: Sequence[str]) -> str:
    """See that a machine can be reached and has what a run needs; returns its operating system.

    Raises:
        LaunchError: it has not; the message says what to do.
    """
    facts = facts_of(host, "system", "packages", "disk", *tools, folder=project_dir)
    if missing := [tool for tool in tools if not facts.has(tool)]:
        fixes = "; ".join(f"there: {facts.installing(tool)}" for tool in missing)
        raise LaunchError(
            f"{host.node} ({host.shown}): has no {' and no '.join(missing)} ({fixes})"
        )
    with suppress(ValueError, LookupError):  # what `df` does not say, the run may tell
        free = facts.free_nbytes
        if free < MIN_FREE_NBYTES:
            raise LaunchError(
                f"{host.node} ({host.shown}): the disk of {project_dir} has {free >> 20} MiB left: free some"
            )
    return facts.system


def hand_over_secret(host: Host, file: str | None, secret: bytes) -> bool:
    """Write the cluster's secret to a machine, by standard input; whether it had another one.

    Raises:
        LaunchError: it cannot be written.
    """
    done = host.run(
        f'umask 077; file={secret_path(file)}; new=$(cat); old=$(cat "$file" 2>/dev/null)\n'
        '[ "$new" = "$old" ] && chmod 600 "$file" && exit 0\n'
        'mkdir -p "$(dirname "$file")" && printf "%s\\n" "$new" > "$file.$$" && mv "$file.$$" "$file" '
        '|| exit 1\n[ -z "$old" ] || exit 3',
        stdin=secret,
    )
    if done.code not in (0, 3):
        raise LaunchError(f"{host.node}: the secret cannot be written: {done.stderr_tail}")
    return done.code == 3


def forwarded(environ: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """What processes on another machine get of this one's environment; `keys`: names that they need."""
    names = (*FORWARDED, *keys)
    return {name: environ[name] for name in names if name in environ} | settings_in(environ)


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of the run in an environment, without those that are this machine's or one node's own."""
    own = ("SMOLCLUSTER_RUNS_DIR", "SMOLCLUSTER_SECRET_FILE")
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("SMOLCLUSTER_") and name not in own and not NODE_ENV.fullmatch(name)
    }
