"""What a launch will start: from a configuration to command lines.

Pure: nothing is read, started or written here. A plan lists the processes of a run, the server first;
each is a command that a person could type as well.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import smolcluster
from smolcluster.configs.resolve import node_overrides, public_overrides
from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.configs.spec import AlgorithmSpec
from smolcluster.errors import ConfigError
from smolcluster.launch.tmux import session_name
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.units import format_address

PATIENCE = "start_timeout_s=86400"
"""The server may tokenize for long before it listens; if it ends, the launcher stops the workers."""
NO_PROGRESS = "--no-progress"
PACKAGE = Path(smolcluster.__file__).resolve().parent
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
    """

    algorithm: AlgorithmSpec
    config: str | None = None
    train_config: str | None = None
    overrides: tuple[str, ...] = ()
    num_workers: int | None = None


@dataclass(frozen=True)
class NodePaths:
    """Where a run lives on a machine; paths as that machine understands them, absolute or from `~/`.

    Attributes:
        ssh: where `ssh` finds it; None: it is this machine.
        project_dir: the project's folder.
        runs_dir: the folder of runs.
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


def plan_local(
    request: Request,
    cluster: ClusterConfig,
    *,
    run_id: str,
    python: str,
    with_threads: Collection[str] = (),
    place: Sequence[str] = (),
    resume: bool = False,
) -> Launched:
    """The commands that run the whole cluster on this machine with the interpreter `python`.

    Every process gets one compute thread, because side by side more of them get into each other's way; but
    for the nodes in `with_threads`, whose number the user has set. `place` are overrides that tell
    every worker where the training file says that the data are. With `resume` the run goes on from its
    newest good checkpoint.
    """

    def overrides(texts: Sequence[str], node: str) -> tuple[str, ...]:
        return _overrides(texts if node in with_threads else (*texts, "threads=1"))

    local = ("--local", *_option("--workers", request.num_workers))
    config = _option("--config", request.config)
    server = LaunchedProcess(
        node=cluster.server,
        role="server",
        rank=None,
        argv=(
            *(python, str(request.algorithm.server), *local),
            *("--run-id", run_id, NO_PROGRESS),
            *_option("--resume", "auto" if resume else None),
            *config,
            *_option("--train-config", request.train_config),
            *overrides(request.overrides, cluster.server),
        ),
    )
    workers = tuple(
        LaunchedProcess(
            node=node,
            role="worker",
            rank=rank,
            argv=(
                *(python, str(request.algorithm.worker), str(rank + 1), node, *local),
                *("--server", format_address(cluster.host_ip[node], cluster.port)),
                *("--run-id", run_id),
                *restarts(cluster),
                *config,
                *overrides((PATIENCE, *place, *node_overrides(request.overrides)), node),
            ),
        )
        for rank, node in enumerate(cluster.workers)
    )
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        processes=(server, *workers),
    )


def plan_cluster(
    request: Request, cluster: ClusterConfig, places: PathsByNode, run_id: str
) -> Launched:
    """The processes of a run on the machines of a cluster, each in a tmux session of its own.

    They read the configuration from copies in their run's folder, which is told to each of them.
    """

    def planned(node: str, rank: int | None, argv: Sequence[str]) -> LaunchedProcess:
        stated = cluster.nodes.get(node, NodeConfig())
        place = places[node]
        return LaunchedProcess(
            node=node,
            role="server" if rank is None else "worker",
            rank=rank,
            ssh=place.ssh,
            run_dir=f"{place.runs_dir}/{run_id}",
            session=session_name(run_id, "server" if rank is None else "worker", rank),
            project_dir=place.project_dir,
            argv=(place.python, *argv, "--config", f"{place.runs_dir}/{run_id}/{CLUSTER_FILE}"),
            device=stated.device,
        )

    def overrides(node: str, texts: Sequence[str]) -> tuple[str, ...]:
        return _overrides(
            (*texts, f"runs_dir={json.dumps(places[node].runs_dir, ensure_ascii=False)}")
        )

    public = tuple(public_overrides(request.overrides))  # commands are for everybody to see
    server_file, worker_file = map(_sent, (request.algorithm.server, request.algorithm.worker))
    train_file = f"{places[cluster.server].runs_dir}/{run_id}/{TRAIN_FILE}"
    server = planned(cluster.server, None, [server_file, "--run-id", run_id])
    server = server.with_arguments(
        *("--train-config", train_file, *overrides(cluster.server, public))
    )
    workers = [
        planned(node, rank, [worker_file, str(rank + 1), node, "--run-id", run_id]).with_arguments(
            *restarts(cluster), *overrides(node, (*places[node].overrides, *node_overrides(public)))
        )
        for rank, node in enumerate(cluster.workers)
    ]
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        overrides=public,
        processes=(server, *workers),
    )


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


def in_sessions(plan: Launched, paths: RunPaths) -> Launched:
    """A plan of this machine whose processes run in tmux sessions, and leave their files in `paths`."""
    place = {"run_dir": str(paths.root), "project_dir": str(paths.root.parent)}
    processes = tuple(
        each.model_copy(
            update={
                **place,
                "session": session_name(paths.run_id, each.role, each.rank),
                "argv": tuple(word for word in each.argv if word != NO_PROGRESS),
            }
        )
        for each in plan.processes
    )
    return plan.model_copy(update={"processes": processes})


def restarts(cluster: ClusterConfig) -> tuple[str, ...]:
    """The option that gives a worker its supervisor; the server's way back is `resume`."""
    return _option("--restarts", cluster.restarts or None)


def _option(flag: str, value: str | int | None) -> tuple[str, ...]:
    return () if value is None else (flag, str(value))


def _overrides(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for text in texts for item in ("--override", text))
