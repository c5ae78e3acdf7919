"""What a launch of a group of `torch.distributed` starts: a command on each machine, for its ranks.

Pure. The commands are those that a person types: `python -m smolcluster.distributed_training`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from smolcluster.configs.checks import check_unencrypted
from smolcluster.configs.schema import ClusterConfig, NodeConfig, Settings, config_of
from smolcluster.errors import ConfigError
from smolcluster.launch.plan import (
    NO_PROGRESS,
    PathsByNode,
    Request,
    Told,
    option,
    override_options,
    plan_roles,
    told_to_all,
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


def plan(
    request: Request,
    settings: Settings,
    places: PathsByNode,
    run_id: str,
    *,
    is_local: bool = False,
    in_sessions: bool = True,
) -> Launched:
    """What a launch starts, of any algorithm; see `plan_roles` and `plan_ranks`.

    Raises:
        ConfigError: as `plan_ranks`.
    """
    how = {"is_local": is_local, "in_sessions": in_sessions}
    if request.algorithm.is_group:
        return plan_ranks(request, settings, places, run_id, **how)
    return plan_roles(request, settings.cluster, places, run_id, **how)


def plan_ranks(
    request: Request,
    settings: Settings,
    places: PathsByNode,
    run_id: str,
    *,
    is_local: bool = False,
    in_sessions: bool = True,
) -> Launched:
    """A command on each machine, rank 0's first; with `is_local` the one that is the whole group.

    Raises:
        ConfigError: the ranks cannot be laid out on these machines, or would speak unencrypted.
    """
    cluster, total = settings.cluster, num_ranks(request, settings)
    public = told_to_all(request, is_local=is_local)
    share = total if is_local else _share_of(request, settings, places, total)

    def planned(index: int, node: str) -> LaunchedProcess:
        place = places[node]
        run_dir = f"{place.runs_dir}/{run_id}"
        told = Told(request, place, run_dir, is_local)
        ranks: tuple[str, ...] = ()
        if not is_local:
            ranks = (
                *("--world-size", str(total), "--rank", str(index * share)),
                *("--nproc-per-node", str(share), "--master-addr", cluster.host_ip[node]),
                *("--master-port", str(cluster.port)),
            )
        argv = (
            *(place.python, *COMMAND, "--run-id", run_id),
            *(() if in_sessions else (NO_PROGRESS,)),
            *ranks,
            *("--cluster", told.config or request.algorithm.name, "--machine", node),
            *option("--config", told.train_config),
            *option("--workload", told.workload),
            *override_options((*public, *told.last_overrides)),
        )
        return LaunchedProcess(
            node=node,
            role=ROLE,
            ssh=place.ssh,
            run_dir=run_dir,
            session=session_name(run_id, f"{ROLE}-{node}", None) if in_sessions else "",
            project_dir=place.project_dir,
            argv=argv,
            device=cluster.nodes.get(node, NodeConfig()).device,
        )

    nodes = [cluster.server] if is_local else cluster.workers
    return Launched(
        run_id=run_id,
        algorithm=request.algorithm.name,
        port=cluster.port,
        overrides=() if is_local else public,
        processes=tuple(planned(index, node) for index, node in enumerate(nodes)),
    )


def _share_of(request: Request, settings: Settings, places: PathsByNode, total: int) -> int:
    """How many ranks each machine of a cluster has.

    Raises:
        ConfigError: as `plan_ranks`.
    """
    cluster = settings.cluster
    share = ranks_per_node(cluster, total)
    if len({places[node].ssh for node in cluster.workers}) > 1:
        check_unencrypted(cluster.encryption)
    check_addresses(cluster, places)
    for node in cluster.workers:
        stated = cluster.nodes.get(node, NodeConfig()).device
        if stated is not None:
            settings.of(config_of(request.algorithm)).check_device(stated)
    return share


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
