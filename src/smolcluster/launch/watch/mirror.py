"""Copies of a run's files on other machines, which grow with the originals; nothing is written there.

What is asked of each machine are its log files, and of the server's also events and metrics: from their
beginning, then what is new. Its status comes every two seconds, as for `smolcluster status`.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smolcluster.errors import DataError, SmolclusterError
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.watch.fetch import is_here
from smolcluster.launch.watch.growing import Reader
from smolcluster.launch.watch.probe import ProbeResult, look
from smolcluster.observability.view.run import Files
from smolcluster.runs.launched import Launched
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import read_status, write_status
from smolcluster.runs.summary import write_summary

LOOK_EVERY_S = 2.0
END_S = 2.0
GROWING = ("events.jsonl", "metrics.jsonl")


@dataclass(frozen=True)
class Copied:
    """A file that grows: where it is there, a word of a shell, and its copy here."""

    there: str
    here: Path


def is_wholly_here(launched: Launched, paths: RunPaths) -> bool:
    """Whether nothing needs to be read on another machine: also of a run that is over and was fetched."""
    if all(is_here(process, paths) for process in launched.processes):
        return True
    with suppress(DataError):
        logs = [paths.logs / f"{process.stem}.log" for process in launched.processes]
        is_over = read_status(paths.status).is_over
        return is_over and paths.metrics.is_file() and all(log.is_file() for log in logs)
    return False


def copied_from(launched: Launched, paths: RunPaths, folder: RunPaths) -> dict[Host, list[Copied]]:
    """The files that grow and are not in the run's folder here, by the machine that has them."""
    files: dict[Host, list[Copied]] = {}
    for process in launched.processes:
        if is_here(process, paths):
            continue
        own = files.setdefault(Host(process.node, process.ssh), [])
        there = shell_path(process.run_dir)
        if process == launched.server:
            own += [Copied(f"{there}/{name}", folder.root / name) for name in GROWING]
        stem = f"{process.stem}.log"
        own.append(Copied(f"{there}/logs/{stem}", folder.logs / stem))
    return files


class Mirror:
    """Copies one run into a folder, in threads of its own, until it is closed.

    Args:
        paths: the run's own folder.
        launched: which processes it has, and where.
        folder: beside it is made the one where the copies go, which is removed at the end: a run can be
            opened again while its copies of before are still being removed.
        watch: looks at the run; only tests say another one.
    """

    def __init__(
        self,
        paths: RunPaths,
        launched: Launched,
        folder: Path,
        watch: Callable[[RunPaths], ProbeResult] = look,
    ) -> None:
        self._paths = paths
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._copy = RunPaths(Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)))
        self._watch = watch
        self._is_here = is_here(launched.server, paths)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._copy.logs.mkdir(parents=True, exist_ok=True)
        copied = copied_from(launched, paths, self._copy)
        self._readers = [self._reader(host, files) for host, files in copied.items()]
        self._threads = [
            threading.Thread(target=self._follow, args=(reader,), daemon=True)
            for reader in self._readers
        ]
        if not self._is_here:
            self._threads.append(threading.Thread(target=self._look, daemon=True))
        for thread in self._threads:
            thread.start()

    def files(self) -> Files:
        """Where the run is read now."""
        return Files(
            own=self._paths,
            served=self._paths if self._is_here else self._copy,
            logs=(self._copy.logs, self._paths.logs),
            is_here=self._is_here,
            problems=self.problems,
            close=self.close,
        )

    def problems(self) -> Sequence[str]:
        """What cannot be read now, and what to do about it."""
        with self._lock:
            return list(self._problems.values())

    def close(self) -> None:
        """Stop copying and remove the copies."""
        self._stopped.set()
        for reader in self._readers:
            reader.stop()
        for thread in self._threads[: len(self._readers)]:
            thread.join(END_S)
        for reader in self._readers:
            reader.kill()
        shutil.rmtree(self._copy.root, ignore_errors=True)

    def _reader(self, host: Host, files: list[Copied]) -> Reader:
        def take(index: int, lines: list[bytes]) -> None:
            if not self._stopped.is_set():
                with suppress(OSError), files[index].here.open("ab") as copy:
                    copy.write(b"\n".join(lines) + b"\n")

        return Reader(host, [each.there for each in files], on_lines=take)

    def _follow(self, reader: Reader) -> None:
        node = reader.host.node
        reader.follow(
            lambda problem: self._say(node, f"{problem}; trying again"),
            lambda: self._say(node, None),
        )

    def _look(self) -> None:
        while not self._stopped.is_set():
            try:
                self._take(self._watch(self._paths))
            except SmolclusterError as error:
                self._say("", str(error))
            self._stopped.wait(LOOK_EVERY_S)

    def _take(self, probed: ProbeResult) -> None:
        """Copy what the server has written."""
        self._say("", None)
        with suppress(SmolclusterError, OSError):
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
