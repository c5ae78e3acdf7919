"""How a run stands: what the small files of its folder say, and what was seen of its processes."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from smolcluster.configs.spec import SINGLE
from smolcluster.errors import DataError
from smolcluster.observability.sinks.jsonl import MetricLine, follow_metrics
from smolcluster.observability.view.stages import StageView
from smolcluster.runs.advice import ADVICE, Prediction
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.events import RunEnded, RunStarted, first_start, last_end
from smolcluster.runs.files import Follower, or_none
from smolcluster.runs.launched import Launched, Process, launched_of
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import Presence, RunStatus, instant, read_status
from smolcluster.runs.summary import Summary, read_summary

STARTING_S = 60.0
"""So long a run may take to load PyTorch and its data before it writes anything."""

State = Literal[
    "starting", "waiting", "training", "ended", "stopped", "failed", "broken off", "unknown"
]
OVER = ("ended", "stopped", "failed", "broken off")
"""States of a run that does not go on."""
File = TypeVar("File")
LAST_STEP, LAST_EPOCH = "last step", "mean of the last epoch"
"""What a run's training loss is: of a status, and of a run that has left its summary alone."""


Liveness = Literal["running", "ended", "gone", "unreachable", "unknown"]


class ProcessReport(Process):
    """How one process stands. Null is what is not known, or does not apply."""

    process: Liveness = Field(
        description="ended: of itself or when asked to; gone: not there any more, and nobody knows how it "
        "ended; unreachable: its machine cannot be asked; unknown: this launcher did not start it."
    )
    exit_code: int | None = None
    why: str | None = Field(None, description="Why its machine cannot be asked.")
    fix: str | None = Field(None, description="The same in a sentence, with what mends it.")
    presence: Presence | None = Field(
        None, description="A worker's, as the server sees it; who saw the end has left."
    )
    device: str | None = None
    step: int | None = None
    loss: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    heartbeat_age_s: float | None = Field(
        None, description="Since the server's last word; of a worker since the server heard of it."
    )
    gpu: dict[str, float] = Field(
        {},
        description="What its GPU does, as far as it tells: utilization (of 1), memory_bytes, "
        "memory_size_bytes, temperature_c, power_w.",
    )
    peak_bytes: dict[str, float] = Field(
        {}, description="Most memory by phase, where memory_profiling is on."
    )
    stage: StageView | None = Field(None, description="Of a pipeline: its part in the newest step.")
    mean_staleness: float | None = Field(
        None, exclude=True, description="Of a worker's pushes, where any was stale."
    )
    process_stats: dict[str, float] = Field(
        {}, exclude=True, description="What it reported of itself last, while it takes part."
    )


@dataclass(frozen=True)
class Snapshot:
    """How a run stands; None is what is missing, or damaged, of which `problems` tells.

    Attributes:
        launched: which processes were started for it, and where.
        seen: what was found of its processes, the owner's first; empty: nobody has looked.
        now: when that was, by the clock of the owner's machine.
        stderr_tail: the owner's last words, where it has ended and left some.
        is_full: whether the disk of the run's folder has no space left.
        series: the content of `series.json` on another machine, if it was asked for.
    """

    paths: RunPaths
    launched: Launched | None = None
    status: RunStatus | None = None
    summary: Summary | None = None
    problems: Sequence[str] = ()
    seen: tuple[ProcessReport, ...] = ()
    now: datetime = field(default_factory=lambda: instant(time.time()))
    stderr_tail: str | None = None
    is_full: bool = False
    series: str = ""

    @property
    def state(self) -> State:
        """What its owner wrote, unless that lives no more."""
        return self.state_if(self.is_alive)

    @property
    def heard(self) -> State:
        """The same, but of one whose machine cannot be asked it is what was heard last."""
        return self.state if self.status is None else self.state_if(self.is_alive is not False)

    def state_if(self, is_alive: bool | None) -> State:
        """How the run stands if its owner lives or not; None: nobody knows."""
        status = self.status
        if is_alive and self.is_status_of_before:
            return "starting"
        if status is not None and status.is_over:
            return status.word
        if status is None and self.summary is not None:
            return "ended"
        if is_alive is None:
            return "unknown"
        if not is_alive:
            return "broken off" if self.ended is None else self.ended.word
        return "starting" if status is None else status.state

    @property
    def reason(self) -> str | None:
        """Why it is over, as its owner has said."""
        if self.status is not None:
            return self.status.reason
        return None if self.summary is not None or self.ended is None else self.ended.reason

    @property
    def is_status_of_before(self) -> bool:
        """Whether its owner, which was started again, has written nothing yet."""
        status, launched = self.status, self.launched
        return bool(status and launched and status.incarnation == launched.before)

    @cached_property
    def ended(self) -> RunEnded | None:
        """How it has ended by its events; only asked of a run that has left no status."""
        return None if self.status is not None else last_end(self.paths.events)

    @cached_property
    def is_alive(self) -> bool | None:
        """Whether its owner lives: as it was seen, else by its lock; None: only another machine knows.

        Of one that has written nothing yet it is told by the run's age, too; of a job only by its scheduler.
        """
        if self.seen:
            owner = self.seen[0].process
            return None if owner in ("unreachable", "unknown") else owner == "running"
        launched = self.launched
        if is_held(self.paths.lock) or (launched is not None and launched.server.lives_here):
            return True
        if launched is None and self.paths.launched.is_file():  # it is damaged
            return None
        if launched is not None and (launched.server.ssh is not None or launched.is_job):
            return None
        has_written = self.status is not None or self.paths.events.exists()
        return not has_written and time.time() - self.began < STARTING_S

    @cached_property
    def started(self) -> RunStarted | None:
        """How it began, as its first events tell."""
        return first_start(self.paths.events)

    @cached_property
    def prediction(self) -> Prediction | None:
        """What was predicted of it, and what was measured for that; of a launch with --auto."""
        return or_none(ADVICE.read, self.paths.advice)

    @property
    def processes(self) -> Sequence[Process]:
        """What was started for it, here or elsewhere."""
        return () if self.launched is None else self.launched.processes

    @property
    def algorithm(self) -> str | None:
        """Its name for people: a mesh's owner writes as a single process does."""
        names = (each.algorithm for each in (self.launched, self.status, self.summary) if each)
        name = next(filter(None, names), None)
        return self.started.shown_algorithm if name == SINGLE and self.started else name

    @property
    def is_over(self) -> bool:
        return self.status.is_over if self.status is not None else self.summary is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether only other machines can say how it stands."""
        has_list = self.paths.launched.is_file()
        return has_list and (self.launched is None or not self.launched.is_local)

    @property
    def began(self) -> float:
        """When it began, as well as its files tell; seconds since 1970. Who joins changes `launch.json`."""
        for path in (self.paths.config, self.paths.launched, self.paths.processes):
            with suppress(OSError):
                return path.stat().st_mtime
        if self.status is not None:
            return self.status.started_at.timestamp()
        with suppress(OSError):
            return self.paths.root.stat().st_mtime
        return 0.0


def measured(paths: RunPaths) -> Follower[MetricLine]:
    """What a run's owner measures, as it comes."""
    return follow_metrics(paths.metrics)


def read_snapshot(paths: RunPaths) -> Snapshot:
    """What the small files of a run say now."""
    problems: list[str] = []

    def read(reader: Callable[[Path], File], path: Path) -> File | None:
        try:
            return reader(path)
        except DataError as error:
            if path.exists():
                problems.append(str(error))
            return None

    return Snapshot(
        paths,
        read(lambda root: launched_of(RunPaths(root)), paths.root),
        read(read_status, paths.status),
        read(read_summary, paths.summary),
        problems,
    )


def numbers_of(status: RunStatus | None, summary: Summary | None) -> dict[str, Any]:
    """How far a run is and what it is worth, by its status, or by its summary where that is all there is."""
    if status is not None:
        told_apart = {"run_id", "algorithm", "state", "workers", "ranks", "process_stats"}
        return status.model_dump(mode="json", exclude=told_apart) | {"loss_is": LAST_STEP}
    if summary is None:
        return {}
    final = summary.final
    return {
        "step": summary.steps,
        "total_steps": summary.steps,
        "epoch": max(0, summary.epochs - 1),
        "num_epochs": summary.epochs,
        "samples_applied": summary.samples_applied,
        "total_samples": summary.samples_applied,
        "loss": final.train_loss,
        "loss_is": LAST_EPOCH,
        **{name: value for name, value in final if name.startswith(PREFIX)},
        "samples_per_s": summary.samples_applied / summary.wall_s if summary.wall_s else None,
        "wall_s": summary.wall_s,
        "pushes": summary.pushes.model_dump(),
        "leases_returned": summary.leases_returned,
    }
