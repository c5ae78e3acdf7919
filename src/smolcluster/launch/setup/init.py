"""`smolcluster init`: from the names of some machines to a cluster file for them.

It logs in to each, measures every way from each worker to the server, and writes down the best ones with
the reason. What flags leave open is asked, where there is a terminal.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from smolcluster.configs.keys import A_NAME, A_REMOTE_PATH
from smolcluster.configs.schema import NodeName, RemotePath, SshDestination
from smolcluster.configs.spec import default_algorithm, get_algorithm
from smolcluster.errors import ConfigError, LaunchError, SmolclusterError
from smolcluster.launch.host import HERE, Host
from smolcluster.launch.links import addresses_of, measure_ways
from smolcluster.launch.node_facts import facts_of
from smolcluster.launch.prepare import NotFit, run_on_all
from smolcluster.launch.setup.cluster_file import cluster_text
from smolcluster.launch.setup.discover import Neighbour, discover
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.runs.files import write_whole
from smolcluster.utils.words import as_command, one_line

DEFAULT_PORT = 65432
BACK = "<"
"""The answer that goes back to the question before; no machine can be called so."""
INTRODUCTION = (
    f"A name is what the run calls a machine, such as mini1 or pi5: {A_NAME.removeprefix('a name of ')}. "
    f"Where ssh finds it is asked next. {BACK} goes back to the question before."
)
A_DESTINATION = "a host of ~/.ssh/config, an address or user@address, or local for this machine"
NEEDED = (
    "init needs --server NODE[=SSH] and at least one --worker NODE[=SSH], because there is no terminal to "
    "ask on"
)


@dataclass(frozen=True)
class InitOptions:
    """What the user's flags say; None and empty: nothing.

    Attributes:
        server: the server's node, as NODE or NODE=SSH.
        workers: the workers' nodes, in the same form.
        to: the file to write; None: cluster_config_<algorithm>.yaml in this folder.
        yes: ask for no confirmation.
        force: write over a file that is there.
        project_dir: the machines' own clone of the project; None: a launch brings it.
        discover: look for machines by mDNS.
    """

    server: str | None = None
    workers: tuple[str, ...] = ()
    port: int = DEFAULT_PORT
    to: Path | None = None
    algorithm: str | None = None
    yes: bool = False
    force: bool = False
    project_dir: str | None = None
    discover: bool = False


class Terminal:
    """The user at the terminal, whose Ctrl-C is a `typer.Abort`."""

    def text(self, question: str, default: str) -> str:
        """A line of text; empty only where `default` is."""
        answer = typer.prompt(question, default=default, show_default=bool(default))
        return str(answer).strip()

    def confirm(self, question: str) -> bool:
        return typer.confirm(question, default=True)


def init(
    options: InitOptions, user: Terminal | None = None, *, console: Console | None = None
) -> int:
    """Write a cluster file for the user's machines; returns the exit code.

    `user` answers what the flags leave open; None: who is at the terminal, if there is one.

    Raises:
        ConfigError: a flag is wrong or missing, or the file is there already.
        LaunchError: a machine cannot be reached, or a worker has no way to the server.
        SmolclusterError: the file cannot be written.
    """
    if user is None and sys.stdin.isatty() and sys.stdout.isatty():
        user = Terminal()
    console = console or SteadyConsole()
    algorithm = (
        get_algorithm(options.algorithm) if options.algorithm else default_algorithm()
    ).name
    server, workers = check_flags(options)
    target = options.to or Path(f"cluster_config_{algorithm}.yaml")
    if not may_write(target, options, user):
        return 1
    found = neighbours(console) if options.discover else []
    server, workers = machines(server, workers, user, found, console)
    name = one_line(shlex.quote(str(target)))
    text = draft(options, algorithm, server, workers, name=name, console=console)
    if user and not options.yes and not user.confirm(f"Write {target}?"):
        return 1
    write_whole(target, text, durable=False)
    examines = as_command("doctor", "--config", str(target))
    starts = as_command("launch", algorithm, "--config", str(target))
    print_line(console, f"wrote {target}; {examines} examines its machines, {starts} starts it")
    return 0


def check_flags(options: InitOptions) -> tuple[Host | None, list[Host]]:
    """The server and the workers that the flags name.

    Raises:
        ConfigError: one line about the first flag that is wrong.
    """
    if not 1 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}, must be a whole number from 1 to 65535")
    if options.project_dir is not None and not _is_a(RemotePath, options.project_dir):
        raise _wrong(f"--project-dir is {options.project_dir!r}, must be {A_REMOTE_PATH}")
    server = None if options.server is None else parse_machine(options.server, "--server")
    workers = [parse_machine(text, "--worker") for text in options.workers]
    for node, times in Counter(worker.node for worker in workers).items():
        if times > 1:
            raise ConfigError(f"--worker names {node!r} twice, must name each node once")
    return server, workers


def parse_machine(text: str, flag: str) -> Host:
    """The machine that NODE or NODE=SSH means.

    Raises:
        ConfigError: its name or destination could be taken for something else.
    """
    node, stated, destination = text.partition("=")
    if not _is_a(NodeName, node):
        raise _wrong(f"{flag}: {node!r} is no name of a node, must be {A_NAME}")
    if not stated:
        return Host(node, node)
    if not _is_a(SshDestination, destination):
        raise _wrong(f"{flag}: {destination!r} is nowhere for ssh to go, must be {A_DESTINATION}")
    return Host(node, None if destination == HERE else destination)


def may_write(target: Path, options: InitOptions, user: Terminal | None) -> bool:
    """Whether the file may be written; asked before all else, so that no work is in vain.

    Raises:
        ConfigError: its folder is not there, or it is there and nobody can be asked.
    """
    if not target.parent.is_dir():
        raise _wrong(f"--to {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise _wrong(f"--to {target}: is a folder, must be a file")
    if options.force or not target.exists():
        return True
    if user is None or options.yes:
        raise _wrong(f"{target} is there already: --force writes over it, --to FILE names another")
    return user.confirm(f"{target} is there already; write over it?")


def neighbours(console: Console) -> list[Neighbour]:
    print_line(console, "looking for machines that announce themselves …")
    found = discover()
    for place, machine in enumerate(found, start=1):
        print_line(console, f"  {place}  {machine.name}  {machine.address}")
    if not found:
        print_line(
            console, "found none: they may be asleep, in another network, or have SSH turned off"
        )
    return found


def machines(
    server: Host | None,
    workers: list[Host],
    user: Terminal | None,
    found: Sequence[Neighbour],
    console: Console,
) -> tuple[Host, list[Host]]:
    """The server and the workers, all of which let us in; who is missing is asked for.

    Raises:
        ConfigError: nobody can be asked.
        LaunchError: a machine that a flag names cannot be reached.
    """
    if user is None and not (server and workers):
        raise ConfigError(NEEDED)
    given = [server] if server else []
    if stated := {host.node: host for host in (*workers, *given)}:
        print_line(console, f"logging in to {', '.join(stated)} …")
        run_on_all(list(stated.values()), log_in)
    if user and not (server and workers):
        server, *asked = ask_machines(user, given, found, console, most=1 if workers else None)
        workers = workers or asked
    assert server is not None  # noqa: S101 - for mypy: NEEDED was raised else
    return server, [server if worker.node == server.node else worker for worker in workers]


def ask_machines(
    user: Terminal,
    given: Sequence[Host],
    found: Sequence[Neighbour],
    console: Console,
    *,
    most: int | None,
) -> list[Host]:
    """The server, if it is not `given`, and workers, at least one, until there are `most` or no more."""
    print_line(console, INTRODUCTION)
    named = list(given)
    while len(named) != most:
        answer = ask_machine(user, named, found, console)
        if isinstance(answer, Host):
            named.append(answer)
        elif answer == BACK and len(named) > len(given):
            last = named.pop()
            if named:
                print_line(console, f"{last.node} is left out again")
        elif not answer and named[1:]:
            break
    return named


def ask_machine(
    user: Terminal, named: Sequence[Host], found: Sequence[Neighbour], console: Console
) -> Host | str:
    """The machine that comes after those that are `named`, and lets us in; else empty, or BACK."""
    what = f"Worker {len(named)}" if named else "Server"
    question = f"{what}: its name{', or its number' * bool(found)}"
    if named[1:]:
        question += ", empty: no more"
    while (answer := user.text(question, "")) not in ("", BACK):
        node, destination = picked(answer, found)
        if not _is_a(NodeName, node):
            print_line(
                console, one_line(f"{what}: {node!r} is no name of a node, must be {A_NAME}")
            )
        elif node in [worker.node for worker in named[1:]]:
            print_line(console, f"{node} is a worker already")
        elif named and node == named[0].node:
            return named[0]
        elif host := ask_destination(user, node, destination, what, console):
            return host
    return answer


def ask_destination(
    user: Terminal, node: str, destination: str, what: str, console: Console
) -> Host | None:
    """The machine of that name, which lets us in; None: the user wants to say another name."""
    while True:
        destination = user.text(f"Where ssh finds {node} (local: this machine)", destination)
        if destination == BACK:
            return None
        try:
            host = parse_machine(f"{node}={destination}", what)
            log_in(host)
        except (ConfigError, LaunchError) as error:
            print_line(console, str(error))
        else:
            return host


def picked(answer: str, found: Sequence[Neighbour]) -> tuple[str, str]:
    for place, machine in enumerate(found, start=1):
        if answer in (str(place), machine.name):
            return machine.name, machine.destination
    return answer, answer


def log_in(host: Host) -> None:
    """See that commands can be run on a machine.

    Raises:
        LaunchError: they cannot; the message says why and what to do.
    """
    facts_of(host, "system")


def draft(
    options: InitOptions,
    algorithm: str,
    server: Host,
    workers: Sequence[Host],
    *,
    name: str,
    console: Console,
) -> str:
    """The cluster file of this name for some machines, whose links are measured for it.

    Raises:
        LaunchError: a machine cannot be reached, or a worker has no way to the server.
    """
    others = [worker for worker in workers if worker.node != server.node]
    addresses = addresses_of(server)
    lost: list[SmolclusterError] = []
    say = partial(print_line, console)
    best = measure_ways(server, others, addresses, options.port, say, lost=lost.append)
    if lost:
        raise NotFit(lost)
    for node, way in best.items():
        say(f"{node} reaches {server.node} best at {way.address}: {way.reason}")
    host_ip = {node: way.address for node, way in best.items()}
    used = Counter([*host_ip.values()] or [addresses[0].address])
    [(own, _)] = used.most_common(1)  # the server's own entry: what most workers use
    return cluster_text(
        name,
        datetime.now().astimezone().date(),
        algorithm=algorithm,
        server=server.node,
        workers=[worker.node for worker in workers],
        port=options.port,
        host_ip={server.node: own} | host_ip,
        remarks={server.node: "Server"} | {node: way.reason for node, way in best.items()},
        nodes=settings_of([server, *others], options.project_dir),
    )


def settings_of(hosts: Sequence[Host], project_dir: str | None) -> dict[str, dict[str, str]]:
    """What the file says about single machines, where it is not the default."""
    settings = {}
    for host in hosts:
        own = {} if host.destination == host.node else {"ssh": host.destination or HERE}
        if project_dir is not None and host.destination is not None:
            own["project_dir"] = project_dir
        if own:
            settings[host.node] = own
    return settings


def _wrong(text: str) -> ConfigError:
    return ConfigError(one_line(text))


def _is_a(kind: Any, text: str) -> bool:
    try:
        TypeAdapter(kind).validate_python(text)
    except ValidationError:
        return False
    return True
