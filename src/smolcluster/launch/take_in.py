"""One more worker for a run that was launched from here: its machine is made ready, as a launch does.

What the run's own files say of its workers is changed before the worker starts, so that whoever stops the run
meanwhile ends it too, and changed back if it does not come.
"""

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from smolcluster.configs.load import dump_yaml, parse_yaml, read_config
from smolcluster.configs.resolve import Settings
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError, Rejected
from smolcluster.launch.cluster_run import ClusterRun, EndedBadly, Machine, Payload, Stopped
from smolcluster.launch.host import shell_path
from smolcluster.launch.interrupts import Interrupts, interrupts
from smolcluster.launch.plan import CLUSTER_FILE, TRAIN_FILE, PathsByNode, Request, plan_cluster
from smolcluster.launch.remote import (
    machines_of,
    own_secret_file,
    places_of,
    project_root,
    without_env,
)
from smolcluster.launch.requests import settings_of
from smolcluster.launch.sessions import begin, exit_code, kill, put, stderr_tail
from smolcluster.launch.shipping import begin_shippers, loki_of, with_shippers
from smolcluster.launch.tmux import session_name
from smolcluster.launch.watch.probe import look
from smolcluster.net.membership import free_worker_id
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import RunStatus
from smolcluster.transport.security import load_secret
from smolcluster.utils.words import as_command, one_line

POLL_S = 0.5
PROBE = """
import socket, sys
for host in sys.argv[2:]:
    try:
        socket.create_connection((host, int(sys.argv[1])), 3).close()
    except OSError:
        continue
    print(host)
    break
"""
"""Prints the first of some addresses at which somebody listens on a port."""


@dataclass(frozen=True)
class JoinOptions:
    """What the user says of a machine that joins.

    Attributes:
        name: its name in the run; None: on the machine itself its own, else the worker's that has gone.
        address: where it reaches the server; None: the first of the run's addresses that it reaches.
        secret_file: on the machine itself, where the cluster's secret is.
        wait_s: on the machine itself, how long a server is waited for.
        detach: on the machine itself, whether to leave the worker alone.
        sync: bring code and environment there first.
        overwrite: replace what somebody has edited there, and keep it aside.
        overrides: `key=value` texts that belong to the machine, such as `device=cpu`, or `ssh=pi@10.0.0.7`.
    """

    name: str | None = None
    address: str | None = None
    secret_file: Path | None = None
    wait_s: float = 20.0
    detach: bool = False
    sync: bool = True
    overwrite: bool = False
    overrides: tuple[str, ...] = ()


def join_cluster(paths: RunPaths, launched: Launched, wanted: JoinOptions) -> int:
    """Start a worker on a machine of a cluster, and wait until it takes part; returns the exit code.

    Raises:
        Rejected: its name is that of a living worker.
        LaunchError: the run is over, or the machine is not fit.
        ConfigError: the name is missing, or a setting of the machine is wrong.
    """
    if not (paths.root / CLUSTER_FILE).is_file():
        raise ConfigError(
            f"run {paths.run_id} was not launched from here: {CLUSTER_FILE} is missing"
        )
    status = ClusterRun(launched, {}, paths, SteadyConsole()).status()
    if exit_code(launched.server) is not None or status is None or status.is_over:
        raise LaunchError(
            f"run {paths.run_id} is over, or has not begun: {as_command('resume', paths.run_id)} goes "
            "on with it"
        )
    name = wanted.name or _who_has_gone(paths)
    _check_free(name, launched, status)
    with _cluster_file(paths) as file:
        draft = _Draft(paths, launched, status, name=name, wanted=wanted, file=file)
        machine = draft.machine
        run = ClusterRun(launched, {name: machine}, paths, SteadyConsole())
        run.bring_in(name, draft.payload, sync=wanted.sync, overwrite=wanted.overwrite)
        draft.find_way(run)
        process = draft.process
        put(machine.host, f"{process.run_dir}/{CLUSTER_FILE}", without_env(file))
        code = begin_and_wait(paths, launched, process, machine.env, draft.settings)
        file.replace(paths.root / CLUSTER_FILE)
    return code


def _who_has_gone(paths: RunPaths) -> str:
    """The only worker of a run whose process is no more.

    Raises:
        ConfigError: there is none, or several.
    """
    found = look(paths).processes
    gone = [
        each.node for each in found if each.rank is not None and each.liveness in ("ended", "gone")
    ]
    if len(gone) == 1:
        return gone[0]
    why = f"{', '.join(gone)} have gone" if gone else "all its workers are alive, or out of reach"
    raise ConfigError(f"run {paths.run_id}: {why}: `--name NODE` says which machine is to join")


def _check_free(name: str, launched: Launched, status: RunStatus) -> None:
    """See that no living worker has this name.

    A machine that has lost its power is still counted for some seconds; its process says that it has gone.

    Raises:
        Rejected: one has.
        LaunchError: its machine cannot be asked.
    """
    process = next((each for each in launched.workers if each.node == name), None)
    joined = [each for each in status.workers if each.node == name and each.state == "joined"]
    lives = bool(joined) if process is None else exit_code(process) is None
    if lives:
        rank = joined[0].rank if process is None else process.rank
        raise Rejected(
            f"run {launched.run_id}: the name {name} is taken by a live worker, worker {(rank or 0) + 1}; "
            "stop that one or choose another name"
        )


@contextmanager
def _cluster_file(paths: RunPaths) -> Iterator[Path]:
    file = paths.root / f"{CLUSTER_FILE}.joining.yaml"
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


class _Draft:
    """The run's cluster file with one more worker, and what follows from it."""

    def __init__(
        self,
        paths: RunPaths,
        launched: Launched,
        status: RunStatus,
        *,
        name: str,
        wanted: JoinOptions,
        file: Path,
    ) -> None:
        self._paths, self._launched, self._status = paths, launched, status
        self._name, self._file = name, file
        self._raw = read_config(paths.root / CLUSTER_FILE, "cluster")
        known = (self._raw.get("host_ip") or {}).get(name)
        self._is_sure = wanted.address is not None or known is not None
        self._ways = list(dict.fromkeys(map(str, self._raw["host_ip"].values())))
        self._own = settings_of_node(name, wanted.overrides)
        self._write(wanted.address or known or self._ways[0])

    def _write(self, address: str) -> None:
        raw = with_worker(self._raw, self._name, address, self._own)
        self._file.touch(mode=0o600)
        self._file.write_text(dump_yaml(raw))
        train_file = self._paths.root / TRAIN_FILE
        self._request = Request(
            algorithm=get_algorithm(self._launched.algorithm),
            config=str(self._file),
            train_config=str(train_file),
            overrides=self._launched.overrides,
        )
        self.settings = settings_of(self._request, local=False)
        self._places: PathsByNode = places_of(
            self._request, self.settings.cluster, self._file, train_file, self._paths.root.parent
        )

    @property
    def machine(self) -> Machine:
        return machines_of(self.settings.cluster, self._places, self._file)[self._name]

    @property
    def payload(self) -> Payload:
        return Payload(
            root=project_root(),
            cluster_file=b"",
            train_file=b"",
            secret=load_secret(own_secret_file()).key,
        )

    def find_way(self, run: ClusterRun) -> None:
        """Let the machine try where it reaches the server, unless that is known.

        Raises:
            LaunchError: nowhere.
        """
        if self._is_sure:
            return
        place, host = self._places[self._name], self.machine.host
        port = self._launched.port
        words = [place.python, "-c", PROBE, str(port), *self._ways]
        script = f"cd {shell_path(place.project_dir)} && {shlex.join(words)}"
        found = host.run(script, timeout_s=20.0 + 3 * len(self._ways)).stdout.strip()
        if not found:
            raise LaunchError(
                f"{self._name} reaches the server at none of {', '.join(self._ways)} (port {port}): check "
                "cables and firewalls, or say where it does: --address"
            )
        run.say(f"{self._name}: reaches the server at {found}")
        self._write(found)

    @property
    def process(self) -> LaunchedProcess:
        """Its worker, under a number that is free."""
        planned = plan_cluster(
            self._request, self.settings.cluster, self._places, self._paths.run_id
        ).workers
        worker = next(each for each in planned if each.node == self._name)
        before = next((w for w in self._launched.workers if w.node == self._name), None)
        if before is not None and before.rank is not None:
            rank = before.rank
        else:
            rank = _free_rank(self._name, self._launched, self._status, self.settings)
        python, file, _, *rest = worker.argv
        return worker.model_copy(
            update={
                "rank": rank,
                "session": session_name(self._paths.run_id, "worker", rank),
                "argv": (python, file, str(rank + 1), *rest),
            }
        )


def _free_rank(name: str, launched: Launched, status: RunStatus, settings: Settings) -> int:
    known = {each.rank + 1: each.node for each in status.workers}
    known |= {each.rank + 1: each.node for each in launched.workers if each.rank is not None}
    present = [each.rank + 1 for each in status.workers if each.state == "joined"]
    return free_worker_id(name, known, present, settings.cluster) - 1


def with_worker(
    raw: Mapping[str, Any], name: str, address: str, own: Mapping[str, Any]
) -> dict[str, Any]:
    workers = [*(raw.get("workers") or ())]
    workers += [name] if name not in workers else []
    nodes = dict(raw.get("nodes") or {})
    if own:
        nodes[name] = {**(nodes.get(name) or {}), **own}
    content = {
        **raw,
        "host_ip": {**(raw.get("host_ip") or {}), name: address},
        "workers": workers,
        "num_workers": len(workers),
        "nodes": nodes,
    }
    shares = raw.get("batch_share")
    if shares is not None:  # it stands in for others, as the server says
        content["batch_share"] = {name: 0.0, **shares}
    return content


def settings_of_node(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What `--override` says of a machine, as its part of a cluster file.

    Raises:
        ConfigError: a text is no `key=value`.
    """
    own: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        *sections, last = key.removeprefix(f"nodes.{name}.").split(".")
        if not equals or not last:
            raise ConfigError(f"--override is {text!r}, must be KEY=VALUE such as device=cpu")
        place = own
        for section in sections:
            place = place.setdefault(section, {})
        try:
            place[last] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"--override {one_line(text)}{error}") from error
    return own


def begin_and_wait(
    paths: RunPaths,
    launched: Launched,
    process: LaunchedProcess,
    env: Mapping[str, str],
    settings: Settings | None = None,
) -> int:
    """Start a worker in its session, as one of its run, and wait until it takes part; returns the exit code.

    `settings`: of a cluster, whose logs may be shipped.

    Raises:
        LaunchError: it does not come; then nothing of it is left.
    """
    run = ClusterRun(launched.with_worker(process), {}, paths, SteadyConsole())
    seen_before = _last_seen(run.status(), process)
    write_launched(paths.launched, read_launched(paths.launched).with_worker(process))
    run.say(f"run {launched.run_id}: starting {process.title}")
    try:
        with interrupts() as asked:
            begin(process, env)
            while not _is_there(run.status(), process, seen_before, asked):
                time.sleep(POLL_S)
    except BaseException:
        with suppress(LaunchError):
            kill(process)
        write_launched(paths.launched, launched)
        raise
    if settings is not None and launched.shippers:
        _ship(paths, process, env, settings, run)
    run.say(f"{process.title} takes part in run {launched.run_id}")
    return 0


def _last_seen(status: RunStatus | None, process: LaunchedProcess) -> datetime | None:
    workers = [] if status is None else status.workers
    return next((each.last_seen for each in workers if each.rank == process.rank), None)


def _is_there(
    status: RunStatus | None,
    process: LaunchedProcess,
    seen_before: datetime | None,
    asked: Interrupts,
) -> bool:
    """Whether a worker takes part.

    The server counts one whose machine has lost its power as present for some seconds, but hears nothing.

    Raises:
        LaunchError: it has ended, or the run has, or the user no longer wants it.
    """
    if asked:
        raise Stopped("stopped while it was starting")
    if status is not None:
        found = [each for each in status.workers if each.rank == process.rank]
        if found and found[0].state == "joined" and found[0].last_seen != seen_before:
            return True
        if status.is_over:
            raise LaunchError(f"run {status.run_id} is over: {process.title} came too late")
    code = exit_code(process)
    if code is not None:
        raise EndedBadly(process.title, code, stderr_tail(process))
    return False


def _ship(
    paths: RunPaths,
    process: LaunchedProcess,
    env: Mapping[str, str],
    settings: Settings,
    run: ClusterRun,
) -> None:
    """Ship the logs of a worker on a machine of which none are shipped yet."""
    launched = read_launched(paths.launched)
    if any(each.node == process.node for each in launched.shippers):
        others = [each for each in launched.shippers if each.node == process.node]
    else:
        alone = launched.model_copy(update={"processes": (process,), "shippers": ()})
        others = list(with_shippers(alone, loki_of(settings.cluster, None), run.say).shippers)
        shippers = (*launched.shippers, *others)
        write_launched(paths.launched, launched.model_copy(update={"shippers": shippers}))
    begin_shippers(others, {process.node: env}, run.say)
