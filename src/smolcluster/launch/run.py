"""A launched run, from the start of its processes to their end: what all kinds of process have in common.

`RunOfChildren` starts the launcher's own children, `RunInSessions` starts tmux sessions and jobs.
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from rich.console import Console
from rich.text import Text

from smolcluster.errors import AuthError, LaunchError, Rejected, RunBusy, SmolclusterError, TryAgain
from smolcluster.launch.interrupts import Interrupts, interrupts
from smolcluster.launch.observe.beside import forget
from smolcluster.launch.sessions import Ending, exit_code, kill, status_of, text_of
from smolcluster.launch.shipping import LokiAddress, with_shippers
from smolcluster.launch.stop import SERVER_GRACE_S, StopResult, stop_processes
from smolcluster.launch.tmux import close_window
from smolcluster.observability.sinks.console import ProgressView
from smolcluster.observability.terminal import displayable, shown_text, steady
from smolcluster.runs.asked import ASKED
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched
from smolcluster.runs.paths import RunPaths, latest_of, take_back_latest
from smolcluster.runs.status import RunStatus
from smolcluster.runs.summary import SUMMARY, sample_shown, table
from smolcluster.utils.at_once import at_once
from smolcluster.utils.retry import Deadline
from smolcluster.utils.words import as_command

POLL_S = 0.5
INTERRUPTED = 130
SHUTDOWN_TIMEOUT_S = 10.0
"""From the end of a good run to the end of its workers, who hear of it from the server."""
PASSED_ON = (TryAgain.exit_code, AuthError.exit_code, Rejected.exit_code)


class Stopped(LaunchError):
    """The user has stopped the run while it was starting."""

    exit_code = INTERRUPTED


class EndedBadly(LaunchError):
    """A process has ended before it took part; a code that says what to do is the launcher's too."""

    def __init__(self, title: str, code: int, said: str) -> None:
        if code in PASSED_ON:
            self.exit_code = code
        super().__init__(f"{title} ended with exit code {code}: {said}")


class Run(ABC):
    """One launched run, for the main thread."""

    server_grace_s = SERVER_GRACE_S
    _poll_s = 2 * POLL_S

    def __init__(
        self,
        launched: Launched,
        paths: RunPaths,
        console: Console,
        *,
        num_epochs: int | None = None,
    ) -> None:
        """Nothing is started yet; progress is shown as a part of `num_epochs`, where they are known."""
        self._launched = launched
        self._paths = paths
        self._console = console
        self._view = ProgressView(console, num_epochs=num_epochs)
        self._waiting: list[LaunchedProcess] = []
        """Workers that are there from before, and look for their server."""
        self._left_out: list[LaunchedProcess] = []
        """Processes of before on nodes that take no part any more."""
        self._newest_before: str | None = None

    def keep_what_waits(self, *, without: Collection[str] = ()) -> None:
        """Find the workers of a run that goes on which still look for their server.

        Kept is who was started by the same command in the same folder, whose name is that of its code; the
        start ends the others. Nodes that are left out are not asked: they may be out of reach, so that the
        start only tries to end what is there.

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
        self._waiting = waiting
        self._left_out = [each for each in before.processes if each not in asked]

    # what each kind of process does in its own way

    @abstractmethod
    def _begin_all(self, asked: Interrupts) -> None:
        """Start all processes, and note them in the run's folder.

        Raises:
            LaunchError: it cannot be done.
        """

    @abstractmethod
    def _begin_beside(self, process: LaunchedProcess, env: Mapping[str, str]) -> LaunchedProcess:
        """Start one that trains nothing, with these variables; returns it as it can be found again.

        Raises:
            LaunchError: it cannot be started.
        """

    @abstractmethod
    def _look(self) -> int | None:
        """Tell how far the run is; the server's exit code, None while it runs or is out of reach.

        Raises:
            LaunchError: the run has failed, and has been ended.
        """

    @abstractmethod
    def _interrupted(self, asked: Interrupts) -> int:
        """Leave the run or stop it, as the user has asked; returns the exit code."""

    @abstractmethod
    def _codes_of_others(self) -> list[int | None]:
        """The exit code of each process but the server; None: it runs."""

    @abstractmethod
    def _ending(self, code: int) -> str:
        """How the server has ended, which has failed, and why."""

    # its start

    def start(self, loki: LokiAddress | None = None) -> None:
        """Start the server, then the workers; see the kind of run for when it returns.

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
                self._begin_all(asked)
            except BaseException as error:
                self._take_back(error)
                raise

    def _forget_what_was(self) -> None:
        """Remove what a run that goes on left here before."""
        self._paths.processes.unlink(missing_ok=True)
        self._paths.standing.unlink(missing_ok=True)
        close_window(self._launched.run_id)  # its panes show what has ended

    def _note_what_was(self) -> None:
        """Note which status the server has left, so that nobody takes that for its newest.

        Raises:
            LaunchError: its machine cannot be asked.
        """
        left = status_of(self._launched.server)
        before = None if left is None else left.incarnation
        self._launched = self._launched.model_copy(update={"before": before})

    def _end_outdated(self) -> None:
        def end_left_out(process: LaunchedProcess) -> None:
            with suppress(LaunchError):
                kill(process)

        at_once(end_left_out, self._left_out)
        for worker in self._waiting:
            if worker not in self._launched.workers and kill(worker) is Ending.REMAINS:
                raise LaunchError(f"{worker.title} of before does not end: its disk may hang")

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

    def add_inviter(self, inviter: LaunchedProcess, env: Mapping[str, str]) -> None:
        """Start what invites other machines, with these variables; it ends with the run.

        Raises:
            LaunchError: it cannot be started.
        """
        shippers = (*self._launched.shippers, self._begin_beside(inviter, env))
        self._launched = self._launched.model_copy(update={"shippers": shippers})
        write_launched(self._paths.launched, self._launched)

    # its course

    def _new_status(self) -> RunStatus | None:
        """What the server has written of itself since it was started.

        Raises:
            LaunchError: its machine cannot be asked.
        """
        status = status_of(self._launched.server)
        is_old = status is not None and status.incarnation == self._launched.before
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

    def follow(self) -> int:
        """Tell how the run goes on, until its end or Ctrl-C; returns the exit code.

        A lost connection ends nothing: it is said, and tried again.

        Raises:
            LaunchError: the run has failed, and has been ended.
        """
        with interrupts() as asked:
            return self._follow(asked)

    def _follow(self, asked: Interrupts) -> int:
        while not asked:
            if (code := self._look()) is not None:
                return self.conclude(code, asked)
            _wait(self._poll_s, asked)
        return self._interrupted(asked)

    # its end

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

        It is `code`, but 1 where the run has ended well, or was stopped, and its server could not save the
        end. Who is `asked` to stop waits for no worker, and asked twice kills them.
        """
        is_stopped = self._was_stopped()
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
        else:
            self.say(f"{self._launched.server.title} {self._ending(code)}", "red")
        if ended.unsaved is not None:
            self.say(f"run {self._launched.run_id}: {ended.unsaved}", "red")
            code = 1 if code == 0 or is_stopped else code
        self._say_where(code)
        return code

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
                self._with_who_joined(),
                in_a_hurry=lambda: in_a_hurry or signal.SIGINT in asked.received,
                say=self.say,
                server_grace_s=self.server_grace_s,
                why=why,
            )
        close_window(self._launched.run_id)
        forget(self._launched.run_id)
        return result

    def _with_who_joined(self) -> Launched:
        """The run with what was started in it since, from another terminal, as its folder tells."""
        ours, told = self._launched, or_none(read_launched, self._paths.launched)
        is_same = told is not None and (told.server, told.before) == (ours.server, ours.before)
        return told if told is not None and is_same else ours

    def _show_summary(self) -> None:
        summary = SUMMARY.parse(text_of(self._launched.server, "summary.json"))
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
                self.say(
                    f"next: {as_command('dashboard')} shows it on a page; `--workload FILE.py:FUNCTION` "
                    f"trains a model of your own; {as_command('init')} names other machines"
                )
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


def missing_workers(
    workers: Sequence[LaunchedProcess], status: RunStatus | None, before: RunStatus | None
) -> list[LaunchedProcess]:
    """Those of the workers of whom the server has heard nothing since it wrote `before`.

    It counts one whose machine has lost its power as present for some seconds. The number of one on another
    machine may be held by who had it before, and was left out since.
    """

    def seen(told: RunStatus | None, rank: int | None) -> datetime | None:
        found = [each.last_seen for each in (told.workers if told else []) if each.rank == rank]
        return found[0] if found else None

    told = status.workers if status else []
    there = {each.rank: each.node for each in told if before is None or each.state == "joined"}
    return [
        each
        for each in workers
        if each.rank not in there
        or (each.ssh is not None and there[each.rank] != each.node)
        or seen(status, each.rank) == seen(before, each.rank)
    ]


def _wait(seconds: float, asked: Interrupts) -> None:
    deadline = Deadline(seconds)
    while not deadline.expired and not asked:
        time.sleep(0.05)
