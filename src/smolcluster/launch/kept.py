"""What a launcher keeps with a run, for who lets it go on, and how that is believed."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from smolcluster.configs.begun import is_known, remember
from smolcluster.configs.load import dump_yaml, parse_yaml
from smolcluster.configs.overrides import from_overrides
from smolcluster.configs.resolve import cluster_without, resolved_from
from smolcluster.configs.schema import Settings, config_of
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.plan import CLUSTER_FILE, TRAIN_FILE, Request
from smolcluster.launch.requests import settings_of
from smolcluster.launch.sessions import host_of, put, text_of
from smolcluster.launch.workload_code import WORKLOAD_FILE
from smolcluster.runs.advice import ADVICE, Prediction
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.paths import ADVICE_FILE, RunPaths

TOLD_FILE = "launch/told.json"
"""In a run's folder on the machine that launched it; it may hold secrets."""

GLOBAL_BATCH = "global_batch_size"

LAUNCH_FILES = (CLUSTER_FILE, TRAIN_FILE, TOLD_FILE, WORKLOAD_FILE)
"""What a launcher keeps with a run, for who lets it go on."""


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
    packed: bytes | None = None,
) -> None:
    """Keep a run's configuration with it, where only its user reads it, for who lets it go on.

    `packed`: the code of its workload.

    Raises:
        LaunchError: they cannot be written.
    """
    try:
        (paths.root / CLUSTER_FILE).parent.mkdir(mode=0o700, exist_ok=True)
        contents = (cluster_file, train_file, TOLD.text(told), packed)
        for name, content in zip(LAUNCH_FILES, contents, strict=True):
            if content is not None:
                remember(paths.run_id, name, content)
                (paths.root / name).touch(mode=0o600)
                (paths.root / name).write_bytes(content)
    except OSError as error:
        raise LaunchError(f"{paths.root} cannot be written: {error.strerror or error}") from error


def keep_prediction(prediction: Prediction, server: LaunchedProcess, paths: RunPaths) -> None:
    """Keep what was predicted there for the report, which the server makes, and here for the page.

    Raises:
        LaunchError, SmolclusterError: it cannot be written.
    """
    ADVICE.write(paths.advice, prediction)
    put(host_of(server), f"{server.run_dir}/{ADVICE_FILE}", ADVICE.text(prediction))


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


def request_again(paths: RunPaths, launched: Launched, overrides: Sequence[str] = ()) -> Request:
    """What was asked for when a run was launched from here; environment settings come back.

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
    return Request(
        algorithm=get_algorithm(launched.algorithm),
        config=str(files[0]),
        train_config=str(files[1]),
        overrides=(*told.overrides, *overrides),
        script=told.script,
    )


def going_on(
    paths: RunPaths, launched: Launched, overrides: Sequence[str], without: Sequence[str] = ()
) -> Request:
    """What to launch so that a run over SSH goes on, with more overrides and without these nodes.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    request = replace(request_again(paths, launched, overrides), without=tuple(without))
    if not _pinned(settings_of(request, local=False), request):
        return request
    before = settings_of(request_again(paths, launched), local=False)
    trained = _trained_with(paths, launched) or before
    return keeping_steps(request, before, trained, overrides, local=False)


def _trained_with(paths: RunPaths, launched: Launched) -> Settings | None:
    """The configuration of a run's server; None: it cannot be read.

    There it is known how many samples a batch of the user's own loader has, and how many workers the run
    began with: a machine that has joined since is one more in the file that is kept here.
    """
    with suppress(LaunchError, ConfigError, ValueError):
        content = parse_yaml(text_of(launched.server, paths.config.name))
        if isinstance(content, dict):
            return resolved_from(content, launched.server.title)
    return None


def keeping_steps(
    request: Request,
    before: Settings,
    trained: Settings,
    overrides: Sequence[str],
    *,
    local: bool,
) -> Request:
    """The same request, whose steps have as many samples as before, however many workers there are now.

    Where `overrides` change a worker's batch, the step changes with it.

    Args:
        request: for a run that goes on, with `overrides` in it.
        before: its settings without them.
        trained: the settings with which the run's server trained.
        overrides: what the user says now.
        local: whether all processes are on this machine.

    Raises:
        ConfigError: `overrides` change a worker's batch, and the samples of a step were stated.
    """
    pinned = _pinned(trained, request)
    stated = {each.path[0] for each in from_overrides(overrides)}
    had = before.train.samples_per_push
    has = settings_of(request, local).train.samples_per_push
    if GLOBAL_BATCH in pinned.keys() - stated and has != had:
        if before.train.global_batch_size is not None:
            raise ConfigError(
                f"batch_size x gradient_accumulation was {had} and is {has}, but a step has "
                f"{pinned[GLOBAL_BATCH]} samples, as {GLOBAL_BATCH} says: set that as well"
            )
        if trained.train.samples_per_push == had:  # else a loader says it
            pinned[GLOBAL_BATCH] = pinned[GLOBAL_BATCH] * has // had
    return replace(
        request, kept=tuple(f"{key}={json.dumps(value)}" for key, value in pinned.items())
    )


def _pinned(settings: Settings, request: Request) -> dict[str, Any]:
    return settings.of(config_of(request.algorithm)).pinned(settings)


def cluster_bytes(
    cluster_file: Path, without: Sequence[str] = (), *, travels: bool = True
) -> bytes:
    """A cluster file, without these nodes, as it is kept here or `travels`.

    What one machine's environment holds is nobody else's business.
    """
    raw = cluster_without(cluster_file, without)
    nodes = {name: node or {} for name, node in (raw.get("nodes") or {}).items()}
    has_env = travels and any("env" in node for node in nodes.values())
    if not (without or has_env):
        return cluster_file.read_bytes()
    if has_env:
        for node in nodes.values():
            node.pop("env", None)
        raw["nodes"] = nodes
    return dump_yaml(raw).encode()
