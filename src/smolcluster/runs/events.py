"""What happens in a run, as typed events in `events.jsonl`.

Each line carries `ts` (RFC 3339, UTC), `kind`, `incarnation` (which start of the server wrote it,
so that an abandoned time line can be left out) and the event's own fields. Epochs and ranks count
from 0; `start` and `stop` are positions in the epoch's permutation.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smolcluster.configs.spec import algorithm_of_groups
from smolcluster.runs.files import Follower, StampedLog, json_objects
from smolcluster.runs.model_file import Measured, WithMetrics
from smolcluster.runs.status import STOPPED
from smolcluster.runs.tail import Tail


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WorkerEvent(_Event):
    """Something that happened to one worker."""

    rank: int
    node: str


class RunStarted(_Event):
    """The server is ready for workers."""

    run_id: str
    algorithm: str
    node: str
    num_workers: int = Field(description="Workers in the configuration, not those present.")
    num_epochs: int
    train_samples: int = Field(description="Samples an epoch.")
    batch_size: int
    codec: str
    dataset: str
    model: str
    num_params: int
    source: str | None = Field(None, description="SHA-256 of a workload's code.")
    samples: list[list[str]] = Field(
        [],
        description="What some training samples are known by, to tell if a run goes on with others.",
    )
    order: str | None = Field(None, description="The same of the order of the data's own sampler.")
    mesh: str | None = Field(
        None, description="A mesh's sizes, such as `dp 2 x fsdp 1 x tp 1 x pp 2`."
    )
    num_ranks: int | None = Field(None, description="Ranks of a mesh.")
    tokens_per_sample: int | None = Field(None, description="Null where a sample is no text.")

    @property
    def shown_algorithm(self) -> str:
        """The algorithm's name for people: a mesh's owner trains as a single process does."""
        return self.algorithm if self.mesh is None else algorithm_of_groups().name

    @property
    def owner_role(self) -> str:
        """The role of the process that owns the run."""
        if self.mesh is not None:
            return "rank"
        return "trainer" if self.num_workers == 0 or self.algorithm == "single" else "server"


class WorkerJoined(WorkerEvent):
    """A worker is a member now, for the first time or again."""

    device: str
    samples_per_s: float
    rejoined: bool = False


class WorkerLeft(WorkerEvent):
    """A worker said goodbye."""

    reason: str


class WorkerLost(WorkerEvent):
    """A worker's connection broke, fell silent, or was cut."""

    reason: str


class WorkerStalled(WorkerEvent):
    """A worker is connected and has not answered for long; its samples go to others."""

    silent_s: float
    reason: str


class WorkerRejected(_Event):
    """A peer was refused."""

    node: str
    worker_id: int | None = None
    code: str
    reason: str


class LeaseReturned(WorkerEvent):
    """Samples that were handed out go back and will be handed out again."""

    epoch: int
    start: int
    stop: int
    reason: str


class PushDropped(WorkerEvent):
    """A gradient was not applied."""

    outcome: Literal["stale", "late", "duplicate", "non_finite", "lost"]
    epoch: int
    start: int
    stop: int
    staleness: int | None = None
    reason: str


class StepOverdue(WorkerEvent):
    """SyncPS: a worker has had a part of a step for far longer than expected."""

    step: int
    reason: str


class LayersMoved(_Event):
    """PipelineParallel: the layers are dealt out again after `step`, though no stage was lost."""

    step: int
    reason: str


class BeginningEnded(_Event):
    """DiLoCo: its synchronous beginning is over after batch `step`; `reason`: how far it went, and why."""

    step: int
    reason: str


class StepsUndone(_Event):
    """EDP: a store on another host is lost; its slice, `share` of the weights, goes back by so many steps."""

    node: str
    num_steps: int
    share: float


class WorkerParked(WorkerEvent):
    """SyncPS: a worker does not keep up, and is sent no more steps until it can be sent the whole state."""

    step: int
    reason: str


class EpochFinished(_Event):
    """Every sample of an epoch has been applied."""

    epoch: int
    step: int
    samples_applied: int


class Evaluated(_Event, WithMetrics):
    """The validation split was evaluated on the weights of `step`."""

    model_config = ConfigDict(allow_inf_nan=True)

    epoch: int
    step: int
    val_loss: float | None
    val_accuracy: Measured = None
    val_perplexity: Measured = None


class CheckpointSaved(_Event):
    """The weights of `step` are on the disk, and the run can go on from there."""

    step: int


class RunResumed(_Event):
    """The run goes on from the checkpoint of `step`; what other incarnations did after it is undone."""

    step: int
    samples_applied: int


class RunEnded(_Event):
    """The run is over; `reason` is one sentence."""

    ok: bool
    reason: str
    wall_s: float
    steps: int
    samples_applied: int

    @property
    def word(self) -> Literal["ended", "stopped", "failed"]:
        """How the run stands then."""
        if self.ok:
            return "ended"
        return "stopped" if self.reason == STOPPED else "failed"


MAX_FIRST_NBYTES = 64 * 1024

Event = (
    RunStarted
    | WorkerJoined
    | WorkerLeft
    | WorkerLost
    | WorkerStalled
    | WorkerRejected
    | LeaseReturned
    | PushDropped
    | StepOverdue
    | LayersMoved
    | BeginningEnded
    | StepsUndone
    | WorkerParked
    | EpochFinished
    | Evaluated
    | CheckpointSaved
    | RunResumed
    | RunEnded
)


def kind_of(model: type[Event]) -> str:
    """An event's `kind` in the file: `worker_joined` for `WorkerJoined`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", model.__name__).lower()


@dataclass(frozen=True)
class EventRecord:
    """One line of `events.jsonl`."""

    ts: str
    incarnation: str
    event: Event


class EventLog(StampedLog):
    """Appends events to `events.jsonl`. `on_event` hears of each, whatever becomes of the file."""

    def __init__(
        self,
        path: Path,
        incarnation: str,
        *,
        warn: Callable[[str], None],
        on_event: Callable[[Event], None] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path, incarnation, warn=warn, now=now)
        self._on_event = on_event

    def write(self, event: Event) -> None:
        self.stamp(kind_of(type(event)), event.model_dump())
        self._on_event(event)


_KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {kind_of(model): model for model in get_args(Event)}
)


def parse_event(entry: dict[str, Any]) -> EventRecord | None:
    """The event of one line's JSON object; None when it is of no known kind."""
    kind, ts, incarnation = (str(entry.pop(name, "")) for name in ("kind", "ts", "incarnation"))
    try:
        return EventRecord(ts, incarnation, _KINDS[kind].model_validate(entry))
    except (KeyError, ValidationError):
        return None


def records_of(lines: Iterable[bytes]) -> Iterator[EventRecord]:
    """The events among the lines of the file; those of unknown kinds are left out."""
    return filter(None, map(parse_event, json_objects(lines)))


def first_start(path: Path) -> RunStarted | None:
    """How the run began; None when its first lines do not tell."""
    lines = Tail(path, max_piece_nbytes=MAX_FIRST_NBYTES).poll()
    events = (record.event for record in records_of(line.data for line in lines))
    return next((event for event in events if isinstance(event, RunStarted)), None)


def last_end(path: Path) -> RunEnded | None:
    """How the run has ended; None when its last event tells of no end."""
    lines = [line.data for line in Tail.newest(path, MAX_FIRST_NBYTES).poll()]
    last = next(records_of(reversed(lines)), None)
    return last.event if last is not None and isinstance(last.event, RunEnded) else None


def read_events(path: Path) -> list[EventRecord]:
    """All events of known kinds that are in the file now; none when it does not exist."""
    return Follower(path, parse_event).poll()


def num_resumed(path: Path) -> int:
    """How often a server has gone on with the run of these events."""
    return sum(isinstance(each.event, RunResumed) for each in read_events(path))
