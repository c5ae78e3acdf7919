"""What a launch of a group of `torch.distributed` starts: a command on each machine, for its ranks.

Pure. The commands are those that a person types: `python -m smolcluster.distributed_training`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smolcluster.configs.resolve import (
    Settings,
    check_unencrypted,
    public_overrides,
    without_workload,
)
from smolcluster.configs.schema import ClusterConfig, NodeConfig, config_of
from smolcluster.errors import ConfigError
from smolcluster.launch.plan import (
    CLUSTER_FILE,
    NO_PROGRESS,
    TRAIN_FILE,
    PathsByNode,
    Request,
    in_run,
    option,
    override_options,
)
from smolcluster.launch.tmux import session_name
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.utils.addresses import is_loopback_name

ROLE = "ranks"
PROGRAM = ("-m", "smolcluster.distributed_training")
"""As torchrun is told it as well."""
COMMAND = ("-P", *PROGRAM)


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


def plan_group_local(
    request: Request,
    settings: Settings,
    *,
    run_dir: Path,
    python: str,
    resume: bool,
    in_sessions: bool = False,
) -> Launched:
    """The command that is the whole group on this machine.

    Raises:
        ConfigError: as `num_ranks`.
    """
    num_ranks(request, settings)
    node, run_id = settings.cluster.server, run_dir.name
    argv = (
        *(python, *COMMAND, "--run-id", run_id),
        *(() if in_sessions else (NO_PROGRESS,)),
        *option("--resume", "auto" if resume else None),
        *("--cluster", request.config or request.algorithm.name, "--machine", node),
        *option("--config", request.train_config),
        *option("--workload", request.workload),
        *override_options(without_workload(request.overrides)),
    )
    process = LaunchedProcess(
        node=node,
        role=ROLE,
        run_dir=str(run_dir),
        session=session_name(run_id, ROLE, None) if in_sessions else "",
        project_dir=str(run_dir.parent),
        argv=argv,
    )
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=settings.cluster.port,
        processes=(process,),
    )


def plan_group(request: Request, settings: Settings, places: PathsByNode, run_id: str) -> Launched:
    """The commands on the machines of a cluster, each in a tmux session of its own, rank 0's first.

    Raises:
        ConfigError: the ranks cannot be laid out on these machines, or would speak unencrypted.
    """
    cluster = settings.cluster
    total = num_ranks(request, settings)
    share = ranks_per_node(cluster, total)
    if len({places[node].ssh for node in cluster.workers}) > 1:
        check_unencrypted(cluster.encryption)
    check_addresses(cluster, places)
    public = tuple(public_overrides(without_workload(request.overrides)))
    for node in cluster.workers:
        stated = cluster.nodes.get(node, NodeConfig()).device
        if stated is not None:
            settings.of(config_of(request.algorithm)).check_device(stated)

    def planned(index: int, node: str) -> LaunchedProcess:
        place, stated = places[node], cluster.nodes.get(node, NodeConfig())
        run_dir = f"{place.runs_dir}/{run_id}"
        runs_dir = f"runs_dir={json.dumps(place.runs_dir, ensure_ascii=False)}"
        argv = (
            *(place.python, *COMMAND, "--run-id", run_id),
            *("--world-size", str(total), "--rank", str(index * share)),
            *("--nproc-per-node", str(share)),
            *("--master-addr", cluster.host_ip[node], "--master-port", str(cluster.port)),
            *("--cluster", f"{run_dir}/{CLUSTER_FILE}", "--machine", node),
            *("--config", f"{run_dir}/{TRAIN_FILE}"),
            *option("--workload", in_run(request.workload, run_dir)),
            *override_options((*public, runs_dir)),
        )
        return LaunchedProcess(
            node=node,
            role=ROLE,
            ssh=place.ssh,
            run_dir=run_dir,
            session=session_name(run_id, f"{ROLE}-{node}", None),
            project_dir=place.project_dir,
            argv=argv,
            device=stated.device,
        )

    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        overrides=public,
        processes=tuple(planned(index, node) for index, node in enumerate(cluster.workers)),
    )


def ranks_per_node(cluster: ClusterConfig, total: int) -> int:
    """As many on each machine.

    Raises:
        ConfigError: that is not possible, or rank 0's machine is not the first one.
    """
    if cluster.server != cluster.workers[0]:
        raise ConfigError(
            f"server is {cluster.server}, which has rank 0, but workers begins with {cluster.workers[0]}: "
            f"put {cluster.server} first in workers"
        )
    if total % len(cluster.workers):
        raise ConfigError(
            f"mesh makes {total} ranks, which the {len(cluster.workers)} machines of workers "
            f"({', '.join(cluster.workers)}) cannot share equally: change mesh, or workers and num_workers"
        )
    return total // len(cluster.workers)


def check_addresses(cluster: ClusterConfig, places: PathsByNode) -> None:
    """Refuse an address of rank 0 at which a machine would find itself.

    Raises:
        ConfigError: one line with the machine and the address.
    """
    if len(set(cluster.workers)) == 1 or len({places[node].ssh for node in cluster.workers}) == 1:
        return
    for node in cluster.workers:
        if is_loopback_name(cluster.host_ip[node]):
            raise ConfigError(
                f"host_ip.{node} is {cluster.host_ip[node]}, {node}'s own loopback, at which it would only "
                f"find itself: set it to the address at which {node} reaches {cluster.server}"
            )


def check_systems(systems: Sequence[tuple[str, str]]) -> None:
    """Refuse machines of several operating systems, each (its name, its system as `uname -s` says).

    Raises:
        ConfigError: two differ: Gloo's transports on Linux and macOS do not understand each other.
    """
    first_node, first = systems[0]
    for node, system in systems:
        if system != first:
            raise ConfigError(
                f"{first_node} runs {first} and {node} {system}, between which torch.distributed does not "
                "work: launch a parameter server (edp, syncps, diloco) or a pipeline"
            )
