"""What a user asks for, filled in where little is said, and the settings that follow."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.function_name import known_here
from smolcluster.configs.load import find_config, shipped_names
from smolcluster.configs.meant import (
    DEFAULT_TRAINING,
    SMALLER,
    cluster_source,
    training_source,
    written_here,
)
from smolcluster.configs.overrides import ENVIRONMENT_PREFIX, WORKLOAD, workload_overrides
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings, config_of
from smolcluster.configs.spec import AlgorithmSpec, LaunchCommand, default_algorithm
from smolcluster.errors import ConfigError
from smolcluster.launch.estimate import tensors_of
from smolcluster.launch.plan import ATTACHED, Request
from smolcluster.launch.workload_code import check_source
from smolcluster.server.listening import opened
from smolcluster.utils.words import as_command

NOTHING_FILLED_IN = LaunchCommand("", "")


@dataclass(frozen=True)
class Resolved:
    """A request and what its files say, read once: what every step of a launch goes by.

    Attributes:
        request: its files are named for any folder, and so is the function that the settings name.
        settings: the server's.
        local: whether all processes are on this machine.
        cluster_file, train_file: the files that it names.
    """

    request: Request
    settings: Settings
    local: bool
    cluster_file: Path
    train_file: Path

    def with_overrides(self, overrides: Sequence[str]) -> "Resolved":
        """The same with more `key=value` texts, which win."""
        if not overrides:
            return self
        request = replace(self.request, overrides=(*self.request.overrides, *overrides))
        return resolved(request, local=self.local)

    def checked(self) -> "Resolved":
        """The same, if its algorithm can follow the settings, and train the model that they describe.

        Of a workload or a script, whose code is not run here, the server tells as soon as it has built the
        model.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        settings, algorithm = self.settings, self.request.algorithm
        check_algorithm(settings, algorithm.name)
        num_tensors = None if self.request.script is not None else tensors_of(settings)
        if num_tensors is not None:
            settings.of(config_of(algorithm)).check_model(num_tensors)
        return self


def resolved(request: Request, *, local: bool) -> Resolved:
    """Read the files of a request, or those that are meant where it names none.

    Raises:
        ConfigError: one line with what is wrong.
    """
    settings = settings_of(request, local)
    config = cluster_source(request.config, request.algorithm.name)
    train_config = request.train_config or DEFAULT_TRAINING
    cluster_file = find_config(config, "cluster").absolute()
    train_file = find_config(train_config, "training").absolute()
    workload = request.workload
    if settings.train.workload is not None:
        name = known_here(settings.train.workload)
        check_source(name, settings.train.workload_args)
        workload = name.text
    request = replace(
        request,
        config=config if config in shipped_names("cluster") else str(cluster_file),
        train_config=(
            train_config if train_config in shipped_names("training") else str(train_file)
        ),
        workload=workload,
    )
    return Resolved(request, settings, local, cluster_file, train_file)


def settings_of(request: Request, local: bool, node: str | None = None) -> Settings:
    """What a process on `node` (None: the server's) is told by this request.

    Raises:
        ConfigError: one line with what is wrong.
    """
    settings = load_settings(
        cluster_source(request.config, request.algorithm.name),
        request.train_config or DEFAULT_TRAINING,
        node,
        [*request.kept, *request.overrides, *workload_overrides(request.workload)],
        local_workers=request.num_workers,
        local=local,
        without=request.without,
    )
    return opened(settings) if request.is_open else settings


def cluster_line(asked: Resolved) -> str:
    """Which cluster file names the machines; of a shipped example also how to name one's own."""
    said = f"cluster: {asked.cluster_file}"
    if asked.request.config not in shipped_names("cluster"):
        return said
    own = [file for each in shipped_names("cluster") if (file := written_here(each))]
    other = f", or name {' or '.join(own)} by --config" if own else ""
    init = as_command("init", "--algorithm", asked.request.algorithm.name)
    return f"{said}: an example; {init} writes one of your machines{other}"


def training_line(asked: Resolved) -> str:
    """What is trained, by which file, and how to choose another: the first line of every launch."""
    request, train, file = asked.request, asked.settings.train, asked.train_file
    if request.script is not None:
        return f"training: what {shlex.split(request.script)[0]} says: its own model and data"
    source = str(request.train_config)
    what = train.workload or f"{train.model.type} on {train.dataset.name}"
    names = [name for name in shipped_names("training") if name not in (source, WORKLOAD)]
    own = find_config(SMALLER.get(source, source), "training").absolute()
    edit = "it" if own == file else own
    return (
        f"training: {file}: {what}; to choose another: --train-config FILE (or {', '.join(names)}), "
        f"or edit {edit}"
    )


def request_of(
    spec: AlgorithmSpec | None = None,
    command: LaunchCommand = NOTHING_FILLED_IN,
    *,
    local: bool,
    num_workers: int | None,
    config: str | None,
    train_config: str | None,
    overrides: Sequence[str],
    workload: str | None = None,
    script: str | None = None,
) -> Request:
    """What a command asks for; without a `spec` it is the default algorithm, whose cluster file is meant."""
    spec = spec or default_algorithm()
    if script is not None:
        return Request(
            algorithm=spec,
            config=config,
            train_config=str(ATTACHED),
            overrides=tuple(overrides),
            num_workers=num_workers,
            script=known_script(script),
        )
    default = command.train_config or DEFAULT_TRAINING
    trained = training_source(
        train_config, cluster_source(config, spec.name), default=default, workload=workload
    )
    is_commands = train_config is None and trained == command.train_config
    filled_in = command.train_overrides if is_commands and workload is None else ()
    if local:
        filled_in += command.local_overrides
        num_workers = command.local_workers if num_workers is None else num_workers
    elif is_commands:
        filled_in += command.cluster_overrides
    names = {_variable_of(text): text for text in filled_in}
    left_out = set(os.environ)
    if not EPOCHS.isdisjoint({*map(_variable_of, overrides), *os.environ}):
        left_out.add(_variable_of("num_steps"))
    filled_in = tuple(text for name, text in names.items() if name not in left_out)
    return Request(
        algorithm=spec,
        config=config,
        train_config=trained,
        overrides=(*filled_in, *overrides),
        num_workers=num_workers,
        workload=workload,
    )


def _variable_of(override: str) -> str:
    """The environment's variable of the key in `key=value`."""
    return f"{ENVIRONMENT_PREFIX}{override.partition('=')[0].replace('.', '__').upper()}"


EPOCHS = frozenset(map(_variable_of, ("num_epochs", "training.epochs", "training.num_epochs")))
"""Where a user sets one of these, `num_steps` that a command fills in gives way."""


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
