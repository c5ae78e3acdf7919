"""A run on the machines of a cluster, from the first look at them to its end.

    look at each machine -> code and environment -> secret and configuration -> server -> workers -> follow

Until all workers have joined, a failure anywhere stops what was started. From then on the run does not need
this machine: it may sleep, lose its network or leave, and come back with `smolcluster attach`.
"""

import hashlib
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from smolcluster.errors import (
    AuthError,
    LaunchError,
    Rejected,
    RunBusy,
    TryAgain,
)
from smolcluster.launch.host import Host, TookTooLong, Unreachable, shell_path
from smolcluster.launch.interrupts import Interrupts, interrupts
from smolcluster.launch.manifest import as_manifest, read_tree, without
from smolcluster.launch.observe.beside import forget
from smolcluster.launch.plan import CLUSTER_FILE, TRAIN_FILE
from smolcluster.launch.prepare import TOOLS, check, check_port, hand_over_secret, run_on_all
from smolcluster.launch.sessions import (
    Ending,
    begin,
    exit_code,
    host_of,
    kill,
    newest_line,
    put,
    stderr_tail,
)
from smolcluster.launch.shipping import LokiAddress, begin_shippers, with_shippers
from smolcluster.launch.stop import StopResult, stop_processes
from smolcluster.launch.sync import Sending, environment_digest, look, make_environment, send_code
from smolcluster.launch.tmux import close_window, is_stopping
from smolcluster.observability.terminal import displayable, steady
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched
from smolcluster.runs.paths import RunPaths, latest_of, point_latest, take_back_latest
from smolcluster.runs.status import STATUS, RunStatus
from smolcluster.runs.summary import SUMMARY, Summary, table
from smolcluster.utils.at_once import at_once
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count, format_duration
from smolcluster.utils.words import as_command

POLL_S = 0.5
INTERRUPTED = 130
SHUTDOWN_TIMEOUT_S = 10.0
"""From the end of a good run to the end of its workers, who hear of it from the server."""
TOLD_EVERY_S = 10.0
SERVER_SILENT_S = 1800.0
"""A server that does not listen yet and logs nothing for so long is given up; it may have data to prepare."""
PASSED_ON = (TryAgain.exit_code, AuthError.exit_code, Rejected.exit_code)


@dataclass(frozen=True)
class Machine:
    """A node before the run.

    Attributes:
        host: how it is reached.
        project_dir: the project's folder there.
        torch: the build of PyTorch, as `nodes.<name>.torch`.
        env: what is added to the environment of its processes.
        secret_file: where the secret belongs; None: the default place.
        kept: what else it has below that folder, as patterns of rsync.
    """

    host: Host
    project_dir: str
    torch: str
    env: Mapping[str, str]
    secret_file: str | None = None
    kept: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that launches: then nothing needs to be brought there."""
        return self.host.destination is None


@dataclass(frozen=True)
class Payload:
    """What the machines get: the project at `root`, the two configuration files, the cluster's secret."""

    root: Path
    cluster_file: bytes
    train_file: bytes
    secret: bytes


class OnInterrupt(Enum):
    """What Ctrl-C was meant for."""

    LEAVE = "l"
    STOP = "s"


class Stopped(LaunchError):
    """The user has stopped the run while it was starting."""

    exit_code = INTERRUPTED


class EndedBadly(LaunchError):
    """A process has ended before it took part; a code that says what to do is the launcher's too."""

    def __init__(self, title: str, code: int, said: str) -> None:
        if code in PASSED_ON:
            self.exit_code = code
        super().__init__(f"{title} ended with exit code {code}: {said}")


class ClusterRun:
    """One run of a plan on its machines, for the main thread."""

    def __init__(
        self,
        launched: Launched,
        machines: Mapping[str, Machine],
        paths: RunPaths,
        console: Console,
    ) -> None:
        """`machines`: by the names of nodes."""
        self._launched = launched
        self._machines = machines
        self._paths = paths
        self._console = console
        self._kept: set[int | None] = set()
        """Ranks of the workers that are there from before, and look for their server."""
        self._outdated: list[LaunchedProcess] = []
        """Workers from before that were told something else."""

    def prepare(self, payload: Payload, *, sync: bool, overwrite: bool = False) -> None:
        """Look at the machines, and bring there what a run needs; with `sync` also code and environment.

        Nothing is changed anywhere before all machines have been found fit. Files that somebody has edited in
        a project's folder are a reason not to begin; with `overwrite` they are moved aside.

        Raises:
            LaunchError: a machine is not fit; the message says what to do.
        """
        machines, server = self._machines, self._launched.server
        hosts = [machine.host for machine in machines.values()]
        tools = [tool for tool in TOOLS if sync or tool == "tmux"]
        self.say(f"looking at {', '.join(machines)}")
        run_on_all(hosts, lambda host: self._check(host, tools))
        tree = read_tree(payload.root)
        version = hashlib.sha256(as_manifest(tree)).hexdigest()
        self.keep_what_waits(version if sync else None)
        check_port(host_of(server), self._launched.port)
        if sync:
            self._sync(hosts, payload.root, overwrite=overwrite)
        run_on_all(hosts, lambda host: self._hand_over(host, payload.secret))
        nodes = {process.node: process for process in reversed(self._launched.processes)}
        for process in nodes.values():
            put(host_of(process), f"{process.run_dir}/{CLUSTER_FILE}", payload.cluster_file)
        put(host_of(server), f"{server.run_dir}/{TRAIN_FILE}", payload.train_file)

    def _sync(self, hosts: Sequence[Host], root: Path, *, overwrite: bool) -> None:
        """Bring code and environment to those that are not here, when all of them have been found fit."""
        tree = read_tree(root)

        def find(host: Host) -> Sending:
            machine = self._machines[host.node]
            ours = without(tree, machine.kept)
            return look(host, machine.project_dir, ours, overwrite=overwrite)

        others = [host for host in hosts if not self._machines[host.node].is_here]
        found = run_on_all(others, find)
        run_on_all(others, partial(self._bring, root=root, found=found))

    def bring_in(self, node: str, payload: Payload, *, sync: bool, overwrite: bool = False) -> None:
        """Look at one more machine of a run that lives, and bring there what it needs.

        Raises:
            LaunchError: it is not fit; the message says what to do.
        """
        machine = self._machines[node]
        self.say(f"looking at {node}")
        self._check(machine.host, [tool for tool in TOOLS if sync or tool == "tmux"])
        if sync:
            self._sync([machine.host], payload.root, overwrite=overwrite)
        self._hand_over(machine.host, payload.secret)

    def keep_what_waits(self, version: str | None = None) -> None:
        """Keep the workers of a run that goes on which still look for their server; end the others then.

        Kept is who was started by the same command with the same code, whose digest is `version`; None: that
        is not changed.

        Raises:
            RunBusy: its server is alive.
            LaunchError: a machine cannot be asked.
        """
        before = or_none(read_launched, self._paths.launched)
        if before is None:  # it has never been started
            self._launched = self._launched.model_copy(update={"version": version or ""})
            return
        version = before.version if version is None else version
        self._launched = self._launched.model_copy(update={"version": version})
        waiting = [each for each, code in exit_codes(before.processes) if code is None]
        if before.server in waiting:
            run_id = self._launched.run_id
            raise RunBusy(
                f"run {run_id} is not over ({before.server.title}): {as_command('stop', run_id)} "
                "stops it"
            )
        for worker in waiting:
            if worker in self._launched.workers and version == before.version:
                self._kept.add(worker.rank)
            else:
                self._outdated.append(worker)

    def _check(self, host: Host, tools: list[str]) -> None:
        machine = self._machines[host.node]
        needed = [tool for tool in tools if tool == "tmux" or not machine.is_here]
        check(host, machine.project_dir, needed)

    def _bring(self, host: Host, *, root: Path, found: Mapping[str, Sending]) -> None:
        machine, began = self._machines[host.node], time.monotonic()
        self.say(f"{host.node}: code and environment in {machine.project_dir}")
        sending = found[host.node]
        if backup := send_code(root, host, machine.project_dir, sending, machine.kept):
            self.say(f"{host.node}: what was edited there is now in {backup} there", "yellow")
        digest = environment_digest(root, machine.torch)
        make_environment(host, machine.project_dir, machine.torch, digest, machine.env)
        self.say(f"{host.node}: ready ({time.monotonic() - began:.1f} s)")

    def _hand_over(self, host: Host, secret: bytes) -> None:
        machine = self._machines[host.node]
        if machine.is_here and machine.secret_file is None:
            return  # it is where it comes from
        if hand_over_secret(host, machine.secret_file, secret):
            self.say(f"{host.node}: had another secret, which this machine's replaces", "yellow")

    def start(self, loki: LokiAddress | None = None) -> None:
        """Start the server, then the workers; return when all of them have joined, or the run is over.

        `loki`: where the logs go; None: nowhere.

        Raises:
            LaunchError: it cannot be done; nothing of it is left running.
        """
        self._launched = with_shippers(self._launched, loki, self._warn)
        write_launched(self._paths.launched, self._launched)
        self._paths.processes.unlink(missing_ok=True)  # of a launch without sessions
        self._forget_copies()
        root = self._paths.root.parent
        newest_before = latest_of(root)
        close_window(self._launched.run_id)  # of a run that goes on: its panes show what has ended
        with interrupts() as asked:
            try:
                self._end_outdated()
                self._start_server(asked)
                self._start_workers(asked)
            except BaseException as error:
                self._take_back(error)
                take_back_latest(self._paths, newest_before)
                raise
        point_latest(root, self._launched.run_id)

    def _end_outdated(self) -> None:
        for worker in self._outdated:
            if kill(worker) is Ending.REMAINS:
                raise LaunchError(f"{worker.title} of before does not end: its disk may hang")

    def _forget_copies(self) -> None:
        """Remove what this machine has learnt of a run elsewhere that goes on now."""
        self._paths.standing.unlink(missing_ok=True)
        if self._launched.server.ssh is not None:
            self._paths.status.unlink(missing_ok=True)
            self._paths.summary.unlink(missing_ok=True)

    def _start_server(self, asked: Interrupts) -> None:
        server = self._launched.server
        before = self.status()
        self.say(
            f"run {self._launched.run_id}: starting the server on {server.node}; loading PyTorch takes "
            "some seconds"
        )
        self._begin(server)
        self._ship([each for each in self._launched.shippers if each.node == server.node])
        told, patience, newest = Deadline(TOLD_EVERY_S), Deadline(SERVER_SILENT_S), ""
        while not _is_new(self.status(), before):
            self._check_alive([server], asked)
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
        begun = [worker for worker in workers if worker.rank not in self._kept]
        there = [f"{', '.join(kept)} still there"] * bool(kept)
        new = [f"starting {', '.join(worker.title for worker in begun)}"] * bool(begun)
        self.say("; ".join(["it listens", *there, *new]))
        by_node: dict[str, list[LaunchedProcess]] = {}
        for worker in begun:
            by_node.setdefault(worker.node, []).append(worker)

        def begin_there(host: Host) -> None:
            for worker in by_node[host.node]:
                self._begin(worker)

        run_on_all([self._machines[node].host for node in by_node], begin_there)
        elsewhere = {worker.node for worker in workers} - {self._launched.server.node}
        self._ship([each for each in self._launched.shippers if each.node in elsewhere])
        told = Deadline(TOLD_EVERY_S)
        while missing := self._missing():
            self._check_alive(self._launched.processes, asked)
            if told.expired:
                told = Deadline(TOLD_EVERY_S)
                self.say(f"waiting for {', '.join(missing)}")
            time.sleep(POLL_S)
        self.say("all have joined")

    def _begin(self, process: LaunchedProcess) -> None:
        begin(process, self._machines[process.node].env)

    def _ship(self, shippers: Sequence[LaunchedProcess]) -> None:
        begin_shippers(
            shippers, {node: each.env for node, each in self._machines.items()}, self._warn
        )

    def _missing(self) -> list[str]:
        """The workers that have not joined yet; none when the run is over."""
        status = self.status()
        if status is not None and status.is_over:
            return []
        joined = {worker.rank for worker in status.workers} if status else set()
        return [worker.title for worker in self._launched.workers if worker.rank not in joined]

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
        forget(self._launched.run_id)
        self.say(
            f"{error}"
            if isinstance(error, Stopped)
            else "the start has failed: stopping what was started"
        )
        for left in self._end().left:
            self.say(f"{left.process.title}: {left.reason}", "red")

    def _end(self, *, in_a_hurry: bool = False) -> StopResult:
        """End all processes; Ctrl-C from now on kills them."""
        with interrupts() as asked:
            return stop_processes(
                self._launched,
                in_a_hurry=lambda: in_a_hurry or signal.SIGINT in asked.received,
                say=self.say,
            )

    def status(self) -> RunStatus | None:
        """What the server last wrote of itself; None: nothing yet.

        Raises:
            LaunchError: its machine cannot be asked.
        """
        server = self._launched.server
        file = f"{shell_path(server.run_dir)}/status.json"
        return STATUS.parse(host_of(server).run(f"cat {file} 2>/dev/null").stdout)

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added to it; a machine out of reach does not say so."""
        try:
            status = self.status()
        except LaunchError:
            return False
        return status is not None and status.is_over

    @property
    def folder(self) -> Path:
        return self._paths.root.absolute()

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

    def with_devices(self) -> tuple[LaunchedProcess, ...]:
        """The processes with the devices on which they compute, as far as these are known."""
        try:
            status = self.status()
        except LaunchError:
            status = None
        found = {worker.rank: worker.device for worker in status.workers} if status else {}
        return tuple(
            process
            if process.rank is None
            else process.model_copy(update={"device": found.get(process.rank, process.device)})
            for process in self._launched.processes
        )

    def follow(self) -> int:
        """Tell how the run goes on, until its end or Ctrl-C; returns the exit code.

        A lost connection ends nothing: it is said, and tried again.
        """
        server = self._launched.server
        told, is_lost = Deadline(0), False
        with interrupts() as asked:
            while True:
                if asked:
                    return self._interrupted(asked)
                try:
                    code, status = exit_code(server), self.status()
                except LaunchError as error:
                    if not is_lost:
                        self.say(
                            f"no contact with {server.node}, where the run goes on ({error})",
                            "yellow",
                        )
                    is_lost = True
                    _wait(POLL_S * 4, asked)
                    continue
                if is_lost:
                    self.say(f"{server.node} is back")
                    is_lost = False
                if code is not None:
                    return self.conclude(code)
                if status is not None and told.expired:
                    told = Deadline(TOLD_EVERY_S)
                    self.say(progress_line(status))
                _wait(POLL_S * 2, asked)

    def left_window(self) -> int:
        """The user has left the window: say what came of the run, or how to get back to it."""
        run_id = self._launched.run_id
        if is_stopping(run_id):
            return self.stop() or INTERRUPTED
        try:
            code = exit_code(self._launched.server)
        except LaunchError as error:
            self.say(f"no contact with {self._launched.server.node} ({error})", "yellow")
            code = None
        if code is not None:
            return self.conclude(code)
        self.say(left_running(run_id))
        return 0

    def _interrupted(self, asked: Interrupts) -> int:
        if self._ask(asked) is OnInterrupt.LEAVE:
            self.say(left_running(self._launched.run_id))
            return 0
        return self.stop() or INTERRUPTED

    def _ask(self, asked: Interrupts) -> OnInterrupt:
        """Leave the run going, or stop it? Who closes the terminal leaves it.

        Where there was no terminal nobody can answer: then it is stopped.
        """
        if asked.hung_up:
            return OnInterrupt.LEAVE
        if not sys.stdin.isatty():
            return OnInterrupt.STOP
        self.say("leave the run going (l), or stop it (s, or Ctrl-C again)?")
        while not (asked.repeated or asked.hung_up):
            ready, _, _ = select.select([sys.stdin], [], [], 0.1)
            try:
                line = sys.stdin.readline() if ready else None
            except OSError:  # its terminal has gone
                line = ""
            if line == "":
                return OnInterrupt.LEAVE
            answer = (line or "").strip().lower()[:1]
            if answer in {choice.value for choice in OnInterrupt}:
                return OnInterrupt(answer)
        return OnInterrupt.LEAVE if asked.hung_up else OnInterrupt.STOP

    def stop(self, *, in_a_hurry: bool = False) -> int:
        run_id = self._launched.run_id
        if not in_a_hurry:
            self.say("stopping the run; Ctrl-C kills it, without a last checkpoint", "yellow")
        stopped = self._end(in_a_hurry=in_a_hurry)
        for each in stopped.left:
            self.say(f"{each.process.title}: {each.reason}", "red")
        close_window(run_id)
        if stopped.left:
            self.say(f"the others are stopped; {as_command('stop', run_id)} tries again", "red")
            return 1
        forget(run_id)
        what = "it was over already" if stopped.was_over else "stopped"
        self.say(f"run {run_id}: {what}; nothing of it is left running")
        return 0

    def conclude(self, code: int) -> int:
        """Say what came of a run whose server has ended, and see that its workers end; returns `code`."""
        if code:
            server = self._launched.server
            self.say(f"{server.title} ended with exit code {code}: {stderr_tail(server)}", "red")
        deadline = Deadline(SHUTDOWN_TIMEOUT_S if code == 0 else 0)
        try:
            while not deadline.expired and any(
                ended is None for _, ended in exit_codes(self._launched.workers)
            ):
                time.sleep(POLL_S)
        except LaunchError:
            pass  # stopping says which machine it is
        for left in self._end().left:
            self.say(f"{left.process.title}: {left.reason}", "yellow")
        close_window(self._launched.run_id)
        forget(self._launched.run_id)
        if code == 0 and (summary := self._summary()):
            with steady(self._console):
                self._console.print(table(summary))
        if self._launched.is_local:
            self.say(f"files of the run: {self._paths.root}")
        else:
            self.say(f"{as_command('fetch', self._launched.run_id)} brings its files here")
        return code

    def _summary(self) -> Summary | None:
        server = self._launched.server
        file = f"{shell_path(server.run_dir)}/summary.json"
        return SUMMARY.parse(host_of(server).run(f"cat {file}").stdout)

    def _warn(self, line: str) -> None:
        self.say(line, "yellow")

    def say(self, line: str, style: str = "") -> None:
        with steady(self._console):
            self._console.print(Text(displayable(self._console, line), style=style), soft_wrap=True)


def exit_codes(
    processes: Sequence[LaunchedProcess],
) -> list[tuple[LaunchedProcess, int | None]]:
    """The exit code of each process (None: it runs), asked of all machines at once.

    Raises:
        LaunchError: one cannot be asked.
    """
    return list(zip(processes, at_once(exit_code, processes), strict=True))


def progress_line(status: RunStatus) -> str:
    parts = [f"step {status.step:,} of {status.total_steps:,}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.val_accuracy is not None:
        parts.append(f"validation accuracy {status.val_accuracy:.3f}")
    if status.val_perplexity is not None:
        parts.append(f"validation perplexity {status.val_perplexity:.4g}")
    parts.append(f"{status.samples_per_s:,.0f} samples/s")
    present = sum(worker.state == "joined" for worker in status.workers)
    return ", ".join([*parts, format_count(present, "worker")])


def left_running(run_id: str) -> str:
    return (
        f"run {run_id} goes on: {as_command('attach', run_id)} shows it, status, logs and stop do what "
        "they say"
    )


def _is_new(status: RunStatus | None, before: RunStatus | None) -> bool:
    """Whether a server has written this since it was started."""
    return status is not None and (before is None or status.incarnation != before.incarnation)


def _wait(seconds: float, asked: Interrupts) -> None:
    deadline = Deadline(seconds)
    while not deadline.expired and not asked:
        time.sleep(0.05)
