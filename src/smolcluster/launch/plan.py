"""What a launch will start: from a configuration to command lines.

Pure: nothing is read, started or written here. A plan lists the processes of a run, the server first, of a
group of `torch.distributed` the one with rank 0; each is a command that a person could type as well.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from smolcluster.configs.begun import WORKLOAD_FOLDER
from smolcluster.configs.checks import check_unencrypted
from smolcluster.configs.function_name import FunctionName
from smolcluster.configs.overrides import node_overrides, public_overrides, without_workload
from smolcluster.configs.schema import ClusterConfig, NodeConfig, Settings, config_of
from smolcluster.configs.spec import AlgorithmSpec
from smolcluster.errors import ConfigError
from smolcluster.launch.host import Host
from smolcluster.launch.jobs.scheduler import submission
from smolcluster.launch.tmux import session_name
from smolcluster.runs.launched import HELPERS, Launched, LaunchedProcess, Scheduler
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.utils.units import format_address, format_count

PATIENCE = "start_timeout_s=86400"
"""The server may tokenize for long before it listens; if it ends, the launcher stops the workers."""
NO_PROGRESS = "--no-progress"
MODULE = ("-P", "-m")
"""How Python is told a module of ours: the folder it starts in, which may be a run's, brings no code."""
PROGRAM = ("-m", "smolcluster.distributed_training")
"""What each rank of a group runs, as torchrun is told it as well."""
PACKAGE = Path(__file__).resolve().parents[1]
SCRIPT = PACKAGE / "api" / "script.py"
"""What runs a script as a worker."""
ATTACHED = PACKAGE / "algorithms" / "attached.yaml"
"""The training file with which `serve` begins."""
CLUSTER_FILE, TRAIN_FILE = "launch/cluster.yaml", "launch/train.yaml"
"""The configuration's copies in a run's folder on a node."""
SERVER, RANKS = "server", "ranks"


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
        is_open: whether other machines can reach the server of a run on this machine.
        kept: of a run that goes on, overrides that give way to the user's.
    """

    algorithm: AlgorithmSpec
    config: str | None = None
    train_config: str | None = None
    overrides: tuple[str, ...] = ()
    num_workers: int | None = None
    workload: str | None = None
    script: str | None = None
    without: tuple[str, ...] = ()
    is_open: bool = False
    kept: tuple[str, ...] = ()

    def in_run(self, run_dir: str) -> "Request":
        """The same request as a machine is told it that has its files and its code in a run's folder."""
        folder, workload, script = f"{run_dir}/{WORKLOAD_FOLDER}", self.workload, self.script
        if script is not None:
            file, *arguments = shlex.split(script)
            script = shlex.join([f"{folder}/{file}", *arguments])
        if workload is not None:
            workload = FunctionName.parse(workload).below(folder).text
        return replace(
            self,
            config=f"{run_dir}/{CLUSTER_FILE}",
            train_config=None if script else f"{run_dir}/{TRAIN_FILE}",
            overrides=self.public,
            workload=workload,
            script=script,
        )

    @property
    def public(self) -> tuple[str, ...]:
        """The overrides that every machine, and who looks at a command, may see."""
        return tuple(public_overrides(without_workload(self.overrides)))


@dataclass(frozen=True)
class Machine:
    """Where a run lives on a machine; paths as that machine understands them, absolute or from `~/`.

    Attributes:
        project_dir: the project's folder there.
        python: the interpreter, relative to `project_dir` or absolute.
        overrides: for a worker: where the training file says that the data are.
        threads: compute threads of each process, where all run on one machine; None: as configured.
        torch: the build of PyTorch, as `nodes.<name>.torch`.
        env: what is added to the environment of its processes.
        secret_file: where the secret belongs; None: the default place.
        is_own: whether the project's folder is a clone of its owner's on another machine, which is used as
            it is.
    """

    host: Host
    project_dir: str
    runs_dir: str
    python: str = ".venv/bin/python"
    overrides: tuple[str, ...] = ()
    threads: int | None = None
    torch: str = "pypi"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_file: str | None = None
    is_own: bool = False

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that launches: then nothing needs to be brought there."""
        return self.host.destination is None

    @property
    def interpreter(self) -> str:
        """The interpreter's whole path there."""
        return self.python if self.python.startswith("/") else f"{self.project_dir}/{self.python}"


Machines = Mapping[str, Machine]
"""By the names of nodes."""


def plan(
    request: Request,
    settings: Settings,
    machines: Machines,
    run_id: str,
    *,
    is_local: bool = False,
    in_sessions: bool = True,
) -> Launched:
    """The processes of a run: the server, stores, stages, then workers; of a group one for a machine's ranks.

    On the machines of a cluster they read copies of the configuration in their run's folder. With `is_local`
    all run on this machine and read the files that the request names. `in_sessions`: each in one of tmux.

    Raises:
        ConfigError: the ranks cannot be laid out on these machines, or would speak unencrypted.
    """
    cluster, is_group = settings.cluster, request.algorithm.is_group
    layout = _layout(request, settings, machines, is_local=is_local) if is_group else {}

    def planned(role: str, node: str, rank: int | None) -> LaunchedProcess:
        machine = machines[node]
        run_dir = f"{machine.runs_dir}/{run_id}"
        last = [runs_dir_override(machine.runs_dir)]
        if is_local:
            last = [] if machine.threads is None else [f"threads={machine.threads}"]
        told = request if is_local else request.in_run(run_dir)
        no_progress = (NO_PROGRESS,) * (role in (SERVER, RANKS) and not in_sessions)
        if is_group:
            options = (*no_progress, *layout[node], "--machine", node)
            words = ("-P", *ranks_command(told, run_id, options, last))
        else:
            address = format_address(cluster.host_ip[node], cluster.port) if is_local else None
            words = (
                *_program(told, role, node, rank, is_local=is_local),
                *(("--local", *option("--workers", request.num_workers)) if is_local else ()),
                *(("--open",) if role == SERVER and request.is_open else ()),
                *option("--server", address if role in ("store", "worker") else None),
                *("--run-id", run_id),
                *no_progress,
                *(() if role == SERVER else restarts(cluster)),
                *_files(told, role),
                *override_options((*_overrides(told, role, machine, is_local=is_local), *last)),
            )
        name = f"{role}-{node}" if role in (*HELPERS, RANKS) else role
        return LaunchedProcess(
            node=node,
            role=role,
            rank=rank,
            ssh=machine.host.destination,
            run_dir=run_dir,
            session=session_name(run_id, name, rank) if in_sessions else "",
            project_dir=machine.project_dir,
            argv=(machine.python, *words),
            device=cluster.nodes.get(node, NodeConfig()).device,
        )

    members = _members(request, cluster, is_local=is_local)
    overrides = () if is_local else request.public
    return _launched(request, settings, run_id, overrides, *(planned(*each) for each in members))


def plan_job(
    request: Request, settings: Settings, runs_dir: str, run_id: str, on: Scheduler
) -> Launched:
    """A group that a scheduler starts: the command that hands its job over, see `jobs`."""
    argv, session = submission(settings.cluster, run_id, on)
    process = LaunchedProcess(
        node=on,
        role=RANKS,
        run_dir=f"{runs_dir}/{run_id}",
        project_dir=runs_dir,
        session=session,
        argv=argv,
        scheduler=on,
    )
    return _launched(request, settings, run_id, request.public, process)


def by_hand(
    algorithm: AlgorithmSpec,
    role: str,
    node: str,
    rank: int | None,
    *options: str,
    run_dir: str,
) -> LaunchedProcess:
    """A process of this machine, as its owner starts it, of a run that may be another machine's."""
    number = () if rank is None else (str(rank + 1), node)
    return LaunchedProcess(
        node=node,
        role=role,
        rank=rank,
        run_dir=run_dir,
        project_dir=run_dir.rpartition("/")[0],
        argv=(sys.executable, str(algorithm.folder / algorithm.roles[role]), *number, *options),
    )


def _launched(
    request: Request,
    settings: Settings,
    run_id: str,
    overrides: tuple[str, ...],
    *processes: LaunchedProcess,
) -> Launched:
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=settings.cluster.port,
        overrides=overrides,
        processes=processes,
    )


def _members(
    request: Request, cluster: ClusterConfig, *, is_local: bool
) -> Iterator[tuple[str, str, int | None]]:
    """Each process's role, node and rank."""
    if request.algorithm.is_group:  # on this machine one command starts all ranks
        nodes = (cluster.server,) if is_local else cluster.workers
        yield from ((RANKS, node, None) for node in nodes)
        return
    yield SERVER, cluster.server, None
    yield from (("store", node, None) for node in cluster.store_nodes[1:])
    yield from (("stage", node, None) for node in cluster.stage_nodes)
    yield from (("worker", node, rank) for rank, node in enumerate(cluster.workers))


def _program(
    told: Request, role: str, node: str, rank: int | None, *, is_local: bool
) -> tuple[str, ...]:
    """What Python runs, and the process's place in the run."""
    name, folder = told.algorithm.name, told.algorithm.folder
    if role == SERVER and told.script is not None:
        serve = (*MODULE, "smolcluster.cli", "serve")
        return (*serve, told.config or name, "--algorithm", name)
    file = folder / told.algorithm.roles[role]
    words = (*(() if rank is None else (str(rank + 1),)), *(() if role == SERVER else (node,)))
    if role == "worker" and told.script is not None:
        file, words = SCRIPT, (*words, "--script", told.script, "--algorithm", name)
    return (str(file) if is_local else _sent(file), *words)


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


def _files(told: Request, role: str) -> tuple[str, ...]:
    """How a process is told the configuration's files and the function that makes the workload."""
    train = told.train_config
    if role != SERVER or (told.script is not None and train == str(ATTACHED)):
        train = None
    return (
        *option("--config", None if role == SERVER and told.script else told.config),
        *option("--train-config", train),
        *option("--workload", None if role == "store" else told.workload),
    )


def _overrides(told: Request, role: str, machine: Machine, *, is_local: bool) -> tuple[str, ...]:
    """What the user has said, of which all but the server are told only what belongs to a machine."""
    said = without_workload(told.overrides)
    if role == SERVER:
        return (*told.kept, *said)
    data = () if role == "store" else machine.overrides
    return (*((PATIENCE,) if is_local else ()), *data, *node_overrides(said))


def runs_dir_override(runs_dir: str) -> str:
    return f"runs_dir={json.dumps(runs_dir, ensure_ascii=False)}"


def restarts(cluster: ClusterConfig) -> tuple[str, ...]:
    """The option that gives a worker its supervisor; the server's way back is `resume`."""
    return option("--restarts", cluster.restarts or None)


def option(flag: str, value: str | int | None) -> tuple[str, ...]:
    return () if value is None else (flag, str(value))


def override_options(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for text in texts for item in ("--override", text))


# A group of torch.distributed


def ranks_command(
    told: Request, run_id: str, options: Sequence[str], last: Sequence[str]
) -> tuple[str, ...]:
    """What Python runs as the ranks of a group, as a person types it; `last`: overrides that win."""
    return (
        *(*PROGRAM, "--run-id", run_id, *options),
        *("--cluster", told.config or told.algorithm.name),
        *option("--config", told.train_config),
        *option("--workload", told.workload),
        *override_options((*without_workload(told.overrides), *last)),
    )


def num_ranks(request: Request, settings: Settings) -> int:
    """How many ranks the group has.

    Raises:
        ConfigError: the launch says something that a group has not.
    """
    title = request.algorithm.title
    total = settings.of(config_of(request.algorithm)).num_ranks
    if request.num_workers is not None:
        raise ConfigError(
            f"--workers is {request.num_workers}, but {title} has as many ranks as its sizes make, "
            f"{total}: change those, such as by --override mesh.dp=2"
        )
    if request.script is not None:
        raise ConfigError(f"--script: {title} serves no loops; launch edp, syncps or diloco")
    return total


def portable_request(request: Request, settings: Settings) -> Request:
    """The same request, without files that are this machine's own."""
    portable = settings.of(config_of(request.algorithm)).portable
    told = (f"{key}={json.dumps(value)}" for key, value in portable.items())
    return replace(request, overrides=(*request.overrides, *told))


def _layout(
    request: Request, settings: Settings, machines: Machines, *, is_local: bool
) -> Mapping[str, tuple[str, ...]]:
    """Which ranks each machine has, as its command says it: as many on each.

    Raises:
        ConfigError: see `plan`.
    """
    cluster, total = settings.cluster, num_ranks(request, settings)
    if is_local:
        return {cluster.server: ()}
    if cluster.server != cluster.workers[0]:
        raise ConfigError(
            f"server is {cluster.server}, which has rank 0, but workers begins with {cluster.workers[0]}: "
            f"put {cluster.server} first in workers"
        )
    share, rest = divmod(total, len(cluster.workers))
    if rest:
        raise ConfigError(
            f"mesh makes {format_count(total, 'rank')}, which the {len(cluster.workers)} machines of workers "
            f"({', '.join(cluster.workers)}) cannot share equally: change mesh, or workers and num_workers"
        )
    is_spread = len({machines[node].host.destination for node in cluster.workers}) > 1
    if is_spread:
        check_unencrypted(cluster.encryption)
    for node in cluster.workers:
        if is_spread and is_loopback_name(cluster.host_ip[node]):
            raise ConfigError(
                f"host_ip.{node} is {cluster.host_ip[node]}, {node}'s own loopback, at which it would only "
                f"find itself: set it to the address at which {node} reaches {cluster.server}"
            )
        stated = cluster.nodes.get(node, NodeConfig()).device
        if stated is not None:
            settings.of(config_of(request.algorithm)).check_device(stated)
    return {
        node: (
            *("--world-size", str(total), "--rank", str(place * share)),
            *("--nproc-per-node", str(share), "--master-addr", cluster.host_ip[node]),
            *("--master-port", str(cluster.port)),
        )
        for place, node in enumerate(cluster.workers)
    }
