"""What a launch will start: from a configuration to command lines.

Pure: nothing is read, started or written here. A plan lists the processes of a run, the server first;
each is a command that a person could type as well.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import smolcluster
from smolcluster.configs.begun import WORKLOAD_FOLDER
from smolcluster.configs.function_name import FunctionName
from smolcluster.configs.overrides import node_overrides, public_overrides, without_workload
from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.configs.spec import AlgorithmSpec
from smolcluster.errors import ConfigError
from smolcluster.launch.tmux import session_name
from smolcluster.runs.launched import HELPERS, Launched, LaunchedProcess
from smolcluster.utils.units import format_address

PATIENCE = "start_timeout_s=86400"
"""The server may tokenize for long before it listens; if it ends, the launcher stops the workers."""
NO_PROGRESS = "--no-progress"
MODULE = ("-P", "-m")
"""How Python is told a module of ours: the folder it starts in, which may be a run's, brings no code."""
PACKAGE = Path(smolcluster.__file__).resolve().parent
SCRIPT = PACKAGE / "api" / "script.py"
"""What runs a script as a worker."""
ATTACHED = PACKAGE / "algorithms" / "attached.yaml"
"""The training file with which `serve` begins."""
CLUSTER_FILE, TRAIN_FILE = "launch/cluster.yaml", "launch/train.yaml"
"""The configuration's copies in a run's folder on a node."""


@dataclass(frozen=True)
class Request:
    """What a user asks to be launched.

    Attributes:
        algorithm: the algorithm whose server and workers are started.
        config: cluster file, a path or a shipped name; None: the algorithm's own.
        train_config: training file, a path or a shipped name; None: the default one.
        overrides: `key=value` texts, in the order in which they were given.
        num_workers: workers on this machine; None: as many as the cluster file lists.
        workload: the function that makes the workload, as every process is told; on the machines of a cluster
            as it is seen from WORKLOAD_FOLDER in the run's folder; None: what the training file names.
        script: a script that attaches, and its arguments, which is every worker; on the machines of a cluster
            as it is seen from there, too; None: the algorithm's own.
        without: nodes of the cluster file that are left out.
    """

    algorithm: AlgorithmSpec
    config: str | None = None
    train_config: str | None = None
    overrides: tuple[str, ...] = ()
    num_workers: int | None = None
    workload: str | None = None
    script: str | None = None
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodePaths:
    """Where a run lives on a machine; paths as that machine understands them, absolute or from `~/`.

    Attributes:
        ssh: where `ssh` finds it; None: it is this machine.
        python: the interpreter, relative to `project_dir` or absolute.
        overrides: for a worker: where the training file says that the data are.
        threads: compute threads of each process, where all run on one machine; None: as configured.
    """

    ssh: str | None
    project_dir: str
    runs_dir: str
    python: str = ".venv/bin/python"
    overrides: tuple[str, ...] = ()
    threads: int | None = None


PathsByNode = Mapping[str, NodePaths]
"""By the names of nodes."""
SERVER = "server"


def plan_roles(
    request: Request,
    cluster: ClusterConfig,
    places: PathsByNode,
    run_id: str,
    *,
    is_local: bool = False,
    in_sessions: bool = True,
) -> Launched:
    """The processes of a run with a server: the server, stores, stages, then workers.

    On the machines of a cluster they read copies of the configuration in their run's folder. With `is_local`
    all run on this machine and read the files that the request names. `in_sessions`: each in one of tmux.
    """
    public = told_to_all(request, is_local=is_local)
    first, for_nodes = (PATIENCE,) if is_local else (), node_overrides(public)

    def planned(role: str, node: str, rank: int | None = None) -> LaunchedProcess:
        place, is_server = places[node], role == SERVER
        run_dir = f"{place.runs_dir}/{run_id}"
        told = Told(request, place, run_dir, is_local)
        data = () if role == "store" else place.overrides
        texts = public if is_server else (*first, *data, *for_nodes)
        dials = is_local and role in ("store", "worker")
        address = format_address(cluster.host_ip[node], cluster.port) if dials else None
        argv = (
            place.python,
            *told.program(role, node, rank),
            *(("--local", *option("--workers", request.num_workers)) if is_local else ()),
            *option("--server", address),
            *("--run-id", run_id),
            *((NO_PROGRESS,) if is_server and not in_sessions else ()),
            *(() if is_server else restarts(cluster)),
            *option("--config", None if is_server and request.script else told.config),
            *option("--train-config", told.train_config if is_server else None),
            *option("--workload", None if role == "store" else told.workload),
            *override_options((*texts, *told.last_overrides)),
        )
        return LaunchedProcess(
            node=node,
            role=role,
            rank=rank,
            ssh=place.ssh,
            run_dir=run_dir,
            session=_session(run_id, node, role, rank) if in_sessions else "",
            project_dir=place.project_dir,
            argv=argv,
            device=cluster.nodes.get(node, NodeConfig()).device,
        )

    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        overrides=() if is_local else public,
        processes=(
            planned(SERVER, cluster.server),
            *(planned("store", node) for node in cluster.store_nodes[1:]),
            *(planned("stage", node) for node in cluster.stage_nodes),
            *(planned("worker", node, rank) for rank, node in enumerate(cluster.workers)),
        ),
    )


def told_to_all(request: Request, *, is_local: bool) -> tuple[str, ...]:
    """The overrides of a command; those of a cluster's machines are for everybody to see."""
    said = without_workload(request.overrides)
    return tuple(said if is_local else public_overrides(said))


@dataclass(frozen=True)
class Told:
    """How a process is told its files and what belongs to its machine."""

    request: Request
    place: NodePaths
    run_dir: str
    is_local: bool

    def program(self, role: str, node: str, rank: int | None) -> tuple[str, ...]:
        """What Python runs, and the process's place in the run."""
        request, name = self.request, self.request.algorithm.name
        if role == SERVER and request.script is not None:
            serve = (*MODULE, "smolcluster.cli", "serve")
            return (*serve, self.config or name, "--algorithm", name)
        folder, roles = request.algorithm.folder, request.algorithm.roles
        if role == "worker" and request.script is not None:
            script = request.script
            if not self.is_local:
                file, *arguments = shlex.split(script)
                script = shlex.join([f"{self.run_dir}/{WORKLOAD_FOLDER}/{file}", *arguments])
            words = (str((rank or 0) + 1), node, "--script", script, "--algorithm", name)
            return (self._file(SCRIPT), *words)
        number = () if rank is None else (str(rank + 1),)
        return (self._file(folder / roles[role]), *number, *(() if role == SERVER else (node,)))

    def _file(self, file: Path) -> str:
        return str(file) if self.is_local else _sent(file)

    @property
    def config(self) -> str | None:
        return self.request.config if self.is_local else f"{self.run_dir}/{CLUSTER_FILE}"

    @property
    def train_config(self) -> str | None:
        has_script, stated = self.request.script is not None, self.request.train_config
        if self.is_local:
            return None if has_script and stated == str(ATTACHED) else stated
        return None if has_script else f"{self.run_dir}/{TRAIN_FILE}"

    @property
    def workload(self) -> str | None:
        workload = self.request.workload
        return workload if self.is_local else in_run(workload, self.run_dir)

    @property
    def last_overrides(self) -> tuple[str, ...]:
        """What no setting of the user's changes."""
        place = self.place
        if self.is_local:
            return () if place.threads is None else (f"threads={place.threads}",)
        return (f"runs_dir={json.dumps(place.runs_dir, ensure_ascii=False)}",)


def _session(run_id: str, node: str, role: str, rank: int | None) -> str:
    """The name of a process's session: a run has one server, and at most one store and stage a node."""
    return session_name(run_id, f"{role}-{node}" if role in HELPERS else role, rank)


def in_run(workload: str | None, run_dir: str) -> str | None:
    """How a process whose run is in `run_dir` is told the function that makes the workload."""
    if workload is None:
        return None
    return FunctionName.parse(workload).below(f"{run_dir}/{WORKLOAD_FOLDER}").text


def _sent(file: Path) -> str:
    """Where a file of this package is in the project's folder of any machine.

    Raises:
        ConfigError: it is of another package, which is not sent.
    """
    if not file.is_relative_to(PACKAGE):
        raise ConfigError(
            f"{file} is not in {PACKAGE}, which is all that is sent to machines: launch with --local"
        )
    return f"src/smolcluster/{file.relative_to(PACKAGE).as_posix()}"


def restarts(cluster: ClusterConfig) -> tuple[str, ...]:
    """The option that gives a worker its supervisor; the server's way back is `resume`."""
    return option("--restarts", cluster.restarts or None)


def option(flag: str, value: str | int | None) -> tuple[str, ...]:
    return () if value is None else (flag, str(value))


def override_options(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for text in texts for item in ("--override", text))
