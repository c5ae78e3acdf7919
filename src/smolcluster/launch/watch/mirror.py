"""What a run's view needs of other machines, brought into a folder here; nothing is written there.

Of the server's machine these are small files, asked for again and again (`status.json`, `summary.json`,
`series.json`), and the newest events; of each machine the logs, as they grow.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from smolcluster.errors import SmolclusterError
from smolcluster.launch.host import shell_path
from smolcluster.launch.sessions import host_of
from smolcluster.launch.watch.fetch import is_here
from smolcluster.launch.watch.logs import log_of, sources_of
from smolcluster.launch.watch.probe import Ask, AskMore, look
from smolcluster.launch.watch.report import ProbeResult
from smolcluster.launch.watch.tail import Followed, RemoteTail, Told
from smolcluster.observability.view.run import Files
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.files import write_whole
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import write_status
from smolcluster.runs.summary import write_summary

LOOK_EVERY_S = 2.0
NUM_EVENTS = 5000


def is_wholly_here(launched: Launched, paths: RunPaths) -> bool:
    """Whether nothing needs to be read on another machine: also of a run that is over and was fetched."""
    if all(is_here(process, paths) for process in launched.processes):
        return True
    logs = [paths.logs / f"{process.stem}.log" for process in sources_of(paths)]
    status = read_snapshot(paths).status
    is_over = status is not None and status.is_over
    return is_over and paths.metrics.is_file() and all(log.is_file() for log in logs)


class Mirror:
    """Brings what one run needs into a folder, in threads of its own, until it is closed.

    Args:
        paths: the run's own folder.
        launched: which processes it has, and where.
        folder: beside it is made the one where the copies go, which is removed at the end: a run can be
            opened again while its copies of before are still being removed.
        ask: runs a script on a machine; only tests say another one.
    """

    def __init__(
        self, paths: RunPaths, launched: Launched, folder: Path, ask: Ask | None = None
    ) -> None:
        self._paths = paths
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._copy = RunPaths(Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)))
        self._copy.logs.mkdir(parents=True, exist_ok=True)
        self._launched = launched
        self._is_here = is_here(launched.server, paths)
        self._ask = AskMore(ask, launched.server, lambda _: "")
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._followed = Followed(list(self._tails()))
        if not self._is_here:
            threading.Thread(target=self._look, daemon=True).start()

    def files(self) -> Files:
        return Files(
            own=self._paths,
            served=self._paths if self._is_here else self._copy,
            logs=(self._copy.logs, self._paths.logs),
            is_here=self._is_here,
            problems=self.problems,
            close=self.close,
        )

    def problems(self) -> Sequence[str]:
        with self._lock:
            return list(self._problems.values())

    def close(self) -> None:
        self._stopped.set()
        self._followed.close()
        shutil.rmtree(self._copy.root, ignore_errors=True)

    def _tails(self) -> Iterator[tuple[RemoteTail, Told, Callable[[], None]]]:
        """The files that grow and are not in the run's folder here: the logs, and the server's events."""
        for process in sources_of(self._paths):
            if not is_here(process, self._paths):
                log = self._copy.logs / f"{process.stem}.log"
                yield self._tail(process, log_of(process), log)
        if not self._is_here:
            server = self._launched.server
            events = f"{shell_path(server.run_dir)}/{self._copy.events.name}"
            yield self._tail(server, events, self._copy.events, NUM_EVENTS)

    def _tail(
        self, process: LaunchedProcess, there: str, here: Path, newest: int | None = None
    ) -> tuple[RemoteTail, Told, Callable[[], None]]:
        def take(lines: list[bytes]) -> None:
            if not self._stopped.is_set():
                with suppress(OSError), here.open("ab") as copy:
                    copy.write(b"\n".join(lines) + b"\n")

        node = process.node
        return (
            RemoteTail(host_of(process), there, on_lines=take, newest=newest),
            lambda problem: self._say(node, f"{problem}; trying again"),
            lambda: self._say(node, None),
        )

    def _look(self) -> None:
        while not self._stopped.is_set():
            try:
                self._take(look(self._paths, self._ask))
            except SmolclusterError as error:
                self._say("", str(error))
            self._stopped.wait(LOOK_EVERY_S)

    def _take(self, probed: ProbeResult) -> None:
        """Copy what the server has written."""
        self._say("", None)
        with suppress(SmolclusterError, OSError):
            if self._ask.series:
                write_whole(self._copy.series, self._ask.series, durable=False)
            if probed.status is not None:
                write_status(self._copy.status, probed.status)
            if probed.summary is not None:
                write_summary(self._copy.summary, probed.summary)
            elif probed.status is not None:  # it was resumed
                self._copy.summary.unlink(missing_ok=True)

    def _say(self, node: str, problem: str | None) -> None:
        with self._lock:
            if problem is None:
                self._problems.pop(node, None)
            else:
                self._problems[node] = problem
