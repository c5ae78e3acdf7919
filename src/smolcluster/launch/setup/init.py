"""`smolcluster init`: from the names of some machines to a cluster file for them.

It logs in to each, measures every way from each worker to the server, and writes down the best ones with
the reason. What flags leave open is asked, where there is a terminal.
"""

import secrets
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from smolcluster.configs.keys import A_NAME, A_REMOTE_PATH
from smolcluster.configs.schema import (
    NodeConfig,
    NodeName,
    RemotePath,
    SshDestination,
)
from smolcluster.configs.spec import default_algorithm, get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.host import HERE, Host
from smolcluster.launch.prepare import run_on_all
from smolcluster.launch.probing import listening, probe_script
from smolcluster.launch.setup.cluster_file import ClusterFile
from smolcluster.launch.setup.discover import Neighbour, discover
from smolcluster.launch.setup.links import (
    START_S,
    BestAddress,
    Interface,
    MeasuredLink,
    choose,
    interfaces_of,
    measure,
    measuring_s,
)
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.utils.replacing import replacing
from smolcluster.utils.units import format_count
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
        project_dir: the project's folder on the machines.
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


class Asker(Protocol):
    """Somebody who answers questions."""

    def text(self, question: str, default: str) -> str:
        """Some text; empty only where `default` is."""

    def confirm(self, question: str) -> bool:
        """Yes or no."""


class Terminal:
    """The user at the terminal."""

    def text(self, question: str, default: str) -> str:
        """A line of text.

        Raises:
            KeyboardInterrupt: the user wants to stop.
        """
        try:
            answer = typer.prompt(question, default=default, show_default=bool(default))
        except typer.Abort:
            raise KeyboardInterrupt from None
        return str(answer).strip()

    def confirm(self, question: str) -> bool:
        """Yes or no.

        Raises:
            KeyboardInterrupt: the user wants to stop.
        """
        try:
            return typer.confirm(question, default=True)
        except typer.Abort:
            raise KeyboardInterrupt from None


def init(
    options: InitOptions, asker: Asker | None = None, *, console: Console | None = None
) -> int:
    """Write a cluster file for the user's machines; returns the exit code.

    `asker` answers what the flags leave open; None: the user, if there is a terminal.

    Raises:
        ConfigError: a flag is wrong or missing, or the file is there already.
        LaunchError: a machine cannot be reached, or a worker has no way to the server.
    """
    if asker is None and sys.stdin.isatty() and sys.stdout.isatty():
        asker = Terminal()
    console = console or SteadyConsole()
    algorithm = (
        get_algorithm(options.algorithm) if options.algorithm else default_algorithm()
    ).name
    check_flags(options)
    target = options.to or Path(f"cluster_config_{algorithm}.yaml")
    if not may_write(target, options, asker):
        return 1
    found = neighbours(console) if options.discover else []
    server, workers = machines(options, asker, found, console)
    file = draft(options, algorithm, server, workers, console)
    text = file.text(one_line(shlex.quote(str(target))), datetime.now().astimezone().date())
    if asker and not options.yes and not asker.confirm(f"Write {target}?"):
        return 1
    write(target, text)
    print_line(
        console,
        f"wrote {target}; {as_command('launch', algorithm, '--config', str(target))} starts it",
    )
    return 0


def check_flags(options: InitOptions) -> None:
    """Refuse flags that are wrong, before anything is done.

    Raises:
        ConfigError: one line about the first of them.
    """
    if not 1 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}, must be a whole number from 1 to 65535")
    if options.project_dir is not None and not _is_a(RemotePath, options.project_dir):
        raise ConfigError(
            one_line(f"--project-dir is {options.project_dir!r}, must be {A_REMOTE_PATH}")
        )
    if options.server is not None:
        parse_machine(options.server, "--server")
    check_workers([parse_machine(text, "--worker") for text in options.workers])


def parse_machine(text: str, flag: str) -> Host:
    """The machine that NODE or NODE=SSH means.

    Raises:
        ConfigError: its name or destination could be taken for something else.
    """
    node, stated, destination = text.partition("=")
    if not _is_a(NodeName, node):
        raise ConfigError(one_line(f"{flag}: {node!r} is no name of a node, must be {A_NAME}"))
    if not stated:
        return Host(node, node)
    if not _is_a(SshDestination, destination):
        raise ConfigError(
            one_line(f"{flag}: {destination!r} is nowhere for ssh to go, must be {A_DESTINATION}")
        )
    return Host(node, None if destination == HERE else destination)


def check_workers(workers: Sequence[Host]) -> None:
    """Refuse a worker that is named twice.

    Raises:
        ConfigError: one is.
    """
    node, times = (
        Counter(worker.node for worker in workers).most_common(1)[0] if workers else ("", 0)
    )
    if times > 1:
        raise ConfigError(f"--worker names {node!r} twice, must name each node once")


def may_write(target: Path, options: InitOptions, asker: Asker | None) -> bool:
    """Whether the file may be written; asked before all else, so that no work is in vain.

    Raises:
        ConfigError: its folder is not there, or it is there and nobody can be asked.
    """
    if not target.parent.is_dir():
        raise ConfigError(one_line(f"--to {target}: there is no folder {target.parent}"))
    if target.is_dir():
        raise ConfigError(one_line(f"--to {target}: is a folder, must be a file"))
    if options.force or not target.exists():
        return True
    if asker is None or options.yes:
        raise ConfigError(
            one_line(f"{target} is there already: --force writes over it, --to FILE names another")
        )
    return asker.confirm(f"{target} is there already; write over it?")


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
    options: InitOptions, asker: Asker | None, found: Sequence[Neighbour], console: Console
) -> tuple[Host, list[Host]]:
    """The server and the workers, all of which let us in.

    Raises:
        ConfigError: nobody can be asked for what is missing.
        LaunchError: a machine that a flag names cannot be reached.
    """
    server = parse_machine(options.server, "--server") if options.server else None
    workers = [parse_machine(text, "--worker") for text in options.workers]
    if asker is None and not (server and workers):
        raise ConfigError(NEEDED)
    named = {host.node: host for host in (*workers, *([server] if server else []))}
    if named:
        print_line(console, f"logging in to {', '.join(named)} …")
        run_on_all(list(named.values()), log_in)
    if asker and not (server and workers):
        server, asked = ask_machines(asker, server, found, console, workers=not workers)
        workers = workers or asked
    assert server is not None  # noqa: S101 - for mypy: NEEDED was raised else
    return server, [server if worker.node == server.node else worker for worker in workers]


class Back(Exception):
    """The user wants to answer the question before once more."""


def ask_machines(
    asker: Asker,
    server: Host | None,
    found: Sequence[Neighbour],
    console: Console,
    *,
    workers: bool,
) -> tuple[Host, list[Host]]:
    """The server, where it is not given, and the `workers`, at least one; until the user names no more."""
    print_line(console, INTRODUCTION)
    given = server
    named: dict[str, Host] = {}
    while True:
        try:
            if server is None:
                server = ask_machine(asker, "Server", found, console, workers={})
            if server is None or not workers:
                if server is not None:
                    return server, []
                continue
            end = ", empty: no more" if named else ""
            what = f"Worker {len(named) + 1}"
            worker = ask_machine(asker, what, found, console, workers=named, server=server, end=end)
            if worker is not None:
                named[worker.node] = worker
            elif named:
                return server, list(named.values())
        except Back:
            if named:
                print_line(console, f"{named.popitem()[0]} is left out again")
            elif server is not given:
                server = None


def ask_machine(
    asker: Asker,
    what: str,
    found: Sequence[Neighbour],
    console: Console,
    *,
    workers: Mapping[str, Host],
    server: Host | None = None,
    end: str = "",
) -> Host | None:
    """A machine that lets us in, or None when the user names none.

    Raises:
        Back: the user wants to go back.
    """
    listed = ", or its number" if found else ""
    while answer := asker.text(f"{what}: its name{listed}{end}", ""):
        if answer == BACK:
            raise Back
        node, destination = picked(answer, found)
        if not _is_a(NodeName, node):
            print_line(
                console, one_line(f"{what}: {node!r} is no name of a node, must be {A_NAME}")
            )
        elif node in workers:
            print_line(console, f"{node} is a worker already")
        elif server is not None and node == server.node:
            return server
        elif host := ask_destination(asker, node, destination, what, console):
            return host
    return None


def ask_destination(
    asker: Asker, node: str, destination: str, what: str, console: Console
) -> Host | None:
    """The machine of that name, which lets us in; None: the user wants to say another name."""
    while True:
        destination = asker.text(f"Where ssh finds {node} (local: this machine)", destination)
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
    done = host.run("echo at your service")
    if "at your service" not in done.stdout:
        raise LaunchError(
            f"{host.node} ({host.shown}): its shell does not run commands as a POSIX shell does: "
            f"{done.stderr_tail}"
        )


def draft(
    options: InitOptions,
    algorithm: str,
    server: Host,
    workers: Sequence[Host],
    console: Console,
) -> ClusterFile:
    """The cluster file for some machines, whose links are measured for it.

    Raises:
        LaunchError: a machine cannot be reached, or a worker has no way to the server.
    """
    others = [worker for worker in workers if worker.node != server.node]
    interfaces = interfaces_of(server)
    links = measured(server, others, interfaces, options.port, console)
    choices = chosen(server, links, options.port)
    for node, choice in choices.items():
        print_line(console, f"{node} reaches {server.node} best at {choice.ip}: {choice.reason}")
    own = most_used(choices, interfaces)
    return ClusterFile(
        algorithm=algorithm,
        server=server.node,
        workers=[worker.node for worker in workers],
        port=options.port,
        host_ip={server.node: own, **{node: choice.ip for node, choice in choices.items()}},
        remarks={
            server.node: "Server",
            **{node: choice.reason for node, choice in choices.items()},
        },
        nodes=settings_of([server, *others], options.project_dir),
    )


def measured(
    server: Host,
    workers: Sequence[Host],
    interfaces: Sequence[Interface],
    port: int,
    console: Console,
) -> dict[str, list[MeasuredLink]]:
    """The links from each worker to each address of the server, one worker after the other.

    Raises:
        LaunchError: a machine cannot be reached, or has no Python.
    """
    if not workers:
        return {}
    links = {}
    seconds = measuring_s(len(workers), interfaces)
    token = secrets.token_hex(16)
    addresses = (interface.ip for interface in interfaces)
    listen = probe_script("", "listen", port, token, seconds, *addresses)
    with listening(server, listen, START_S) as listener:
        for worker in workers:
            ways = format_count(len(interfaces), "way")
            print_line(console, f"measuring {ways} from {worker.node} to {server.node} …")
            links[worker.node] = measure(worker, interfaces, listener, token)
    return links


def chosen(
    server: Host, links: Mapping[str, Sequence[MeasuredLink]], port: int
) -> dict[str, BestAddress]:
    """Each worker's best address of the server.

    Raises:
        LaunchError: a worker has none.
    """
    choices = {node: choose(ways) for node, ways in links.items()}
    lost = [node for node, choice in choices.items() if choice is None]
    if lost:
        ways = "; ".join(f"{link.interface.shown}: {link.failure}" for link in links[lost[0]])
        raise LaunchError(
            f"{' and '.join(lost)}: no way to {server.node} ({ways}): let port {port} through its "
            "firewall, or connect them to one network"
        )
    return {node: choice for node, choice in choices.items() if choice}


def most_used(choices: Mapping[str, BestAddress], interfaces: Sequence[Interface]) -> str:
    """The server's own entry: the address that most workers use."""
    used = Counter(choice.ip for choice in choices.values())
    return used.most_common(1)[0][0] if used else interfaces[0].ip


def settings_of(hosts: Sequence[Host], project_dir: str | None) -> dict[str, dict[str, str]]:
    """What the file says about single machines, where it is not the default."""
    usual = NodeConfig.model_fields["project_dir"].default
    settings = {}
    for host in hosts:
        own = {} if host.destination == host.node else {"ssh": host.destination or HERE}
        if project_dir not in (None, usual) and host.destination is not None:
            own["project_dir"] = str(project_dir)
        if own:
            settings[host.node] = own
    return settings


def write(target: Path, text: str) -> None:
    """Put the file in its place, at once.

    Raises:
        LaunchError: it cannot be written.
    """
    try:
        with replacing(target, durable=False) as path:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            one_line(f"{target}: cannot be written ({error.strerror or error})")
        ) from error


def _is_a(kind: Any, text: str) -> bool:
    try:
        TypeAdapter(kind).validate_python(text)
    except ValidationError:
        return False
    return True
