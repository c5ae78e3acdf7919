"""What a launch will start: from a configuration to command lines.

Pure: nothing is read, started or written here. A plan lists the processes of a run, the server first;
each is a command that a person could type as well.
"""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import smolcluster
from smolcluster.configs.begun import WORKLOAD_FOLDER
from smolcluster.configs.function_name import FunctionName
from smolcluster.configs.resolve import node_overrides, public_overrides, without_workload
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
    """

    ssh: str | None
    project_dir: str
    runs_dir: str
    python: str = ".venv/bin/python"
    overrides: tuple[str, ...] = ()


PathsByNode = Mapping[str, NodePaths]
"""By the names of nodes."""
Part = int | Literal["stage"] | None
"""What a process is on its node: the worker of a rank, a stage, or the server or a store."""


def plan_local(
    request: Request,
    cluster: ClusterConfig,
    *,
    run_dir: Path,
    python: str,
    with_threads: Collection[str] = (),
    place: Sequence[str] = (),
    resume: bool = False,
    in_sessions: bool = False,
) -> Launched:
    """The commands that run the whole cluster on this machine with the interpreter `python`.

    Every process gets one compute thread, because side by side more of them get into each other's way; but
    for the nodes in `with_threads`, whose number the user has set. `place` are overrides that tell
    every worker where the training file says that the data are. With `resume` the run goes on from its
    newest good checkpoint.
    """
    run_id = run_dir.name

    def planned(
        node: str, part: Part, argv: Sequence[str], overrides: Sequence[str]
    ) -> LaunchedProcess:
        role, rank = _role(cluster, node, part), part if isinstance(part, int) else None
        texts = overrides if node in with_threads else (*overrides, "threads=1")
        return LaunchedProcess(
            node=node,
            role=role,
            rank=rank,
            run_dir=str(run_dir),
            session=_session(run_id, node, role, rank) if in_sessions else "",
            project_dir=str(run_dir.parent),
            argv=(python, *argv, *override_options(texts)),
        )

    server = planned(
        cluster.server,
        None,
        _local_server(request, run_id, resume=resume, in_sessions=in_sessions),
        without_workload(request.overrides),
    )
    own = node_overrides(request.overrides)
    stores = (
        planned(node, None, _local_other(request, cluster, run_id, node, None), (PATIENCE, *own))
        for node in cluster.store_nodes[1:]
    )
    stages = (
        planned(
            node, "stage", _local_stage(request, cluster, run_id, node), (PATIENCE, *place, *own)
        )
        for node in cluster.stage_nodes
    )
    workers = (
        planned(
            node,
            rank,
            _local_other(request, cluster, run_id, node, rank),
            (PATIENCE, *place, *own),
        )
        for rank, node in enumerate(cluster.workers)
    )
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        processes=(server, *stores, *stages, *workers),
    )


def _local_server(
    request: Request, run_id: str, *, resume: bool, in_sessions: bool
) -> tuple[str, ...]:
    """What the server is told on this machine, but for overrides."""
    return (
        *_server_code(request),
        *_local(request),
        *("--run-id", run_id),
        *(() if in_sessions else (NO_PROGRESS,)),
        *option("--resume", "auto" if resume else None),
        *option("--config", request.config if request.script is None else None),
        *option("--train-config", _train_config(request)),
        *option("--workload", request.workload),
    )


def _local_other(
    request: Request, cluster: ClusterConfig, run_id: str, node: str, rank: int | None
) -> tuple[str, ...]:
    """The same of a worker; without a rank of a store."""
    if rank is None:
        code: tuple[str, ...] = (str(_file(request, "store")), node)
    else:
        script = _script(request.script, request)
        code = (str(_worker_file(request)), str(rank + 1), node, *script)
    return (
        *code,
        *_local(request),
        *("--server", format_address(cluster.host_ip[node], cluster.port)),
        *("--run-id", run_id),
        *restarts(cluster),
        *option("--config", request.config),
        *option("--workload", None if rank is None else request.workload),
    )


def _local_stage(
    request: Request, cluster: ClusterConfig, run_id: str, node: str
) -> tuple[str, ...]:
    """The same of a stage, which knows by the configuration where its worker is."""
    return (
        *(str(_file(request, "stage")), node),
        *_local(request),
        *("--run-id", run_id),
        *restarts(cluster),
        *option("--config", request.config),
        *option("--workload", request.workload),
    )


def _local(request: Request) -> tuple[str, ...]:
    return ("--local", *option("--workers", request.num_workers))


def _role(cluster: ClusterConfig, node: str, part: Part) -> str:
    """What a process is: workers alone have ranks."""
    if isinstance(part, int):
        return "worker"
    return part or ("server" if node == cluster.server else "store")


def _session(run_id: str, node: str, role: str, rank: int | None) -> str:
    """The name of a process's session: a run has one server, and at most one store and stage a node."""
    return session_name(run_id, f"{role}-{node}" if role in HELPERS else role, rank)


def _server_code(request: Request) -> tuple[str, ...]:
    if request.script is None:
        return (str(request.algorithm.server),)
    name = request.algorithm.name
    return (*MODULE, "smolcluster.cli", "serve", request.config or name, "--algorithm", name)


def _train_config(request: Request) -> str | None:
    is_default = request.script is not None and request.train_config == str(ATTACHED)
    return None if is_default else request.train_config


def _worker_file(request: Request) -> Path:
    return request.algorithm.worker if request.script is None else SCRIPT


def _file(request: Request, role: str) -> Path:
    return request.algorithm.folder / request.algorithm.roles[role]


def _script(script: str | None, request: Request) -> tuple[str, ...]:
    if script is None:
        return ()
    return ("--script", script, "--algorithm", request.algorithm.name)


def plan_cluster(
    request: Request, cluster: ClusterConfig, places: PathsByNode, run_id: str
) -> Launched:
    """The processes of a run on the machines of a cluster, each in a tmux session of its own.

    They read the configuration from copies in their run's folder, which is told to each of them.
    """

    def planned(node: str, part: Part, argv: Sequence[str]) -> LaunchedProcess:
        stated = cluster.nodes.get(node, NodeConfig())
        place = places[node]
        run_dir = f"{place.runs_dir}/{run_id}"
        role, rank = _role(cluster, node, part), part if isinstance(part, int) else None
        script = None if rank is None else _script_in_run(request.script, run_dir)
        return LaunchedProcess(
            node=node,
            role=role,
            rank=rank,
            ssh=place.ssh,
            run_dir=run_dir,
            session=_session(run_id, node, role, rank),
            project_dir=place.project_dir,
            argv=(
                *(place.python, *argv, f"{run_dir}/{CLUSTER_FILE}", *_script(script, request)),
                *option(
                    "--workload",
                    None if role == "store" else in_run(request.workload, run_dir),
                ),
            ),
            device=stated.device,
        )

    def overrides(node: str, texts: Sequence[str]) -> tuple[str, ...]:
        return override_options(
            (*texts, f"runs_dir={json.dumps(places[node].runs_dir, ensure_ascii=False)}")
        )

    public = tuple(
        public_overrides(without_workload(request.overrides))
    )  # commands are for everybody to see
    name, worker_file = request.algorithm.name, _sent(_worker_file(request))
    train_file = f"{places[cluster.server].runs_dir}/{run_id}/{TRAIN_FILE}"
    if request.script is None:
        server_file = _sent(request.algorithm.server)
        server = planned(cluster.server, None, [server_file, "--run-id", run_id, "--config"])
        server = server.with_arguments("--train-config", train_file)
    else:
        served = [*MODULE, "smolcluster.cli", "serve", "--algorithm", name, "--run-id", run_id]
        server = planned(cluster.server, None, served)
    server = server.with_arguments(*overrides(cluster.server, public))
    workers = [
        planned(
            node, rank, [worker_file, str(rank + 1), node, "--run-id", run_id, "--config"]
        ).with_arguments(
            *restarts(cluster), *overrides(node, (*places[node].overrides, *node_overrides(public)))
        )
        for rank, node in enumerate(cluster.workers)
    ]
    stores = [
        planned(
            node,
            None,
            [_sent(_file(request, "store")), node, "--run-id", run_id, "--config"],
        ).with_arguments(*restarts(cluster), *overrides(node, node_overrides(public)))
        for node in cluster.store_nodes[1:]
    ]
    stages = [
        planned(
            node,
            "stage",
            [_sent(_file(request, "stage")), node, "--run-id", run_id, "--config"],
        ).with_arguments(
            *restarts(cluster), *overrides(node, (*places[node].overrides, *node_overrides(public)))
        )
        for node in cluster.stage_nodes
    ]
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        overrides=public,
        processes=(server, *stores, *stages, *workers),
    )


def in_run(workload: str | None, run_dir: str) -> str | None:
    """How a process whose run is in `run_dir` is told the function that makes the workload."""
    if workload is None:
        return None
    return FunctionName.parse(workload).below(f"{run_dir}/{WORKLOAD_FOLDER}").text


def _script_in_run(script: str | None, run_dir: str) -> str | None:
    """How a worker whose run is in `run_dir` is told the script that it is."""
    if script is None:
        return None
    file, *arguments = shlex.split(script)
    return shlex.join([f"{run_dir}/{WORKLOAD_FOLDER}/{file}", *arguments])


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
