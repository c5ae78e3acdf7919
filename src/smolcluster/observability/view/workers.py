"""Who took part in a run: its workers, and the processes that have a log."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from smolcluster.configs.schema import Settings
from smolcluster.observability.logs import traceback_of
from smolcluster.observability.parsing import LogLine
from smolcluster.observability.view.snapshot import Snapshot
from smolcluster.observability.view.story import Story
from smolcluster.runs.events import (
    RunStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import process_title
from smolcluster.runs.status import WorkerStatus
from smolcluster.runs.summary import WorkerShare

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


def expected_of(read: Snapshot, story: Story, settings: Settings | None) -> list[Process]:
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


def stderr_tail(error: BaseException | None, expected: Sequence[Process]) -> LogLine | None:
    """What the run's owner will say of its end; nothing of one that was asked for."""
    if error is None or not isinstance(error, Exception):
        return None
    owner = next((each.title for each in expected if each.rank is None), "server")
    text = traceback_of(error)
    return LogLine(time.time(), "ERROR", str(error) or type(error).__name__, text, source=owner)


def workers_of(read: Snapshot, story: Story) -> list[Worker]:
    """Everyone who took part, by rank; two if one machine had the place of another."""
    found = _in_events(story)

    def worker(of: WorkerStatus | WorkerShare) -> Worker:
        return found.setdefault((of.rank, of.node), Worker(of.rank, of.node))

    for each in read.status.workers if read.status else ():
        for name in OF_STATUS:
            if value := getattr(each, name):
                setattr(worker(each), name, value)
    for share in read.summary.workers if read.summary else ():
        own = worker(share)
        own.samples, own.mean_staleness = share.samples, share.mean_staleness
    if total := sum(own.samples or 0 for own in found.values()):
        for own in found.values():
            own.share = None if own.samples is None else own.samples / total
    return [found[key] for key in sorted(found)]


def _in_events(story: Story) -> dict[tuple[int, str], Worker]:
    """By rank and node."""
    found: dict[tuple[int, str], Worker] = {}
    for record in story.events:
        match record.event:
            case WorkerJoined() | WorkerLost() | WorkerLeft() as event:
                key = event.rank, event.node
                _note(found.setdefault(key, Worker(*key)), event)
            case RunStarted():  # again: who was there when the owner ended has to join anew
                for each in found.values():
                    each.state = "" if each.state == "joined" else each.state
    return found


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
