"""What a launcher keeps with a run, for who lets it go on, and how that is believed."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from smolcluster.configs.begun import is_known, remember
from smolcluster.configs.load import dump_yaml
from smolcluster.configs.resolve import cluster_without
from smolcluster.configs.schema import Settings, config_of
from smolcluster.configs.spec import AlgorithmSpec, get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.plan import CLUSTER_FILE, TRAIN_FILE, Request
from smolcluster.launch.requests import settings_of
from smolcluster.launch.sessions import host_of, put
from smolcluster.launch.workload_code import WORKLOAD_FILE
from smolcluster.runs.advice import ADVICE, Prediction
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.paths import ADVICE_FILE, RunPaths

TOLD_FILE = "launch/told.json"
"""In a run's folder on the machine that launched it; it may hold secrets."""

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


def request_again(
    paths: RunPaths, launched: Launched, overrides: Sequence[str], without: Sequence[str] = ()
) -> Request:
    """What to launch so that a run goes on which was launched from here; environment settings come back.

    `without`: nodes that take no part any more; what the algorithm pins is as it was with them.

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
    again = Request(
        algorithm=get_algorithm(launched.algorithm),
        config=str(files[0]),
        train_config=str(files[1]),
        overrides=(*told.overrides, *overrides),
        script=told.script,
    )
    if not without:
        return again
    pinned = pinned_overrides(settings_of(again, local=False), again.algorithm)
    return replace(again, overrides=(*pinned, *again.overrides), without=tuple(without))


def pinned_overrides(settings: Settings, algorithm: AlgorithmSpec) -> Iterator[str]:
    """What stays as it is when a run goes on with another number of workers, as overrides."""
    for key, value in settings.of(config_of(algorithm)).pinned(settings).items():
        yield f"{key}={json.dumps(value)}"


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
