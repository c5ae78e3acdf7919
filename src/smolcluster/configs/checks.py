"""What of a configuration fits together: keys of one cluster file, and keys of an algorithm's."""

from smolcluster.configs.problems import HAS_KEY, SettingError
from smolcluster.configs.schema import (
    AlgorithmName,
    ClusterConfig,
    Encryption,
    NodeConfig,
    Settings,
    config_of,
)
from smolcluster.configs.spec import AlgorithmSpec, algorithms
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.utils.words import show


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse a cluster file whose keys contradict each other.

    Raises:
        SettingError: the first contradiction.
    """
    num_workers, workers = cluster.num_workers, cluster.workers
    if num_workers != len(workers):
        listed = f"workers lists {len(workers)} ({', '.join(workers) or 'none'})"
        problem = f"but {listed}; the two must agree"
        raise SettingError(("num_workers",), num_workers, problem, also=(("workers",),))
    cluster.check_known(("server",), cluster.server, verb="is")
    _check_servers(cluster)
    _check_listed(cluster, "workers", workers)
    for name in cluster.nodes:
        cluster.check_known(("nodes",), name, verb=HAS_KEY)
    _check_stages(cluster)
    if cluster.min_workers > num_workers and not cluster.elastic:
        raise SettingError(
            ("min_workers",),
            cluster.min_workers,
            f"must be at most num_workers, {num_workers}, unless elastic is true",
            also=(("num_workers",), ("elastic",)),
        )


def _check_stages(cluster: ClusterConfig) -> None:
    taken: dict[str, str] = {}
    for name, stages in cluster.pipelines.items():
        place = ("nodes", name, "stages")
        if name not in cluster.workers:
            listed = f"workers ({', '.join(cluster.workers)})"
            raise SettingError(
                place,
                stages,
                f"but {name} is not one of {listed}: list it there, or set nodes.{name}.stages to null",
                also=(("workers",),),
            )
        for each in stages.host_ip:
            cluster.check_known(place, each)
            if each in taken:
                problem = f"which is a stage of {taken[each]} already"
                raise SettingError(place, each, problem, verb="lists")
            taken[each] = name
    _check_ports_of_stages(cluster)


def _check_ports_of_stages(cluster: ClusterConfig) -> None:
    """Refuse two listeners on one port of a machine, as far as addresses tell that it is one."""
    is_one_machine = all(map(is_loopback_name, cluster.host_ip.values()))
    hosts = (cluster.server, *cluster.host_ip.values())
    taken = {(each, cluster.port): "port" for each in hosts}
    for name, stages in cluster.pipelines.items():
        port, found = stages.port, stages.host_ip.values()
        addresses = {each for each in found if not is_loopback_name(each)}
        if is_one_machine:
            addresses.update(cluster.host_ip.values())
        places = [(each, port) for each in (name, *sorted(addresses))]
        if other := next((taken[each] for each in places if each in taken), None):
            problem = f"and {other} of the same machine as well: give it another one"
            raise SettingError(
                ("nodes", name, "stages", "port"), port, problem, also=(("port",), ("nodes",))
            )
        taken |= dict.fromkeys(places, f"nodes.{name}.stages.port")


def _check_servers(cluster: ClusterConfig) -> None:
    if cluster.servers in (None, "auto"):
        return
    servers = tuple(cluster.servers)
    if servers[:1] != (cluster.server,):
        problem = f"must begin with server, {cluster.server!r}"
        raise SettingError(("servers",), servers, problem, also=(("server",),))
    _check_listed(cluster, "servers", servers)


def _check_listed(cluster: ClusterConfig, key: str, names: tuple[str, ...]) -> None:
    if len(set(names)) < len(names):
        raise SettingError((key,), names, "must list each node once")
    for name in names:
        cluster.check_known((key,), name)


def check_unencrypted(encryption: Encryption) -> None:
    """Refuse a group of ranks on several machines, unless it is said that its traffic is not encrypted.

    Raises:
        SettingError: it is not said.
    """
    if encryption != "off":
        raise SettingError(
            ("encryption",),
            encryption,
            "but between machines nothing of a mesh is encrypted (Gloo and NCCL cannot): on a network that "
            "is yours alone say --override encryption=off, or launch edp, syncps, diloco or a pipeline, "
            "which encrypt",
        )


def check_algorithm(settings: Settings, algorithm: AlgorithmName) -> None:
    """Refuse settings that mean nothing to the algorithm, or that it cannot follow.

    Raises:
        ConfigError: one line with the key, its value and what to change.
    """
    spec = algorithms().get(algorithm)
    if spec is None:
        return
    own = settings.of(config_of(spec))
    if len(settings.cluster.store_nodes) > 1 and "store" not in spec.roles:
        raise SettingError(
            ("servers",),
            settings.cluster.store_nodes,
            f"but {spec.title} keeps its weights on one node; set servers to null, or launch edp, syncps or "
            "diloco",
        )
    for name in settings.cluster.pipelines:
        check_has_local_steps(name, settings.cluster.nodes[name], spec)
    for other in algorithms().values():
        for key, reason in config_of(other).claims.items():
            if other is not spec and key not in own.claims:
                _check_unclaimed(settings, key, f"{other.title}'s: {reason}", other.name)
    own.check(settings)


def check_has_local_steps(name: str, node: NodeConfig, spec: AlgorithmSpec) -> None:
    """Refuse several processes as one worker of an algorithm whose workers take no local steps.

    Raises:
        SettingError: node `name` is to have them.
    """
    if node.spread is not None and not spec.has_local_steps:
        key, value = node.spread
        problem = f"but a worker of {spec.title} is one process: set it to null, or launch diloco"
        raise SettingError(("nodes", name, key), value, problem)


def _check_unclaimed(settings: Settings, key: str, reason: str, name: str) -> None:
    """Refuse a key that another algorithm claims, unless it has its default."""
    part = settings.cluster if key in type(settings.cluster).model_fields else settings.train
    value, default = getattr(part, key), type(part).model_fields[key].default
    if value != default:
        usual = show(default) if default is None else default
        problem = f"which is {reason}; set {key} to {usual}, or launch {name}"
        raise SettingError((key,), value, problem)
