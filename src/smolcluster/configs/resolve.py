"""One configuration out of files, environment and command line.

Precedence, highest first: `--override a.b=c`; the environment's `SMOLCLUSTER_A__B`; `nodes.<name>` of the
cluster file, for what belongs to a machine; the file; the schema's default.

The first part of a key says which section it belongs to. `dataset` is in two: `dataset.name` is the run's;
`dataset.root` and `dataset.download` are this machine's. Where a machine says nothing about its dataset, the
training file's `dataset.root` and `dataset.download` hold.
"""

import copy
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from smolcluster.configs.begun import check_workload
from smolcluster.configs.function_name import check_secrets, known_here
from smolcluster.configs.keys import fixed_paths, show
from smolcluster.configs.layers import (
    OVERRIDE_FLAG,
    Draft,
    OverrideValue,
    config_error,
    from_environment,
    from_overrides,
)
from smolcluster.configs.load import (
    NODE_SECTION,
    SECTIONS,
    dump_yaml,
    find_config,
    is_of_run,
    read_config,
    read_yaml,
)
from smolcluster.configs.nested import DATA, DATASET, flatten, is_nested
from smolcluster.configs.node_names import rename_in_value
from smolcluster.configs.schema import (
    AlgorithmConfig,
    AlgorithmName,
    ClusterConfig,
    DatasetPlace,
    Encryption,
    NodeConfig,
    RunConfig,
    TrainConfig,
    cluster_section,
    config_of,
    train_section,
)
from smolcluster.configs.spec import AlgorithmSpec, algorithms, spec_of
from smolcluster.configs.without import check_server, without_nodes
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.utils.words import as_command, hint_at, one_line

LOOPBACK = "127.0.0.1"
ENV = "env"
"""The key of a machine's section whose values may be secrets, such as tokens and passwords."""
HIDDEN = "***"
LOCAL_NAMES = "local_names"
WORKLOAD = "workload"
"""The key that names a function, and the shipped training file for those that give it by a flag."""

C = TypeVar("C", bound=AlgorithmConfig)

_WORKER_CLUSTER_KEYS = (
    "server",
    "host_ip",
    "port",
    "encryption",
    "start_timeout_s",
    "metrics_port",
    "metrics_bind",
    "nodes",
)


@dataclass(frozen=True)
class Settings:
    """Everything that a process on one machine has been told."""

    cluster: ClusterConfig
    train: TrainConfig
    node: NodeConfig
    data_section: str = field(default=DATASET, compare=False)
    """What the user calls the section `dataset`, for messages."""
    name: str | None = field(default=None, compare=False)
    """The machine's; None: the server's."""

    @property
    def global_batch_size(self) -> int:
        """Samples in a step that all workers take together, however many of them are present."""
        return (
            self.train.global_batch_size or self.train.samples_per_push * self.cluster.num_workers
        )

    def num_threads(self, environ: Mapping[str, str] = os.environ) -> int | None:
        """Compute threads of one of the run's processes; None: PyTorch's choice.

        Where the user has set no number, the server and the workers that reach it on this very machine share
        its cores: with more threads than cores in all they hinder each other.
        """
        if self.node.threads is not None or "OMP_NUM_THREADS" in environ:
            return self.node.threads
        server, host_ip = self.cluster.server, self.cluster.host_ip
        others = (node for node in self.cluster.machines if node != server)
        here = [server, *(node for node in others if is_loopback_name(host_ip.get(node, "")))]
        is_alone = len(here) == 1 or (self.name or server) not in here
        return None if is_alone else max(1, (os.cpu_count() or 1) // len(here))

    def with_batch_size(self, batch_size: int | None) -> "Settings":
        """The same with so many samples a batch; None: as the configuration says."""
        if batch_size is None:
            return self
        return replace(self, train=self.train.model_copy(update={"batch_size": batch_size}))

    def run_config(self, run_id: str, algorithm: AlgorithmName) -> RunConfig:
        """What travels to the workers: nothing of any one machine."""
        cluster = self.cluster
        train: dict[str, object] = {"dataset": self.train.dataset.anywhere, "workload": None}
        own = self.of(config_of(spec_of(algorithm)))
        train |= own.pinned(self)
        trained = self.train.without_weights()
        shared = {name: getattr(trained, name) for name in TrainConfig.model_fields}
        return RunConfig(
            run_id=run_id,
            algorithm=algorithm,
            seed=cluster.seed,
            worker_update_interval=cluster.worker_update_interval,
            use_quantization=cluster.use_quantization,
            codec=cluster.codec,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
            reconnect_timeout_s=cluster.reconnect_timeout_s,
            workload=self.train.workload_label,
            own=own.model_dump(mode="json"),
            train=TrainConfig.model_validate(shared | train),
        )

    def of(self, config: type[C]) -> C:
        """What an algorithm alone understands."""
        told = {**dict(self.cluster), **dict(self.train)}
        return config.model_validate(
            {name: told[name] for name in config.model_fields if name in told}
        )

    def to_yaml(self, *, env_names: bool = False) -> str:
        """The resolved configuration with all defaults, one mapping a section, to keep with a run.

        The machines' `env` is left out, for others may read the file; with `env_names` its names are there,
        each with `***` as its value.
        """
        sections = {
            SECTIONS["cluster"]: self.cluster,
            SECTIONS["training"]: self.train,
            NODE_SECTION: self.node,
        }
        dumped = {name: part.model_dump(mode="json") for name, part in sections.items()}
        for node in (dumped[NODE_SECTION], *dumped[SECTIONS["cluster"]]["nodes"].values()):
            if env_names:
                node[ENV] = dict.fromkeys(node[ENV], HIDDEN)
            else:
                del node[ENV]
        return dump_yaml(dumped)


def load_settings(
    cluster_source: str | Path,
    train_source: str | Path,
    node_name: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    local_workers: int | None = None,
    local: bool = False,
    without: Collection[str] = (),
) -> Settings:
    """Read both files and resolve them for one machine.

    Args:
        cluster_source, train_source: paths or shipped names, such as "edp" and "digits".
        node_name: the machine, a key of `host_ip`; None: the server's.
        overrides: `key=value`, the highest layer.
        environ: where `SMOLCLUSTER_…` are looked up; all other names are ignored.
        local_workers: number of workers on this machine, only with `local`; None: the cluster file's.
        local: everything runs on this machine, see `localise`.
        without: nodes of the cluster file that take no part.

    Raises:
        ConfigError: one line with the file, flag or variable, the key, its value and what is allowed; or the
            training file is that of a run, and names code that is not known here, see `check_workload`.
    """
    if local_workers is not None and not local:
        raise ConfigError(
            "--workers needs --local: the workers of a cluster are listed in its file"
        )
    cluster_path = find_config(cluster_source, "cluster")
    train_path = find_config(train_source, "training")
    cluster = cluster_without(cluster_path, without)
    if local:
        flat, words = flatten(cluster, str(cluster_path))
        stated = Draft(cluster_section(), str(cluster_path), flat, words).check()
        cluster = localise(stated, local_workers).model_dump(exclude_unset=True)
    settings = resolve(
        cluster=cluster,
        train=read_config(train_path, "training"),
        node_name=node_name,
        overrides=overrides,
        environ=environ,
        cluster_file=str(cluster_path),
        train_file=str(train_path),
    )
    check_server(settings.cluster, without)
    if settings.train.workload is None and not settings.train.workload_args:
        return settings
    said = (*from_environment(environ), *from_overrides(overrides))
    if not is_of_run(train_path):  # of a run that has begun it is too late
        check_secrets(settings.train.workload_args)
    elif not any(assignment.path[0] == WORKLOAD for assignment in said):
        folder = train_path.parent.resolve()
        check_workload(folder, load_resolved(train_path).train, may_have_changed=True)
    return settings


def cluster_without(path: Path, names: Collection[str]) -> dict[str, Any]:
    """What a cluster file says; without these nodes, see `without_nodes`.

    Raises:
        ConfigError: the file is wrong, or one of them cannot be left out.
    """
    content = read_config(path, "cluster")
    if not names:
        return content
    flat, words = flatten(content, str(path))
    stated: ClusterConfig = Draft(cluster_section(), str(path), flat, words).check()
    return without_nodes(content, stated, names, str(path))


def resolve(
    *,
    cluster: Mapping[str, Any],
    train: Mapping[str, Any],
    node_name: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    cluster_file: str = "cluster configuration",
    train_file: str = "training configuration",
) -> Settings:
    """Put the layers on top of each other and check the result; no argument is changed.

    Messages name the two files as `cluster_file` and `train_file`.

    Raises:
        ConfigError: as `load_settings`.
    """
    data_section = DATA if is_nested(train) else DATASET
    cluster, cluster_words = flatten(cluster, cluster_file)
    train, words = flatten(train, train_file)
    stated = (*from_environment(environ or {}), *from_overrides(overrides))
    local_names = cluster.get(LOCAL_NAMES)
    names = local_names if isinstance(local_names, dict) else {}
    assignments = [assignment.of_nodes(names) for assignment in stated]
    cluster_draft = Draft(cluster_section(), cluster_file, copy.deepcopy(cluster), cluster_words)
    train_draft = Draft(train_section(), train_file, copy.deepcopy(train), words)
    for assignment in assignments:
        cluster_draft.take(assignment)
        train_draft.take(assignment)
    checked_cluster, checked_train = cluster_draft.check(), train_draft.check()
    checked_train = checked_train.for_any_folder()
    name = _known_node(node_name, checked_cluster)
    node_draft = Draft(NodeConfig, cluster_file, _node_values(cluster, train, name))
    for assignment in assignments:
        node_draft.take(assignment.seen_by(name))
    for assignment in assignments:
        if assignment.path[0] == DATASET:
            data_section = assignment.written[0]
    settings = Settings(checked_cluster, checked_train, node_draft.check(), data_section, name)
    return _with_optimizer(settings) if checked_train.optimizer == "auto" else settings


def _with_optimizer(settings: Settings) -> Settings:
    """Choose what `optimizer: auto` stands for: Muon steps whole matrices."""
    cluster = settings.cluster
    are_cut = (
        len(cluster.store_nodes) > 1
        or any(node.ranks and node.ranks.cut_matrices for node in cluster.nodes.values())
        or any(settings.of(config_of(spec)).cuts_matrices for spec in algorithms().values())
    )
    chosen = {"optimizer": "adamw" if are_cut else "muon"}
    return replace(settings, train=settings.train.model_copy(update=chosen))


def load_resolved(path: Path) -> Settings:
    """The configuration that `save_resolved` kept with a run: without the `env` of machines.

    It is data, which somebody else may have written: code that it names is for `check_workload` first.

    Raises:
        ConfigError: the file cannot be read, or is not such a configuration.
    """
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file: the run had not begun when it ended; launch it anew"
        )
    node = read_yaml(path).get(NODE_SECTION)
    cluster, train = read_config(path, "cluster"), read_config(path, "training")
    settings = resolve(cluster=cluster, train=train, cluster_file=str(path), train_file=str(path))
    if not isinstance(node, dict):
        raise ConfigError(
            f"{path}: is not the configuration of a run: it has no section {NODE_SECTION}"
        )
    return replace(settings, node=Draft(NodeConfig, str(path), copy.deepcopy(node)).check())


def localise(cluster: ClusterConfig, num_workers: int | None) -> ClusterConfig:
    """The same cluster on this machine alone, with `num_workers` workers (None: as many as it lists).

    Every address is the loopback's, each pipeline has a port of its own, and an algorithm's keys are as its
    `local` has them. Workers are called worker1, worker2, …; their names in the file stand for them, see
    `ClusterConfig.node_of`. A localised cluster stays as it is.

    Raises:
        ConfigError: `num_workers` is below 1.
    """
    wanted = cluster.num_workers if num_workers is None else num_workers
    if wanted < 1:
        raise ConfigError(f"--workers is {wanted}, must be a whole number above 0")
    cluster = _with_local_names(cluster)
    numbered = (f"worker{number}" for number in count(cluster.num_workers + 1))
    free = (name for name in numbered if name not in cluster.machines)
    workers = (*cluster.workers, *islice(free, max(0, wanted - cluster.num_workers)))[:wanted]
    own = {
        key: value for spec in algorithms().values() for key, value in config_of(spec).local.items()
    }
    return cluster.model_copy(
        update=own
        | {
            "host_ip": dict.fromkeys((*cluster.host_ip, *workers), LOOPBACK),
            "bind": (LOOPBACK,),
            "workers": workers,
            "num_workers": wanted,
            "min_workers": min(cluster.min_workers, wanted),
            "nodes": _localised(cluster, workers),
        }
    )


def _with_local_names(cluster: ClusterConfig) -> ClusterConfig:
    """The same with the workers' names on one machine: worker1, worker2, … by their places.

    A worker on the server's node keeps its name; where another node has one of these names, all do.
    """
    places = enumerate(cluster.workers, 1)
    names = {name: f"worker{number}" for number, name in places if name != cluster.server}
    if any(name in cluster.host_ip for name in names.values()):
        return cluster
    addresses = {new: cluster.host_ip[old] for old, new in names.items()}
    values = rename_in_value(
        (), cluster.model_dump(exclude_unset=True), lambda name: names.get(name, name)
    )
    values |= {"host_ip": cluster.host_ip | addresses, LOCAL_NAMES: cluster.local_names | names}
    return type(cluster).model_validate(values)


def _localised(cluster: ClusterConfig, workers: Sequence[str]) -> dict[str, NodeConfig]:
    """The nodes of a cluster on this machine, of whose workers these are left."""
    nodes, taken = dict(cluster.nodes), {cluster.port}
    for name, node in cluster.nodes.items():
        if (stages := node.stages) is None:
            continue
        if name not in workers:
            nodes[name] = node.model_copy(update={"stages": None})
            continue
        port = next(each for each in count(stages.port) if each not in taken)
        taken.add(port)
        host_ip = dict.fromkeys(stages.host_ip, LOOPBACK)
        own = stages.model_copy(update={"host_ip": host_ip, "port": port})
        nodes[name] = node.model_copy(update={"stages": own})
    return nodes


def check_unencrypted(encryption: Encryption) -> None:
    """Refuse a group of ranks on several machines, unless it is said that its traffic is not encrypted.

    Raises:
        ConfigError: it is not said.
    """
    if encryption != "off":
        raise ConfigError(
            f"encryption is {encryption}, but between machines nothing of a mesh is encrypted (Gloo and NCCL "
            "cannot): on a network that is yours alone say --override encryption=off, or launch edp, syncps, "
            "diloco or a pipeline, which encrypt"
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
        listed = ", ".join(settings.cluster.store_nodes)
        raise ConfigError(
            f"servers lists {listed}, but {spec.title} keeps its weights on one; set servers to null, or "
            "launch edp, syncps or diloco"
        )
    for name, node in settings.cluster.nodes.items():
        if node.stages is not None:
            check_has_local_steps(name, node, spec)
    for other in algorithms().values():
        for key, reason in config_of(other).claims.items():
            if other is not spec and key not in own.claims:
                _check_unclaimed(settings, key, f"{other.title}'s: {reason}", other.name)
    own.check(settings)


def check_has_local_steps(name: str, node: NodeConfig, spec: AlgorithmSpec) -> None:
    """Refuse several processes as one worker of an algorithm whose workers take no local steps.

    Raises:
        ConfigError: node `name` is to have them.
    """
    if node.spread is not None and not spec.has_local_steps:
        key, value = node.spread
        raise ConfigError(
            f"nodes.{name}.{key} is {value}, but a worker of {spec.title} is one process: set it to null, or "
            "launch diloco"
        )


def _check_unclaimed(settings: Settings, key: str, reason: str, name: str) -> None:
    """Refuse a key that another algorithm claims, unless it has its default."""
    part = settings.cluster if key in type(settings.cluster).model_fields else settings.train
    value, default = getattr(part, key), type(part).model_fields[key].default
    if value != default:
        raise ConfigError(
            f"{key} is {value if isinstance(value, str) else show(value)}, which is {reason}; set {key} to "
            f"{show(default) if default is None else default}, or launch {name}"
        )


def save_resolved(settings: Settings, path: Path) -> None:
    """Keep the resolved configuration at `path`: YAML, a section a key, with all defaults written out.

    What `Settings.to_yaml` hides is not in it.

    Raises:
        SmolclusterError: the file cannot be written; what is there then is incomplete.
    """
    try:
        path.write_text(settings.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise SmolclusterError(
            one_line(f"{path}: cannot be written ({error.strerror or error})")
        ) from error


def node_overrides(overrides: Iterable[str]) -> list[str]:
    """Those of `overrides` that may be handed to a worker, see `check_node_overrides`.

    Raises:
        ConfigError: an override that is malformed or names no setting.
    """
    return [text for text in overrides if all(map(_is_for_worker, from_overrides([text])))]


def public_overrides(overrides: Iterable[str]) -> list[str]:
    """What of `overrides` others may see, in an order that means the same.

    Of one that sets more than environment variables, such as `nodes.pi5={env: {A: b}, threads: 2}`, the
    rest is kept.

    Raises:
        ConfigError: an override is malformed or names no setting.
    """
    public = []
    for text in overrides:
        assignments = from_overrides([text])
        if not any(map(_is_secret, assignments)):
            public.append(text)
            continue
        for assignment in assignments:
            if not _is_secret(assignment):
                public.append(_as_override(assignment))
    return public


def workload_overrides(stated: str | None) -> list[str]:
    """What `--workload` stands for.

    Raises:
        ConfigError: it is no name of a function, or its file is not here.
    """
    return [] if stated is None else [f"{WORKLOAD}={known_here(stated).text}"]


def server_overrides(stated: str | None, node: str) -> list[str]:
    """What `--server HOST:PORT` stands for.

    Raises:
        ConfigError: it is malformed.
    """
    if stated is None:
        return []
    host, colon, port = stated.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ConfigError(f"--server is {stated!r}, must be HOST:PORT such as 10.10.0.1:65432")
    return [f"host_ip.{node}={host.strip('[]')}", f"port={port}"]


def without_workload(overrides: Iterable[str]) -> list[str]:
    """Those of `overrides` that do more than to name the workload, which each process is told by a flag."""
    return [
        text
        for text in overrides
        if any(each.path[0] != WORKLOAD for each in from_overrides([text]))
    ]


def _is_secret(assignment: OverrideValue) -> bool:
    path = assignment.path
    return path[0] == ENV or (path[0] == "nodes" and path[2:3] == (ENV,))


def _as_override(assignment: OverrideValue) -> str:
    """The text of an override that makes the same assignment, whatever its names consist of."""
    first, *below = assignment.path
    value = assignment.value
    for part in reversed(below):
        value = {part: value}
    return f"{first}={json.dumps(value, default=str, ensure_ascii=False)}"


def check_node_overrides(overrides: Iterable[str]) -> None:
    """Refuse overrides in which a worker has no say: the server owns the run.

    A worker decides what belongs to its machine, and how it gets to the server.

    Raises:
        ConfigError: an override that is malformed, names no setting, or is the server's.
    """
    for assignment in from_overrides(overrides):
        if not _is_for_worker(assignment):
            own_keys = [".".join(path) for path in fixed_paths(NodeConfig)]
            key = ".".join(assignment.path)
            listed = as_command("config", "show", "--node", "NODE")
            raise config_error(
                OVERRIDE_FLAG,
                f"{key} is not a worker's to set; give it to the server. A worker sets the keys that "
                f"{listed} lists under node, and {', '.join(_WORKER_CLUSTER_KEYS)}"
                f"{hint_at(key, [*own_keys, *_WORKER_CLUSTER_KEYS])}",
            )


def _is_for_worker(assignment: OverrideValue) -> bool:
    return assignment.is_node_key or assignment.path[0] in _WORKER_CLUSTER_KEYS


def _known_node(node_name: str | None, cluster: ClusterConfig) -> str:
    if node_name is None:
        return cluster.server
    node_name = cluster.node_of(node_name)
    if node_name not in cluster.host_ip:
        known, hint = ", ".join(cluster.host_ip), hint_at(node_name, cluster.host_ip)
        raise config_error(
            "node", f"{node_name!r} has no address in host_ip (known: {known}){hint}"
        )
    return node_name


def _node_values(
    cluster: Mapping[str, Any], train: Mapping[str, Any], node_name: str
) -> dict[str, Any]:
    of_run = train.get("dataset") or {}
    own = (cluster.get("nodes") or {}).get(node_name) or {}
    place = {key: of_run[key] for key in DatasetPlace.model_fields if key in of_run}
    return {**own, "dataset": {**place, **(own.get("dataset") or {})}}
