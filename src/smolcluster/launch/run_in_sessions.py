"""A run whose processes are tmux sessions on any machines, or one job of a scheduler.

Server -> workers -> follow, or leave. Until all workers have joined, a failure anywhere stops what was
started. From then on the run does not need its launcher, which may sleep, lose its network or leave, and come
back with `smolcluster attach`.
"""

import select
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from rich.console import Console

from smolcluster.errors import LaunchError
from smolcluster.launch.host import TookTooLong, Unreachable
from smolcluster.launch.interrupts import Interrupts, interrupts
from smolcluster.launch.prepare import run_on_all
from smolcluster.launch.run import (
    INTERRUPTED,
    POLL_S,
    EndedBadly,
    Run,
    Stopped,
    exit_codes,
    missing_workers,
)
from smolcluster.launch.sessions import (
    begin,
    exit_code,
    kill,
    newest_line,
    status_of,
    stderr_tail,
)
from smolcluster.launch.shipping import begin_shippers
from smolcluster.launch.tmux import is_stopping, open_window, show_in_window
from smolcluster.runs.evaluated import metrics_in
from smolcluster.runs.launched import INVITER, Launched, LaunchedProcess, write_launched
from smolcluster.runs.paths import RunPaths, point_latest
from smolcluster.runs.status import RunStatus
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count, format_duration
from smolcluster.utils.words import as_command

TOLD_EVERY_S = 10.0
SERVER_SILENT_S = 1800.0
"""A server that does not listen yet and logs nothing for so long is given up; it may have data to prepare."""


class RunInSessions(Run):
    """Of `launched.processes`, each a session or a job."""

    def __init__(
        self,
        launched: Launched,
        paths: RunPaths,
        console: Console,
        env: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        """`env`: what sessions on each node have in their environment besides."""
        super().__init__(launched, paths, console)
        self._env = env
        self._kept: set[int | None] = set()
        """Ranks of the workers from before that take part as they are."""
        self._told = Deadline(0)
        self._is_lost = False

    def _forget_what_was(self) -> None:
        super()._forget_what_was()
        if self._launched.server.ssh is not None:  # copies of what its machine wrote
            self._paths.status.unlink(missing_ok=True)
            self._paths.summary.unlink(missing_ok=True)

    # its start

    def _begin_all(self, asked: Interrupts) -> None:
        """Return when all have joined or the run is over."""
        self._note_what_was()
        write_launched(self._paths.launched, self._launched)
        self._start_server(asked)
        if not self._launched.is_job:
            self._start_workers(asked)
        point_latest(self._paths.root.parent, self._launched.run_id)

    def _start_server(self, asked: Interrupts) -> None:
        server = self._launched.server
        if server.scheduler is not None:
            self._begin_server(server)
            self.say(
                f"run {self._launched.run_id}: {server.scheduler} has it as a job of that name"
            )
            return
        self.say(
            f"run {self._launched.run_id}: starting the server on {server.node}; loading PyTorch takes "
            "some seconds"
        )
        self._begin_server(server)
        self._ship({server.node})
        # one with a script begins when that has told what is trained, a group when all are there
        if not (self._launched.has_script or self._launched.is_group):
            self._wait_until_it_listens(server, asked)

    def _begin_server(self, server: LaunchedProcess) -> None:
        """Start it; a `runs` that was told before that nothing lives does not remember it."""
        self._begin(server)
        self._paths.launched.touch()  # it may still be asking
        self._paths.standing.unlink(missing_ok=True)

    def _wait_until_it_listens(self, server: LaunchedProcess, asked: Interrupts) -> None:
        told, patience, newest = Deadline(TOLD_EVERY_S), Deadline(SERVER_SILENT_S), ""
        while self._new_status() is None:
            self._check_alive(
                self._launched.processes if self._launched.is_group else [server], asked
            )
            if told.expired:
                if (line := newest_line(server)) != newest:
                    newest, patience = line, Deadline(SERVER_SILENT_S)
                if patience.expired:
                    raise LaunchError(
                        f"{server.title} does not listen and has logged nothing for "
                        f"{format_duration(SERVER_SILENT_S)}: is its disk or its dataset's out of reach? "
                        f"Its last line: {newest or 'none'}"
                    )
                self._say_waiting(server, newest)
                told = Deadline(TOLD_EVERY_S)
            time.sleep(POLL_S)

    def _start_workers(self, asked: Interrupts) -> None:
        workers = self._launched.workers
        self._kept = {each.rank for each in self._waiting if each in workers}
        kept = [worker.title for worker in workers if worker.rank in self._kept]
        new_workers = [worker for worker in workers if worker.rank not in self._kept]
        begun = [*self._launched.helpers, *new_workers]
        there = [f"{', '.join(kept)} still there"] * bool(kept)
        new = [f"starting {', '.join(worker.title for worker in begun)}"] * bool(begun)
        listens = ["it listens"] * (not (self._launched.has_script or self._launched.is_group))
        self.say("; ".join([*listens, *there, *new]))
        by_node: dict[str, list[LaunchedProcess]] = {}
        for worker in begun:
            by_node.setdefault(worker.node, []).append(worker)

        def begin_there(processes: Sequence[LaunchedProcess]) -> None:
            for process in processes:
                self._begin(process)

        run_on_all(by_node.values(), begin_there)
        self._ship({each.node for each in self._launched.others} - {self._launched.server.node})
        if self._launched.is_group:
            self._wait_until_it_listens(self._launched.server, asked)
            self.say("all ranks are there")
            return
        missing = self._wait_for(workers, self._launched.processes, asked)
        names = ", ".join(each.title for each in missing)
        self.say(f"not joined: {names}" if missing else "all have joined")

    def _begin(self, process: LaunchedProcess) -> None:
        begin(process, self._env.get(process.node, {}))

    def _ship(self, nodes: Collection[str]) -> None:
        shippers = [each for each in self._launched.shippers if each.node in nodes]
        begin_shippers(shippers, self._env, self._warn)

    def _wait_for(
        self,
        workers: Sequence[LaunchedProcess],
        alive: Sequence[LaunchedProcess],
        asked: Interrupts,
        before: RunStatus | None = None,
    ) -> list[LaunchedProcess]:
        """Wait until these workers take part, or the run is over; returns who does not take part.

        Raises:
            LaunchError: one of those that must be `alive` has ended, or the user no longer wants it.
        """
        told = Deadline(TOLD_EVERY_S)
        while missing := missing_workers(workers, status := self._new_status(), before):
            if status is not None and status.is_over:
                break
            self._check_alive(alive, asked)
            if told.expired:
                told = Deadline(TOLD_EVERY_S)
                for each in missing:
                    self._say_waiting(each, newest_line(each))
            time.sleep(POLL_S)
        return missing

    def _say_waiting(self, process: LaunchedProcess, newest: str) -> None:
        self.say(f"waiting for {process.title}: {newest or 'it has logged nothing yet'}")

    def _check_alive(self, processes: Sequence[LaunchedProcess], asked: Interrupts) -> None:
        """See that nobody has ended or is out of reach, and that the user still wants this."""
        if asked:
            raise Stopped("stopped while it was starting")
        for process, code in exit_codes(processes):
            if code is not None and process.rank in self._kept:  # it has given up meanwhile
                self._kept.discard(process.rank)
                self._begin(process)
            elif code:
                raise EndedBadly(process.title, code, stderr_tail(process))

    def _begin_beside(self, process: LaunchedProcess, env: Mapping[str, str]) -> LaunchedProcess:
        begin(process, env)
        return process

    def add(self, worker: LaunchedProcess) -> None:
        """Start one more worker in its session, as one of the run, and wait until it takes part.

        Of a stage only its worker knows when it does.

        Raises:
            LaunchError: it does not come; then nothing of it is left.
        """
        without, status = self._launched, status_of(self._launched.server)
        self._launched = without.with_worker(worker)
        write_launched(self._paths.launched, self._launched)
        self.say(f"run {without.run_id}: starting {worker.title}")
        try:
            with interrupts() as asked:
                self._begin(worker)
                with suppress(LaunchError):  # a run does not need its window
                    show_in_window(without.run_id, worker)
                if worker.is_helper:
                    self.say(f"{worker.title} is started")
                    return
                is_late = bool(self._wait_for([worker], [worker], asked, status))
        except BaseException:
            self._forget_worker(worker, without)
            raise
        if is_late:
            self._forget_worker(worker, without)
            raise LaunchError(f"run {without.run_id} is over: {worker.title} came too late")
        self.say(f"{worker.title} takes part in run {without.run_id}")

    def _forget_worker(self, worker: LaunchedProcess, without: Launched) -> None:
        with suppress(LaunchError):
            kill(worker)
        write_launched(self._paths.launched, without)

    # its course

    def check_alive(self) -> None:
        """See that there is something to look at; a machine out of reach counts as alive.

        Raises:
            LaunchError: the run is over.
        """
        with suppress(Unreachable, TookTooLong):
            if all(code is not None for _, code in exit_codes(self._launched.processes)):
                run_id = self._launched.run_id
                raise LaunchError(
                    f"run {run_id} is over: {as_command('logs', run_id)} shows what it said"
                )

    def open_window(self, *, is_shown: bool) -> str:
        """Open the run's local window, or find it; returns its session's name.

        `is_shown`: it stays until somebody has looked at it, even if the run ends before.

        Raises:
            LaunchError: tmux is not here, or will not.
        """
        found: dict[int | None, str | None] = {}
        with suppress(LaunchError):
            status = status_of(self._launched.server)
            found = {each.rank: each.device for each in status.workers} if status else {}
        processes = [
            each.model_copy(update={"device": found.get(each.rank, each.device)})
            for each in self._launched.processes
        ]
        processes += [each for each in self._launched.shippers if each.role == INVITER]
        stop = stop_command(self._paths)
        return open_window(self._launched.run_id, processes, stop, is_shown=is_shown)

    def _look(self) -> int | None:
        node = self._launched.server.node
        try:
            code, status = exit_code(self._launched.server), status_of(self._launched.server)
        except LaunchError as error:
            if not self._is_lost:
                self._warn(f"no contact with {node}, where the run goes on ({error})")
            self._is_lost = True
            return None
        if self._is_lost:
            self.say(f"{node} is back")
            self._is_lost = False
        if code is None and status is not None and self._told.expired:
            self._told = Deadline(TOLD_EVERY_S)
            self.say(progress_line(status, is_group=self._launched.is_group))
        return code

    # its end

    def left_window(self) -> int:
        """The user has left the window: say what came of the run, or how to get back to it."""
        run_id = self._launched.run_id
        if is_stopping(run_id):
            return self.stop() or INTERRUPTED
        try:
            code = exit_code(self._launched.server)
        except LaunchError as error:
            self._warn(f"no contact with {self._launched.server.node} ({error})")
            code = None
        if code is not None:
            return self.conclude(code)
        self.say(left_running(self._launched))
        return 0

    def _interrupted(self, asked: Interrupts) -> int:
        if self._is_to_be_left(asked):
            self.say(left_running(self._launched))
            return 0
        return self.stop() or asked.exit_code

    def _codes_of_others(self) -> list[int | None]:
        return [code for _, code in exit_codes(self._launched.others)]

    def _ending(self, code: int) -> str:
        return f"ended with exit code {code}: {stderr_tail(self._launched.server)}"

    def _is_to_be_left(self, asked: Interrupts) -> bool:
        """Whether Ctrl-C leaves the run going, and does not stop it. Who closes the terminal leaves it.

        Where there was no terminal nobody can answer: then it is stopped.
        """
        if asked.hung_up or not sys.stdin.isatty():
            return asked.hung_up
        self.say("leave the run going (l), or stop it (s, or Ctrl-C again)?")
        while not (asked.repeated or asked.hung_up):
            ready, _, _ = select.select([sys.stdin], [], [], 0.1)
            try:
                line = sys.stdin.readline() if ready else None
            except OSError:  # its terminal has gone
                line = ""
            answer = "l" if line == "" else (line or "").strip().lower()[:1]
            if answer in ("l", "s"):
                return answer == "l"
        return asked.hung_up


def stop_command(paths: RunPaths) -> str:
    """What a shell runs to stop a run, wherever and however it is started."""
    program = "from smolcluster.cli import main; raise SystemExit(main())"
    return shlex.join([sys.executable, "-P", "-c", program, "stop", str(paths.root.absolute())])


def progress_line(status: RunStatus, *, is_group: bool = False) -> str:
    parts = [f"step {status.step:,} of {status.total_steps:,}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    for name, value in metrics_in(dict(status)).items():
        number = f"{value:.3f}" if name == "accuracy" else f"{value:.4g}"
        parts.append(f"validation {name} {number}")
    parts.append(f"{status.samples_per_s:,.0f} samples/s now")
    if is_group:
        return ", ".join(parts)
    present = sum(worker.state == "joined" for worker in status.workers)
    return ", ".join([*parts, format_count(present, "worker")])


def left_running(launched: Launched) -> str:
    run_id = launched.run_id
    attach = "" if launched.is_job else f"{as_command('attach', run_id)} shows it, "
    return f"run {run_id} goes on: {attach}status, logs and stop do what they say"
