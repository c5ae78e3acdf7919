"""What the small files of a run's folder say of it, read once; and how it stands, in a word."""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.events import RunStarted, first_start, follow_events
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import RunStatus, read_status
from smolcluster.runs.summary import Summary, read_summary

STARTING_S = 60.0
"""So long a run may take to load PyTorch and its data before it writes anything."""

State = Literal[
    "starting", "waiting", "training", "ended", "stopped", "failed", "broken off", "unknown"
]


@dataclass(frozen=True)
class RunSnapshot:
    """A run as its folder tells; None is what is missing or damaged."""

    paths: RunPaths
    launched: Launched | None
    status: RunStatus | None
    summary: Summary | None

    @cached_property
    def started(self) -> RunStarted | None:
        """How it began, as its first events tell."""
        return first_start(self.paths.events)

    @property
    def algorithm(self) -> str | None:
        """What trains it."""
        told = self.status or self.summary or self.launched
        return None if told is None else told.algorithm

    @property
    def is_over(self) -> bool:
        """Whether its files say so."""
        return self.status.is_over if self.status is not None else self.summary is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether only other machines can say how it stands."""
        has_list = self.paths.launched.is_file()
        return has_list and (self.launched is None or not self.launched.is_local)

    @property
    def began(self) -> float:
        """When it began, as well as its files tell, which are written in this order; seconds since 1970."""
        for path in (self.paths.launched, self.paths.config, self.paths.processes):
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


class Feed:
    """What a run's owner measures and tells, as it comes."""

    def __init__(self, paths: RunPaths) -> None:
        self.metrics = follow_metrics(paths.metrics)
        self.events = follow_events(paths.events)

    def skip(self) -> None:
        """Leave out what is there."""
        self.metrics.poll()
        self.events.poll()


def read_snapshot(paths: RunPaths) -> RunSnapshot:
    """What the small files of a run say now."""
    return RunSnapshot(
        paths,
        or_none(read_launched, paths.launched),
        or_none(read_status, paths.status),
        or_none(read_summary, paths.summary),
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
