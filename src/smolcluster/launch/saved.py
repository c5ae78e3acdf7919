"""The baseline, and a run that goes on, as commands."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel

from smolcluster.algorithms import single
from smolcluster.algorithms.claim import AUTO, run_name
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.algorithms.process import process_log
from smolcluster.configs.machines import LOOPBACK
from smolcluster.configs.overrides import from_environment, from_overrides
from smolcluster.configs.resolve import Draft, load_resolved, load_settings
from smolcluster.configs.schema import NodeConfig, Settings
from smolcluster.configs.spec import SINGLE, default_algorithm, get_algorithm
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.launch.find import find, in_folder
from smolcluster.launch.flow import LaunchOptions, launch
from smolcluster.launch.kept import check_launched_here, going_on, keeping_steps
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import known_script, resolved
from smolcluster.launch.take_in import script_of
from smolcluster.observability.logs import console_logger
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.launched import Launched, launched_of
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import LATEST as LATEST_RUN
from smolcluster.runs.paths import RunPaths, find_run, runs_root
from smolcluster.runs.summary import check_unfinished
from smolcluster.server.offering import ATTACHED_DATA
from smolcluster.training.checkpoint import (
    CheckpointStore,
)
from smolcluster.utils.units import format_count
from smolcluster.utils.words import as_command


def resume(
    run: str,
    num_workers: int | None,
    overrides: Sequence[str],
    how: LaunchOptions,
    *,
    without: Sequence[str] = (),
) -> int:
    """Start a whole run again where it ran, from its newest good checkpoint; returns the exit code.

    `without`: nodes of a run over SSH that take no part any more.

    Raises:
        ConfigError: there is no such run, or it did not get as far as to begin.
        RunBusy: it is still alive.
    """
    paths = find(run)
    launched = launched_of(paths)
    has_machines = launched is not None and not (launched.is_local or launched.is_job)
    if without and not has_machines:
        raise ConfigError(
            f"--without {without[0]}: it leaves out machines that are reached over SSH, and run "
            f"{paths.run_id} has none"
        )
    if launched is None or (launched.is_local and not launched.is_job):
        return _resume_here(paths, launched, num_workers, overrides, how)
    if launched.is_job:
        how = replace(how, on=launched.server.scheduler or how.on)
    elif num_workers is not None:
        raise ConfigError("--workers: the workers of a cluster are those of its file")
    request = going_on(paths, launched, overrides, without)
    return _launch_again(paths, request, how, local=False)


def _launch_again(paths: RunPaths, request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Launch a run that goes on, if it has not ended or is asked for more than it had."""
    asked = resolved(request, local=local)
    check_unfinished(paths, asked.settings.train)
    return launch(asked.checked(), how, run_id=paths.run_id, resume=True)


def _resume_here(
    paths: RunPaths,
    launched: Launched | None,
    num_workers: int | None,
    overrides: Sequence[str],
    how: LaunchOptions,
) -> int:
    with run_lock(paths.lock):  # the server takes it again
        settings = load_resolved(paths.config)
        store = store_of(paths)
        checkpoint = store.newest_good(is_loaded=False)
        name = checkpoint.state.algorithm if checkpoint else _algorithm(paths)
    if checkpoint is None and store.count():
        raise CheckpointError(
            f"none of the {format_count(store.count(), 'checkpoint')} of {paths.run_id} is good"
        )
    if launched is not None and launched.is_group:
        name = launched.algorithm
    if name == SINGLE:
        return _resume_single(paths, settings, num_workers, overrides, dry_run=how.dry_run)
    algorithm = get_algorithm(name)
    if set(settings.cluster.host_ip.values()) != {LOOPBACK}:
        raise ConfigError(
            f"run {paths.run_id} was not a local one: start its server with --resume {paths.run_id}, and its "
            "workers as before"
        )
    script = None
    if launched is not None and not launched.is_group:
        script = script_of(launched.workers[0])
    if script is not None:
        check_launched_here(paths)
    if script is None and settings.train.dataset.name == ATTACHED_DATA:
        raise ConfigError(
            f"run {paths.run_id} was not launched: go on with "
            f"{as_command('serve', 'CLUSTER', '--algorithm', algorithm.name, '--resume', paths.run_id)}, "
            "and start its processes as before"
        )
    request = Request(
        algorithm=algorithm,
        config=str(paths.config),
        train_config=str(paths.config),
        overrides=(*_kept(settings, paths, algorithm.name), *overrides),
        num_workers=num_workers,
        script=script and known_script(script),
        is_open=how.invite,
    )
    request = keeping_steps(request, settings, settings, overrides, local=True)
    return _launch_again(paths, request, how, local=True)


def _resume_single(
    paths: RunPaths,
    settings: Settings,
    num_workers: int | None,
    overrides: Sequence[str],
    *,
    dry_run: bool,
) -> int:
    if num_workers is not None:
        raise ConfigError(f"--workers: run {paths.run_id} trains in one process and has none")
    if not dry_run:
        return _go_on(paths, settings, overrides, paths.run_id)
    stated = [f"seed={settings.cluster.seed}", *_kept(settings, paths, SINGLE), *overrides]
    options = ["--config", str(paths.config), "--resume", paths.run_id, "--override", *stated]
    sys.stdout.write(shlex.join(["smolcluster", "train", *options]) + "\n")
    return 0


def _go_on(paths: RunPaths, settings: Settings, overrides: Sequence[str], resume: str) -> int:
    kept = _kept(settings, paths, SINGLE)
    config = str(paths.config)
    return train(config, [*kept, *overrides], cluster=config, run_id=paths.run_id, resume=resume)


def train_or_go_on(
    config: str | None,
    overrides: Sequence[str],
    *,
    default: str,
    run_id: str | None,
    resume: str | None,
) -> int:
    """The command `train`; returns the exit code.

    A run that goes on does so with its own configuration, unless a file is named.

    Args:
        config: training file, by path or shipped name; None: the run's own, else `default`.
        overrides: `key=value` texts, on top of either.
        default: the file of a run that begins.
        run_id: name of the run; None: made from the time, or that of `resume`.
        resume: a run to go on with: its name or folder, latest, or auto; None: a new run.

    Raises:
        ConfigError: there is no such run, or a file, key or value is wrong.
    """
    paths = None if resume is None else _run_meant(run_id, resume, overrides)
    if resume is None or paths is None:
        return train(config or default, overrides, run_id=run_id, resume=resume)
    resume = AUTO if resume == AUTO else paths.run_id
    if config is None and paths.config.is_file():
        return _go_on(paths, load_resolved(paths.config), overrides, resume)
    overrides = [f"runs_dir={json.dumps(str(paths.root.parent), ensure_ascii=False)}", *overrides]
    return train(config or default, overrides, run_id=paths.run_id, resume=resume)


def _run_meant(run_id: str | None, resume: str, overrides: Sequence[str]) -> RunPaths | None:
    """The run that `--run-id` and `--resume` mean; None: one that begins now.

    Raises:
        ConfigError: there is no such run, or the two differ.
    """
    if (paths := in_folder(resume)) is not None:
        run_name(run_id, paths.run_id, has_latest=False)
        return paths
    node = Draft(NodeConfig, "cluster configuration", {})
    for assignment in (*from_environment(os.environ), *from_overrides(overrides)):
        node.take(assignment)
    root = runs_root(node.check().runs_dir)
    name = run_name(run_id, resume, has_latest=(root / LATEST_RUN).exists())
    if name is None or (resume == AUTO and not (root / name).exists()):
        return None
    return find_run(root, name)


def _algorithm(paths: RunPaths) -> str:
    started = read_snapshot(paths).started
    if started is None:
        raise ConfigError(
            f"run {paths.run_id} did not get as far as to begin: launch a new one instead"
        )
    return started.algorithm


def _kept(settings: Settings, paths: RunPaths, algorithm: str) -> Iterator[str]:
    """What the run's machine said, as overrides."""
    node, server = settings.node, settings.cluster.server
    everybodys = {"runs_dir": paths.root.parent, "secret_file": node.secret_file}
    yield from _assignments(node.model_copy(update=everybodys), only=("runs_dir", "secret_file"))
    yield from _assignments(node.dataset, "dataset.")
    own = ("device", "microbatch", *(["threads"] if algorithm == SINGLE else []))
    stated = node.model_dump(mode="json", include={*own}, exclude_none=True)
    for key, value in stated.items():  # the server's name may have dots
        yield f"nodes={json.dumps({server: {key: value}}, ensure_ascii=False)}"


def _assignments(
    section: BaseModel, prefix: str = "", only: Collection[str] | None = None
) -> Iterator[str]:
    for name, value in section:
        if value is not None and (only is None or name in only):
            yield f"{prefix}{name}={json.dumps(value, default=str, ensure_ascii=False)}"


def store_of(paths: RunPaths) -> CheckpointStore:
    return CheckpointStore(paths.checkpoints, 1, console_logger())


def train(
    config: str,
    overrides: Sequence[str],
    *,
    run_id: str | None = None,
    resume: str | None = None,
    cluster: str | None = None,
) -> int:
    """Train what the training file `config` says, all in this process; returns the exit code.

    Args:
        config: a path or a shipped name.
        overrides: `key=value` texts.
        run_id: name of the run; None: made from the time.
        resume: a run that it goes on with, latest, or auto; None: a new run.
        cluster: the file whose seed is taken, so that the baseline begins as the cluster does, and how often
            checkpoints are; None: the default algorithm's.
    """
    settings = load_settings(
        cluster or default_algorithm().name, config, None, overrides, local=True, local_workers=1
    )
    return guarded(lambda: _train(settings, run_id, resume))


def _train(settings: Settings, run_id: str | None, resume: str | None) -> None:
    console, host = SteadyConsole(stderr=True), platform.node()
    with process_log("trainer", host, console=console) as log:
        own_run(
            Owner(SINGLE, "trainer", host, settings),
            log,
            single.train,
            run_id=run_id,
            resume=resume,
            progress=console,
            output=SteadyConsole(),
        )
