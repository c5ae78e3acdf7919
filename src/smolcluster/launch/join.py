"""`smolcluster join`: a new or returned machine takes part in a living run.

From the machine that launched it, over SSH, as a launch does; or on the machine itself, which needs the
server's address and the cluster's secret. A run of one machine is joined on that machine.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from smolcluster.cluster.joining import RunOver, ask
from smolcluster.configs.resolve import LOOPBACK, load_resolved
from smolcluster.configs.schema import ClusterConfig, NodeName
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.cluster_run import EndedBadly
from smolcluster.launch.find import RUNS_DIR, find
from smolcluster.launch.remote import inherited, own_secret_file
from smolcluster.launch.run import place_overrides
from smolcluster.launch.take_in import JoinOptions, begin_and_wait, join_cluster, settings_of_node
from smolcluster.launch.tmux import session_name
from smolcluster.net.dialling import Address
from smolcluster.observability.logs import setup_logging
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched
from smolcluster.runs.paths import RunPaths, create_run, log_stem, runs_root
from smolcluster.runs.processes import ProcessEntry, read_processes, start_of, write_processes
from smolcluster.transport.messages import Welcome
from smolcluster.transport.security import load_secret
from smolcluster.utils.locks import release, take

POLL_S = 0.1
LOCK = "joining.lock"
"""In a run's folder: who brings a machine into it holds its lock."""


def join(where: str, wanted: JoinOptions) -> int:
    """Bring a machine into a run; returns the exit code.

    Args:
        where: the run, as `find` takes it, or the server's address, `host` or `host:port`.
        wanted: what the user says of the machine.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    address = address_of(where)
    if address is not None:
        return _join_as_process(address, wanted, _of_this_machine(wanted), paths=None)
    paths = find(where, acts=True)
    with _taking_turns(paths):
        return _join_run(paths, wanted)


@contextmanager
def _taking_turns(paths: RunPaths) -> Iterator[None]:
    """Wait until no other machine is being brought into the run: joining changes the run's files."""

    def on_busy(who: str) -> None:
        print_line(
            SteadyConsole(), f"waiting for {who}, which brings a machine into run {paths.run_id}"
        )

    try:
        lock = take(paths.root / LOCK, on_busy)
    except OSError as error:
        raise LaunchError(f"{paths.root / LOCK} cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        release(lock)


def _join_run(paths: RunPaths, wanted: JoinOptions) -> int:
    launched = read_launched(paths.launched) if paths.launched.is_file() else None
    if launched is not None and not launched.is_local:
        return join_cluster(paths, launched, wanted)
    status = read_snapshot(paths).status
    if status is None or status.is_over:
        raise LaunchError(f"run {paths.run_id} is over, or has not begun: nobody can join it")
    settings = load_resolved(paths.config)
    address = Address(LOOPBACK, settings.cluster.port)
    own = [*place_overrides(settings), "threads=1", f"runs_dir={_quoted(paths.root.parent)}"]
    options = ["--local", "--override", *own, *_of_this_machine(wanted)]
    if launched is None:
        return _join_as_process(address, wanted, options, paths=paths)
    return _join_in_session(address, wanted, options, paths, launched)


def address_of(where: str) -> Address | None:
    """The server's address that a word is; None: it is a run's name or folder."""
    if "/" in where or not (where == "localhost" or re.search(r"[.:]", where)):
        return None
    found = re.fullmatch(
        r"\[(?P<v6>[^]]+)\](:(?P<port6>\d+))?|(?P<host>[^:]+)(:(?P<port>\d+))?", where
    )
    default: int = ClusterConfig.model_fields["port"].default
    if found is None:
        return Address(where, default)  # an IPv6 address
    host, port = found["v6"] or found["host"], found["port6"] or found["port"]
    return Address(host, int(port or default))


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _of_this_machine(wanted: JoinOptions) -> list[str]:
    secret = (
        ()
        if wanted.secret_file is None
        else (f"secret_file={_quoted(wanted.secret_file.absolute())}",)
    )
    texts = (*secret, *wanted.overrides)
    return ["--override", *texts] if texts else []


def own_name(stated: str | None) -> str:
    """This machine's name in the run.

    Raises:
        ConfigError: it cannot be one.
    """
    name = stated or re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().partition(".")[0]) or "worker"
    try:
        return TypeAdapter(NodeName).validate_python(name)
    except ValidationError as error:
        raise ConfigError(
            f"--name is {name!r}, must be 1 to 64 letters, digits, dots, dashes or underlines"
        ) from error


def _ask(address: Address, name: str, wanted: JoinOptions) -> Welcome:
    secret = load_secret(wanted.secret_file or own_secret_file())
    log = setup_logging("join", name, named=False)
    try:
        return ask(address, name, secret, timeout_s=wanted.wait_s, log=log.logger)
    except RunOver as news:
        raise LaunchError(f"the run at {address} is over: {news}") from None


def _command(welcome: Welcome, name: str, address: Address, options: Sequence[str]) -> list[str]:
    worker = get_algorithm(welcome.run.algorithm).worker
    place = (str(welcome.worker_id), name, "--server", str(address))
    allowed: int = ClusterConfig.model_fields["restarts"].default
    return [sys.executable, str(worker), *place, "--restarts", str(allowed), *options]


def _join_as_process(
    address: Address, wanted: JoinOptions, options: Sequence[str], *, paths: RunPaths | None
) -> int:
    """Be a worker from now on, or start one that outlives this terminal.

    `paths`: of the run, where it is one of this machine whose launcher has plain children.
    """
    name = own_name(wanted.name)
    welcome = _ask(address, name, wanted)
    assert welcome.worker_id is not None  # noqa: S101 - we have asked for it
    rank, command = welcome.worker_id - 1, _command(welcome, name, address, options)
    print_line(
        SteadyConsole(), f"joining run {welcome.run_id} as worker {welcome.worker_id} ({name})"
    )
    if not wanted.detach:
        _note(paths, name, rank, os.getpid())
        sys.stdout.flush()
        os.execv(command[0], command)  # noqa: S606 - an argument list, no shell
    stated = settings_of_node(name, wanted.overrides).get("runs_dir", os.environ.get(RUNS_DIR))
    paths = paths or create_run(
        runs_root(Path(str(stated)) if stated else None), welcome.run_id, newest=False
    )
    return _detached(paths, command, name, rank)


def _detached(paths: RunPaths, command: Sequence[str], name: str, rank: int) -> int:
    """Start a worker that outlives this terminal, with its log in the run's folder, and wait for its log."""
    log = paths.log_file("worker", name, rank)
    output = paths.logs / f"{log_stem('worker', name, rank)}.console.txt"
    before = log.stat().st_size if log.exists() else 0
    with output.open("ab") as sink:
        process = subprocess.Popen(  # noqa: S603 - an argument list, no shell
            [*command, "--override", f"runs_dir={_quoted(paths.root.parent)}"],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _note(paths, name, rank, process.pid)
    while not log.exists() or log.stat().st_size == before:
        if process.poll() is not None:
            said = output.read_text(errors="replace").strip().splitlines()
            raise EndedBadly(
                f"worker {rank + 1} ({name})", process.returncode, (said or ["it said nothing"])[-1]
            )
        time.sleep(POLL_S)
    print_line(
        SteadyConsole(),
        f"it is process {process.pid}: `kill {process.pid}` stops it, and what it says is in {output}",
    )
    return 0


def _note(paths: RunPaths | None, name: str, rank: int, pid: int) -> None:
    """Let `status` and `stop` know of a worker of a run that lists its processes."""
    if paths is None or not paths.processes.is_file():
        return
    others = [each for each in read_processes(paths.processes) if each.rank != rank]
    entry = ProcessEntry(node=name, role="worker", rank=rank, pid=pid, started=start_of(pid))
    write_processes(paths.processes, [*others, entry])


def _join_in_session(
    address: Address,
    wanted: JoinOptions,
    options: Sequence[str],
    paths: RunPaths,
    launched: Launched,
) -> int:
    """Start a worker in a tmux session of this machine, beside those of a run that has such."""
    name = own_name(wanted.name)
    welcome = _ask(address, name, wanted)
    assert welcome.worker_id is not None  # noqa: S101 - we have asked for it
    rank = welcome.worker_id - 1
    process = LaunchedProcess(
        node=name,
        role="worker",
        rank=rank,
        ssh=None,
        run_dir=str(paths.root),
        session=session_name(paths.run_id, "worker", rank),
        project_dir=str(paths.root.parent),
        argv=tuple(_command(welcome, name, address, options)),
    )
    return begin_and_wait(paths, launched, process, inherited())
