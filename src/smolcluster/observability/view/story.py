"""A run's events as a reader wants them: those that repeat themselves in one row, with how often."""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from smolcluster.runs.events import (
    BeginningEnded,
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Event,
    EventRecord,
    LayersMoved,
    LeaseReturned,
    PushDropped,
    RunEnded,
    RunResumed,
    RunStarted,
    StepOverdue,
    StepsUndone,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerParked,
    WorkerRejected,
    WorkerStalled,
    records_of,
)
from smolcluster.runs.paths import process_title
from smolcluster.utils.units import format_duration

ROUTINE = (EpochFinished, Evaluated, CheckpointSaved)
"""What is expected to happen: the curves show it."""
FREQUENT = (LeaseReturned, PushDropped, StepOverdue, WorkerParked, WorkerRejected)
"""Of these there may be as many as there are steps."""


@dataclass
class Happening:
    """An event, how often it came again before one that is not in `FREQUENT` did, and when last."""

    first: EventRecord
    count: int
    last_ts: str


@dataclass
class Story:
    """What happened in a run.

    Attributes:
        events: in order, without those of `FREQUENT`.
        happenings: all but the routine, in order.
        routine: how often each routine kind happened.
    """

    events: list[EventRecord] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    routine: Counter[type[Event]] = field(default_factory=Counter)

    def of(self, kind: type[Event]) -> Iterator[EventRecord]:
        """The events of a kind that is not in `FREQUENT`."""
        return (record for record in self.events if isinstance(record.event, kind))


def read_story(path: Path) -> Story:
    """What happened, from a file that may be larger than the memory; nothing when it does not exist.

    Raises:
        OSError: the file cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return story_of(records_of(file))
    return Story()


def story_of(records: Iterable[EventRecord]) -> Story:
    """Put frequent events that repeat themselves together, and count the routine."""
    story = Story()
    repeated: dict[Hashable, Happening] = {}
    for record in records:
        if not isinstance(record.event, FREQUENT):
            story.events.append(record)
        if isinstance(record.event, ROUTINE):
            story.routine[type(record.event)] += 1
            continue
        key = _key(record.event)
        if key is None:
            repeated.clear()
        if last := repeated.get(key):
            last.count, last.last_ts = last.count + 1, record.ts
        else:
            repeated[key] = Happening(record, 1, record.ts)
            story.happenings.append(repeated[key])
    return story


def _key(event: Event) -> Hashable:
    """What events have in common of which one tells of all; None of those that each have their own row."""
    match event:
        case PushDropped():
            return PushDropped, event.rank, event.outcome
        case LeaseReturned():
            return LeaseReturned, event.rank, event.reason
        case StepOverdue() | WorkerParked():
            return type(event), event.rank
        case WorkerRejected():
            return WorkerRejected, event.node, event.code
    return None


def _who(event: WorkerEvent) -> str:
    return process_title("worker", event.node, event.rank)


def told(event: Event) -> str:  # noqa: C901, PLR0911, PLR0912  (a table that reads from top to bottom)
    """What happened, as a sentence without its stop."""
    match event:
        case RunStarted():
            workers = f" for {event.num_workers} workers" if event.num_workers > 1 else ""
            if event.mesh is not None:
                workers = f" with {event.num_ranks} ranks, {event.mesh}"
            return f"{event.shown_algorithm} started on {event.node}{workers}"
        case WorkerJoined():
            verb = "came back" if event.rejoined else "joined"
            return f"{_who(event)} {verb}, on {event.device}"
        case WorkerLeft():
            return f"{_who(event)} left: {event.reason}"
        case WorkerLost():
            return f"{_who(event)} is lost: {event.reason}"
        case WorkerStalled():
            silent = format_duration(event.silent_s)
            return f"{_who(event)} has not answered for {silent}: {event.reason}"
        case WorkerRejected():
            return f"{event.node} was refused ({event.code}): {event.reason}"
        case LeaseReturned():
            samples = f"{event.stop - event.start:,} samples"
            return f"{samples} of {_who(event)} went back: {event.reason}"
        case PushDropped():
            outcome = event.outcome.replace("_", "-")
            return f"a push of {_who(event)} was dropped as {outcome}: {event.reason}"
        case StepOverdue():
            return f"step {event.step:,} waited for {_who(event)}: {event.reason}"
        case LayersMoved():
            return f"the layers were dealt out again after step {event.step:,}: {event.reason}"
        case BeginningEnded():
            return f"the synchronous beginning is over: {event.reason}"
        case StepsUndone():
            steps = f"{event.num_steps:,} steps of {event.share:.0%} of the weights"
            return f"the store {event.node} is lost, with it {steps}"
        case WorkerParked():
            return f"{_who(event)} does not keep up, parked: {event.reason}"
        case EpochFinished():
            return f"epoch {event.epoch + 1} finished at step {event.step:,}"
        case Evaluated():
            loss = "" if event.val_loss is None else f": validation loss {event.val_loss:.4g}"
            return f"evaluated at step {event.step:,}{loss}"
        case CheckpointSaved():
            return f"checkpoint of step {event.step:,} saved"
        case RunResumed():
            return f"resumed from step {event.step:,}, after {event.samples_applied:,} samples"
        case RunEnded():
            return f"the run ended after {format_duration(event.wall_s)}: {event.reason}"
