"""Saved runs as commands: list their checkpoints, take a model out of one, let one go on."""

import json
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from smolcluster.algorithms.claim import check_unfinished
from smolcluster.algorithms.registry import get_algorithm
from smolcluster.configs.layers import ENVIRONMENT_PREFIX
from smolcluster.configs.resolve import LOOPBACK, Settings, load_resolved
from smolcluster.configs.schema import GPTConfig
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.launch.plan import Request
from smolcluster.launch.run import launch_local, settings_of
from smolcluster.launch.single import ALGORITHM as SINGLE
from smolcluster.launch.single import train
from smolcluster.models.gpt import GPT
from smolcluster.models.gpt2_weights import write_gpt2
from smolcluster.observability.logs import setup_logging
from smolcluster.observability.terminal import SteadyConsole, steady
from smolcluster.runs.events import first_start
from smolcluster.runs.lock import RunLock
from smolcluster.runs.paths import RunPaths, find_run, runs_root
from smolcluster.training.checkpoint import (
    BEST,
    LATEST,
    Checkpoint,
    CheckpointInfo,
    CheckpointStore,
    export,
)
from smolcluster.utils.units import format_bytes

EMBEDDING = "wte.weight"
"""Its rows are the vocabulary."""


def find(run: str) -> RunPaths:
    """The run of that name in the folder of runs, or the run whose folder that is.

    Raises:
        ConfigError: there is neither.
    """
    with suppress(RuntimeError, OSError):  # no such user; a name that is too long
        folder = Path(run).expanduser()
        if folder.name != run and folder.is_dir():
            if not (folder / "config.yaml").is_file():
                raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
            return RunPaths(folder.resolve())
    stated = os.environ.get(f"{ENVIRONMENT_PREFIX}RUNS_DIR")
    return find_run(runs_root(Path(stated) if stated else None), run)


def show_checkpoints(run: str) -> int:
    """Print a line for each checkpoint of a run; 1 when one is damaged."""
    paths = find(run)
    infos = store_of(paths).list()
    named = {
        (paths.checkpoints / name).resolve(): name
        for name in (LATEST, BEST)
        if (paths.checkpoints / name).is_dir()
    }
    console = SteadyConsole()
    table = Table("step", "train loss", "val loss", "size", "written (UTC)", "state")
    for info in infos:
        table.add_row(*_row(info, named.get(info.path.resolve(), "")))
    with steady(console):
        console.print(table if infos else f"run {run} has no checkpoint yet")
        for info in infos:
            if info.problem:
                console.print(Text(f"step {info.step:,}: {info.problem}"), soft_wrap=True)
    return int(any(info.problem for info in infos))


def export_model(run: str, folder: Path, *, best: bool, transformers: bool) -> int:
    """Write a run's `model.safetensors`, the newest good one or the best one, into a folder.

    With `transformers` it is a GPT, in the format of the library of that name.

    Raises:
        CheckpointError: there is none, or it cannot be written.
        ConfigError: it is no GPT, but ought to be.
    """
    paths = find(run)
    store = store_of(paths)
    checkpoint = store.best() if best else store.newest_good()
    if checkpoint is None:
        kind = "good checkpoint with a validation loss" if best else "good checkpoint"
        raise CheckpointError(f"run {paths.run_id} has no {kind} in {paths.checkpoints}")
    if transformers:
        write_gpt2(checkpoint.model, gpt_config(paths), folder)
        target = folder
    else:
        target = export(checkpoint, folder)
    sys.stdout.write(f"step {checkpoint.state.step} of run {paths.run_id} -> {target}\n")
    return 0


def gpt_config(paths: RunPaths) -> GPTConfig:
    """The sizes of the language model that a run trained.

    Raises:
        ConfigError: it trained none.
    """
    config = load_resolved(paths.config).train.model
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"run {paths.run_id} trained a {config.type}, which is no language model")
    return config


def gpt_of(paths: RunPaths, checkpoint: Checkpoint) -> GPT:
    """The language model of a checkpoint, in evaluation mode.

    Raises:
        ConfigError: it is none.
        CheckpointError: its tensors are not those of the run's configuration.
    """
    config = gpt_config(paths)
    try:
        model = GPT(config, len(checkpoint.model[EMBEDDING]))
        model.load_state_dict(dict(checkpoint.model))
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path} is of another model: {reason}") from error
    return model.eval()


def resume(run: str, num_workers: int | None, overrides: Sequence[str], *, dry_run: bool) -> int:
    """Start a whole local run again, from its newest good checkpoint; returns the exit code.

    Raises:
        ConfigError: there is no such run, it was not a local one, or it did not get as far as to begin.
        RunBusy: it is still alive.
    """
    paths = find(run)
    with RunLock(paths.lock):  # the server takes it again
        settings = load_resolved(paths.config)
        store = store_of(paths)
        checkpoint = store.newest_good()
        name = checkpoint.state.algorithm if checkpoint else _algorithm(paths)
    if checkpoint is None and store.count():
        raise CheckpointError(f"none of the {store.count()} checkpoints of {paths.run_id} is good")
    if name == SINGLE:
        return _resume_single(paths, settings, num_workers, overrides, dry_run=dry_run)
    algorithm = get_algorithm(name)
    if set(settings.cluster.host_ip.values()) != {LOOPBACK}:
        raise ConfigError(
            f"run {paths.run_id} was not a local one: start its server with --resume {paths.run_id}, and its "
            "workers as before"
        )
    request = Request(
        algorithm=algorithm,
        config=str(paths.config),
        train_config=str(paths.config),
        overrides=(*_kept(settings, paths, algorithm.name), *overrides),
        num_workers=num_workers,
    )
    check_unfinished(paths, settings_of(request, local=True).train)
    return launch_local(request, paths.run_id, dry_run=dry_run, resume=True)


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
    config = str(paths.config)
    overrides = [*_kept(settings, paths, SINGLE), *overrides]
    if dry_run:
        stated = [f"seed={settings.cluster.seed}", *overrides]
        options = ["--config", config, "--resume", paths.run_id, "--override", *stated]
        sys.stdout.write(shlex.join(["smolcluster", "train", *options]) + "\n")
        return 0
    return train(config, overrides, cluster=config, resume=paths.run_id)


def _algorithm(paths: RunPaths) -> str:
    started = first_start(paths.events)
    if started is None:
        raise ConfigError(
            f"run {paths.run_id} did not get as far as to begin: launch a new one instead"
        )
    return started.algorithm


def _kept(settings: Settings, paths: RunPaths, algorithm: str) -> Iterator[str]:
    """What the run's machine and its number of workers said, as overrides."""
    node, server = settings.node, settings.cluster.server
    everybodys = {"runs_dir": paths.root.parent, "secret_file": node.secret_file}
    yield from _assignments(node.model_copy(update=everybodys), only=("runs_dir", "secret_file"))
    yield from _assignments(node.dataset, "dataset.")
    own = ("device", "microbatch", *(["threads"] if algorithm == SINGLE else []))
    yield from _assignments(node, f"nodes.{server}.", only=own)
    if algorithm == "syncps":  # it must not change with the number of workers
        yield f"global_batch_size={settings.global_batch_size}"


def _assignments(
    section: BaseModel, prefix: str = "", only: Collection[str] | None = None
) -> Iterator[str]:
    for name, value in section:
        if value is not None and (only is None or name in only):
            yield f"{prefix}{name}={json.dumps(value, default=str)}"


def store_of(paths: RunPaths) -> CheckpointStore:
    """The checkpoints of a run, to be read."""
    log = setup_logging("checkpoints", paths.run_id, named=False).logger
    return CheckpointStore(paths.checkpoints, 1, log)


def _row(info: CheckpointInfo, name: str) -> list[str | Text]:
    def loss(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    state = Text("damaged", "red") if info.problem else Text("good", "green")
    state.append(f", {name}" if name else "", "")
    written = (info.written_at or "").replace("T", " ")[:19]
    size = format_bytes(info.nbytes)
    return [f"{info.step:,}", loss(info.train_loss), loss(info.val_loss), size, written, state]
