"""All that is known of a run, read from its folder in bounded memory. What is missing is None or empty."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smolcluster.configs.resolve import load_resolved
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError, DataError, SmolclusterError
from smolcluster.observability.logs import traceback_of
from smolcluster.observability.parsing import LogLine
from smolcluster.observability.view.curves import Curves, curves_of, read_series
from smolcluster.observability.view.first_error import Logs, read_logs
from smolcluster.observability.view.snapshot import RunSnapshot, read_snapshot
from smolcluster.observability.view.story import Story, read_story
from smolcluster.runs.advice import Prediction
from smolcluster.runs.events import (
    RunStarted,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from smolcluster.runs.launched import Process
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.runs.series import ProcessSeries
from smolcluster.runs.status import RunStatus, WorkerStatus
from smolcluster.runs.summary import Summary, WorkerShare

OF_STATUS = (
    *("state", "device", "address", "samples", "mean_staleness", "staleness"),
    *("sent_bytes", "received_bytes"),
)
"""What a worker's newest status tells of it."""


@dataclass
class Worker:
    """What is known of one worker, over the whole run.

    Attributes:
        state: joined, left or lost, when the run ended or now; empty: not known.
        share: its part of all samples applied, 0 to 1.
        staleness: how many of its pushes had which τ, as in `WorkerStatus`.
        sent_bytes: by it to the server, since it joined.
        received_bytes: by it from the server, since it joined.
    """

    rank: int
    node: str
    state: str = ""
    device: str = ""
    address: str = ""
    samples: int | None = None
    share: float | None = None
    mean_staleness: float | None = None
    staleness: Sequence[int] = ()
    num_joins: int = 0
    num_losses: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def name(self) -> str:
        return process_title("worker", self.node, self.rank)


@dataclass(frozen=True)
class ReportData:
    """A run, as far as its files tell.

    Attributes:
        is_alive: whether a process of this machine writes it now.
        config: the text of its configuration file.
        prediction: what was predicted of it.
        problems: what could not be read, a sentence each.
    """

    paths: RunPaths
    is_alive: bool
    settings: Settings | None
    config: str
    started: RunStarted | None
    status: RunStatus | None
    summary: Summary | None
    story: Story
    curves: Curves
    processes: Sequence[ProcessSeries]
    logs: Logs
    prediction: Prediction | None
    problems: Sequence[str]

    @property
    def algorithm(self) -> str:
        """Its name; empty: not known."""
        if self.started is not None:
            return self.started.shown_algorithm
        told = self.summary or self.status
        return told.algorithm if told else ""


def read_run(paths: RunPaths) -> ReportData:
    """Its numbers and curves, without the logs and the reports of its processes.

    Raises:
        SmolclusterError: a file cannot be read.
    """
    return _read(paths, with_logs=False, ended_by=None)


def read_facts(paths: RunPaths, ended_by: BaseException | None = None) -> ReportData:
    """All of it; `ended_by`: what is just ending it, which no log tells yet.

    Raises:
        SmolclusterError: a file cannot be read.
    """
    return _read(paths, with_logs=True, ended_by=ended_by)


def _read(paths: RunPaths, *, with_logs: bool, ended_by: BaseException | None) -> ReportData:
    read, problems = read_snapshot(paths), list[str]()
    settings, logs = _settings(paths.config, problems), Logs()
    try:
        story = read_story(paths.events)
        series = read_series(paths)
        processes = sorted(
            series.processes.values(),
            key=lambda each: (-1 if each.rank is None else each.rank, each.node),
        )
        if with_logs:
            expected = _expected(read, story, settings)
            words = _stderr_tail(ended_by, expected)
            logs = read_logs(paths.logs, expected, story.events, _offsets(processes), words)
    except OSError as error:
        where, reason = error.filename or paths.root, error.strerror or str(error)
        raise SmolclusterError(f"cannot read {where}: {reason}") from error
    return ReportData(
        paths=paths,
        is_alive=bool(is_held(paths.lock)),
        settings=settings,
        config=_text(paths.config),
        started=read.started,
        status=read.status,
        summary=read.summary,
        story=story,
        curves=curves_of(paths.run_id, series, story.events),
        processes=processes,
        logs=logs,
        prediction=read.prediction,
        problems=[*problems, *read.problems],
    )


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _settings(path: Path, problems: list[str]) -> Settings | None:
    """A run's settings; one that has none is no problem."""
    try:
        return load_resolved(path) if path.is_file() else None
    except (ConfigError, DataError) as error:
        problems.append(str(error))
        return None


def _offsets(processes: Sequence[ProcessSeries]) -> dict[str, float]:
    """How far a worker's clock was ahead of the server's when it last reported, seconds, by its title."""
    return {
        process_title("worker", each.node, each.rank): each.totals["clock_offset_s"].newest
        for each in processes
        if "clock_offset_s" in each.totals
    }


def _expected(read: RunSnapshot, story: Story, settings: Settings | None) -> list[Process]:
    """The processes that have or had a log, the owner's first."""
    is_group = read.launched is not None and read.launched.is_group
    found = [] if is_group else list(read.processes)
    for record in story.events:
        match record.event:
            case RunStarted():
                found.append(Process(role=record.event.owner_role, node=record.event.node))
            case WorkerJoined(rank=rank, node=node):
                found.append(Process(role="worker", node=node, rank=rank))
    ranks = read.status.ranks if read.status else []
    found += [Process(role="rank", node=each.node, rank=each.rank or None) for each in ranks]
    workers = read.status.workers if read.status else []
    found += [Process(role="worker", node=each.node, rank=each.rank) for each in workers]
    if not found and settings is not None:
        found.append(Process(role="server", node=settings.cluster.server))
    by_title = {each.title: each for each in found}
    return sorted(
        by_title.values(), key=lambda each: (each.rank is not None, each.rank or 0, each.node)
    )


def _stderr_tail(error: BaseException | None, expected: Sequence[Process]) -> LogLine | None:
    """What the run's owner will say of its end; nothing of one that was asked for."""
    if error is None or not isinstance(error, Exception):
        return None
    owner = next((each.title for each in expected if each.rank is None), "server")
    text = traceback_of(error)
    return LogLine(time.time(), "ERROR", str(error) or type(error).__name__, text, source=owner)


def workers_of(facts: ReportData) -> list[Worker]:
    """Everyone who took part, by rank; two if one machine had the place of another."""
    found: dict[tuple[int, str], Worker] = {}

    def worker(of: WorkerEvent | WorkerStatus | WorkerShare) -> Worker:
        return found.setdefault((of.rank, of.node), Worker(of.rank, of.node))

    for record in facts.story.events:
        if isinstance(record.event, WorkerJoined | WorkerLost | WorkerLeft):
            _note(worker(record.event), record.event)
    for each in facts.status.workers if facts.status else ():
        for name in OF_STATUS:
            if value := getattr(each, name):
                setattr(worker(each), name, value)
    for share in facts.summary.workers if facts.summary else ():
        own = worker(share)
        own.samples, own.mean_staleness = share.samples, share.mean_staleness
    if total := sum(own.samples or 0 for own in found.values()):
        for own in found.values():
            own.share = None if own.samples is None else own.samples / total
    return [found[key] for key in sorted(found)]


def _note(worker: Worker, event: WorkerJoined | WorkerLost | WorkerLeft) -> None:
    """What an event tells of a worker."""
    match event:
        case WorkerJoined():
            worker.device, worker.state = event.device, "joined"
            worker.num_joins += 1
        case WorkerLost():
            worker.state = "lost"
            worker.num_losses += 1
        case WorkerLeft():
            worker.state = "left"
