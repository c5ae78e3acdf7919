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

from smolcluster.configs.begun import WORKLOAD_FOLDER, brought_workload, check_workload
from smolcluster.configs.function_name import FunctionName, known_here
from smolcluster.configs.machines import LOOPBACK
from smolcluster.configs.resolve import load_resolved
from smolcluster.configs.schema import ClusterConfig, NodeName
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.find import find
from smolcluster.launch.invite.start import TOGETHER
from smolcluster.launch.places import inherited, own_secret_file, place_overrides
from smolcluster.launch.plan import by_hand, runs_dir_override
from smolcluster.launch.run import EndedBadly
from smolcluster.launch.run_in_sessions import RunInSessions
from smolcluster.launch.take_in import JoinOptions, join_cluster, settings_of_node
from smolcluster.launch.tmux import session_name
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.launched import LaunchedProcess, launched_of, write_launched
from smolcluster.runs.paths import (
    RUNS_DIR,
    RunPaths,
    all_runs,
    check_run_id,
    create_run,
    runs_root,
)
from smolcluster.server.joining import Follower, RunOver
from smolcluster.utils.locks import held
from smolcluster.utils.retry import Deadline
from smolcluster.utils.seed import with_hash_seed
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import Welcome
from smolcluster.wire.security import load_secret

POLL_S = 0.1
BEGIN_S = 60.0
"""How long a worker that is left alone is watched until it logs; PyTorch takes some seconds."""


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
        named = () if wanted.workload is None else ("--workload", known_here(wanted.workload).text)
        options = [*named, *_of_this_machine(wanted)]
        return _join_as_process(address, wanted, options, paths=None)
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

    def unlockable(reason: str) -> LaunchError:
        return LaunchError(f"{paths.joining} cannot be locked: {reason}")

    with held(paths.joining, on_busy, unlockable):
        yield


def _join_run(paths: RunPaths, wanted: JoinOptions) -> int:
    launched = launched_of(paths)
    if launched is not None and launched.is_group:
        why = TOGETHER.format(launched.algorithm)
        raise ConfigError(f"run {paths.run_id}: {why}: stop the run, and resume it")
    if launched is not None and not launched.is_local:
        return join_cluster(paths, launched, wanted)
    status = read_snapshot(paths).status
    if status is None or status.is_over:
        raise LaunchError(f"run {paths.run_id} is over, or has not begun: nobody can join it")
    settings = load_resolved(paths.config)
    name = own_name(wanted.name)
    _check_is_one_process(name, settings.cluster)
    address = Address(LOOPBACK, settings.cluster.port)
    own = [*place_overrides(settings), "threads=1", runs_dir_override(str(paths.root.parent))]
    if wanted.workload is None:
        check_workload(paths.root, settings.train, may_have_changed=True)
    workload = wanted.workload or settings.train.workload
    named = () if workload is None else ("--workload", known_here(workload).text)
    options = [
        *("--local", *named),
        *("--override", *own, *_of_this_machine(wanted)),
    ]
    print_line(SteadyConsole(), f"run {paths.run_id} is of this machine alone: {name} starts here")
    if launched is None or not launched.has_sessions:
        return _join_as_process(address, wanted, options, paths=paths)
    process = _asked_for(address, wanted, options, paths)
    session = session_name(paths.run_id, "worker", process.rank)
    run = RunInSessions(launched, paths, SteadyConsole(), {process.node: inherited()})
    run.add(process.model_copy(update={"session": session}))
    return 0


def _check_is_one_process(name: str, cluster: ClusterConfig) -> None:
    """Refuse to bring what belongs to a pipeline into a run of this machine alone.

    Raises:
        ConfigError: it is a stage, or a worker that has stages.
    """
    own = cluster.node_of(name)
    is_stage = own not in cluster.workers and cluster.stages_with(own) is not None
    has_stages = own in cluster.nodes and cluster.nodes[own].stages is not None
    if is_stage or has_stages:
        what = "is a stage of a worker" if is_stage else "has its layers in stages"
        raise ConfigError(
            f"{name} {what}, which join does not start in a run of one machine: start worker.py and stage.py "
            "of algorithms/DiLoCo by hand, with --local and the run's configuration"
        )


def address_of(where: str) -> Address | None:
    """The server's address that a word is; None: it is a run's name, which may have dots, or folder.

    Raises:
        ConfigError: what follows the colon is no port.
    """
    if "/" in where or (all_runs() / where).is_dir():
        return None
    if not (where == "localhost" or re.search(r"[.:]", where)):
        return None
    found = re.fullmatch(
        r"\[(?P<v6>[^]]+)\](:(?P<port6>\d+))?|(?P<host>[^:]+)(:(?P<port>\d+))?", where
    )
    default: int = ClusterConfig.model_fields["port"].default
    if found is None and where.count(":") > 1:
        return Address(where, default)  # an IPv6 address
    port = int((found["port6"] or found["port"] or default) if found else 0)
    if found is None or not 0 < port < 65536:
        raise ConfigError(f"{where!r} is no address, must be HOST:PORT such as 10.10.0.1:65432")
    return Address(found["v6"] or found["host"], port)


def _of_this_machine(wanted: JoinOptions) -> list[str]:
    texts = list(wanted.overrides)
    if wanted.secret_file is not None:
        file = json.dumps(str(wanted.secret_file.absolute()), ensure_ascii=False)
        texts.insert(0, f"secret_file={file}")
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
    follower = Follower(
        hello=introduce(name),
        secret=load_secret(wanted.secret_file or own_secret_file()),
        log=NodeLog("join", name, named=False).logger,
        address=address,
        start_timeout_s=wanted.wait_s,
    )
    try:
        return follower.ask()
    except RunOver as news:
        raise LaunchError(f"the run at {address} is over: {news}") from None


def _asked_for(
    address: Address, wanted: JoinOptions, options: Sequence[str], paths: RunPaths | None
) -> LaunchedProcess:
    """A worker of the run at an address, in that run's folder; `paths`: the run's, where it is one of here.

    Raises:
        SmolclusterError: the run does not take it.
    """
    name = own_name(wanted.name)
    welcome = _ask(address, name, wanted)
    assert welcome.worker_id is not None  # noqa: S101 - we have asked for it
    run_id = check_run_id(welcome.run_id)
    if paths is None:
        stated = settings_of_node(name, wanted.overrides).get("runs_dir", os.environ.get(RUNS_DIR))
        paths = RunPaths(runs_root(Path(str(stated)) if stated else None) / run_id)
    if welcome.run.workload is not None and "--workload" not in options:
        options = ["--workload", _brought(welcome, paths), *options]
    algorithm, rank = get_algorithm(welcome.run.algorithm), welcome.worker_id - 1
    allowed: int = ClusterConfig.model_fields["restarts"].default
    said = ("--server", str(address), "--run-id", run_id, "--restarts", str(allowed), *options)
    return by_hand(algorithm, "worker", name, rank, *said, run_dir=str(paths.root))


def _brought(welcome: Welcome, paths: RunPaths) -> str:
    """The function whose code the launcher has brought to this machine for a run.

    Raises:
        ConfigError: it has brought none, or another one.
    """
    name = brought_workload(paths.root)
    if name is None:
        raise ConfigError(
            f"run {welcome.run_id} trains the workload {welcome.run.workload}, whose code is not here as a "
            f"launcher brought it ({paths.root / WORKLOAD_FOLDER}): name it with --workload FILE.py:FUNCTION"
        )
    if FunctionName.parse(name).label != welcome.run.workload:
        raise ConfigError(
            f"run {welcome.run_id} trains the workload {welcome.run.workload}, but the code that was brought "
            f"here is {name}: name it with --workload FILE.py:FUNCTION"
        )
    return name


def _join_as_process(
    address: Address, wanted: JoinOptions, options: Sequence[str], *, paths: RunPaths | None
) -> int:
    """Be a worker from now on, or start one that outlives this terminal.

    `paths`: of the run, where it is one of this machine whose launcher has plain children.
    """
    process = _asked_for(address, wanted, options, paths)
    own = RunPaths(Path(process.run_dir))
    print_line(SteadyConsole(), f"joining run {own.run_id} as {process.title}")
    if wanted.detach:
        create_run(own.root.parent, own.run_id, newest=False)
        return _detached(own, process)
    _note(own, process, os.getpid())
    sys.stdout.flush()
    return os.execve(process.argv[0], process.argv, with_hash_seed(os.environ))  # noqa: S606 - a list, no shell


def _detached(paths: RunPaths, process: LaunchedProcess) -> int:
    """Start a worker that outlives this terminal, with its log in the run's folder, and wait for its log."""
    log = paths.logs / f"{process.stem}.log"
    output = paths.logs / f"{process.stem}.console.txt"
    before = log.stat().st_size if log.exists() else 0
    with output.open("ab") as sink:
        started = subprocess.Popen(  # noqa: S603 - an argument list, no shell
            [*process.argv, "--override", runs_dir_override(str(paths.root.parent))],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=with_hash_seed(os.environ),
            start_new_session=True,
        )
    _note(paths, process, started.pid)
    watched = Deadline(BEGIN_S)
    while not watched.expired and (not log.exists() or log.stat().st_size == before):
        if started.poll() is not None:
            said = output.read_text(errors="replace").strip().splitlines()
            last = (said or ["it said nothing"])[-1]
            raise EndedBadly(process.title, started.returncode, last)
        time.sleep(POLL_S)
    print_line(
        SteadyConsole(),
        f"it is process {started.pid}: `kill {started.pid}` stops it, and what it says is in {output}",
    )
    return 0


def _note(paths: RunPaths, process: LaunchedProcess, pid: int) -> None:
    """Let `status` and `stop` know of a worker of a run that was launched from here."""
    if (launched := launched_of(paths)) is not None and launched.is_local:
        worker = process.model_copy(update={"pid": pid})
        write_launched(paths.launched, launched.with_worker(worker))
