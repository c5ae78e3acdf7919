"""The baseline as a command: training in one process, with everything that a run leaves behind."""

import logging
import platform
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final

import torch
from rich.console import Console

from smolcluster.algorithms.process import closing, guarded, process_log
from smolcluster.configs.resolve import Settings, load_settings, save_resolved
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import Metrics, Sink
from smolcluster.observability.sinks.console import ProgressView
from smolcluster.observability.sinks.jsonl import JsonlSink
from smolcluster.observability.sinks.wandb import WandbSink, run_name
from smolcluster.observability.terminal import SteadyConsole, steady
from smolcluster.runs.events import EventLog
from smolcluster.runs.paths import RunPaths, create_run, new_run_id, runs_root
from smolcluster.runs.summary import table
from smolcluster.training import loop

ALGORITHM: Final = "single"
CLUSTER = "edp"
"""The cluster file whose seed is taken, so that the baseline begins as the cluster does."""


def train(config: str, overrides: Sequence[str]) -> int:
    """Train what the training file `config` says, in this process; returns the exit code."""
    return guarded(False, lambda: _train(config, overrides))


def _train(config: str, overrides: Sequence[str]) -> None:
    settings = load_settings(CLUSTER, config, None, overrides, local=True, local_workers=1)
    if settings.node.threads is not None:
        torch.set_num_threads(settings.node.threads)
    console, host = SteadyConsole(stderr=True), platform.node()
    with process_log("trainer", host, console=console) as log:
        paths = create_run(
            runs_root(settings.node.runs_dir), new_run_id(ALGORITHM, datetime.now().astimezone())
        )
        log.file_logs_to(paths.log_file("trainer", host), paths.run_id)
        save_resolved(settings, paths.config)
        incarnation = secrets.token_hex(8)
        events = EventLog(paths.events, incarnation, warn=log.logger.warning)
        metrics = Metrics(_sinks(settings, paths, incarnation, log, console))
        with closing(events, metrics), _lines_go_to(log.logger):
            summary = loop.train_single(settings, paths, metrics, events)
        output = SteadyConsole()
        with steady(output):
            output.print(table(summary))
        log.logger.info("files of the run: %s", paths.root)


def _sinks(
    settings: Settings, paths: RunPaths, incarnation: str, log: NodeLog, console: Console
) -> list[Sink]:
    train = settings.train
    name = run_name(
        algorithm="Single",
        role="trainer",
        hostname=platform.node(),
        rank=None,
        learning_rate=train.learning_rate,
        batch_size=train.batch_size,
    )
    return [
        JsonlSink(paths.metrics, incarnation, warn=log.logger.warning),
        ProgressView(console, num_epochs=train.num_epochs),
        WandbSink(
            paths.root,
            project=train.logging.project_name,
            run_id=paths.run_id,
            name=name,
            config=settings.run_config(paths.run_id, ALGORITHM).model_dump(mode="json"),
            warn=log.logger.warning,
        ),
    ]


@contextmanager
def _lines_go_to(target: logging.Logger) -> Iterator[None]:
    """Let what the training loop logs appear in the process's log."""
    source = logging.getLogger(loop.__name__)
    forward = logging.Handler()
    forward.emit = target.handle  # type: ignore[method-assign]
    before = source.level, source.propagate
    source.setLevel(logging.INFO)
    source.propagate = False
    source.addHandler(forward)
    try:
        yield
    finally:
        source.removeHandler(forward)
        source.level, source.propagate = before
