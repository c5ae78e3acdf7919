"""A launched run, from the start of its processes to their end.

Processes in tmux sessions: server -> workers -> follow, or leave. Until all workers have joined, a failure
anywhere stops what was started. From then on the run does not need its launcher, which may sleep, lose its
network or leave, and come back with `smolcluster attach`.

Children of the launcher, on its own machine: all are started at once, their output is shown line by line
behind what each of them is, and they end with their launcher. Training is elastic: a worker that fails does
not end the run, but for one that was refused, or has a wrong configuration, before it took part: it would
be so the next time, too. When none is left, the run is ended.
"""

import itertools
import select
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

from smolcluster.errors import (
    AuthError,
    ConfigError,
    LaunchError,
    Rejected,
    RunBusy,
    SmolclusterError,
    TryAgain,
)
from smolcluster.launch.children import Child
from smolcluster.launch.host import Host, TookTooLong, Unreachable, shell_path
from smolcluster.launch.interrupts import Interrupts, interrupts
from smolcluster.launch.observe.beside import forget
from smolcluster.launch.prepare import run_on_all
from smolcluster.launch.sessions import (
    Ending,
    begin,
    exit_code,
    host_of,
    kill,
    newest_line,
    status_of,
    stderr_tail,
)
from smolcluster.launch.shipping import LokiAddress, begin_shippers, with_shippers
from smolcluster.launch.stop import SERVER_GRACE_S, StopResult, stop_processes
from smolcluster.launch.tmux import close_window, is_stopping, open_window, show_in_window
from smolcluster.observability.sinks.console import ProgressView
from smolcluster.observability.terminal import COLOURS, displayable, shown_text, steady
from smolcluster.observability.view.snapshot import measured
from smolcluster.runs.asked import ASKED
from smolcluster.runs.evaluated import metrics_in
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import (
    INVITER,
    Launched,
    LaunchedProcess,
    read_launched,
    write_launched,
)
from smolcluster.runs.paths import RunPaths, latest_of, point_latest, take_back_latest
from smolcluster.runs.status import RunStatus
from smolcluster.runs.summary import SUMMARY, sample_shown, table
from smolcluster.utils.at_once import at_once
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count, format_duration
from smolcluster.utils.words import as_command

POLL_S, CHILD_POLL_S = 0.5, 0.05
INTERRUPTED = 130
SHUTDOWN_TIMEOUT_S = 10.0
"""From the end of a good run to the end of its workers, who hear of it from the server."""
PATIENCE_S = 3.0
"""How long a server may be alone after all our workers have failed; what it reports is a second old."""
TOLD_EVERY_S = 10.0
SERVER_SILENT_S = 1800.0
"""A server that does not listen yet and logs nothing for so long is given up; it may have data to prepare."""
WILL_NOT_HEAL = (ConfigError.exit_code, Rejected.exit_code)
"""Exit codes of a worker that would end so again, whenever it were started."""
PASSED_ON = (TryAgain.exit_code, AuthError.exit_code, Rejected.exit_code)
NEXT = (
    "next: `smolcluster dashboard` shows it on a page; `--workload FILE.py:FUNCTION` trains a model of your "
    "own; `smolcluster init` names other machines"
)
"""Said at the end of a run on this machine."""


class Stopped(LaunchError):
    """The user has stopped the run while it was starting."""

    exit_code = INTERRUPTED


class EndedBadly(LaunchError):
    """A process has ended before it took part; a code that says what to do is the launcher's too."""

    def __init__(self, title: str, code: int, said: str) -> None:
        if code in PASSED_ON:
            self.exit_code = code
        super().__init__(f"{title} ended with exit code {code}: {said}")


class Run:
    """One launched run, for the main thread."""

    def __init__(
        self,
        launched: Launched,
        paths: RunPaths,
        console: Console,
        env: Mapping[str, Mapping[str, str]] | None = None,
        *,
        num_epochs: int | None = None,
        server_grace_s: float = SERVER_GRACE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`env`: what sessions on each node have in their environment besides."""
        self._launched = launched
        self._paths = paths
        self._console = console
        self._env = env or {}
        self._server_grace_s = server_grace_s
        self._patience_s = patience_s
        self._kept: set[int | None] = set()
        """Ranks of the workers that are there from before, and look for their server."""
        self._outdated: list[LaunchedProcess] = []
        """Workers from before that were told something else."""
        self._children: dict[str, Child] = {}
        """What was started as our children, by stem."""
        self._errors: dict[str, str] = {}
        """The title of the child that said each error first."""
        self._failed: set[str] = set()
        """Workers of these whose failure has been told."""
        self._alone: Deadline | None = None
        self._view = ProgressView(console, num_epochs=num_epochs)
        self._metrics = measured(paths)
        self._poll_s = 2 * POLL_S if launched.has_sessions else CHILD_POLL_S
        self._told, self._is_lost = Deadline(0), False
        self._asked_early: list[int] = []
        """Signals that came while our children were started."""
        self._before: RunStatus | None = None
        """What the server wrote last before it was started."""
        self._newest_before: str | None = None

    def keep_what_waits(self, *, without: Collection[str] = ()) -> None:
        """Keep the workers of a run that goes on which still look for their server; end the others then.

        Kept is who was started by the same command in the same folder, whose name is that of its code. Nodes
        that are left out are not asked: they may be out of reach.

        Raises:
            RunBusy: its server is alive.
            LaunchError: a machine cannot be asked.
        """
        before = or_none(read_launched, self._paths.launched)
        if before is None:  # it has never been started
            return
        asked = [each for each in before.processes if each.node not in without]
        waiting = [each for each, code in exit_codes(asked) if code is None]
        if before.server in waiting:
            run_id = self._launched.run_id
            raise RunBusy(
                f"run {run_id} is not over ({before.server.title}): {as_command('stop', run_id)} "
                "stops it"
            )
        for worker in waiting:
            if worker in self._launched.workers:
                self._kept.add(worker.rank)
            else:
                self._outdated.append(worker)

    # its start

    def start(self, loki: LokiAddress | None = None) -> None:
        """Start the server, then the workers; of sessions, return when all have joined or the run is over.

        `loki`: where the logs go; None: nowhere.

        Raises:
            LaunchError: it cannot be done; nothing of it is left running.
        """
        self._launched = with_shippers(self._launched, loki, self._warn)
        self._newest_before = latest_of(self._paths.root.parent)
        self._forget_what_was()
        with interrupts() as asked:
            try:
                self._end_outdated()
                if self._launched.has_sessions:
                    write_launched(self._paths.launched, self._launched)
                    self._start_server(asked)
                    if not self._launched.is_job:
                        self._start_workers(asked)
                    point_latest(self._paths.root.parent, self._launched.run_id)
                else:
                    self._start_children()
                    self._asked_early = asked.received
            except BaseException as error:
                self._take_back(error)
                raise

    def _forget_what_was(self) -> None:
        """Remove what a run that goes on left here before."""
        paths = self._paths
        paths.processes.unlink(missing_ok=True)
        paths.standing.unlink(missing_ok=True)
        if self._launched.server.ssh is not None:  # copies of what its machine wrote
            paths.status.unlink(missing_ok=True)
            paths.summary.unlink(missing_ok=True)
        if not self._launched.has_sessions:
            for folder in (ASKED, "exits"):
                shutil.rmtree(paths.root / folder, ignore_errors=True)
        close_window(self._launched.run_id)  # its panes show what has ended

    def _end_outdated(self) -> None:
        for worker in self._outdated:
            if kill(worker) is Ending.REMAINS:
                raise LaunchError(f"{worker.title} of before does not end: its disk may hang")

    def _start_children(self) -> None:
        roles = Counter(each.role for each in self._launched.helpers)
        helpers = [format_count(number, role) for role, number in roles.items()]
        workers = format_count(len(self._launched.workers), "worker")
        others = " and ".join([*helpers, workers])
        what = "all ranks" if self._launched.is_group else f"a server and {others}"
        self.say(
            f"run {self._launched.run_id}: starting {what}; Ctrl-C stops them. "
            "Loading PyTorch takes each of them some seconds"
        )
        self._before = status_of(self._launched.server)
        self._metrics.poll()  # what it has done before is shown no more
        processes = self._launched.processes
        width = max(len(process.title) for process in processes)
        try:
            for process, colour in zip(processes, itertools.cycle(COLOURS), strict=False):
                self._start_child(process, Text(f"{process.title:<{width}}", style=colour))
            self._start_shippers(width)
        finally:
            pids = {stem: child.pid for stem, child in self._children.items()}
            self._launched = self._launched.with_pids(pids)
        try:
            write_launched(self._paths.launched, self._launched)
        except SmolclusterError as error:
            self._warn(f"{error}; the run goes on without it")

    def _start_shippers(self, width: int) -> None:
        for shipper in self._launched.shippers:
            try:
                self._start_child(shipper, Text(f"{shipper.role:<{width}}", style="dim"))
            except LaunchError as error:
                self._warn(f"the logs are not shipped: {error}")

    def _start_child(
        self, process: LaunchedProcess, prefix: Text, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        def say(line: str) -> None:
            shown = displayable(self._console, self._said_once(process, line))
            self._view.print(Text.assemble(prefix, " | ", shown))

        self._children[process.stem] = Child(process, say, env)

    def _said_once(self, process: LaunchedProcess, line: str) -> str:
        """A line of a child's output; an error that another child has said in the same words is short."""
        time_of_day, _, said = line.partition(" ")
        if not said.startswith("ERROR "):
            return line
        first = self._errors.setdefault(said, process.title)
        return line if first == process.title else f"{time_of_day} ERROR the same as {first}"

    def _start_server(self, asked: Interrupts) -> None:
        server = self._launched.server
        self._before = status_of(self._launched.server)
        if server.scheduler is not None:
            self._begin(server)
            self.say(
                f"run {self._launched.run_id}: {server.scheduler} has it as a job of that name"
            )
            return
        self.say(
            f"run {self._launched.run_id}: starting the server on {server.node}; loading PyTorch takes "
            "some seconds"
        )
        self._begin(server)
        self._ship([each for each in self._launched.shippers if each.node == server.node])
        if self._launched.has_script:  # the run begins when a script has told what is trained
            return
        if self._launched.is_group:  # which begins when all are there
            return
        self._wait_until_it_listens(server, asked)

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
                self.say(f"waiting for {server.title}: {newest or 'it has logged nothing yet'}")
                told = Deadline(TOLD_EVERY_S)
            time.sleep(POLL_S)

    def _start_workers(self, asked: Interrupts) -> None:
        workers = self._launched.workers
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

        def begin_there(host: Host) -> None:
            for worker in by_node[host.node]:
                self._begin(worker)

        run_on_all([host_of(each[0]) for each in by_node.values()], begin_there)
        elsewhere = {each.node for each in self._launched.others} - {self._launched.server.node}
        self._ship([each for each in self._launched.shippers if each.node in elsewhere])
        if self._launched.is_group:
            self._wait_until_it_listens(self._launched.server, asked)
            self.say("all ranks are there")
            return
        missing = self._wait_for(workers, self._launched.processes, asked)
        self.say(f"not joined: {', '.join(missing)}" if missing else "all have joined")

    def _begin(self, process: LaunchedProcess) -> None:
        begin(process, self._env.get(process.node, {}))

    def _ship(self, shippers: Sequence[LaunchedProcess]) -> None:
        begin_shippers(shippers, self._env, self._warn)

    def _wait_for(
        self,
        workers: Sequence[LaunchedProcess],
        alive: Sequence[LaunchedProcess],
        asked: Interrupts,
        before: RunStatus | None = None,
    ) -> list[str]:
        """Wait until these workers take part, or the run is over; returns who does not take part.

        Raises:
            LaunchError: one of those that must be `alive` has ended, or the user no longer wants it.
        """
        told = Deadline(TOLD_EVERY_S)
        while missing := _missing(workers, status := self._new_status(), before):
            if status is not None and status.is_over:
                break
            self._check_alive(alive, asked)
            if told.expired:
                told = Deadline(TOLD_EVERY_S)
                self.say(f"waiting for {', '.join(missing)}")
            time.sleep(POLL_S)
        return missing

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

    def _take_back(self, error: BaseException) -> None:
        self.say(
            f"{error}"
            if isinstance(error, Stopped)
            else "the start has failed: stopping what was started"
        )
        has_failed = isinstance(error, SmolclusterError) and not isinstance(error, Stopped)
        for left in self._end(why=str(error) if has_failed else None).left:
            self.say(f"{left.process.title}: {left.reason}", "red")
        take_back_latest(self._paths, self._newest_before)

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

    def add_inviter(self, inviter: LaunchedProcess, env: Mapping[str, str]) -> None:
        """Start what invites other machines, with these variables; it ends with the run.

        Raises:
            LaunchError: it cannot be started.
        """
        if inviter.session:
            begin(inviter, env)
        else:
            self._start_child(inviter, Text(inviter.role, style="dim"), env)
            inviter = inviter.model_copy(update={"pid": self._children[inviter.stem].pid})
        shippers = (*self._launched.shippers, inviter)
        self._launched = self._launched.model_copy(update={"shippers": shippers})
        write_launched(self._paths.launched, self._launched)

    # its course

    def _new_status(self) -> RunStatus | None:
        """What the server has written of itself since it was started.

        Raises:
            LaunchError: its machine cannot be asked.
        """
        status = status_of(self._launched.server)
        is_old = status and self._before and status.incarnation == self._before.incarnation
        return None if is_old else status

    @property
    def _last_status(self) -> RunStatus | None:
        """The same; None also of a machine out of reach."""
        with suppress(LaunchError):
            return self._new_status()
        return None

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added to it; a machine out of reach does not say so."""
        status = self._last_status
        return status is not None and status.is_over

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

    def follow(self) -> int:
        """Tell how the run goes on, until its end or Ctrl-C; returns the exit code.

        A lost connection ends nothing: it is said, and tried again.

        Raises:
            LaunchError: no worker of a run of children is left; it has been ended.
        """
        look = self._look if self._launched.has_sessions else self._look_at_children
        with interrupts() as asked:
            asked.received += self._asked_early
            try:
                while not asked:
                    if (code := look()) is not None:
                        return self.conclude(code, asked)
                    _wait(self._poll_s, asked)
                return self._interrupted(asked)
            except BaseException:
                if self._children:
                    self._end()
                raise

    def _look(self) -> int | None:
        """Tell how far the run is; the server's exit code, None while it runs or is out of reach."""
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

    def _look_at_children(self) -> int | None:
        """Show how far the run is, and whose workers have failed; the server's exit code."""
        code = self._children[self._launched.server.stem].exit_code
        self._show_progress()
        for each in self._launched.others:
            child = self._children[each.stem]
            if child.exit_code not in (None, 0) and each.stem not in self._failed:
                self._failed.add(each.stem)
                self._warn(f"{each.title} {child.ending}")
                if code is None:
                    self._check_can_take_part(each, child)
        workers = {each: self._children[each.stem] for each in self._launched.workers}
        if code is None and self._has_nobody_attached(workers.values()):
            raise self._failed_run(
                "the script has ended without smolcluster.attach(model, optimizer): nothing was trained"
            )
        # a group ends as its first rank does
        have_failed = not self._launched.is_group and self._failed >= {
            each.stem for each in workers
        }
        if code is None and have_failed and self._is_deserted():
            endings = "; ".join(f"{each.title} {child.ending}" for each, child in workers.items())
            raise self._failed_run(
                f"no worker is left ({endings}): the run was stopped; their logs are in {self._paths.logs}"
            )
        return code

    def _check_can_take_part(self, ended: LaunchedProcess, child: Child) -> None:
        """End the run if a worker of it never took part, and would not if it were started again.

        Raises:
            EndedBadly: it was refused, or its configuration is wrong.
        """
        is_worker = ended in self._launched.workers and not self._launched.is_group
        if not is_worker or (code := child.exit_code) not in WILL_NOT_HEAL:
            return
        if not _missing([ended], self._new_status(), None):
            return
        self._end(why=str(EndedBadly(ended.title, code, child.last_words())))
        told = as_command("status", self._launched.run_id)
        raise EndedBadly(ended.title, code, f"what it said is above, and in {told}")

    def _failed_run(self, why: str) -> LaunchError:
        """End the run, which has failed."""
        self._end(why=why)
        return LaunchError(why)

    def _has_nobody_attached(self, workers: Collection[Child]) -> bool:
        """Whether the scripts have all ended well, and the server still waits for the first."""
        have_ended = all(child.exit_code == 0 for child in workers)
        return self._launched.has_script and have_ended and self._new_status() is None

    def _show_progress(self) -> None:
        for line in self._metrics.poll():
            self._view.log(line.record)
        self._view.tick()

    def _is_deserted(self) -> bool:
        """Whether nobody has taken part for a while, since all our workers have failed."""
        status = self._new_status()
        others = [each for each in status.workers if each.state == "joined"] if status else []
        if others or (status is not None and status.is_over):
            self._alone = None
            return False
        self._alone = self._alone or Deadline(self._patience_s)
        return self._alone.expired

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
        if self._children:
            code = self.stop(in_a_hurry=asked.repeated)
            if self._is_complete:  # its server has ended by itself meanwhile
                self._show_summary()
            else:
                code = code or asked.exit_code
            self._say_where(code)
            return code
        if self._is_to_be_left(asked):
            self.say(left_running(self._launched))
            return 0
        return self.stop() or asked.exit_code

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

    def stop(self, *, in_a_hurry: bool = False) -> int:
        """End the run, and see that nothing of it is left; returns the exit code."""
        run_id = self._launched.run_id
        if not in_a_hurry:
            self._warn("stopping the run; Ctrl-C kills it, without a last checkpoint")
        stopped = self._end(in_a_hurry=in_a_hurry)
        for each in stopped.left:
            self.say(f"{each.process.title}: {each.reason}", "red")
        if stopped.left:
            self.say(f"the others are stopped; {as_command('stop', run_id)} tries again", "red")
            return 1
        what = "it was over already" if stopped.was_over else "stopped"
        if stopped.unsaved is not None:
            self.say(f"run {run_id}: {what}, but {stopped.unsaved}", "red")
            return 1
        self.say(f"run {run_id}: {what}; nothing of it is left running")
        return 0

    def conclude(self, code: int, asked: Interrupts | None = None) -> int:
        """Say what came of a run whose server has ended, and see that all others end; returns the exit code.

        It is `code`, but 1 where the run has ended well, or was stopped, and a full disk kept its server from
        saving the end. Who is `asked` to stop waits for no worker, and asked twice kills them.
        """
        server, is_stopped = self._launched.server, self._was_stopped()
        deadline = Deadline(SHUTDOWN_TIMEOUT_S if code == 0 else 0)
        with suppress(LaunchError):  # stopping says which machine it is
            while not (deadline.expired or asked) and None in self._codes_of_others():
                time.sleep(self._poll_s)
        ended = self._end(in_a_hurry=bool(asked and asked.repeated))
        for left in ended.left:
            self._warn(f"{left.process.title}: {left.reason}")
        if code == 0:
            self._show_summary()
        elif is_stopped:
            self.say("stopped: nothing of it is left running")
        elif child := self._children.get(server.stem):
            status = self._last_status
            reason = status.reason if status is not None and status.state == "failed" else None
            self.say(f"{server.title} {child.ending}: {reason or 'the run has failed'}", "red")
        else:
            self.say(f"{server.title} ended with exit code {code}: {stderr_tail(server)}", "red")
        if ended.unsaved is not None:
            self.say(f"run {self._launched.run_id}: {ended.unsaved}", "red")
            code = 1 if code == 0 or is_stopped else code
        self._say_where(code)
        return code

    def _codes_of_others(self) -> list[int | None]:
        if self._children:
            return [self._children[each.stem].exit_code for each in self._launched.others]
        return [code for _, code in exit_codes(self._launched.others)]

    def _was_stopped(self) -> bool:
        """Whether its server was asked to end, by anybody; without a word from its machine it was not."""
        asked = (self._paths.root / ASKED).glob(f"{self._launched.server.stem}.*")
        status = self._last_status
        return any(asked) or (status is not None and status.word == "stopped")

    @property
    def _is_complete(self) -> bool:
        """Whether the run has ended and its end is saved; a machine out of reach does not say so."""
        status = self._last_status
        return status is not None and status.word == "ended" and status.trouble is None

    def _end(self, *, in_a_hurry: bool = False, why: str | None = None) -> StopResult:
        """End all processes; Ctrl-C from now on kills them. `why`: how the run has failed, if it has."""
        with interrupts() as asked:
            result = stop_processes(
                self._launched,
                in_a_hurry=lambda: in_a_hurry or signal.SIGINT in asked.received,
                say=self.say,
                server_grace_s=self._server_grace_s,
                why=why,
            )
        close_window(self._launched.run_id)
        forget(self._launched.run_id)
        if self._children:
            self._close_children()
        return result

    def _close_children(self) -> None:
        for child in self._children.values():
            child.close()
        self._show_progress()
        self._view.close()
        status = self._new_status()
        has_begun = status is not None and (status.workers or self._launched.is_group)
        if not has_begun:  # none has ever taken part
            take_back_latest(self._paths, self._newest_before)

    def _show_summary(self) -> None:
        server = self._launched.server
        file = f"{shell_path(server.run_dir)}/summary.json"
        summary = SUMMARY.parse(host_of(server).run(f"cat {file} 2>/dev/null").stdout)
        if summary is None:
            return
        with steady(self._console):
            self._console.print(table(summary))
            if self._paths.sample.is_file():
                self._console.print(shown_text(self._console, sample_shown(self._paths)))

    def _say_where(self, code: int) -> None:
        if code and self._paths.checkpoints.is_dir() and not self._is_complete:
            self.say(f"{as_command('resume', self._paths.root)} goes on with it")
        if self._launched.is_local:
            self.say(f"files of the run: {self._paths.root}")
            if not code:
                self.say(NEXT)
        else:
            self.say(f"{as_command('fetch', self._launched.run_id)} brings its files here")

    def _warn(self, line: str) -> None:
        self.say(line, "yellow")

    def say(self, line: str, style: str = "") -> None:
        self._view.print(Text(displayable(self._console, line), style=style))


def exit_codes(
    processes: Sequence[LaunchedProcess],
) -> list[tuple[LaunchedProcess, int | None]]:
    """The exit code of each process (None: it runs), asked of all machines at once.

    Raises:
        LaunchError: one cannot be asked.
    """
    return list(zip(processes, at_once(exit_code, processes), strict=True))


def _missing(
    workers: Sequence[LaunchedProcess], status: RunStatus | None, before: RunStatus | None
) -> list[str]:
    """Those of the workers of whom the server has heard nothing since it wrote `before`.

    It counts one whose machine has lost its power as present for some seconds.
    """

    def seen(told: RunStatus | None, rank: int | None) -> datetime | None:
        found = [each.last_seen for each in (told.workers if told else []) if each.rank == rank]
        return found[0] if found else None

    told = status.workers if status else []
    there = {each.rank for each in told if before is None or each.state == "joined"}
    return [
        each.title
        for each in workers
        if each.rank not in there or seen(status, each.rank) == seen(before, each.rank)
    ]


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
    parts.append(f"{status.samples_per_s:,.0f} samples/s")
    if is_group:
        return ", ".join(parts)
    present = sum(worker.state == "joined" for worker in status.workers)
    return ", ".join([*parts, format_count(present, "worker")])


def left_running(launched: Launched) -> str:
    run_id = launched.run_id
    attach = "" if launched.is_job else f"{as_command('attach', run_id)} shows it, "
    return f"run {run_id} goes on: {attach}status, logs and stop do what they say"


def _wait(seconds: float, asked: Interrupts) -> None:
    deadline = Deadline(seconds)
    while not deadline.expired and not asked:
        time.sleep(0.05)
