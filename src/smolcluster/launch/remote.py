"""Launching on the machines of a cluster: from what the user asked for to a run that is followed or left."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from smolcluster.configs.load import dump_yaml, find_config, read_config
from smolcluster.configs.nested import flatten, is_nested
from smolcluster.configs.resolve import check_algorithm
from smolcluster.configs.schema import HUB_NAME, ClusterConfig, DatasetPlace, NodeConfig
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.cluster_run import ClusterRun, Machine, Payload, left_running
from smolcluster.launch.doctor.packets import check_packets
from smolcluster.launch.find import find
from smolcluster.launch.host import HERE, Host
from smolcluster.launch.observe.beside import announce, stack_for
from smolcluster.launch.plan import (
    CLUSTER_FILE,
    TRAIN_FILE,
    NodePaths,
    PathsByNode,
    Request,
    plan_cluster,
)
from smolcluster.launch.prepare import forwarded, settings_in
from smolcluster.launch.requests import DEFAULT_TRAINING, cluster_source, settings_of
from smolcluster.launch.shipping import LokiAddress, loki_of
from smolcluster.launch.show_plan import show_plan
from smolcluster.launch.stop import stop_children
from smolcluster.launch.tmux import open_window, show_window, window_name
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.paths import RunPaths, check_run_id, create_run, new_run_id, runs_root
from smolcluster.transport.security import default_secret_path, ensure_secret
from smolcluster.utils.words import as_command

NOT_INHERITED = (
    *("TMUX", "TMUX_PANE", "TERM", "PWD", "OLDPWD", "SHLVL", "_"),
    *("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "IFS"),  # of which a shell lets none be set
)


TOLD_FILE = "launch/told.json"
"""In a run's folder on the machine that launched it; it may hold secrets."""


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch.

    Attributes:
        dry_run: only print the plan.
        sync: bring code and environment to the machines first.
        overwrite: replace what somebody has edited there, and keep it aside.
        tmux: open a window with a pane a process, where there is a terminal.
        detach: leave the run alone when all workers have joined.
        observe: start Grafana, Loki and Prometheus where they can be; None: as the cluster file says, and
            otherwise use those that run; False: leave them alone.
    """

    dry_run: bool = False
    sync: bool = True
    overwrite: bool = False
    tmux: bool = True
    detach: bool = False
    observe: bool | None = None


def launch_remote(
    request: Request, how: LaunchOptions, *, run_id: str | None = None, resume: bool = False
) -> int:
    """Run on the machines of the cluster file; returns the exit code.

    With `resume` the run of that id goes on from its newest good checkpoint.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    settings = settings_of(request, local=False)
    check_algorithm(settings, request.algorithm.name)
    run_id = run_id or new_run_id(request.algorithm.name, datetime.now().astimezone())
    cluster_file = find_config(cluster_source(request.config, request.algorithm.name), "cluster")
    train_file = find_config(request.train_config or DEFAULT_TRAINING, "training")
    stated = os.environ.get("SMOLCLUSTER_RUNS_DIR")
    here = runs_root(Path(stated) if stated else None)
    places = places_of(request, settings.cluster, cluster_file, train_file, here)
    launched = plan_cluster(request, settings.cluster, places, run_id)
    if resume:
        launched = launched.resumed()
    if how.dry_run:
        show_plan(launched, settings)
        return 0
    secret = ensure_secret(own_secret_file())
    payload = Payload(
        root=project_root(),
        cluster_file=without_env(cluster_file),
        train_file=train_file.read_bytes(),
        secret=secret.key,
    )
    machines = machines_of(settings.cluster, places, cluster_file)
    run = ClusterRun(launched, machines, RunPaths(here / check_run_id(run_id)), SteadyConsole())
    run.prepare(payload, sync=how.sync, overwrite=how.overwrite)
    check_packets(settings.cluster, places)
    told = StoredOptions(environ=settings_in(os.environ), overrides=request.overrides)
    keep(
        create_run(here, run_id, newest=False), cluster_file.read_bytes(), payload.train_file, told
    )
    stack = stack_for(how.observe, settings.cluster, run.say)
    if stack is not None:
        ssh = {node: place.ssh for node, place in places.items()}
        announce(stack, run_id, launched.processes, settings.cluster, ssh=ssh.get, say=run.say)
    run.start(loki_of(settings.cluster, stack))
    return go_on(run, launched, how)


def own_secret_file() -> Path:
    stated = os.environ.get("SMOLCLUSTER_SECRET_FILE")
    return Path(stated).expanduser() if stated else default_secret_path()


def without_env(cluster_file: Path) -> bytes:
    """A cluster file as it may travel: what one machine's environment holds is nobody else's business."""
    raw = read_config(cluster_file, "cluster")
    nodes = raw.get("nodes") or {}
    if not any("env" in (node or {}) for node in nodes.values()):
        return cluster_file.read_bytes()
    bare = {
        name: {key: value for key, value in (node or {}).items() if key != "env"}
        for name, node in nodes.items()
    }
    return dump_yaml({**raw, "nodes": bare}).encode()


class StoredOptions(BaseModel):
    """What a launch was told besides its files: settings of the environment, and all overrides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environ: dict[str, str]
    overrides: tuple[str, ...]


TOLD = ModelFile[StoredOptions](StoredOptions, "is damaged")


def keep(paths: RunPaths, cluster_file: bytes, train_file: bytes, told: StoredOptions) -> None:
    """Keep a run's configuration with it, where only its user reads it, for who lets it go on.

    Raises:
        LaunchError: they cannot be written.
    """
    try:
        (paths.root / CLUSTER_FILE).parent.mkdir(mode=0o700, exist_ok=True)
        (paths.root / CLUSTER_FILE).write_bytes(cluster_file)
        (paths.root / TRAIN_FILE).write_bytes(train_file)
        (paths.root / TOLD_FILE).touch(mode=0o600)
        (paths.root / TOLD_FILE).write_bytes(TOLD.text(told))
    except OSError as error:
        raise LaunchError(f"{paths.root} cannot be written: {error.strerror or error}") from error


def launch_here(
    launched: Launched,
    paths: RunPaths,
    console: Console,
    how: LaunchOptions,
    loki: LokiAddress | None = None,
) -> int:
    """Run a plan of this machine alone in tmux sessions; returns the exit code.

    `loki`: where the logs go; None: nowhere.

    Raises:
        LaunchError: what prevents it, in one line.
    """
    env = inherited()
    machines = {
        process.node: Machine(Host(process.node), process.project_dir, "pypi", env)
        for process in launched.processes
    }
    run = ClusterRun(launched, machines, paths, console)
    run.keep_what_waits()
    run.start(loki)
    return go_on(run, launched, how)


def wants_window(how: LaunchOptions) -> bool:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return how.detach or (how.tmux and on_terminal and shutil.which("tmux") is not None)


def go_on(run: ClusterRun, launched: Launched, how: LaunchOptions) -> int:
    if run.is_over:  # a small one may end before its last worker is there, who must not wait for it
        return run.follow()
    has_window = how.tmux and shutil.which("tmux") is not None
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if has_window and (how.detach or on_terminal):
        try:
            open_window(launched.run_id, run.with_devices(), stop_command(run.folder))
        except LaunchError as error:
            run.say(f"no window: {error}", "yellow")
            has_window = False
    elif on_terminal:
        run.say("without a window: Ctrl-C asks whether to leave the run or to stop it")
    if how.detach:
        run.say(left_running(launched.run_id))
        return 0
    if has_window and on_terminal:
        show_window(window_name(launched.run_id))
        return run.left_window()
    return run.follow()


def attach(run: str) -> int:
    """Show a launched run in a window of this terminal; returns the exit code.

    Raises:
        SmolclusterError: there is no such run, or no terminal.
    """
    paths = find(run)
    if not paths.launched.is_file():
        raise ConfigError(
            f"run {paths.run_id} has no sessions to attach to: it ran without tmux, or was launched elsewhere"
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LaunchError(f"attach needs a terminal; {as_command('logs', '--follow')} needs none")
    launched = read_launched(paths.launched)
    shown = ClusterRun(launched, {}, paths, SteadyConsole())
    shown.check_alive()
    show_window(open_window(launched.run_id, shown.with_devices(), stop_command(shown.folder)))
    return shown.left_window()


def stop(run: str, *, now: bool) -> int:
    """Stop a run on all its machines, and see that nothing is left; returns the exit code.

    With `now` all are killed at once, and nothing is saved.

    Raises:
        SmolclusterError: there is no such run.
    """
    paths = find(run, acts=True)
    if not paths.launched.is_file():
        return stop_children(paths, now=now)
    launched = read_launched(paths.launched)
    return ClusterRun(launched, {}, paths, SteadyConsole()).stop(in_a_hurry=now)


def stop_command(folder: Path) -> str:
    """What a shell runs to stop the run that is kept in a folder, wherever and however it is started."""
    program = "from smolcluster.cli import main; raise SystemExit(main())"
    return shlex.join([sys.executable, "-c", program, "stop", str(folder)])


def project_root() -> Path:
    """The checkout that this is.

    Raises:
        LaunchError: it is none, so that there is nothing to bring to other machines.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file():
        raise LaunchError("launching on other machines needs a checkout of the project: clone it")
    return root


def places_of(
    request: Request, cluster: ClusterConfig, cluster_file: Path, train_file: Path, here: Path
) -> PathsByNode:
    """Where the run lives on each machine; `here`: this one's folder of runs."""
    raw = read_config(cluster_file, "cluster").get("nodes") or {}
    data = list(_data_overrides(train_file))
    places = {}
    for node in dict.fromkeys((cluster.server, *cluster.workers)):
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
        runs_dir = _override_of(request, "runs_dir") or stated.get("runs_dir")
        places[node] = NodePaths(
            ssh=config.ssh or node,
            project_dir=config.project_dir,
            runs_dir=(runs_dir or f"{config.project_dir}/runs").rstrip("/"),
            overrides=tuple(
                text for text in data if text.partition("=")[0].rpartition(".")[2] not in own
            ),
        )
    return places


def machines_of(
    cluster: ClusterConfig, places: PathsByNode, cluster_file: Path
) -> Mapping[str, Machine]:
    raw = read_config(cluster_file, "cluster").get("nodes") or {}
    machines = {}
    for node, place in places.items():
        config = cluster.nodes.get(node, NodeConfig())
        machines[node] = Machine(
            host=Host(node, place.ssh),
            project_dir=place.project_dir,
            torch=config.torch,
            env=(inherited() if place.ssh is None else forwarded(os.environ)) | config.env,
            secret_file=(raw.get(node) or {}).get("secret_file"),
            kept=tuple(own_paths(raw.get(node) or {}, place.project_dir, place.runs_dir)),
        )
    return machines


def own_paths(stated: Mapping[str, Any], project_dir: str, runs_dir: str | None) -> Iterator[str]:
    """What a machine keeps below the project's folder besides the project, as patterns of rsync."""
    dataset = stated.get("dataset") or {}
    places = (dataset.get(name) for name in ("root", "cache", "tokenizer_path"))
    paths = [runs_dir, stated.get("secret_file"), *places]
    for path in filter(None, paths):
        if str(path).startswith(f"{project_dir}/"):
            yield str(path).removeprefix(project_dir).rstrip("/")


def inherited() -> dict[str, str]:
    """The environment of this process, for processes of this machine that tmux starts."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and name.isidentifier()
    }


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


def resume_remote(
    paths: RunPaths, launched: Launched, overrides: Sequence[str], how: LaunchOptions
) -> int:
    """Let a run go on on its machines, from its newest good checkpoint; returns the exit code.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    from smolcluster.configs.spec import get_algorithm  # noqa: PLC0415

    files = paths.root / CLUSTER_FILE, paths.root / TRAIN_FILE
    if not all(file.is_file() for file in files):
        raise ConfigError(f"run {paths.run_id} was not launched from here: {files[0]} is missing")
    told = or_none(TOLD.read, paths.root / TOLD_FILE)  # a launch of before has left none
    told = told or StoredOptions(environ={}, overrides=launched.overrides)
    for name, value in told.environ.items():
        os.environ.setdefault(name, value)  # what is set now wins
    request = Request(
        algorithm=get_algorithm(launched.algorithm),
        config=str(files[0]),
        train_config=str(files[1]),
        overrides=(*told.overrides, *overrides),
    )
    return launch_remote(request, how, run_id=paths.run_id, resume=True)
