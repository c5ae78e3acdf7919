"""Where a run lives on each machine, and what its processes there are given."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smolcluster.configs.load import read_config
from smolcluster.configs.schema import HUB_NAME, ClusterConfig, DatasetPlace, NodeConfig, Settings
from smolcluster.configs.sections import flatten, is_nested
from smolcluster.launch.host import HERE, Host
from smolcluster.launch.installed import installed_project
from smolcluster.launch.plan import NodePaths, PathsByNode, Request
from smolcluster.launch.prepare import HUB_KEY, WANDB_KEY, Machine, forwarded
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


def places_here(request: Request, settings: Settings, root: Path) -> PathsByNode:
    """All on this machine, with one compute thread each, but where the user has set their number.

    Side by side more threads get into each other's way.
    """
    here = NodePaths(
        ssh=None,
        project_dir=str(root),
        runs_dir=str(root),
        python=sys.executable,
        overrides=tuple(place_overrides(settings)),
    )
    nodes = settings.cluster.machines
    if request.algorithm.is_group:  # one process, whose ranks share the cores
        return dict.fromkeys(nodes, here)
    stated = {node: settings_of(request, True, node).node.threads for node in nodes}
    return {node: replace(here, threads=1 if stated[node] is None else None) for node in nodes}


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


def places_of(
    request: Request,
    cluster: ClusterConfig,
    cluster_file: Path,
    train_file: Path,
    *,
    here: Path,
    project: Project,
) -> PathsByNode:
    """Where the run lives on each machine; `here`: this one's folder of runs."""
    raw = read_config(cluster_file, "cluster").get("nodes") or {}
    data = list(_data_overrides(train_file))
    places = {}
    for node in cluster.machines:
        config = cluster.nodes.get(node, NodeConfig())
        if config.ssh == HERE:
            places[node] = NodePaths(
                ssh=None,
                project_dir=str(project_root()),
                runs_dir=str(here),
                python=sys.executable,
                overrides=tuple(data),
            )
            continue
        stated = raw.get(node) or {}
        own = stated.get("dataset") or {}
        default = RUNS if config.project_dir is None else f"{config.project_dir}/runs"
        runs_dir = _override_of(request, "runs_dir") or stated.get("runs_dir") or default
        places[node] = NodePaths(
            ssh=config.ssh or node,
            project_dir=config.project_dir or project.folder(config.torch),
            runs_dir=runs_dir.rstrip("/"),
            overrides=tuple(
                text for text in data if text.partition("=")[0].rpartition(".")[2] not in own
            ),
        )
    return places


def _data_overrides(train_file: Path) -> Iterator[str]:
    """Where the training file says that the data are, in its own words: `~` is each machine's own."""
    train: Mapping[str, Any] = read_config(train_file, "training")
    if is_nested(train):
        train, _ = flatten(train, str(train_file))
    dataset = train.get("dataset") or {}
    if "tokenizer" in dataset and not re.fullmatch(HUB_NAME, dataset["tokenizer"]):
        dataset.setdefault("tokenizer_path", dataset["tokenizer"])
    for name in DatasetPlace.model_fields:
        if dataset.get(name) is not None:
            value = dataset[name]
            yield f"dataset.{name}={str(value).lower() if isinstance(value, bool) else value}"


def _override_of(request: Request, key: str) -> str | None:
    """The value that an override gives a key, the last one of it."""
    values = [text.partition("=")[2] for text in request.overrides if text.startswith(f"{key}=")]
    return values[-1] if values else None


def machines_of(
    request: Request, settings: Settings, places: PathsByNode, cluster_file: Path
) -> Mapping[str, Machine]:
    cluster = settings.cluster
    raw = read_config(cluster_file, "cluster").get("nodes") or {}
    machines = {}
    for node, place in places.items():
        config = cluster.nodes.get(node, NodeConfig())
        keys = keys_of(node, request, settings, os.environ | config.env)
        machines[node] = Machine(
            host=Host(node, place.ssh),
            project_dir=place.project_dir,
            torch=config.torch,
            env=(inherited() if place.ssh is None else forwarded(os.environ, keys)) | config.env,
            secret_file=(raw.get(node) or {}).get("secret_file"),
            is_own=config.project_dir is not None,
        )
    return machines


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
