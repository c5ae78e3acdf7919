"""`status.json`: how a run stands now, for whoever looks. Only the run's owner writes it.

While the run lives the file is at most about a second old, unless its owner is busy with one long thing, such
as an evaluation in a single process; how old it is says `updated_at`. The owner's clock gives all times.
"""

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    AwareDatetime,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
)

from smolcluster.errors import SmolclusterError
from smolcluster.runs.files import flush_at_the_end, is_full, utc_timestamp
from smolcluster.runs.model_file import Measured, ModelFile, Strict, WithMetrics
from smolcluster.utils.cadence import Cadence

STALENESS_EDGES = (0, 1, 2, 4, 8, 16, 32)
"""Largest τ of the bins in which pushes are counted, steps; one more bin has all above."""
STOPPED = "it was stopped"
"""The reason of a run that its owner was asked to end."""
EVERY_S = 1.0
"""How often the file is written at most, seconds."""
OLD_S = 10.0
"""A status of a run that goes on ought not to be older."""

RunState = Literal["waiting", "training", "ended", "failed"]
Presence = Literal["joined", "left", "lost"]


Instant = Annotated[
    AwareDatetime,
    PlainSerializer(lambda moment: utc_timestamp(moment.timestamp()), when_used="json"),
]
"""RFC 3339 in the file, UTC."""


PROCESS_STATS = AliasChoices("process_stats", "vitals")
"""Files of older runs use the second name."""


def no_space_on(node: str) -> str:
    """The trouble of a run whose disk, that of `node`, is full."""
    return f"nothing is saved: no space is left on the disk of {node}"


class _Seen(Strict):
    """Somebody from whom the owner hears."""

    last_seen: Instant = Field(description="When the last byte came from it; heartbeats count.")

    def silent_s(self, now: datetime) -> float:
        return age_s(self.last_seen, now)


class WorkerStatus(_Seen):
    """How one worker stands. Who came back has the entry of its rank."""

    rank: NonNegativeInt
    node: str
    state: Presence = Field(description="Of a run that is over: what it was when the run ended.")
    device: str
    step: NonNegativeInt | None = Field(
        description="Newest step it contributed to since the owner started; null before."
    )
    loss: Measured = Field(
        None, description="Mean of the samples that it contributed to that step; null before."
    )
    samples: NonNegativeInt = Field(description="Applied, in the whole run.")
    samples_per_s: NonNegativeFloat = Field(description="Applied; 0 of a worker that has gone.")
    mean_staleness: NonNegativeFloat = Field(
        0.0, description="Mean τ of its applied pushes, steps."
    )
    staleness: list[NonNegativeInt] = Field(
        [],
        description="How many of its applied pushes had a τ of 0, 1, 2, 3-4, 5-8, 9-16, 17-32, more.",
    )
    process_stats: dict[str, float] = Field(
        {}, validation_alias=PROCESS_STATS, description="What it reported of itself last."
    )
    address: str = Field("", description="Its IP address, as the server sees it.")
    sent_bytes: NonNegativeInt = Field(0, description="By it to the server since it joined.")
    received_bytes: NonNegativeInt = Field(0, description="By it from the server since it joined.")


class RankStatus(_Seen):
    """What one rank of a mesh reported of itself last."""

    rank: NonNegativeInt
    node: str
    process_stats: dict[str, float]
    last_seen: Instant = Field(description="When it reported.")


class RunStatus(WithMetrics):
    """How a run stands. Epochs and ranks count from 0.

    `workers` are those that took part since the owner started, by rank; none in a single process.
    """

    run_id: str
    algorithm: str
    incarnation: str
    state: RunState = Field(
        description="waiting: for workers; ended: complete, out of patience, or stopped."
    )
    reason: str | None = Field(description="Why the run is over, one sentence; null until then.")
    updated_at: Instant
    started_at: Instant = Field(description="When the owner started, for the last time.")
    wall_s: NonNegativeFloat = Field(0.0, description="Spent on it by all its owners so far.")
    step: NonNegativeInt
    total_steps: NonNegativeInt
    epoch: NonNegativeInt
    num_epochs: NonNegativeInt
    samples_applied: NonNegativeInt
    total_samples: NonNegativeInt
    loss: Measured = Field(description="Of the newest step since the owner started; null before.")
    val_loss: Measured = Field(description="Of the newest evaluation since the owner started.")
    val_accuracy: Measured
    val_perplexity: Measured
    samples_per_s: NonNegativeFloat
    learning_rate: Measured = None
    grad_norm: Measured = None
    overflows: NonNegativeInt | None = Field(
        None, description="Steps skipped because a gradient overflowed; null: not in float16."
    )
    staleness_bound: PositiveInt | None = Field(None, description="Older pushes are dropped.")
    pushes: dict[str, NonNegativeInt] = Field({}, description="By outcome, in the whole run.")
    leases_returned: NonNegativeInt = 0
    process_stats: dict[str, float] = Field(
        {}, validation_alias=PROCESS_STATS, description="What the owner measured of itself last."
    )
    trouble: str | None = Field(
        None, description="What cannot be saved, such as because the disk is full; null: nothing."
    )
    workers: list[WorkerStatus]
    ranks: list[RankStatus] = Field(
        [], description="Of a mesh, by rank: those that have reported since the owner started."
    )

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added to it."""
        return self.state in ("ended", "failed")

    @property
    def word(self) -> RunState | Literal["stopped"]:
        """The state in a word; `stopped` is one more."""
        is_stopped = self.state == "ended" and self.reason == STOPPED
        return "stopped" if is_stopped else self.state

    def age_s(self, now: datetime) -> float:
        """Seconds since it was written: of a run that is not over, a few at most while its owner lives."""
        return age_s(self.updated_at, now)


def age_s(moment: datetime, now: datetime) -> float:
    """Seconds from `moment` to `now`, both with a time zone; 0 where clocks differ and it is yet to come."""
    return max(0.0, (now - moment).total_seconds())


def instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def unbegun(
    run_id: str, algorithm: str, state: RunState, reason: str, num_epochs: int = 0
) -> RunStatus:
    """The status of a run that ended for this reason before it began."""
    now = instant(time.time())
    return RunStatus(
        run_id=run_id,
        algorithm=algorithm,
        incarnation="",
        state=state,
        reason=reason,
        updated_at=now,
        started_at=now,
        step=0,
        total_steps=0,
        epoch=0,
        num_epochs=num_epochs,
        samples_applied=0,
        total_samples=0,
        loss=None,
        val_loss=None,
        val_accuracy=None,
        val_perplexity=None,
        samples_per_s=0.0,
        workers=[],
    )


def failed(why: str) -> str:
    """The reason of a run that has failed."""
    return f"the run failed: {why}"


def stopped(
    status: RunStatus | None, run_id: str, algorithm: str, why: str | None = None
) -> RunStatus | None:
    """The last status of a run whose owner was stopped; None: the owner has written its last itself.

    `status` is what it wrote last; None: nothing yet. `why`: how the run has failed; None: it has not.
    """
    state: RunState = "ended" if why is None else "failed"
    reason = STOPPED if why is None else failed(why)
    if status is None:
        return unbegun(run_id, algorithm, state, reason)
    if status.is_over:
        return None
    return status.model_copy(update={"state": state, "reason": reason, "samples_per_s": 0.0})


STATUS = ModelFile[RunStatus](
    RunStatus, "is not a run's status", "has the run begun?", durable=False
)
"""Not durable: the disk may be busy with a checkpoint."""
read_status, write_status = STATUS.read, STATUS.write


class StatusFile:
    """Keeps `status.json` up to date: one thread says how the run stands, another one writes that down.

    `warn` is called once, with one sentence, when the file cannot be written; the newest status is tried
    again every second, because the obstacle may pass.
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._warn = warn
        self._clock = clock
        self._cadence = Cadence(0, EVERY_S, clock)
        self._retry_at = -math.inf
        self._problem: BaseException | None = None
        self._writing = threading.Lock()
        self._written: RunStatus | None = None
        self.newest: RunStatus | None = None
        """What was said last; for any thread."""

    @property
    def has_full_disk(self) -> bool:
        """Whether the newest status is not in the file because there is no space for it."""
        return is_full(self._problem)

    def ask(self, status: Callable[[], RunStatus]) -> None:
        """Keep what `status` says for the next `flush`, if it is time; otherwise do not even ask."""
        if self._cadence.take():
            self.newest = status()

    def write(self, status: RunStatus) -> None:
        """Write this status now; never raises for the file's sake."""
        self.newest = status
        self.flush(is_urgent=True)

    def flush(self, *, is_urgent: bool = False) -> None:
        """Write the newest, if it is not yet; after a failure only if it is urgent or time. Any thread."""
        with self._writing:
            status, is_due = self.newest, is_urgent or self._clock() >= self._retry_at
            if status is not None and status is not self._written and is_due:
                self._write(status)

    def close(self, patience_s: float = 0.0) -> None:
        """Write the newest; for so many seconds it is tried again on a full disk."""
        flush = partial(self.flush, is_urgent=True)
        flush_at_the_end(self._path, flush, lambda: self._problem, self._warn, patience_s)

    def _write(self, status: RunStatus) -> None:
        try:
            write_status(self._path, status)
        except SmolclusterError as error:
            if self._problem is None:
                self._warn(f"{error}; training goes on")
            self._problem = error.__cause__ or error
            self._retry_at = self._clock() + EVERY_S
        else:
            self._written, self._problem = status, None
