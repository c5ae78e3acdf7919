"""Saved runs as commands: list their checkpoints, take a model out of one, let one go on."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from smolcluster.algorithms.claim import check_unfinished
from smolcluster.algorithms.registry import get_algorithm
from smolcluster.configs.resolve import LOOPBACK, Settings, load_resolved
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.launch.plan import Request
from smolcluster.launch.run import launch_local, settings_of
from smolcluster.observability.logs import setup_logging
from smolcluster.observability.terminal import SteadyConsole, steady
from smolcluster.runs.events import RunStarted, read_events
from smolcluster.runs.lock import RunLock
from smolcluster.runs.paths import RunPaths, find_run, runs_root
from smolcluster.training.checkpoint import CheckpointInfo, CheckpointStore, export
from smolcluster.utils.units import format_bytes


def find(run: str) -> RunPaths:
    """The run of that name in the folder of runs, or the run whose folder that is.

    Raises:
        ConfigError: there is neither.
    """
    folder = Path(run).expanduser()
    if folder.name != run and folder.is_dir():
        return RunPaths(folder.resolve())
    return find_run(runs_root(), run)


def show_checkpoints(run: str) -> int:
    """Print a line for each checkpoint of a run; 1 when one is damaged."""
    infos = _store(find(run)).list()
    console = SteadyConsole()
    table = Table("step", "train loss", "val loss", "size", "written (UTC)", "state")
    for info in infos:
        table.add_row(*_row(info))
    with steady(console):
        console.print(table if infos else f"run {run} has no checkpoint yet")
    return int(any(info.problem for info in infos))


def export_model(run: str, folder: Path, *, best: bool) -> int:
    """Write a run's `model.safetensors`, the newest good one or the best one, into a folder.

    Raises:
        CheckpointError: there is none, or it cannot be written.
    """
    paths = find(run)
    store = _store(paths)
    checkpoint = store.best() if best else store.newest_good()
    if checkpoint is None:
        kind = "checkpoint with a validation loss" if best else "good checkpoint"
        raise CheckpointError(f"run {paths.run_id} has no {kind} in {paths.checkpoints}")
    target = export(checkpoint, folder)
    sys.stdout.write(f"step {checkpoint.state.step} of run {paths.run_id} -> {target}\n")
    return 0


def resume(run: str, num_workers: int | None, overrides: Sequence[str], *, dry_run: bool) -> int:
    """Start a whole local run again, from its newest good checkpoint; returns the exit code.

    Raises:
        ConfigError: there is no such run, it was not a local one, or it did not get as far as to begin.
        RunBusy: it is still alive.
    """
    paths = find(run)
    with RunLock(paths.lock):  # the server takes it again
        settings = load_resolved(paths.config)
        algorithm = get_algorithm(_algorithm(paths))
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
    check_unfinished(paths, settings_of(request, local=True).train.num_epochs)
    return launch_local(request, paths.run_id, dry_run=dry_run, resume=True)


def _algorithm(paths: RunPaths) -> str:
    started = [each.event for each in read_events(paths.events)]
    found = next((each.algorithm for each in started if isinstance(each, RunStarted)), None)
    if found is None:
        raise ConfigError(
            f"run {paths.run_id} did not get as far as to begin: launch a new one instead"
        )
    return found


def _kept(settings: Settings, paths: RunPaths, algorithm: str) -> Iterator[str]:
    """What the run's machine and its number of workers said, as overrides."""
    node = settings.node.model_copy(update={"runs_dir": paths.root.parent})
    yield from _assignments("", node)
    if algorithm == "syncps":  # it must not change with the number of workers
        yield f"global_batch_size={settings.global_batch_size}"


def _assignments(prefix: str, section: BaseModel) -> Iterator[str]:
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from _assignments(f"{prefix}{name}.", value)
        elif value is not None:
            yield f"{prefix}{name}={json.dumps(value, default=str)}"


def _store(paths: RunPaths) -> CheckpointStore:
    log = setup_logging("checkpoints", paths.run_id, named=False).logger
    return CheckpointStore(paths.checkpoints, 1, log)


def _row(info: CheckpointInfo) -> list[str | Text]:
    def loss(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    state = Text("damaged: " + info.problem, "red") if info.problem else Text("good", "green")
    written = (info.written_at or "").replace("T", " ")[:19]
    size = format_bytes(info.nbytes)
    return [f"{info.step:,}", loss(info.train_loss), loss(info.val_loss), size, written, state]
