"""One more worker for a run that was launched from here: its machine is made ready, as a launch does.

A machine that has layers of a worker comes back as a stage, and a worker with those of its stages that have
gone.

What the run's own files say of its workers is changed before the worker starts, so that whoever stops the run
meanwhile ends it too, and changed back if it does not come.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smolcluster.configs.begun import WORKLOAD_FOLDER, remember
from smolcluster.configs.load import dump_yaml, parse_yaml, read_config
from smolcluster.configs.overrides import without_workload
from smolcluster.configs.schema import ClusterConfig, Settings
from smolcluster.errors import ConfigError, LaunchError, Rejected
from smolcluster.launch.host import shell_path
from smolcluster.launch.kept import check_launched_here, cluster_bytes, request_again
from smolcluster.launch.places import (
    machines_of,
    own_secret_file,
    project_root,
)
from smolcluster.launch.plan import (
    CLUSTER_FILE,
    TRAIN_FILE,
    Machine,
    Machines,
    plan,
)
from smolcluster.launch.prepare import examine, make_ready
from smolcluster.launch.project import Project, read_project
from smolcluster.launch.requests import settings_of
from smolcluster.launch.run_in_sessions import RunInSessions
from smolcluster.launch.sessions import exit_code, host_of, put, status_of
from smolcluster.launch.shipping import ROLE as SHIPPER
from smolcluster.launch.shipping import begin_shippers, loki_of, with_shippers
from smolcluster.launch.tmux import session_name
from smolcluster.launch.watch.probe import look
from smolcluster.launch.workload_code import WORKLOAD_FILE, put_code
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import RunStatus
from smolcluster.utils.words import as_command, one_line
from smolcluster.wire.membership import free_worker_id
from smolcluster.wire.security import load_secret

WORKER, STAGE = "worker", "stage"
Say = Callable[[str], None]
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
        sync: bring code and environment there if it has not these.
        workload: on the machine itself, the function that makes the workload; None: what the run's launcher
            named, if it is known here.
        overrides: `key=value` texts that belong to the machine, such as `device=cpu`, or `ssh=pi@10.0.0.7`.
    """

    name: str | None = None
    address: str | None = None
    secret_file: Path | None = None
    wait_s: float = 20.0
    detach: bool = False
    sync: bool = True
    workload: str | None = None
    overrides: tuple[str, ...] = ()


def join_cluster(paths: RunPaths, launched: Launched, wanted: JoinOptions) -> int:
    """Start what a machine of a cluster has of a run, and wait until it takes part; returns the exit code.

    Raises:
        Rejected: all of it is alive.
        LaunchError: the run is over or was started again meanwhile, or the machine is not fit.
        ConfigError: the name is missing, or a setting of the machine is wrong.
    """
    if not (paths.root / CLUSTER_FILE).is_file():
        raise ConfigError(
            f"run {paths.run_id} was not launched from here: {CLUSTER_FILE} is missing"
        )
    check_launched_here(paths)
    status = status_of(launched.server)
    if exit_code(launched.server) is not None or status is None or status.is_over:
        raise LaunchError(
            f"run {paths.run_id} is over, or has not begun: {as_command('resume', paths.run_id)} goes "
            "on with it"
        )
    name = wanted.name or _who_has_gone(paths)
    with ExitStack() as stack:
        file = paths.root / f"{CLUSTER_FILE}.joining.yaml"
        stack.callback(file.unlink, missing_ok=True)
        before = read_config(paths.root / CLUSTER_FILE, "cluster")
        ways = list(dict.fromkeys(map(str, before["host_ip"].values())))
        known = wanted.address or (before.get("host_ip") or {}).get(name)
        own, project = settings_of_node(name, wanted.overrides), read_project(project_root())

        def write(address: str) -> None:
            file.touch(mode=0o600)
            file.write_text(dump_yaml(with_worker(before, name, address, own)))

        write(known or ways[0])
        settings, machines, whole = _planned(paths, launched, file, project)
        missing = _missing(name, launched, status, settings.cluster)
        nodes = list(dict.fromkeys(node for _, node in missing))
        run = RunInSessions(
            launched, paths, SteadyConsole(), {node: machines[node].env for node in nodes}
        )
        there, secret = [machines[node] for node in nodes], load_secret(own_secret_file()).key
        examine(there, run.say, sync=wanted.sync)
        make_ready(there, secret, run.say, project=project, sync=wanted.sync)
        if known is None:
            write(_way(machines[name], ways, launched.port, run.say))
        planned = {(each.role, each.node): each for each in whole.processes}
        rank = _rank(name, launched, status, settings) if (WORKER, name) in missing else None
        processes = [_with_rank(planned[key], rank) for key in missing]
        packed = paths.root / WORKLOAD_FILE
        code = workload_of(launched.server) or script_of(launched.workers[0])
        one_of_each = {each.node: each for each in processes}.values()
        with _kept_as(file, paths, launched):
            for process in one_of_each:
                host = machines[process.node].host
                if code is not None and packed.is_file():
                    put_code(host, process.run_dir, packed.read_bytes(), code)
            _put_cluster_file(one_of_each, paths.root / CLUSTER_FILE)
            for process in processes:
                run.add(process)
        if any(each.role == SHIPPER for each in launched.shippers):
            for process in one_of_each:
                _ship(paths, process, machines[process.node].env, settings, run.say)
    return 0


def _put_cluster_file(processes: Iterable[LaunchedProcess], file: Path) -> None:
    """Bring it to the machines of these processes but this one, on which they read what is kept."""
    for process in processes:
        if process.ssh is not None:
            put(host_of(process), f"{process.run_dir}/{CLUSTER_FILE}", cluster_bytes(file))


@contextmanager
def _kept_as(file: Path, paths: RunPaths, launched: Launched) -> Iterator[None]:
    """Keep this as the cluster file of a run that is still the one that was `launched`.

    If the block fails, the one from before is back.

    Raises:
        LaunchError: the run has been started again: making a machine ready may take long.
    """
    if read_launched(paths.launched) != launched:
        raise LaunchError(f"run {paths.run_id} was started again meanwhile: join it once more")
    kept = paths.root / CLUSTER_FILE
    before = kept.read_bytes()
    remember(paths.run_id, CLUSTER_FILE, file.read_bytes())
    file.replace(kept)
    try:
        yield
    except BaseException:
        kept.write_bytes(before)
        raise


def _who_has_gone(paths: RunPaths) -> str:
    """The only machine of a run on which a worker or a stage is no more.

    Raises:
        ConfigError: there is none, or several.
    """
    found = look(paths).seen
    can_join = (each for each in found if each.rank is not None or each.role == STAGE)
    gone = list(dict.fromkeys(each.node for each in can_join if each.process in ("ended", "gone")))
    if len(gone) == 1:
        return gone[0]
    why = f"{', '.join(gone)} have gone" if gone else "all its workers are alive, or out of reach"
    raise ConfigError(f"run {paths.run_id}: {why}: `--name NODE` says which machine is to join")


def missing_of(name: str, launched: Launched, cluster: ClusterConfig) -> list[tuple[str, str]]:
    """Processes (role, node) of a machine in a run that are not alive: what it is to start when it joins.

    A worker's stages belong to it.

    Raises:
        LaunchError: a machine cannot be asked.
    """
    wanted = [(STAGE, name)] if cluster.stages_with(name) is not None else []
    if name in cluster.workers and not _is_alive(launched, WORKER, name):
        stages = cluster.nodes[name].stages if name in cluster.nodes else None
        wanted += [(STAGE, node) for node in (stages.host_ip if stages else ())]
        wanted.append((WORKER, name))
    return [
        (role, node)
        for role, node in dict.fromkeys(wanted)
        if role == WORKER or not _is_alive(launched, role, node)
    ]


def _is_alive(launched: Launched, role: str, node: str) -> bool:
    found = (each for each in launched.processes if (each.role, each.node) == (role, node))
    process = next(found, None)
    return process is not None and exit_code(process) is None


def _planned(
    paths: RunPaths, launched: Launched, cluster_file: Path, project: Project
) -> tuple[Settings, Machines, Launched]:
    """The whole run as a launch with this cluster file, told the same as before, would plan it."""
    train_file = paths.root / TRAIN_FILE
    again = request_again(paths, launched)
    told = tuple(without_workload(again.overrides))
    request = replace(again, config=str(cluster_file), overrides=told, script=None)
    settings = settings_of(request, local=False)
    workload, script = workload_of(launched.server), script_of(launched.workers[0])
    request = replace(request, workload=workload, script=script)
    here = paths.root.parent
    machines = machines_of(request, settings, cluster_file, train_file, here=here, project=project)
    return settings, machines, plan(request, settings, machines, paths.run_id)


def _way(machine: Machine, ways: Sequence[str], port: int, say: Say) -> str:
    """Let a machine try where it reaches the server.

    Raises:
        LaunchError: nowhere.
    """
    node = machine.host.node
    words = [machine.python, "-c", PROBE, str(port), *ways]
    script = f"cd {shell_path(machine.project_dir)} && {shlex.join(words)}"
    found = machine.host.run(script, timeout_s=20.0 + 3 * len(ways)).stdout.strip()
    if not found:
        raise LaunchError(
            f"{node} reaches the server at none of {', '.join(ways)} (port {port}): check cables and "
            "firewalls, or say where it does: --address"
        )
    say(f"{node}: reaches the server at {found}")
    return found


def _missing(
    name: str, launched: Launched, status: RunStatus, cluster: ClusterConfig
) -> list[tuple[str, str]]:
    """What is to be started, see `missing_of`.

    Raises:
        Rejected: all is alive.
    """
    joined = [each for each in status.workers if each.node == name]
    started = (*launched.workers, *launched.helpers)
    is_known = any(each.node == name and each.role in (WORKER, STAGE) for each in started)
    lives = not is_known and any(each.state == "joined" for each in joined)
    missing = [] if lives else missing_of(name, launched, cluster)
    if not missing:
        ranks = [each.rank for each in launched.workers if each.node == name]
        ranks += [each.rank for each in joined]
        what = f"a live worker, worker {(ranks[0] or 0) + 1}" if ranks else "a live stage"
        raise Rejected(
            f"run {launched.run_id}: the name {name} is taken by {what}; stop that one or choose another name"
        )
    return missing


def _rank(name: str, launched: Launched, status: RunStatus, settings: Settings) -> int:
    """A worker's from before, or one that is free."""
    known = {each.rank + 1: each.node for each in status.workers}
    known |= {each.rank + 1: each.node for each in launched.workers if each.rank is not None}
    before = next((each.rank for each in launched.workers if each.node == name), None)
    present = [each.rank + 1 for each in status.workers if each.state == "joined"]
    return free_worker_id(name, known, present, settings.cluster) - 1 if before is None else before


def _with_rank(process: LaunchedProcess, rank: int | None) -> LaunchedProcess:
    """The same process with this rank, if it is a worker."""
    if process.role != WORKER or rank is None:
        return process
    python, file, _, *rest = process.argv
    return process.model_copy(
        update={
            "rank": rank,
            "session": session_name(process.run_dir.rpartition("/")[2], WORKER, rank),
            "argv": (python, file, str(rank + 1), *rest),
        }
    )


def workload_of(process: LaunchedProcess) -> str | None:
    """The function that a process was told, as it is seen from WORKLOAD_FOLDER of its run's folder."""
    return _told(process, "--workload", "./")


def script_of(worker: LaunchedProcess) -> str | None:
    """The script that a worker is, and its arguments, as it is seen from there."""
    return _told(worker, "--script", "")


def _told(process: LaunchedProcess, option: str, below: str) -> str | None:
    if option not in process.argv:
        return None
    said = process.argv[process.argv.index(option) + 1]
    return said.replace(f"{process.run_dir}/{WORKLOAD_FOLDER}/", below, 1)


def with_worker(
    raw: Mapping[str, Any], name: str, address: str, own: Mapping[str, Any]
) -> dict[str, Any]:
    """A run's cluster file with this machine, as a worker where it is not a stage of one."""
    workers, nodes = [*(raw.get("workers") or ())], dict(raw.get("nodes") or {})
    of_stages = (((each or {}).get("stages") or {}).get("host_ip") for each in nodes.values())
    is_stage = any(name in (hosts or {}) for hosts in of_stages)
    workers += [name] if not (is_stage or name in workers) else []
    if own:
        nodes[name] = _merged(nodes.get(name) or {}, own)
    content = {
        **raw,
        "host_ip": {**(raw.get("host_ip") or {}), name: address},
        "workers": workers,
        "num_workers": len(workers),
        "nodes": nodes,
    }
    shares = raw.get("batch_share")
    if shares is not None and name in workers:  # it stands in for others, as the server says
        content["batch_share"] = {name: 0.0, **shares}
    return content


def _merged(before: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a machine, with these as well: of a section only the keys that they say."""

    def both(key: str, value: Any) -> Any:
        known = before.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            return _merged(known, value)
        return value

    return {**before, **{key: both(key, value) for key, value in own.items()}}


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


def _ship(
    paths: RunPaths, process: LaunchedProcess, env: Mapping[str, str], settings: Settings, say: Say
) -> None:
    """Ship the logs of a worker, also of one on a machine of which none are shipped yet."""
    launched = read_launched(paths.launched)
    own = [each for each in launched.shippers if (each.role, each.node) == (SHIPPER, process.node)]
    if not own:
        alone = launched.model_copy(update={"processes": (process,), "shippers": ()})
        own = list(with_shippers(alone, loki_of(settings.cluster, None), say).shippers)
        shippers = (*launched.shippers, *own)
        write_launched(paths.launched, launched.model_copy(update={"shippers": shippers}))
    begin_shippers(own, {process.node: env}, say)
