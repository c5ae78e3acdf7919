"""One run, read as it goes on. Safe to use from several threads."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from smolcluster.errors import DataError
from smolcluster.observability.view import lines
from smolcluster.observability.view.happenings import Happenings
from smolcluster.observability.view.measured import Measured
from smolcluster.observability.view.standing import Known, standing
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.processes import read_processes
from smolcluster.runs.status import RunStatus, instant, read_status
from smolcluster.runs.summary import read_summary

EVERY_S = 0.5
"""The files are not read more often than this, however many ask."""
MAX_PIECES = 16
"""Pieces of a file that are read at a time."""
File = TypeVar("File")


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
    """The files of a run that are all in its folder."""
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
        self._status: RunStatus | None = None
        self._changed_at: float | None = None
        self._measured = Measured(files.served)
        self._happenings = Happenings(files.served.events)
        self._launched: Launched | None = None
        self._damaged: list[str] = []
        self._shown: tuple[dict[str, int], dict[str, Any]] | None = None

    @property
    def versions(self) -> dict[str, int]:
        """Numbers that grow when there are new points and new events."""
        return {"series": self._measured.version, "events": self._happenings.version}

    def state(self) -> dict[str, Any]:
        """How the run stands, see `standing`; reads what is new."""
        with self._lock:
            self._poll()
            problems = [*self.files.problems(), *self._damaged]
            known = Known(
                run_id=self.files.own.run_id,
                launched=self._launched,
                places=_places(self.files.own, self._launched),
                started=self._happenings.started,
                status=self._status,
                summary=_read(read_summary, self.files.served.summary, problems),
                age_s=self._age_s(),
                is_held=is_held(self.files.served.lock) if self.files.is_here else None,
                reports=self._measured.newest_reports(),
                staleness=self._measured.staleness_values(),
                problems=problems,
            )
            return standing(known) | {"versions": self.versions}

    def series(self) -> dict[str, Any]:
        """Points for curves: see `Measured`."""
        with self._lock:
            self._poll()
            if self._shown is None or self._shown[0] != self.versions:
                own = self._measured.series()
                self._shown = self.versions, own | {"version": self._measured.version}
            return self._shown[1]

    def events(self) -> dict[str, Any]:
        """What has happened, and how many there were of each kind."""
        with self._lock:
            self._poll()
            return {
                "events": self._happenings.shown(),
                "counts": dict(self._happenings.counts),
                "version": self._happenings.version,
            }

    def log_files(self) -> dict[str, Path]:
        """The log files that are there, by their stems."""
        return lines.log_files(self.files.logs)

    def search(
        self, wanted: lines.Wanted, at_most: int, goes_on: Callable[[], bool] = lambda: True
    ) -> lines.Found:
        """The newest log lines that are wanted.

        `goes_on` is asked for each block of a file: nobody may wait for the answer any more.
        """
        return lines.search(self.log_files(), wanted, at_most, goes_on)

    def close(self) -> None:
        """Stop whatever copies its files."""
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
        self._damaged = []
        own, served = self.files.own, self.files.served
        self._launched = _read(read_launched, own.launched, self._damaged) or self._launched
        status = _read(read_status, served.status, self._damaged)
        if status is not None and status != self._status:
            self._changed_at = None if self._status is None else now
            self._status = status

    def _age_s(self) -> float | None:
        """Seconds since its server wrote; once it was seen to write, by this machine's clock alone."""
        if self._status is None or self._status.is_over:
            return None
        if self._changed_at is None:
            return self._status.age_s(instant(self._now()))
        return max(0.0, self._clock() - self._changed_at)


def _places(paths: RunPaths, launched: Launched | None) -> list[tuple[str, int | None, str]]:
    if launched is not None:
        return [(each.role, each.rank, each.node) for each in launched.processes]
    entries = _read(read_processes, paths.processes, []) or []
    return [(each.role, each.rank, each.node) for each in entries]


def _read(read: Callable[[Path], File], path: Path, problems: list[str]) -> File | None:
    """What a file says; None where there is none, or, which is a problem, it is damaged."""
    try:
        return read(path)
    except DataError as error:
        if path.exists():
            problems.append(str(error))
        return None
