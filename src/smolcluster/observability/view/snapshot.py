"""What the small files of a run's folder say of it, read once; and how it stands, in a word."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from smolcluster.configs.spec import SINGLE
from smolcluster.errors import DataError
from smolcluster.observability.sinks.jsonl import MetricLine, follow_metrics
from smolcluster.runs.advice import ADVICE, Prediction
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.events import RunStarted, first_start
from smolcluster.runs.files import Follower, or_none
from smolcluster.runs.launched import Launched, Process, launched_of
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import RunStatus, read_status
from smolcluster.runs.summary import Summary, read_summary

STARTING_S = 60.0
"""So long a run may take to load PyTorch and its data before it writes anything."""

State = Literal[
    "starting", "waiting", "training", "ended", "stopped", "failed", "broken off", "unknown"
]
File = TypeVar("File")
LAST_STEP, LAST_EPOCH = "last step", "mean of the last epoch"
"""What a run's training loss is: of a status, and of a run that has left its summary alone."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run as its folder tells; None is what is missing, or damaged, of which `problems` tells."""

    paths: RunPaths
    launched: Launched | None
    status: RunStatus | None
    summary: Summary | None
    problems: Sequence[str] = ()

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
        told = self.status or self.summary or self.launched
        if told is None or told.algorithm != SINGLE:
            return None if told is None else told.algorithm
        return self.started.shown_algorithm if self.started else told.algorithm

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

    def state_here(self, *, lives: bool = False) -> State:
        """How a run of this machine stands: an owner that lives holds its run's lock."""
        is_new = self.status is None and (lives or time.time() - self.began < STARTING_S)
        return state_of(self.status, self.summary, bool(is_held(self.paths.lock)) or is_new)


def measured(paths: RunPaths) -> Follower[MetricLine]:
    """What a run's owner measures, as it comes."""
    return follow_metrics(paths.metrics)


def read_snapshot(paths: RunPaths, served: RunPaths | None = None) -> RunSnapshot:
    """What the small files of a run say now; `served`: where a copy is of what its server wrote."""
    problems: list[str] = []

    def read(reader: Callable[[Path], File], path: Path) -> File | None:
        try:
            return reader(path)
        except DataError as error:
            if path.exists():
                problems.append(str(error))
            return None

    own = served or paths
    return RunSnapshot(
        paths,
        read(lambda root: launched_of(RunPaths(root)), paths.root),
        read(read_status, own.status),
        read(read_summary, own.summary),
        problems,
    )


def state_of(status: RunStatus | None, summary: Summary | None, is_alive: bool | None) -> State:
    """How a run stands: what its owner wrote, unless that lives no more; None: nobody knows whether."""
    if status is not None and status.is_over:
        return status.word
    if status is None and summary is not None:
        return "ended"
    if is_alive is None:
        return "unknown"
    if not is_alive:
        return "broken off"
    return "starting" if status is None else status.state


def summed_up(summary: Summary) -> dict[str, Any]:
    """What a status would say of a run that has left its summary alone."""
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
