"""A run's events, read as they come: in words, on a time line, and those that repeat themselves in a row."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    kind_of,
    records_of,
)
from smolcluster.runs.files import seconds_of
from smolcluster.runs.paths import process_title
from smolcluster.runs.tail import Tail
from smolcluster.utils.units import format_count, format_duration

ROUTINE = (EpochFinished, Evaluated, CheckpointSaved)
"""What is expected to happen: the curves show it."""
FREQUENT = (LeaseReturned, PushDropped, StepOverdue, WorkerParked, WorkerRejected)
"""Of these there may be as many as there are steps."""
MAX_OF_A_KIND = 500
"""On a time line, or up to twice as many: of more every second one between the first and the newest goes."""
MAX_TEXT = 500


@dataclass
class Happening:
    """An event, how often it came again before one that is not in `FREQUENT` did, and when last."""

    first: EventRecord
    count: int
    last_ts: str


class Story:
    """What happened in a run, as far as its file was read.

    Attributes:
        version: grows whenever there is something new.
        started: how the run began, as the newest start of its owner has said.
        counts: how many events there were of each kind.
        events: in order, without those of `FREQUENT`.
        happenings: all but the routine, in order.
    """

    def __init__(self, path: Path, newest_nbytes: int | None = None) -> None:
        """Begin with the file, or with so many of its newest bytes."""
        if newest_nbytes is None:
            self._tail = Tail(path, on_restart=self._begin)
        else:
            self._tail = Tail.newest(path, newest_nbytes, on_restart=self._begin)
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self.version += 1
        self.started: RunStarted | None = None
        self.counts: Counter[str] = Counter()
        self.events: list[EventRecord] = []
        self.happenings: list[Happening] = []
        self._repeated: dict[Hashable, Happening] = {}
        self._kept: dict[str, list[tuple[int, EventRecord]]] = {}
        """By kind, those of the time line; each with its place in the file."""

    def poll(self) -> bool:
        """Take what is new, a piece of the file at most; whether there was something."""
        lines = self._tail.poll()
        for record in records_of(line.data for line in lines):
            self.take(record)
        return bool(lines)

    def take(self, record: EventRecord) -> None:
        """Take the next event."""
        event, kind = record.event, kind_of(type(record.event))
        self.version += 1
        self.counts[kind] += 1
        if isinstance(event, RunStarted):
            self.started = event
        if not isinstance(event, FREQUENT):
            self.events.append(record)
        kept = self._kept.setdefault(kind, [])
        kept.append((self.version, record))
        if len(kept) > 2 * MAX_OF_A_KIND:
            del kept[1:-1:2]
        if isinstance(event, ROUTINE):
            return
        key = _key(event)
        if key is None:
            self._repeated.clear()
        if last := self._repeated.get(key):
            last.count, last.last_ts = last.count + 1, record.ts
        else:
            self._repeated[key] = Happening(record, 1, record.ts)
            self.happenings.append(self._repeated[key])

    def of(self, kind: type[Event]) -> Iterator[EventRecord]:
        """The events of a kind that is not in `FREQUENT`."""
        return (record for record in self.events if isinstance(record.event, kind))

    def shown(self) -> list[dict[str, Any]]:
        """The events for a time line, in the order of the file: a later start may have an earlier clock.

        Each has `t`, `kind`, `text`, and `rank`, `node` and `step` where they apply.
        """
        return [_shown(record) for record in self.kept()]

    def kept(self, without: Collection[type[Event]] = ()) -> list[EventRecord]:
        """Those of the time line, but for some kinds."""
        left_out = {kind_of(kind) for kind in without}
        merged = [each for kind, own in self._kept.items() if kind not in left_out for each in own]
        return [record for _, record in sorted(merged, key=lambda each: each[0])]


def _shown(record: EventRecord) -> dict[str, Any]:
    event, kind = record.event.model_dump(), kind_of(type(record.event))
    where = {name: event[name] for name in ("rank", "node", "step") if event.get(name) is not None}
    seconds, text = seconds_of(record.ts, 0.0), told(record.event)[:MAX_TEXT]
    return {"t": seconds, "kind": kind, "text": text, **where}


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


SENTENCES: Mapping[type[Event], str] = MappingProxyType(
    {
        RunStarted: "{algorithm} started on {node}{size}",
        WorkerJoined: "{who} {verb}, on {device}",
        WorkerLeft: "{who} left: {reason}",
        WorkerLost: "{who} is lost: {reason}",
        WorkerStalled: "{who} has not answered for {silent}: {reason}",
        WorkerRejected: "{node} was refused ({code}): {reason}",
        LeaseReturned: "{num} of {who} went back: {reason}",
        PushDropped: "a push of {who} was dropped as {outcome}: {reason}",
        StepOverdue: "step {step:,} waited for {who}: {reason}",
        LayersMoved: "the layers were dealt out again after step {step:,}: {reason}",
        BeginningEnded: "the synchronous beginning is over: {reason}",
        StepsUndone: "the store {node} is lost, with it {num} of {share:.0%} of the weights",
        WorkerParked: "{who} does not keep up, parked: {reason}",
        EpochFinished: "epoch {epoch} finished at step {step:,}",
        Evaluated: "evaluated at step {step:,}{loss}",
        CheckpointSaved: "checkpoint of step {step:,} saved",
        RunResumed: "resumed from step {step:,}, after {num}",
        RunEnded: "the run ended after {wall}: {reason}",
    }
)
"""What is said of each kind of event; the names are those of `_words`."""


def told(event: Event) -> str:
    """What happened, as a sentence without its stop."""
    return SENTENCES[type(event)].format(**_words(event))


def _words(event: Event) -> dict[str, Any]:
    """An event's fields, and what is made of them for a sentence."""
    words = dict(event) | {"num": _counted(event)}
    if isinstance(event, WorkerEvent):
        words["who"] = process_title("worker", event.node, event.rank)
    match event:
        case RunStarted():
            workers = f" for {event.num_workers} workers" if event.num_workers > 1 else ""
            ranks = f" with {format_count(event.num_ranks or 0, 'rank')}, {event.mesh}"
            words["size"] = workers if event.mesh is None else ranks
            words["algorithm"] = event.shown_algorithm
        case WorkerJoined():
            words["verb"] = "came back" if event.rejoined else "joined"
        case WorkerStalled():
            words["silent"] = format_duration(event.silent_s)
        case PushDropped():
            words["outcome"] = event.outcome.replace("_", "-")
        case EpochFinished():
            words["epoch"] = event.epoch + 1
        case Evaluated(val_loss=loss):
            words["loss"] = "" if loss is None else f": validation loss {loss:.4g}"
        case RunEnded():
            words["wall"] = format_duration(event.wall_s)
    return words


def _counted(event: Event) -> str:
    """How many samples or steps an event is about; empty where it is about none."""
    match event:
        case LeaseReturned(start=start, stop=stop):
            return format_count(stop - start, "sample")
        case StepsUndone(num_steps=num_steps):
            return format_count(num_steps, "step")
        case RunResumed(samples_applied=samples):
            return format_count(samples, "sample")
    return ""
