"""One configuration out of files, environment and command line.

Precedence, highest first: `--override a.b=c`; the environment's `SMOLCLUSTER_A__B`; `nodes.<name>` of the
cluster file, for what belongs to a machine; the file; the schema's default.

The first part of a key says which section it belongs to. `dataset` is in two: `dataset.name` is the run's;
`dataset.root` and `dataset.download` are this machine's. Where a machine says nothing about its dataset, the
training file's `dataset.root` and `dataset.download` hold.
"""

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from smolcluster.configs.begun import check_workload
from smolcluster.configs.checks import check_cluster
from smolcluster.configs.function_name import check_secrets
from smolcluster.configs.keys import KeyPath, find_shape, setting_errors
from smolcluster.configs.load import (
    NODE_SECTION,
    find_config,
    is_of_run,
    part_of,
    read_config,
    read_yaml,
)
from smolcluster.configs.machines import LOCAL_NAMES, check_server, localise, without_nodes
from smolcluster.configs.old_keys import OLD_KEYS, read_old_key
from smolcluster.configs.overrides import WORKLOAD, OverrideValue, from_environment, from_overrides
from smolcluster.configs.problems import Place, SettingError, UnknownKey
from smolcluster.configs.schema import (
    ClusterConfig,
    DatasetPlace,
    NodeConfig,
    Section,
    Settings,
    cluster_section,
    config_of,
    train_section,
)
from smolcluster.configs.sections import Told, flatten, unknown_key
from smolcluster.configs.spec import algorithms
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.utils.words import hint_at, one_line

S = TypeVar("S", bound=Section)


@dataclass
class Draft(Generic[S]):
    """One section while layers are put on it.

    Attributes:
        source: what the lowest layer is called in messages.
        values: changed in place; give it a copy.
        told: of each key that was set, what it is called there, and the file, flag or variable.
    """

    section: type[S]
    source: str
    values: dict[str, Any]
    told: Told = field(default_factory=dict)

    def take(self, assignment: OverrideValue) -> None:
        """Set the value, if its key is one of this section's."""
        if find_shape(self.section, assignment.path) is None:
            return
        target = self.values
        path: KeyPath = ()
        *above, last = assignment.path
        for part in above:
            name = _existing(target, part, assignment)
            path = (*path, name)
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
            if not isinstance(target, dict):
                return  # check() will say that a mapping must stand here
        name = _existing(target, last, assignment)
        old = name if not path or path[-1] == "stages" else ".".join((*path, name))
        if old in OLD_KEYS and path and "." in old:  # it says something beside its section
            target, path = self.values, ()
        said = {name: assignment.value}
        if old in OLD_KEYS:
            try:
                said = read_old_key(target, old, assignment.value, assignment.origin)
            except SettingError as error:
                raise error.placed(assignment.written, assignment.origin) from None
        target.update(said)
        for each in said:
            self.told[(*path, each)] = (assignment.written, assignment.origin)

    def check(self, fits: Callable[[S], object] = lambda _: None) -> S:
        """The finished section, whose values agree with each other as `fits` says.

        Raises:
            SettingError: what is wrong with it.
        """
        try:
            section = self.section.model_validate(self.values)
            fits(section)
        except ValidationError as error:
            found = setting_errors(self.section, error)
        except SettingError as error:
            found = [error]
        else:
            return section
        first, *others = map(self._placed, found)
        first.others = tuple(others)
        raise first

    def _placed(self, error: SettingError) -> SettingError:
        """An error of the section in the words, and with the source, of whoever set the key."""
        place, source = self._told(error.place)
        below = [
            said
            for also in error.also
            for key, (_, said) in self.told.items()
            if key[: len(also)] == also
        ]
        sources = [source, *(self._told(also)[1] for also in error.also), *below]
        source = next((each for each in sources if each != self.source), self.source)
        if isinstance(error, UnknownKey) and not error.kind:
            path = tuple(map(str, error.place))
            return unknown_key(path, place, error.known, source, here=self.section)
        return error.placed(place, source)

    def _told(self, place: Place) -> tuple[Place, str]:
        """A place as whoever set it calls it, and the file, flag or variable."""
        path = tuple(map(str, place))
        for length in range(len(path), 0, -1):
            if path[:length] in self.told:
                written, source = self.told[path[:length]]
                return (*written, *place[length:]), source
        return place, self.source


def _existing(mapping: Mapping[str, Any], part: str, assignment: OverrideValue) -> str:
    """The key of `mapping` that `part` means; `part` itself when there is none."""
    if part in mapping:
        return part
    return next((known for known in mapping if assignment.names(known, part)), part)


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
        _, stated = checked_cluster(cluster, str(cluster_path))
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
    flat, stated = checked_cluster(content, str(path))
    return without_nodes(flat, stated, names)


def checked_cluster(
    content: Mapping[str, Any], source: str
) -> tuple[dict[str, Any], ClusterConfig]:
    """A cluster file in the flat shape, and what it says.

    Raises:
        ConfigError: it is wrong.
    """
    flat, told = flatten(content, source, of_training=False)
    return flat, Draft(cluster_section(), source, flat, told).check(check_cluster)


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
    cluster, cluster_told = flatten(cluster, cluster_file, of_training=False)
    train, train_told = flatten(train, train_file)
    layers = (from_environment(environ or {}), from_overrides(overrides))
    stated = [each for layer in layers for each in sorted(layer, key=_is_old)]
    local_names = cluster.get(LOCAL_NAMES)
    names = local_names if isinstance(local_names, dict) else {}
    assignments = [assignment.of_nodes(names) for assignment in stated]
    cluster_draft = Draft(cluster_section(), cluster_file, copy.deepcopy(cluster), cluster_told)
    train_draft = Draft(train_section(), train_file, copy.deepcopy(train), train_told)
    for assignment in assignments:
        cluster_draft.take(assignment)
        train_draft.take(assignment)
    checked_cluster = cluster_draft.check(check_cluster)
    checked_train = train_draft.check().for_any_folder()
    name = _known_node(node_name, checked_cluster)
    node_draft = Draft(NodeConfig, cluster_file, _node_values(cluster, train, name))
    for assignment in assignments:
        node_draft.take(assignment.seen_by(name))
    settings = Settings(checked_cluster, checked_train, node_draft.check(), name)
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
    return resolved_from(read_yaml(path), str(path))


def resolved_from(content: dict[str, Any], source: str) -> Settings:
    """The same of what such a file holds, which is called `source`.

    Raises:
        ConfigError: it is not such a configuration.
    """
    node = content.get(NODE_SECTION)
    cluster, train = part_of(content, "cluster"), part_of(content, "training")
    settings = resolve(cluster=cluster, train=train, cluster_file=source, train_file=source)
    if not isinstance(node, dict):
        raise ConfigError(
            f"{source}: is not the configuration of a run: it has no section {NODE_SECTION}"
        )
    return replace(settings, node=Draft(NodeConfig, source, copy.deepcopy(node)).check())


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


def _is_old(assignment: OverrideValue) -> bool:
    """Whether it sets an old key, which is read when the others of its layer are known."""
    return not OLD_KEYS.keys().isdisjoint({assignment.path[-1], ".".join(assignment.path)})


def _known_node(node_name: str | None, cluster: ClusterConfig) -> str:
    if node_name is None:
        return cluster.server
    node_name = cluster.node_of(node_name)
    if node_name not in cluster.host_ip:
        known, hint = ", ".join(cluster.host_ip), hint_at(node_name, cluster.host_ip)
        raise ConfigError(
            one_line(f"node: {node_name!r} has no address in host_ip (known: {known}){hint}")
        )
    return node_name


def _node_values(
    cluster: Mapping[str, Any], train: Mapping[str, Any], node_name: str
) -> dict[str, Any]:
    of_run = train.get("dataset") or {}
    own = (cluster.get("nodes") or {}).get(node_name) or {}
    place = {key: of_run[key] for key in DatasetPlace.model_fields if key in of_run}
    return {**own, "dataset": {**place, **(own.get("dataset") or {})}}
