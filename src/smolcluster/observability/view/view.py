"""One run, read from its folder as it goes on, or whole: what every way of looking at it draws."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from smolcluster.configs.resolve import load_resolved
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError, DataError, SmolclusterError
from smolcluster.observability.view import lines
from smolcluster.observability.view.curves import Curves, curves_of
from smolcluster.observability.view.first_error import Logs, read_logs
from smolcluster.observability.view.measured import columns_of
from smolcluster.observability.view.snapshot import Snapshot, read_snapshot
from smolcluster.observability.view.standing import standing
from smolcluster.observability.view.story import Story
from smolcluster.observability.view.workers import Worker, expected_of, stderr_tail, workers_of
from smolcluster.runs.events import RunStarted
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.runs.series import ProcessSeries, Series, SeriesReader
from smolcluster.runs.status import RunStatus, instant
from smolcluster.runs.summary import Summary

EVERY_S = 0.5
"""The files are not read more often than this, however many ask."""
MAX_PIECES = 16
"""Pieces of a file that are read at a time."""


class Folder:
    """Where a run is read: its own folder. That of a run on other machines is a mirror of these.

    Attributes:
        own: its folder, where the launcher has left what it knows.
        served: the folder with what its server writes; a copy that grows where that is another machine.
        logs: folders with log files.
        num_events: so many of the newest events were brought when it was opened; None: all are there.
    """

    num_events: int | None = None

    def __init__(self, own: RunPaths) -> None:
        self.own = self.served = own
        self.logs: tuple[Path, ...] = (own.logs,)

    def snapshot(self) -> Snapshot:
        """What its small files say."""
        return read_snapshot(self.own)

    def problems(self) -> Sequence[str]:
        """What cannot be read now, and what to do about it."""
        return ()

    @property
    def is_outdated(self) -> bool:
        """Whether it has to be opened anew to see how the run goes on."""
        return False

    def close(self) -> None:
        """Bring nothing more."""


class View:
    """A run that is looked at. `state`, `columns`, `events` and `search` are for any thread.

    Attributes:
        snapshot: what its small files say.
        story: what happened in it.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        newest_nbytes: int | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look at a run; of its events, so many of the newest bytes are read, or all of them."""
        self.folder = folder
        self.snapshot = Snapshot(folder.own)
        self.story = Story(folder.served.events, newest_nbytes)
        self._reader = SeriesReader(folder.served)
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._polled_at: float | None = None
        self._changed_at: float | None = None
        self._settings: tuple[Settings | None, list[str]] = None, []
        self._configured_at: int | None = None
        """When the file was written of which these are."""
        self._shown: tuple[dict[str, int], dict[str, Any]] | None = None

    # --- whole

    @property
    def paths(self) -> RunPaths:
        return self.folder.own

    @property
    def status(self) -> RunStatus | None:
        return self.snapshot.status

    @property
    def summary(self) -> Summary | None:
        return self.snapshot.summary

    @property
    def started(self) -> RunStarted | None:
        """How it began first."""
        return self.snapshot.started

    @property
    def algorithm(self) -> str:
        """Its name; empty: not known."""
        return (self.started and self.started.shown_algorithm) or self.snapshot.algorithm or ""

    @property
    def series(self) -> Series:
        return self._reader.series

    @property
    def curves(self) -> Curves:
        return curves_of(self.paths.run_id, self.series, self.story.events, self.num_workers)

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that took part, by rank."""
        return workers_of(self.snapshot, self.story)

    @property
    def num_workers(self) -> int:
        """How many workers took part; until the run is over at least as many as are to."""
        came, started = len(self.workers), self.story.started
        if started is None or (came and self.summary):
            return came
        return max(came, started.num_workers)

    @property
    def processes(self) -> Sequence[ProcessSeries]:
        """What its processes reported of themselves, the server first."""
        return sorted(
            self.series.processes.values(),
            key=lambda each: (-1 if each.rank is None else each.rank, each.node),
        )

    @property
    def problems(self) -> list[str]:
        """What cannot be read, a sentence each."""
        return [*self._configured[1], *self.folder.problems(), *self.snapshot.problems]

    @property
    def config(self) -> str:
        """The text of its configuration."""
        with suppress(OSError):
            return self.paths.config.read_text(encoding="utf-8", errors="replace")
        return ""

    @property
    def settings(self) -> Settings | None:
        return self._configured[0]

    @property
    def _configured(self) -> tuple[Settings | None, list[str]]:
        """Its settings, and why they cannot be read; a run that has none yet is no problem."""
        written_at = None
        with suppress(OSError):
            written_at = self.paths.config.stat().st_mtime_ns
        if written_at != self._configured_at:
            self._configured_at = written_at
            try:
                self._settings = load_resolved(self.paths.config) if written_at else None, []
            except (ConfigError, DataError) as error:
                self._settings = None, [str(error)]
        return self._settings

    def logs(self, ended_by: BaseException | None = None) -> Logs:
        """What its logs say; `ended_by`: what is just ending it, which no log tells yet.

        Raises:
            SmolclusterError: one cannot be read.
        """
        expected = expected_of(self.snapshot, self.story, self.settings)
        ahead = {
            process_title("worker", each.node, each.rank): each.totals["clock_offset_s"].newest
            for each in self.processes
            if "clock_offset_s" in each.totals
        }
        words = stderr_tail(ended_by, expected)
        try:
            return read_logs(self.paths.logs, expected, self.story.events, ahead, words)
        except OSError as error:
            where, reason = error.filename or self.paths.root, error.strerror or str(error)
            raise SmolclusterError(f"cannot read {where}: {reason}") from error

    # --- as it goes on

    @property
    def versions(self) -> dict[str, int]:
        """Numbers that grow when there are new points and new events."""
        return {"series": self._reader.version, "events": self.story.version}

    def state(self) -> dict[str, Any]:
        """How the run stands, see `standing`; reads what is new."""
        with self._lock:
            self._poll()
            state = standing(self.snapshot, self.story.started, self.series, self._age_s())
            return {
                **state,
                "num_workers": self.num_workers,
                "problems": self.problems,
                "versions": self.versions,
            }

    def columns(self) -> dict[str, Any]:
        """Points for curves: see `columns_of`."""
        with self._lock:
            self._poll()
            if self._shown is None or self._shown[0] != self.versions:
                own = columns_of(self.series) | {"version": self._reader.version}
                self._shown = self.versions, own
            return self._shown[1]

    def events(self) -> dict[str, Any]:
        """What happened; with `has_older` there may be earlier events that `counts` leaves out."""
        with self._lock:
            self._poll()
            brought = self.folder.num_events
            return {
                "events": self.story.shown(),
                "counts": dict(self.story.counts),
                "has_older": brought is not None and self.story.counts.total() >= brought,
                "version": self.story.version,
            }

    def log_files(self) -> dict[str, Path]:
        return lines.log_files(self.folder.logs)

    def read(self, num_pieces: int | None = None) -> None:
        """Read what is new: all of it, or so many pieces of a file."""
        for source in (self.story, self._reader):
            left = num_pieces
            while left != 0 and source.poll():
                left = None if left is None else left - 1
        before, read = self.snapshot, self.folder.snapshot()
        if read.status is None:
            summary = read.summary or before.summary
            read = replace(read, status=before.status, summary=summary)
        elif read.status != before.status:
            self._changed_at = None if before.status is None else self._polled_at
        self.snapshot = replace(read, launched=read.launched or before.launched)

    def _poll(self) -> None:
        now = self._clock()
        if self._polled_at is None or now - self._polled_at >= EVERY_S:
            self._polled_at = now
            self.read(MAX_PIECES)

    def _age_s(self) -> float | None:
        """Seconds since its server wrote; once it was seen to write, by this machine's clock alone."""
        status = self.status
        if status is None or status.is_over:
            return None
        if self._changed_at is None:
            return status.age_s(instant(self._now()))
        return max(0.0, self._clock() - self._changed_at)


def read_view(paths: RunPaths) -> View:
    """A run of this machine, with all that is in its files now."""
    view = View(Folder(paths))
    view.read()
    return view
