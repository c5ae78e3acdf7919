"""Launching on the machines of a cluster: from what the user asked for to a run that is followed or left."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from smolcluster.configs.begun import is_known, remember
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.load import dump_yaml, find_config, read_config
from smolcluster.configs.meant import DEFAULT_TRAINING, cluster_source
from smolcluster.configs.overrides import workload_overrides
from smolcluster.configs.resolve import cluster_without
from smolcluster.configs.schema import HUB_NAME, ClusterConfig, DatasetPlace, NodeConfig, Settings
from smolcluster.configs.sections import flatten, is_nested
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.doctor.checks_links import check_packets
from smolcluster.launch.find import all_runs, find
from smolcluster.launch.group_plan import check_systems, plan, portable_request
from smolcluster.launch.host import HERE, Host
from smolcluster.launch.installed import installed_project
from smolcluster.launch.observe.beside import announce, stack_for
from smolcluster.launch.plan import (
    CLUSTER_FILE,
    TRAIN_FILE,
    NodePaths,
    PathsByNode,
    Request,
)
from smolcluster.launch.prepare import (
    HUB_KEY,
    WANDB_KEY,
    Machine,
    NotFit,
    check_port,
    examine,
    forwarded,
    make_ready,
    run_on_all,
    settings_in,
)
from smolcluster.launch.project import RUNS, Project, read_project
from smolcluster.launch.requests import (
    check_model,
    naming_workload,
    settings_of,
)
from smolcluster.launch.run import Run, left_running
from smolcluster.launch.sessions import host_of, put
from smolcluster.launch.shipping import loki_of
from smolcluster.launch.show_plan import show_plan
from smolcluster.launch.tmux import show_window, window_name
from smolcluster.launch.workload_check import calling
from smolcluster.launch.workload_code import (
    WORKLOAD_FILE,
    WorkloadCode,
    code_of,
    code_of_script,
    put_code,
)
from smolcluster.observability.sinks.wandb import wandb_mode
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.advice import ADVICE, Prediction
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, LaunchedProcess, launched_of
from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.paths import (
    ADVICE_FILE,
    RunPaths,
    check_run_id,
    create_run,
    new_run_id,
)
from smolcluster.runs.summary import check_unfinished
from smolcluster.utils.folders import checkout
from smolcluster.utils.words import as_command, hint_at
from smolcluster.wire.security import default_secret_path, ensure_secret

NOT_INHERITED = (
    *("TMUX", "TMUX_PANE", "TERM", "PWD", "OLDPWD", "SHLVL", "_"),
    *("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "IFS"),  # of which a shell lets none be set
)


TOLD_FILE = "launch/told.json"
"""In a run's folder on the machine that launched it; it may hold secrets."""

LAUNCH_FILES = (CLUSTER_FILE, TRAIN_FILE, TOLD_FILE, WORKLOAD_FILE)
"""What a launcher keeps with a run, for who lets it go on."""

Place = Literal["ssh", "slurm", "kubernetes"]


PLACES: Mapping[str, Place] = {each: each for each in get_args(Place)}


def place_of(stated: str, *, local: bool) -> Place:
    """Where `--on` says that a run is.

    Raises:
        ConfigError: it says something else, or also --local.
    """
    known = tuple(PLACES)
    if stated not in known:
        raise ConfigError(
            f"--on is {stated!r}, must be one of {', '.join(known)}{hint_at(stated, known)}"
        )
    if local and stated != "ssh":
        raise ConfigError(f"--local and --on {stated} are two places: leave one of them out")
    return PLACES[stated]


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch.

    Attributes:
        dry_run: only print the plan.
        sync: bring code and environment to machines that have not these.
        tmux: open a window with a pane a process, where there is a terminal.
        detach: leave the run alone when all workers have joined.
        observe: start Grafana, Loki and Prometheus where they can be; None: as the cluster file says, and
            otherwise use those that run; False: leave them alone.
        prediction: what was predicted of the run; None: nothing.
        on: where a group runs that is not this machine's alone.
    """

    dry_run: bool = False
    sync: bool = True
    tmux: bool = True
    detach: bool = False
    observe: bool | None = None
    prediction: Prediction | None = None
    on: Place = "ssh"


def launch_remote(
    request: Request, how: LaunchOptions, *, run_id: str | None = None, resume: bool = False
) -> int:
    """Run on the machines of the cluster file; returns the exit code.

    With `resume` the run of that id goes on from its newest good checkpoint.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    settings = settings_of(request, local=False)
    named = naming_workload(request, settings)
    check_algorithm(settings, request.algorithm.name)
    check_model(named, settings)
    run_id = run_id or new_run_id(request.algorithm.name, datetime.now().astimezone())
    cluster_file = find_config(cluster_source(request.config, request.algorithm.name), "cluster")
    train_file = find_config(named.train_config or DEFAULT_TRAINING, "training")
    here, project = all_runs(), read_project(project_root())
    places = places_of(
        request, settings.cluster, cluster_file, train_file, here=here, project=project
    )
    code, seen = _code_of(named)
    if request.algorithm.is_group:
        seen = portable_request(seen, settings)
    launched = plan(seen, settings, places, run_id)
    if resume:
        launched = launched.resumed()
    if how.dry_run:
        show_plan(launched, settings, code, has_known_model=named.script is None)
        return 0
    secret = ensure_secret(own_secret_file()).key
    machines = machines_of(named, settings, places, cluster_file)
    run = Run(launched, RunPaths(here / check_run_id(run_id)), SteadyConsole(), machines)
    train, here_env = settings.train, next((m.env for m in machines.values() if m.is_here), None)
    with calling(
        named.workload, train.workload_args, settings.cluster.seed, run.say, here_env
    ) as wait:
        _examine(machines.values(), run.say, how, settings.cluster)
        wait()
    if request.algorithm.is_group:
        hosts = [machine.host for machine in machines.values()]
        systems = run_on_all(hosts, lambda host: host.run("uname -s").stdout.strip())
        check_systems(list(systems.items()))
    run.keep_what_waits(without=request.without)
    check_port(host_of(launched.server), launched.port)
    make_ready(machines.values(), secret, run.say, project=project, sync=how.sync)
    put_configuration(
        launched, without_env(cluster_file, request.without), train_file.read_bytes(), code
    )
    check_packets(settings.cluster, places)
    overrides = (*request.overrides, *workload_overrides(named.workload))
    environ = settings_in(os.environ)
    told = StoredOptions(environ=environ, overrides=overrides, script=named.script)
    paths = create_run(here, run_id, newest=False)
    if how.prediction is not None:
        keep_prediction(how.prediction, launched.server, paths)
    keep(paths, _content(cluster_file, request.without), train_file.read_bytes(), told, code)
    stack = stack_for(how.observe, settings.cluster, run.say)
    if stack is not None:
        ssh = {node: place.ssh for node, place in places.items()}
        announce(stack, run_id, launched.processes, settings.cluster, ssh=ssh.get, say=run.say)
    run.start(loki_of(settings.cluster, stack))
    return go_on(run, launched, how)


def keep_prediction(prediction: Prediction, server: LaunchedProcess, paths: RunPaths) -> None:
    """Keep what was predicted there for the report, which the server makes, and here for the page.

    Raises:
        LaunchError, SmolclusterError: it cannot be written.
    """
    put(host_of(server), f"{server.run_dir}/{ADVICE_FILE}", ADVICE.text(prediction))
    ADVICE.write(paths.advice, prediction)


def _code_of(named: Request) -> tuple[WorkloadCode | None, Request]:
    """What is sent of the user's code, and the request as machines see it that have it."""
    if named.script is not None:
        code = code_of_script(named.script)
        return code, replace(named, script=code.name)
    found = None if named.workload is None else code_of(named.workload)
    return found, replace(named, workload=found.name if found else named.workload)


def put_configuration(
    launched: Launched, cluster_file: bytes, train_file: bytes, code: WorkloadCode | None = None
) -> None:
    """Write what the processes read, and the code of their workload, into their run's folders.

    Raises:
        LaunchError: it cannot be written.
    """
    server = launched.server
    for process in {each.node: each for each in reversed(launched.processes)}.values():
        put(host_of(process), f"{process.run_dir}/{CLUSTER_FILE}", cluster_file)
        if code is not None:
            put_code(host_of(process), process.run_dir, code.packed, code.name)
    readers = launched.processes if launched.is_group else (server,)
    for process in readers:
        put(host_of(process), f"{process.run_dir}/{TRAIN_FILE}", train_file)


def own_secret_file() -> Path:
    stated = os.environ.get("SMOLCLUSTER_SECRET_FILE")
    return Path(stated).expanduser() if stated else default_secret_path()


def _examine(
    machines: Collection[Machine],
    say: Callable[..., None],
    how: LaunchOptions,
    cluster: ClusterConfig,
) -> None:
    """As `examine`; says of workers' machines out of reach how a run is launched without them."""
    try:
        examine(machines, say, sync=how.sync)
    except NotFit as error:
        left_out = [node for node in error.unreached if node in cluster.workers]
        if not left_out or {cluster.server, *cluster.stage_nodes} & {*error.unreached}:
            raise
        flags = " ".join(f"--without {node}" for node in left_out)
        raise LaunchError(f"{error}; {flags} launches the others alone") from None


def _content(cluster_file: Path, without: Sequence[str]) -> bytes:
    """A cluster file, without these nodes."""
    if not without:
        return cluster_file.read_bytes()
    return dump_yaml(cluster_without(cluster_file, without)).encode()


def without_env(cluster_file: Path, without: Sequence[str] = ()) -> bytes:
    """A cluster file as it may travel: what one machine's environment holds is nobody else's business."""
    raw = cluster_without(cluster_file, without)
    nodes = {name: node or {} for name, node in (raw.get("nodes") or {}).items()}
    if any("env" in node for node in nodes.values()):
        for node in nodes.values():
            node.pop("env", None)
        raw["nodes"] = nodes
    elif not without:
        return cluster_file.read_bytes()
    return dump_yaml(raw).encode()


class StoredOptions(BaseModel):
    """What a launch was told besides its files: the environment's settings, all overrides, and a script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environ: dict[str, str]
    overrides: tuple[str, ...]
    script: str | None = None


TOLD = ModelFile[StoredOptions](StoredOptions, "is damaged")


def keep(
    paths: RunPaths,
    cluster_file: bytes,
    train_file: bytes,
    told: StoredOptions,
    code: WorkloadCode | None = None,
) -> None:
    """Keep a run's configuration with it, where only its user reads it, for who lets it go on.

    Raises:
        LaunchError: they cannot be written.
    """
    try:
        (paths.root / CLUSTER_FILE).parent.mkdir(mode=0o700, exist_ok=True)
        (paths.root / TOLD_FILE).touch(mode=0o600)
        packed = None if code is None else code.packed
        contents = (cluster_file, train_file, TOLD.text(told), packed)
        for name, content in zip(LAUNCH_FILES, contents, strict=True):
            if content is not None:
                remember(paths.run_id, name, content)
                (paths.root / name).write_bytes(content)
    except OSError as error:
        raise LaunchError(f"{paths.root} cannot be written: {error.strerror or error}") from error


def check_launched_here(paths: RunPaths) -> None:
    """Refuse to follow what a run's folder says of machines, commands and code if another has written it.

    Raises:
        ConfigError: one of its files is not as a launcher of this user has left it.
    """
    for file in (paths.launched, *(paths.root / name for name in LAUNCH_FILES)):
        name = file.relative_to(paths.root).as_posix()
        if file.is_file() and not is_known(paths.run_id, name, file.read_bytes()):
            raise ConfigError(
                f"run {paths.run_id} was not launched from here: {file} is not as a launcher of yours left "
                "it, and what it says of machines and code is not followed; launch a new run"
            )


def wants_window(how: LaunchOptions) -> bool:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return how.detach or (how.tmux and on_terminal and shutil.which("tmux") is not None)


def go_on(run: Run, launched: Launched, how: LaunchOptions) -> int:
    # A small one may end before its last worker is there, who must not wait for it.
    if not launched.has_sessions or run.is_over:
        return run.follow()
    has_window = how.tmux and not launched.is_job and shutil.which("tmux") is not None
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if has_window and (how.detach or on_terminal):
        try:
            run.open_window(is_shown=not how.detach)
        except LaunchError as error:
            run.say(f"no window: {error}", "yellow")
            has_window = False
    elif on_terminal:
        run.say("without a window: Ctrl-C asks whether to leave the run or to stop it")
    if how.detach:
        run.say(left_running(launched))
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
    launched = launched_of(paths)
    if launched is None or not launched.has_sessions or launched.is_job:
        raise ConfigError(
            f"run {paths.run_id} has no sessions to attach to: it ran without tmux, or was launched elsewhere"
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LaunchError(f"attach needs a terminal; {as_command('logs', '--follow')} needs none")
    shown = Run(launched, paths, SteadyConsole())
    shown.check_alive()
    show_window(shown.open_window(is_shown=True))
    return shown.left_window()


def stop(run: str, *, now: bool) -> int:
    """Stop a run on all its machines, and see that nothing is left; returns the exit code.

    With `now` all are killed at once, and nothing is saved.

    Raises:
        SmolclusterError: there is no such run.
    """
    paths = find(run, acts=True)
    launched = launched_of(paths)
    if launched is None:
        raise ConfigError(f"run {paths.run_id} was not launched from here: it lists no processes")
    return Run(launched, paths, SteadyConsole()).stop(in_a_hurry=now)


def project_root() -> Path:
    """The project as it is sent to other machines: the checkout, else what is installed.

    Raises:
        LaunchError: there is no checkout, and what is installed cannot be put together.
    """
    return checkout() or installed_project()


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


def request_again(
    paths: RunPaths, launched: Launched, overrides: Sequence[str], without: Sequence[str] = ()
) -> Request:
    """What to launch so that a run goes on which was launched from here; environment settings come back.

    `without`: nodes that take no part any more.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    files = paths.root / CLUSTER_FILE, paths.root / TRAIN_FILE
    if not all(file.is_file() for file in files):
        raise ConfigError(f"run {paths.run_id} was not launched from here: {files[0]} is missing")
    check_launched_here(paths)
    told = or_none(TOLD.read, paths.root / TOLD_FILE)  # a launch of before has left none
    told = told or StoredOptions(environ={}, overrides=launched.overrides)
    for name, value in told.environ.items():
        os.environ.setdefault(name, value)  # what is set now wins
    request = Request(
        algorithm=get_algorithm(launched.algorithm),
        config=str(files[0]),
        train_config=str(files[1]),
        overrides=(*told.overrides, *overrides),
        script=told.script,
        without=tuple(without),
    )
    if paths.summary.is_file():
        check_unfinished(paths, settings_of(request, local=False).train)
    return request
