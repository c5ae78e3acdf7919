"""The records of a run: its folder, resolved configuration, log file, metrics, events and status."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from smolcluster.configs.resolve import save_resolved
from smolcluster.configs.schema import RunConfig, Settings
from smolcluster.configs.spec import title_of
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import Metrics, Sink
from smolcluster.observability.sinks.console import ProgressView, ShownBeside
from smolcluster.observability.sinks.jsonl import JsonlSink
from smolcluster.observability.sinks.tensorboard import TensorBoardSink
from smolcluster.observability.sinks.wandb import wandb_for
from smolcluster.observability.spans import SpanLog
from smolcluster.runs.events import Event, EventLog, RunStarted
from smolcluster.runs.files import LineWriter
from smolcluster.runs.paths import RunPaths, create_run, latest_of, point_latest, runs_root
from smolcluster.runs.series import SeriesFile
from smolcluster.runs.status import StatusFile
from smolcluster.utils.bugs import describe_bug
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count

TICK_S = 0.1
SPACE_S = 30.0
"""How long the end of a run waits for space on a full disk."""
HANG_S = 5.0
"""How much longer it waits for a disk that hangs."""


@dataclass(frozen=True)
class Records:
    """Where a process that owns a run writes down what happens. `incarnation` names this start of it.

    Who tells them something waits neither for the disk nor for the terminal.
    """

    metrics: Metrics
    events: EventLog
    incarnation: str
    status: StatusFile | None = None
    """Where it is kept up to date how the run stands; None: nowhere."""
    spans: SpanLog | None = None
    """Where spans of all processes are kept; None: nowhere."""
    folder: Path | None = None
    """The run's own; None: it has none."""


def open_run(settings: Settings, run: RunConfig, *, role: str, node: str, log: NodeLog) -> RunPaths:
    """Make the run's folder, save the configuration there, and file the log in it from now on."""
    root = runs_root(settings.node.runs_dir)
    # It has not begun yet: another one that has stays the newest.
    paths = create_run(root, run.run_id, newest=latest_of(root) is None)
    log.file_logs_to(paths.log_file(role, node), run.run_id)
    log.logger.info("run %s, files in %s", run.run_id, paths.root)
    save_resolved(settings, paths.config)
    return paths


@contextmanager
def open_records(
    paths: RunPaths,
    run: RunConfig,
    *,
    role: str,
    node: str,
    log: NodeLog,
    progress: Console | None,
) -> Iterator[Records]:
    """Open the records of a run; they are closed at the end, whatever it is.

    Sinks complain in `log`; `progress`: where the progress is shown; None: nowhere.
    """
    incarnation = secrets.token_hex(8)
    warn = log.logger.warning
    lines = JsonlSink(paths.metrics, incarnation, warn=warn)
    sinks: list[Sink] = [lines]
    if progress is not None:
        sinks.append(ShownBeside(ProgressView(progress, num_epochs=run.train.num_epochs)))
    wandb = wandb_for(
        run,
        title_of(run.algorithm),
        role=role,
        node=node,
        rank=None,
        paths=paths,
        warn=warn,
    )
    sinks.append(wandb)
    boards = [TensorBoardSink(paths.tensorboard, warn=warn)] if run.train.tensorboard else []
    sinks.extend(boards)

    def happened(event: Event) -> None:
        if isinstance(event, RunStarted):  # from here on: a start that fails is no newest run
            try:
                point_latest(paths.root.parent, paths.run_id)
            except OSError as error:
                warn("`latest` cannot point to this run: %s", error.strerror or error)
        wandb.happened(event)

    events = EventLog(paths.events, incarnation, warn=warn, on_event=happened)
    status = StatusFile(paths.status, warn=warn)
    spans = SpanLog(paths.spans, warn=warn)
    series = SeriesFile(paths, warn=warn)
    metrics = Metrics(sinks)
    with ExitStack() as closing:
        closing.callback(metrics.close)
        for board in boards:
            closing.callback(board.abandon)  # a disk that hangs is waited for once
        writers = (lines, events, spans)
        others: list[SeriesFile | TensorBoardSink] = [series, *boards]
        closing.enter_context(_written_beside(writers, others, status, log.logger))
        yield Records(metrics, events, incarnation, status, spans, paths.root)


@contextmanager
def _written_beside(
    writers: Sequence[LineWriter],
    others: Sequence[SeriesFile | TensorBoardSink],
    status: StatusFile,
    log: logging.Logger,
) -> Iterator[None]:
    """Write the files several times a second in a thread of its own, and close them after the block.

    A full disk is waited for `SPACE_S` seconds then, one that hangs not much longer.
    """
    done = threading.Event()
    failed: list[object] = []

    def attempt(write: Callable[[], None], whose: object) -> None:
        try:
            write()
        except Exception as error:  # the others go on
            if whose not in failed:
                log.log(logging.ERROR, "%s", describe_bug(error), exc_info=error)
                failed.append(whose)

    def write_on() -> None:
        while not done.wait(TICK_S):
            for each in (*writers, *others):
                attempt(each.tick, each)
            attempt(status.flush, status)
        end = Deadline(SPACE_S)
        for each in writers:
            attempt(partial(each.close, end.remaining()), each)
        attempt(partial(status.close, end.remaining()), status)
        for other in others:
            attempt(other.close, other)

    thread = threading.Thread(target=write_on, name="records", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        try:
            thread.join(SPACE_S + HANG_S)
        finally:
            counts = [(each.path, each.abandon()) for each in writers]
            lost = ", ".join(
                f"{format_count(num, 'line')} of {path}" for path, num in counts if num
            )
            if lost:
                log.warning("lost, because the disk did not take it in time: %s", lost)
