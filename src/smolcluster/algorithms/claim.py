"""Which run a server serves, and what it goes on from: `--run-id` and `--resume`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from smolcluster.configs.schema import AlgorithmName, Settings, TrainConfig
from smolcluster.configs.spec import spec_of
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import (
    LATEST,
    RunPaths,
    create_run,
    find_run,
    new_run_id,
    runs_root,
)
from smolcluster.runs.summary import check_unfinished
from smolcluster.training.checkpoint import Checkpoint, CheckpointStore
from smolcluster.utils.units import format_count

AUTO = "auto"


@dataclass(frozen=True)
class Claimed:
    """A run that nobody else writes. `checkpoint`: what it goes on from; None: it begins."""

    paths: RunPaths
    store: CheckpointStore
    checkpoint: Checkpoint | None


@contextmanager
def claim_run(
    settings: Settings,
    algorithm: AlgorithmName,
    run_id: str | None,
    resume: str | None,
    log: logging.Logger,
) -> Iterator[Claimed]:
    """Hold the run that `--run-id` and `--resume` name, for as long as the block lasts.

    Raises:
        ConfigError: there is no such run, the two differ, or a new run's name is taken.
        RunBusy: another process writes it.
        CheckpointError: it has no good checkpoint, or has ended.
    """
    root = runs_root(settings.node.runs_dir)
    name = run_name(run_id, resume, has_latest=(root / LATEST).exists())
    if name is None:
        name = new_run_id(algorithm, datetime.now())
    elif resume is not None and (resume != AUTO or name == LATEST):
        name = find_run(root, name).run_id
    paths = create_run(root, name, newest=False)
    with run_lock(paths.lock):
        store = CheckpointStore(paths.checkpoints, settings.cluster.keep_last, log)
        if resume is not None:
            _check_algorithm(paths, algorithm)
        is_loaded = spec_of(algorithm).has_whole_model
        found = _checkpoint(paths, store, resume, settings.train, log, is_loaded=is_loaded)
        yield Claimed(paths, store, found)


def run_name(run_id: str | None, resume: str | None, *, has_latest: bool) -> str | None:
    """The run that is meant; None: a new one, whose name is free."""
    if resume is None or (resume == AUTO and run_id is not None):
        return run_id
    if resume == AUTO:
        return LATEST if has_latest else None
    if run_id not in (None, resume):
        raise ConfigError(
            f"--resume is {resume!r} and --run-id {run_id!r}: name one run, or say --resume auto"
        )
    return resume


def _checkpoint(
    paths: RunPaths,
    store: CheckpointStore,
    resume: str | None,
    train: TrainConfig,
    log: logging.Logger,
    *,
    is_loaded: bool,
) -> Checkpoint | None:
    if resume is None:
        if store.count():
            raise ConfigError(
                f"run {paths.run_id} has checkpoints already: add --resume {AUTO} to go on with it, or "
                "choose another --run-id"
            )
        return None
    check_unfinished(paths, train)
    checkpoint = store.newest_good(is_loaded=is_loaded)
    if checkpoint is None and store.count():
        checkpoints = format_count(store.count(), "checkpoint")
        raise CheckpointError(
            f"none of the {checkpoints} in {paths.checkpoints} is good, see above: begin a new run"
        )
    if checkpoint is None and resume != AUTO:
        raise CheckpointError(
            f"run {paths.run_id} has no checkpoint yet: begin it again with --resume {AUTO} --run-id "
            f"{paths.run_id}"
        )
    if checkpoint is None:
        log.info("run %s has no checkpoint yet: it begins from the start", paths.run_id)
    else:
        state = checkpoint.state
        log.info(
            "resuming run %s at step %d, after %s samples, saved at %s",
            paths.run_id,
            state.step,
            f"{state.samples_applied:,}",
            state.written_at,
        )
    return checkpoint


def _check_algorithm(paths: RunPaths, algorithm: AlgorithmName) -> None:
    started = read_snapshot(paths).started
    if started is not None and started.algorithm != algorithm:
        raise CheckpointError(
            f"run {paths.run_id} was begun by {started.algorithm}, not by {algorithm}: name another run with "
            "--resume or --run-id, or begin a new one without --resume"
        )
