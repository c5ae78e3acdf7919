"""All that is known of a run, read from its folder in bounded memory. What is missing is None or empty."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from smolcluster.configs.resolve import Settings, load_resolved
from smolcluster.errors import ConfigError, DataError, SmolclusterError
from smolcluster.observability.view.curves import Curves, curves_of, read_series
from smolcluster.observability.view.first_error import LogLine, Logs, Process, read_logs
from smolcluster.observability.view.story import Story, read_story
from smolcluster.runs.events import RunStarted, WorkerJoined, WorkerLeft, WorkerLost
from smolcluster.runs.launched import read_launched
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.runs.processes import read_processes
from smolcluster.runs.series import ProcessSeries
from smolcluster.runs.status import RunStatus, read_status
from smolcluster.runs.summary import Summary, read_summary

File = TypeVar("File")


@dataclass(frozen=True)
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
        """As all views call it: `worker 2 (pi5)`."""
        return process_title("worker", self.node, self.rank)


@dataclass(frozen=True)
class ReportData:
    """A run, as far as its files tell.

    Attributes:
        is_alive: whether a process of this machine writes it now.
        config: the text of its configuration file.
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
    problems: Sequence[str]

    @property
    def algorithm(self) -> str:
        """Its name; empty: not known."""
        told = self.summary or self.status or self.started
        return told.algorithm if told else ""


class _Known(NamedTuple):
    settings: Settings | None
    status: RunStatus | None
    story: Story


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
    problems: list[str] = []
    settings = _or_none(load_resolved, paths.config, problems)
    status = _or_none(read_status, paths.status, problems)
    summary = _or_none(read_summary, paths.summary, problems)
    logs = Logs()
    try:
        story = read_story(paths.events)
        series = read_series(paths)
        processes = sorted(
            series.processes.values(),
            key=lambda each: (-1 if each.rank is None else each.rank, each.node),
        )
        if with_logs:
            expected = _expected(paths, _Known(settings, status, story))
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
        started=_started(story),
        status=status,
        summary=summary,
        story=story,
        curves=curves_of(paths.run_id, series, story.events),
        processes=processes,
        logs=logs,
        problems=problems,
    )


def _or_none(read: Callable[[Path], File], path: Path, problems: list[str]) -> File | None:
    """The content of a file; one that does not exist is no problem."""
    if not path.is_file():
        return None
    try:
        return read(path)
    except (ConfigError, DataError) as error:
        problems.append(str(error))
        return None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _started(story: Story) -> RunStarted | None:
    events = (record.event for record in story.of(RunStarted))
    return next((event for event in events if isinstance(event, RunStarted)), None)


def _offsets(processes: Sequence[ProcessSeries]) -> dict[Process, float]:
    """How far a worker's clock was ahead of the server's when it last reported, seconds."""
    return {
        Process("worker", each.node, each.rank): each.totals["clock_offset_s"].newest
        for each in processes
        if "clock_offset_s" in each.totals
    }


def _expected(paths: RunPaths, known: _Known) -> list[Process]:
    """The processes that have or had a log, the owner's first."""
    found: list[Process] = []
    with suppress(DataError):
        found += [Process(p.role, p.node, p.rank) for p in read_launched(paths.launched).processes]
    with suppress(DataError):
        found += [Process(p.role, p.node, p.rank) for p in read_processes(paths.processes)]
    for record in known.story.events:
        match record.event:
            case RunStarted(algorithm=algorithm, node=node):
                found.append(Process("trainer" if algorithm == "single" else "server", node))
            case WorkerJoined(rank=rank, node=node):
                found.append(Process("worker", node, rank))
    workers = [*(known.status.workers if known.status else ())]
    found += [Process("worker", worker.node, worker.rank) for worker in workers]
    if not found and known.settings is not None:
        found.append(Process("server", known.settings.cluster.server))
    return sorted(set(found), key=lambda each: (each.rank is not None, each.rank or 0, each.node))


def _stderr_tail(error: BaseException | None, expected: Sequence[Process]) -> LogLine | None:
    """What the run's owner will say of its end; nothing of one that was asked for."""
    if error is None or not isinstance(error, Exception):
        return None
    owner = next((each.title for each in expected if each.rank is None), "server")
    text = "".join(traceback.format_exception(error))
    return LogLine(time.time(), owner, "ERROR", str(error) or type(error).__name__, text)


def workers_of(facts: ReportData) -> list[Worker]:
    """Everyone who took part, by rank; two if one machine had the place of another."""
    rows = _coming_and_going(facts.story)
    if facts.status is not None:
        named = ("state", "device", "address", "samples", "mean_staleness", "staleness")
        names = (*named, "sent_bytes", "received_bytes")
        for each in facts.status.workers:
            row = rows.setdefault((each.rank, each.node), {})
            row |= {name: getattr(each, name) for name in names if getattr(each, name)}
    if facts.summary is not None:
        for share in facts.summary.workers:
            row = rows.setdefault((share.rank, share.node), {})
            row |= {"samples": share.samples, "mean_staleness": share.mean_staleness}
    total = sum(_count(row, "samples") for row in rows.values())
    for row in rows.values():
        if total and "samples" in row:
            row["share"] = _count(row, "samples") / total
    return [Worker(rank, node, **row) for (rank, node), row in sorted(rows.items())]


def _coming_and_going(story: Story) -> dict[tuple[int, str], dict[str, Any]]:
    """What events tell of each worker, as fields of a `Worker`."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for record in story.events:
        match record.event:
            case WorkerJoined(rank=rank, node=node, device=device):
                row = rows.setdefault((rank, node), {})
                row |= {"device": device, "state": "joined"}
                row["num_joins"] = _count(row, "num_joins") + 1
            case WorkerLost(rank=rank, node=node):
                row = rows.setdefault((rank, node), {})
                row |= {"state": "lost", "num_losses": _count(row, "num_losses") + 1}
            case WorkerLeft(rank=rank, node=node):
                rows.setdefault((rank, node), {})["state"] = "left"
    return rows


def _count(row: Mapping[str, Any], name: str) -> int:
    return int(row.get(name, 0))
