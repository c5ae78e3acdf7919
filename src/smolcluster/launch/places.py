"""Where a run lives on each machine, and what its processes there are given."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smolcluster.configs.load import read_config
from smolcluster.configs.overrides import from_environment, from_overrides
from smolcluster.configs.resolve import Draft
from smolcluster.configs.schema import (
    HUB_NAME,
    DatasetPlace,
    NodeConfig,
    Settings,
    cluster_section,
)
from smolcluster.configs.sections import flatten, is_nested
from smolcluster.launch.host import HERE, Host
from smolcluster.launch.installed import installed_project
from smolcluster.launch.plan import Machine, Machines, Request
from smolcluster.launch.prepare import HUB_KEY, WANDB_KEY, forwarded
from smolcluster.launch.project import RUNS, Project
from smolcluster.launch.requests import settings_of
from smolcluster.observability.sinks.wandb import wandb_mode
from smolcluster.utils.folders import checkout
from smolcluster.wire.security import default_secret_path

NOT_INHERITED = (
    *("TMUX", "TMUX_PANE", "TERM", "PWD", "OLDPWD", "SHLVL", "_"),
    *("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "IFS"),  # of which a shell lets none be set
)


def project_root() -> Path:
    """The project as it is sent to other machines: the checkout, else what is installed.

    Raises:
        LaunchError: there is no checkout, and what is installed cannot be put together.
    """
    return checkout() or installed_project()


def own_secret_file() -> Path:
    stated = os.environ.get("SMOLCLUSTER_SECRET_FILE")
    return Path(stated).expanduser() if stated else default_secret_path()


def machines_here(request: Request, settings: Settings, root: Path) -> Machines:
    """All this one, with one compute thread a process, but where the user has set their number.

    Side by side more threads get into each other's way.
    """
    data, env = tuple(place_overrides(settings)), inherited()

    def here(node: str) -> Machine:
        is_free = request.algorithm.is_group  # one process, whose ranks share the cores
        is_free = is_free or settings_of(request, True, node).node.threads is not None
        return Machine(
            host=Host(node),
            project_dir=str(Path.cwd()),  # what the user names is where a child would look for it
            runs_dir=str(root),
            python=sys.executable,
            overrides=data,
            threads=None if is_free else 1,
            env=env,
        )

    return {node: here(node) for node in settings.cluster.machines}


def place_overrides(settings: Settings) -> list[str]:
    """Where the data are on this machine, for workers, which do not read the training file."""
    place = settings.node.dataset
    root = [] if place.root is None else [f"dataset.root={place.root}"]
    cache = [] if place.cache is None else [f"dataset.cache={place.cache}"]
    tokenizer = settings.train.dataset.at(place)
    files = (
        [f"dataset.tokenizer_path={tokenizer.tokenizer}"] if tokenizer.has_tokenizer_path else []
    )
    return [*root, *cache, *files, f"dataset.download={str(place.download).lower()}"]


def machines_of(
    request: Request,
    settings: Settings,
    cluster_file: Path,
    train_file: Path,
    *,
    here: Path,
    project: Project,
) -> Machines:
    """The machines of a cluster, by their names; `here`: this one's folder of runs."""
    raw = nodes_as_written(cluster_file, request.overrides)
    own_keys = {each.path for each in from_environment(os.environ)}
    data = {
        key: value
        for key, value in _data_settings(train_file).items()
        if ("dataset", key) not in own_keys
    }
    keys = [text.partition("=") for text in request.overrides]
    asked_dir = next((value for key, _, value in reversed(keys) if key == "runs_dir"), None)

    def machine(node: str) -> Machine:
        stated, config = raw.get(node) or {}, settings.cluster.nodes.get(node, NodeConfig())
        found = machine_of(node, config, stated, here=here, project=project)
        own = stated.get("dataset") or {}
        texts = (f"dataset.{key}={value}" for key, value in data.items() if key not in own)
        found = replace(found, overrides=tuple(texts))
        if found.is_here:
            return replace(found, env=inherited() | config.env)
        needed = keys_of(node, request, settings, os.environ | config.env)
        return replace(
            found,
            runs_dir=(asked_dir or found.runs_dir).rstrip("/"),
            env=forwarded(os.environ, needed) | config.env,
        )

    return {node: machine(node) for node in settings.cluster.machines}


def nodes_as_written(cluster_file: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """`nodes` in the words of the file, the environment and the overrides: `~` is each machine's own.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    draft = Draft(cluster_section(), str(cluster_file), read_config(cluster_file, "cluster"))
    for assignment in (*from_environment(os.environ), *from_overrides(overrides)):
        if assignment.path[0] == "nodes":
            draft.take(assignment)
    nodes: Mapping[str, Any] | None = draft.values.get("nodes")
    return nodes or {}


def machine_of(
    node: str, config: NodeConfig, stated: Mapping[str, Any], *, here: Path, project: Project
) -> Machine:
    """Where runs live on a machine of a cluster, whose settings are `stated` as `nodes_as_written`."""
    found = Machine(
        host=Host(node, config.ssh or node),
        project_dir=config.project_dir or project.folder(config.torch),
        runs_dir=stated.get("runs_dir")
        or (RUNS if config.project_dir is None else f"{config.project_dir}/runs"),
        torch=config.torch,
        secret_file=stated.get("secret_file"),
        is_own=config.project_dir is not None,
    )
    if config.ssh != HERE:
        return found
    return replace(
        found,
        host=Host(node),
        project_dir=str(project_root()),
        runs_dir=str(here),
        python=sys.executable,
        is_own=False,
    )


def _data_settings(train_file: Path) -> dict[str, str]:
    """Where the training file says that the data are, in its own words: `~` is each machine's own."""
    train: Mapping[str, Any] = read_config(train_file, "training")
    if is_nested(train):
        train, _ = flatten(train, str(train_file))
    dataset = train.get("dataset") or {}
    if "tokenizer" in dataset and not re.fullmatch(HUB_NAME, dataset["tokenizer"]):
        dataset.setdefault("tokenizer_path", dataset["tokenizer"])
    stated = {name: dataset[name] for name in DatasetPlace.model_fields if name in dataset}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in stated.items()
        if value is not None
    }


def keys_of(
    node: str, request: Request, settings: Settings, environ: Mapping[str, str]
) -> Sequence[str]:
    """The keys that the processes on a node need: of W&B who reports to it, of the hub who may read from it.

    `environ`: what the processes there would have.
    """
    cluster, train = settings.cluster, settings.train
    reporting = {cluster.server, *(() if request.algorithm.is_group else cluster.workers)}
    has_own_code = bool(request.script or request.workload or train.workload)
    reads_hub = has_own_code or train.dataset.reads_hub
    reports = node in reporting and wandb_mode(environ) == "online"
    return [*([WANDB_KEY] if reports else []), *([HUB_KEY] if reads_hub else [])]


def inherited() -> dict[str, str]:
    """The environment of this process, for processes of this machine that tmux starts."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and name.isidentifier()
    }
