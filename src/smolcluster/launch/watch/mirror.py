"""What a view needs of a run's other machines, brought here; nothing is written there.

Of the server's machine these are how the run stands and its curves (`series.json`), asked for again and
again, and the newest events; of each machine the logs, as they grow.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from smolcluster.errors import SmolclusterError
from smolcluster.launch.host import shell_path
from smolcluster.launch.sessions import host_of
from smolcluster.launch.watch.fetch import is_here
from smolcluster.launch.watch.logs import log_of, sources_of
from smolcluster.launch.watch.probe import Ask, look
from smolcluster.launch.watch.tail import PATIENCE_S, Followed, RemoteTail
from smolcluster.observability.view.snapshot import Snapshot, read_snapshot
from smolcluster.observability.view.view import Folder
from smolcluster.runs.files import write_whole
from smolcluster.runs.launched import Launched, LaunchedProcess, launched_of
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import EVERY_S as SERIES_EVERY_S

LOOK_EVERY_S, LOOK_ELSEWHERE_EVERY_S = 1.0, 2.0
NUM_EVENTS = 5000


def is_wholly_here(launched: Launched | None, paths: RunPaths) -> bool:
    """Whether nothing needs to be read on another machine: also of a run that is over and was fetched."""
    if launched is None or all(is_here(process, paths) for process in launched.processes):
        return True
    logs = [paths.logs / f"{process.stem}.log" for process in sources_of(paths)]
    status = read_snapshot(paths).status
    is_over = status is not None and status.is_over
    return is_over and paths.metrics.is_file() and all(log.is_file() for log in logs)


class Mirror(Folder):
    """A run's folder, with what is new on other machines, until it is closed; of a run that is here, nothing.

    Args:
        paths: the run's own folder.
        folder: beside it is made the one where the copies go, which is removed at the end: a run can be
            opened again while its copies of before are still being removed.
        ask: runs a script on a machine; only tests say another one.
        num_lines: of each log so many of the newest lines; None: all.

    Raises:
        DataError: what says which processes the run has is damaged.
    """

    def __init__(
        self,
        paths: RunPaths,
        folder: Path,
        ask: Ask | None = None,
        *,
        num_lines: int | None = None,
    ) -> None:
        super().__init__(paths)
        launched = launched_of(paths)
        self._is_whole = launched is None or is_wholly_here(launched, paths)
        self.is_here = launched is None or self._is_whole or is_here(launched.server, paths)
        self._was_fetched = (
            launched is not None and self._is_whole and not is_here(launched.server, paths)
        )
        self._ask = ask
        self._num_lines = num_lines
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._followed = Followed()
        self._come: dict[Path, threading.Event] = {}
        """Of each copy that grows: whether what was there has come, or cannot."""
        self._series_due_at = 0.0
        self._newest: tuple[Snapshot, float] | None = None
        """What the last look found, and when that was by the clock here."""
        self._failure: SmolclusterError | None = None
        """Why there was nothing to be found since."""
        self._copy = paths
        """Where the copies are."""
        if launched is not None and not self._is_whole:
            folder.parent.mkdir(parents=True, exist_ok=True)
            own = tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)
            self._copy = RunPaths(Path(own))
            self._copy.logs.mkdir()
            self.logs = (self._copy.logs, paths.logs)
            if not self.is_here:
                self.served, self.num_events = self._copy, NUM_EVENTS
                there = f"{shell_path(launched.server.run_dir)}/{paths.events.name}"
                self._follow(launched.server, there, self._copy.events, NUM_EVENTS)
            self._follow_logs()

    def snapshot(self) -> Snapshot:
        """What the last look found, as old as it is by now; before the first what the files here say."""
        if self._newest is None:
            return read_snapshot(self.own)
        read, seen_at = self._newest
        return replace(read, now=read.now + timedelta(seconds=time.monotonic() - seen_at))

    def problems(self) -> Sequence[str]:
        with self._lock:
            return list(self._problems.values())

    @property
    def is_outdated(self) -> bool:
        """Whether the run was over and fetched when it was opened, and has been resumed since.

        Who resumes it removes the status that was fetched.
        """
        return self._was_fetched and not self.own.status.exists()

    def look(self) -> Snapshot:
        """Look how the run stands now.

        Raises:
            DataError: what says which processes it has is damaged.
        """
        is_due = not self.is_here and time.monotonic() >= self._series_due_at
        read = look(self.own, self._ask, with_series=is_due)
        self._say("", None)
        if read.series:
            self._series_due_at = time.monotonic() + SERIES_EVERY_S
            with suppress(SmolclusterError):
                write_whole(self._copy.series, read.series, durable=False)
        if not self.is_here and read.seen[0].process == "unreachable":
            self._take_what_was_fetched()
            if self._newest is not None:
                last = self.snapshot()
                read = replace(read, status=last.status, summary=last.summary, now=last.now)
        if not self._is_whole:
            self._follow_logs()  # who joins, and the ranks of a group, begin theirs by and by
        self._newest, self._failure = (read, time.monotonic()), None
        return read

    def has_looked(self) -> bool:
        """Whether somebody has looked yet.

        Raises:
            SmolclusterError: why the last look failed.
        """
        if self._failure is not None:
            raise self._failure
        return self._newest is not None

    def keep_looking(self) -> None:
        """Look again and again, in a thread."""
        threading.Thread(target=self._keep_looking, daemon=True).start()

    def wait(self) -> None:
        """Wait until what was there when it began has come, but not long for a machine that says nothing."""
        end = time.monotonic() + PATIENCE_S
        for come in self._come.values():
            come.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        self._stopped.set()
        self._followed.close()
        if not self._is_whole:
            shutil.rmtree(self._copy.root, ignore_errors=True)

    def _follow_logs(self) -> None:
        """Follow the logs that are not in the run's folder here, until it is closed."""
        for process in sources_of(self.own):
            log = self._copy.logs / f"{process.stem}.log"
            is_new = log not in self._come and not self._stopped.is_set()
            if is_new and not is_here(process, self.own):
                self._follow(process, log_of(process), log, self._num_lines)

    def _follow(
        self, process: LaunchedProcess, there: str, here: Path, newest: int | None = None
    ) -> None:
        come = self._come[here] = threading.Event()
        has_begun = False

        def take(lines: list[bytes]) -> None:
            nonlocal has_begun
            if not self._stopped.is_set():
                with suppress(OSError), here.open("ab" if has_begun else "wb") as copy:
                    copy.write(b"\n".join(lines) + b"\n")
                has_begun = True

        def lost(problem: str) -> None:
            self._say(process.node, f"{problem}; trying again")
            come.set()

        tail = RemoteTail(host_of(process), there, on_lines=take, on_whole=come.set, newest=newest)
        self._followed.add(tail, lost, lambda: self._say(process.node, None))

    def _keep_looking(self) -> None:
        every_s = LOOK_EVERY_S if self.is_here else LOOK_ELSEWHERE_EVERY_S
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self.look()
            except SmolclusterError as error:
                self._failure = error
                self._say("", str(error))
            self._stopped.wait(max(0.1, began + every_s - time.monotonic()))

    def _take_what_was_fetched(self) -> None:
        """Of a server whose machine is off."""
        for own, copy in (
            (self.own.events, self._copy.events),
            (self.own.series, self._copy.series),
        ):
            with suppress(OSError):
                if own.is_file() and not copy.exists():
                    shutil.copyfile(own, copy)

    def _say(self, node: str, problem: str | None) -> None:
        with self._lock:
            if problem is None:
                self._problems.pop(node, None)
            else:
                self._problems[node] = problem
