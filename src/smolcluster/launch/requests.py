"""What a user asks for, filled in where little is said, and the settings of each process that follow."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smolcluster.configs.function_name import known_here
from smolcluster.configs.resolve import (
    Settings,
    default_training,
    load_settings,
    workload_overrides,
)
from smolcluster.configs.schema import config_of
from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand, default_algorithm
from smolcluster.errors import ConfigError
from smolcluster.launch.estimate import tensors_of
from smolcluster.launch.plan import ATTACHED, Request
from smolcluster.launch.workload_code import check_source

DEFAULT_TRAINING = "digits"
"""What a launch trains that names nothing: it needs no download."""
SMALL_GPT = "stdlib"
"""A GPT that needs no download."""


def cluster_source(stated: str | None, algorithm: str | None = None) -> str:
    """The cluster file that is meant: the named one, else the one in this folder, else the shipped one.

    `algorithm`: whose it is; None: the default one's.
    """
    algorithm = algorithm or default_algorithm().name
    return stated or written_here(algorithm) or algorithm


def written_here(algorithm: str) -> str | None:
    file = Path(f"cluster_config_{algorithm}.yaml")
    return str(file) if file.is_file() else None


def settings_of(request: Request, local: bool, node: str | None = None) -> Settings:
    """What a process on `node` (None: the server's) is told by this request.

    Raises:
        ConfigError: one line with what is wrong.
    """
    return load_settings(
        cluster_source(request.config, request.algorithm.name),
        request.train_config or DEFAULT_TRAINING,
        node,
        [*request.overrides, *workload_overrides(request.workload)],
        local_workers=request.num_workers,
        local=local,
    )


def naming_workload(request: Request, settings: Settings) -> Request:
    """The same request, which names the function that its settings name, wherever they do."""
    if settings.train.workload is None:
        return request
    name = known_here(settings.train.workload)
    check_source(name, settings.train.workload_args)
    return replace(
        request,
        workload=name.text,
        train_config=request.train_config or DEFAULT_TRAINING,
    )


def check_model(request: Request, settings: Settings) -> None:
    """Refuse a model that the algorithm cannot train so, where the configuration alone tells what it is.

    Of a workload or a script, whose code is not run here, the server tells as soon as it has built the model.

    Raises:
        ConfigError: one line with the key, its value and what to change.
    """
    num_tensors = None if request.script is not None else tensors_of(settings)
    if num_tensors is not None:
        settings.of(config_of(request.algorithm)).check_model(num_tensors)


def plain_request(
    *,
    local: bool,
    num_workers: int | None,
    config: str | None,
    train_config: str | None,
    overrides: Sequence[str],
    workload: str | None = None,
) -> Request:
    """A request that leaves the algorithm open: it names the default one, whose cluster file is meant."""
    spec = default_algorithm()
    return request_of(
        spec,
        LaunchCommand("", ""),
        local=local,
        num_workers=num_workers,
        config=config,
        train_config=train_config,
        overrides=overrides,
        workload=workload,
    )


def request_of(
    spec: AlgorithmSpec,
    command: LaunchCommand,
    *,
    local: bool,
    num_workers: int | None,
    config: str | None,
    train_config: str | None,
    overrides: Sequence[str],
    workload: str | None = None,
    script: str | None = None,
) -> Request:
    if script is not None:
        return Request(
            algorithm=spec,
            config=config,
            train_config=str(ATTACHED),
            overrides=tuple(overrides),
            num_workers=num_workers,
            script=known_script(script),
        )
    filled_in = command.train_overrides if train_config is None and workload is None else ()
    if local:
        filled_in += command.local_overrides
        num_workers = command.local_workers if num_workers is None else num_workers
    elif train_config is None:
        filled_in += command.cluster_overrides
    train_config = train_config or command.train_config
    if local and train_config == "gpt":
        train_config = SMALL_GPT
    return Request(
        algorithm=spec,
        config=config,
        train_config=train_config or (workload and default_training(workload, DEFAULT_TRAINING)),
        overrides=(*filled_in, *overrides),
        num_workers=num_workers,
        workload=workload,
    )


def known_script(script: str) -> str:
    """A script that attaches, by its absolute path, and its arguments.

    Raises:
        ConfigError: there is no such file.
    """
    try:
        file, *arguments = shlex.split(script) or [""]
    except ValueError as error:
        raise ConfigError(f"--script is {script!r}: {error}") from None
    if not Path(file).is_file():
        raise ConfigError(f"--script is {file}: there is no such file")
    return shlex.join([str(Path(file).absolute()), *arguments])
