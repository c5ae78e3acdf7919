"""A run whose processes are children of the launcher, on its own machine.

All are started at once, their output is shown line by line behind what each of them is, and they end with
their launcher. Training is elastic: a worker that fails does not end the run, but for one that was refused,
or has a wrong configuration, before it took part: it would be so the next time, too. When none is left, the
run is ended.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

from smolcluster.errors import ConfigError, LaunchError, Rejected, SmolclusterError
from smolcluster.launch.child import Child
from smolcluster.launch.interrupts import Interrupts
from smolcluster.launch.run import EndedBadly, Run, missing_workers
from smolcluster.launch.stop import StopResult
from smolcluster.observability.terminal import COLOURS, displayable
from smolcluster.observability.view.snapshot import measured
from smolcluster.runs.launched import Launched, LaunchedProcess, write_launched
from smolcluster.runs.paths import RunPaths, take_back_latest
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count
from smolcluster.utils.words import as_command

WILL_NOT_HEAL = (ConfigError.exit_code, Rejected.exit_code)
"""Exit codes of a worker that would end so again, whenever it were started."""


class RunOfChildren(Run):
    """Of `launched.processes`, each a child."""

    patience_s = 3.0
    """How long a server may be alone after all our workers have failed; what it reports is a second old."""
    _poll_s = 0.05

    def __init__(
        self,
        launched: Launched,
        paths: RunPaths,
        console: Console,
        *,
        num_epochs: int | None = None,
    ) -> None:
        super().__init__(launched, paths, console, num_epochs=num_epochs)
        self._metrics = measured(paths)
        self._children: dict[str, Child] = {}
        """What was started, by stem."""
        self._errors: dict[str, str] = {}
        """The title of the child that said each error first."""
        self._failed: set[str] = set()
        """Workers of these whose failure has been told."""
        self._alone: Deadline | None = None
        self._asked_early: list[int] = []
        """Signals that came while children were started."""

    def _forget_what_was(self) -> None:
        super()._forget_what_was()
        for folder in (self._paths.asked, self._paths.exits):
            shutil.rmtree(folder, ignore_errors=True)

    def _begin_all(self, asked: Interrupts) -> None:
        roles = Counter(each.role for each in self._launched.others)
        others = " and ".join(format_count(number, role) for role, number in roles.items())
        what = "all ranks" if self._launched.is_group else f"a server and {others}"
        self.say(
            f"run {self._launched.run_id}: starting {what}; Ctrl-C stops them. "
            "Loading PyTorch takes each of them some seconds"
        )
        self._note_what_was()
        self._metrics.skip()  # what it has done before is shown no more
        processes = self._launched.processes
        width = max(len(process.title) for process in processes)
        try:
            for process, colour in zip(processes, itertools.cycle(COLOURS), strict=False):
                self._start_child(process, Text(f"{process.title:<{width}}", style=colour))
            for shipper in self._launched.shippers:
                try:
                    self._start_child(shipper, Text(f"{shipper.role:<{width}}", style="dim"))
                except LaunchError as error:
                    self._warn(f"the logs are not shipped: {error}")
        finally:
            pids = {stem: child.pid for stem, child in self._children.items()}
            self._launched = self._launched.with_pids(pids)
        try:
            write_launched(self._paths.launched, self._launched)
        except SmolclusterError as error:
            self._warn(f"{error}; the run goes on without it")
        self._asked_early = asked.received

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

    def _begin_beside(self, process: LaunchedProcess, env: Mapping[str, str]) -> LaunchedProcess:
        self._start_child(process, Text(process.role, style="dim"), env)
        return process.model_copy(update={"pid": self._children[process.stem].pid})

    def _follow(self, asked: Interrupts) -> int:
        asked.received += self._asked_early
        try:
            return super()._follow(asked)
        except BaseException:
            self._end()  # they cannot go on without this launcher
            raise

    def _look(self) -> int | None:
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
        if not missing_workers([ended], self._new_status(), None):
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
        self._alone = self._alone or Deadline(self.patience_s)
        return self._alone.expired

    def _interrupted(self, asked: Interrupts) -> int:
        code = self.stop(in_a_hurry=asked.repeated)
        if self._is_complete:  # its server has ended by itself meanwhile
            self._show_summary()
        else:
            code = code or asked.exit_code
        self._say_where(code)
        return code

    def _codes_of_others(self) -> list[int | None]:
        return [self._children[each.stem].exit_code for each in self._launched.others]

    def _ending(self, code: int) -> str:  # noqa: ARG002 - the child knows it, and its signal
        status = self._last_status
        reason = status.reason if status is not None and status.state == "failed" else None
        child = self._children[self._launched.server.stem]
        return f"{child.ending}: {reason or 'the run has failed'}"

    def _end(self, *, in_a_hurry: bool = False, why: str | None = None) -> StopResult:
        result = super()._end(in_a_hurry=in_a_hurry, why=why)
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
