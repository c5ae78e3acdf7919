"""One run, read as it goes on. Safe to use from several threads."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smolcluster.observability.view import lines
from smolcluster.observability.view.happenings import Happenings
from smolcluster.observability.view.measured import Measured
from smolcluster.observability.view.snapshot import RunSnapshot, read_snapshot
from smolcluster.observability.view.standing import staleness_counts, standing
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import instant

EVERY_S = 0.5
"""The files are not read more often than this, however many ask."""
MAX_PIECES = 16
"""Pieces of a file that are read at a time."""


@dataclass(frozen=True)
class Files:
    """Where the files of a run are read.

    Attributes:
        own: its folder, where the launcher has left what it knows.
        served: the folder with what its server writes; a copy that grows where that is another machine.
        logs: folders with log files.
        is_here: whether its server runs on this machine.
        problems: what cannot be read now, and what to do about it.
        close: ends the copying.
    """

    own: RunPaths
    served: RunPaths
    logs: tuple[Path, ...]
    is_here: bool = True
    problems: Callable[[], Sequence[str]] = field(default=list)
    close: Callable[[], None] = field(default=lambda: None)


def files_here(paths: RunPaths) -> Files:
    return Files(paths, paths, (paths.logs,))


class RunView:
    """A run that is looked at."""

    def __init__(
        self,
        files: Files,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._polled_at: float | None = None
        self._snapshot = RunSnapshot(files.own, None, None, None)
        self._changed_at: float | None = None
        self._measured = Measured(files.served)
        self._happenings = Happenings(files.served.events)
        self._shown: tuple[dict[str, int], dict[str, Any]] | None = None

    @property
    def versions(self) -> dict[str, int]:
        """Numbers that grow when there are new points and new events."""
        return {"series": self._measured.version, "events": self._happenings.version}

    def state(self) -> dict[str, Any]:
        """How the run stands, see `standing`; reads what is new."""
        with self._lock:
            self._poll()
            held = is_held(self.files.served.lock) if self.files.is_here else None
            started, reports = self._happenings.started, self._measured.newest_reports()
            return {
                **standing(self._snapshot, started, reports, age_s=self._age_s(), is_held=held),
                "staleness": staleness_counts(
                    self._snapshot.status, self._measured.staleness_values()
                ),
                "problems": [*self.files.problems(), *self._snapshot.problems],
                "versions": self.versions,
            }

    def series(self) -> dict[str, Any]:
        """Points for curves: see `Measured`."""
        with self._lock:
            self._poll()
            if self._shown is None or self._shown[0] != self.versions:
                own = self._measured.series()
                self._shown = self.versions, own | {"version": self._measured.version}
            return self._shown[1]

    def events(self) -> dict[str, Any]:
        with self._lock:
            self._poll()
            return {
                "events": self._happenings.shown(),
                "counts": dict(self._happenings.counts),
                "version": self._happenings.version,
            }

    def log_files(self) -> dict[str, Path]:
        return lines.log_files(self.files.logs)

    def search(
        self, wanted: lines.Wanted, at_most: int, goes_on: Callable[[], bool] = lambda: True
    ) -> lines.Found:
        """The newest log lines that are wanted.

        `goes_on` is asked for each block of a file: nobody may wait for the answer any more.
        """
        return lines.search(self.log_files(), wanted, at_most, goes_on)

    def close(self) -> None:
        self.files.close()

    def _poll(self) -> None:
        now = self._clock()
        if self._polled_at is not None and now - self._polled_at < EVERY_S:
            return
        self._polled_at = now
        for source in (self._happenings, self._measured):
            for _ in range(MAX_PIECES):
                if not source.poll():
                    break
        before, read = self._snapshot, read_snapshot(self.files.own, self.files.served)
        if read.status is not None and read.status != before.status:
            self._changed_at = None if before.status is None else now
        self._snapshot = replace(
            read, launched=read.launched or before.launched, status=read.status or before.status
        )

    def _age_s(self) -> float | None:
        """Seconds since its server wrote; once it was seen to write, by this machine's clock alone."""
        status = self._snapshot.status
        if status is None or status.is_over:
            return None
        if self._changed_at is None:
            return status.age_s(instant(self._now()))
        return max(0.0, self._clock() - self._changed_at)
