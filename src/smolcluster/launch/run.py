"""Running a whole cluster on this machine: start it, show it, and leave nothing behind.

The server starts first, then the workers. Their output is shown line by line behind what each of them is;
how far training is comes from the run's files. The server's exit code is the launcher's. A worker that fails
does not end the run, because training is elastic; when none is left, the run is ended.
"""

import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial

from rich.console import Console
from rich.text import Text

from smolcluster.cluster.listening import check_port
from smolcluster.configs.load import Kind, find_config, shipped_names
from smolcluster.configs.resolve import Settings, check_algorithm
from smolcluster.errors import LaunchError, SmolclusterError
from smolcluster.launch.children import POLL_S, Child, stop, wait_for
from smolcluster.launch.interrupts import Interrupts, interrupts
from smolcluster.launch.observe.beside import (
    announce,
    beside_others,
    forget,
    stack_for,
    within_reach,
)
from smolcluster.launch.plan import Request, in_sessions, plan_local
from smolcluster.launch.remote import LaunchOptions, launch_here, launch_remote, wants_window
from smolcluster.launch.requests import settings_of, written_here
from smolcluster.launch.shipping import ROLE, LokiAddress, local_shipper, loki_of
from smolcluster.launch.stop import (
    SERVER_GRACE_S,
    SHIPPER_GRACE_S,
    marker_of,
    note_stopped_here,
)
from smolcluster.observability.sinks.console import ProgressView
from smolcluster.observability.terminal import (
    COLOURS,
    SteadyConsole,
    displayable,
    print_line,
    shown_text,
    steady,
)
from smolcluster.observability.view.snapshot import Feed
from smolcluster.runs.events import RunEnded, WorkerJoined, WorkerLeft, WorkerLost
from smolcluster.runs.launched import Launched
from smolcluster.runs.paths import (
    RunPaths,
    create_run,
    latest_of,
    log_stem,
    new_run_id,
    runs_root,
    take_back_latest,
)
from smolcluster.runs.processes import ProcessEntry, start_of, write_processes
from smolcluster.runs.status import STOPPED
from smolcluster.runs.summary import read_summary, sample_shown, table
from smolcluster.transport.security import default_secret_path, ensure_secret
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count
from smolcluster.utils.words import as_command

SHUTDOWN_TIMEOUT_S = 10.0
"""From the end of a good run to the end of its workers, who hear of it from the server."""
PATIENCE_S = 3.0
"""How long a server may be alone after all our workers have failed; what it reports is a second old."""


def launch(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Launch a cluster, or only print its plan; returns the exit code.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    if not local:
        return launch_remote(for_any_folder(request), how)
    run_id = new_run_id(request.algorithm.name, datetime.now().astimezone())
    return launch_local(request, run_id, how)


def launch_local(request: Request, run_id: str, how: LaunchOptions, *, resume: bool = False) -> int:
    """Run a whole cluster on this machine, or only print its plan; returns the exit code.

    On a terminal with tmux it gets a window; elsewhere its processes are this one's children. With `resume`
    the run goes on from its newest good checkpoint.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    request = for_any_folder(request)
    settings = settings_of(request, local=True)
    check_algorithm(settings, request.algorithm.name)
    if how.dry_run:
        _show(_plan(request, settings, run_id, resume=resume))
        return 0
    check_port(settings.cluster)  # or our workers would find somebody else's server
    ensure_secret(settings.node.secret_file or default_secret_path())
    paths = create_run(runs_root(settings.node.runs_dir), run_id, newest=False)
    console = SteadyConsole()
    say = partial(print_line, console)
    stack = stack_for(how.observe, settings.cluster, say)
    if stack is not None:
        request = within_reach(request, settings.cluster)
        settings = settings_of(request, local=True)
    request = beside_others(request, settings.cluster, say)
    settings = settings_of(request, local=True)
    plan = _plan(request, settings, run_id, resume=resume)
    if stack is not None:
        announce(stack, run_id, plan.processes, settings.cluster, ssh=lambda _: None, say=say)
    loki = loki_of(settings.cluster, stack)
    if wants_window(how):
        launched = in_sessions(plan, paths)
        return launch_here(launched, paths, console, how, loki)
    num_epochs = settings.train.num_epochs
    try:
        run = LocalRun(plan, paths, console, num_epochs=num_epochs, resumed=resume, loki=loki)
        return run.run()
    finally:
        forget(run_id)


def _plan(request: Request, settings: Settings, run_id: str, *, resume: bool) -> Launched:
    return plan_local(
        request,
        settings.cluster,
        run_id=run_id,
        python=sys.executable,
        with_threads=_nodes_with_threads(request, settings),
        place=place_overrides(settings),
        resume=resume,
    )


def _show(plan: Launched) -> None:
    for process in plan.processes:
        sys.stdout.write(f"{process.title}:\n  {shlex.join(process.argv)}\n")


def for_any_folder(request: Request) -> Request:
    """The same request with absolute paths, so that its commands also work in another folder."""

    def absolute(source: str | None, kind: Kind) -> str | None:
        if source is None or source in shipped_names(kind):
            return source
        return str(find_config(source, kind).absolute())

    return replace(
        request,
        config=absolute(request.config or written_here(request.algorithm.name), "cluster"),
        train_config=absolute(request.train_config, "training"),
    )


def place_overrides(settings: Settings) -> list[str]:
    """Where the data are on this machine, for workers, which do not read the training file."""
    place = settings.node.dataset
    root = [] if place.root is None else [f"dataset.root={place.root}"]
    cache = [] if place.cache is None else [f"dataset.cache={place.cache}"]
    tokenizer = settings.train.dataset.at(place)
    files = (
        [f"dataset.tokenizer_path={tokenizer.tokenizer}"] if tokenizer.has_tokenizer_path else []
    )
    return [*root, *cache, *files, f"dataset.download={str(place.download).lower()}"]


def _nodes_with_threads(request: Request, settings: Settings) -> list[str]:
    """The nodes whose number of compute threads comes from the user, wherever it is said."""
    names = dict.fromkeys((settings.cluster.server, *settings.cluster.workers))
    return [name for name in names if settings_of(request, True, name).node.threads is not None]


class LocalRun:
    """One run of a plan on this machine; to be run once, from the main thread."""

    def __init__(
        self,
        plan: Launched,
        paths: RunPaths,
        console: Console,
        *,
        num_epochs: int | None = None,
        resumed: bool = False,
        loki: LokiAddress | None = None,
        grace_s: float = SERVER_GRACE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._plan = plan
        self._paths = paths
        self._console = console
        self._loki = loki
        self._grace_s = grace_s
        self._patience_s = patience_s
        self._view = ProgressView(console, num_epochs=num_epochs)
        self._feed = Feed(paths)
        if resumed:  # what it has done before is shown no more
            self._feed.skip()
        self._children: list[Child] = []
        self._shippers: list[Child] = []
        self._reported: set[int] = set()
        self._members: set[int] = set()
        self._has_begun = False
        """Whether a worker has taken part."""
        self._newest_before = latest_of(paths.root.parent)
        self._run_ended = False
        self._stopped = False
        """Whether its server was asked to end, by us or by anybody else."""
        self._alone: Deadline | None = None

    def run(self) -> int:
        """Start everything, wait for the server's end, end what is left; returns the exit code.

        Raises:
            LaunchError: a process cannot be started, or no worker is left.
        """
        with interrupts() as asked:
            try:
                self._start()
                code = self._watch(asked)
            finally:
                server, workers = self._children[:1], self._children[1:]
                stop([*workers, *server], self._grace_s, lambda: asked.repeated)
                stop(self._shippers, SHIPPER_GRACE_S, lambda: asked.repeated)
                self._follow()
                self._view.close()
                self._note_exits()
                if not self._has_begun:
                    take_back_latest(self._paths, self._newest_before)
        was_stopped = (bool(asked) and code == asked.exit_code) or self._was_asked()
        if was_stopped:
            note_stopped_here(self._paths)
        self._conclude(code, interrupted=was_stopped or self._stopped)
        return code

    def _start(self) -> None:
        """Start the server, then the workers; `_children` has what was started, come what may."""
        workers = format_count(len(self._plan.workers), "worker")
        self._say(
            f"run {self._paths.run_id}: starting a server and {workers}; Ctrl-C stops them. "
            "Loading PyTorch takes each of them some seconds"
        )
        width = max(len(process.title) for process in self._plan.processes)
        self._paths.launched.unlink(missing_ok=True)  # of sessions that it had before
        for folder in ("asked", "exits"):
            shutil.rmtree(self._paths.root / folder, ignore_errors=True)
        for process, colour in zip(self._plan.processes, itertools.cycle(COLOURS), strict=False):
            prefix = Text(f"{process.title:<{width}}", style=colour)
            self._children.append(Child(process, self._behind(prefix)))
        entries = [self._entry(child) for child in self._children]
        try:
            write_processes(self._paths.processes, entries)
        except SmolclusterError as error:
            self._say(f"{error}; the run goes on without it", "yellow")
        if self._loki is not None:
            self._ship(self._loki, width)

    def _note_exits(self) -> None:
        with suppress(OSError):
            exits = self._paths.root / "exits"
            exits.mkdir(exist_ok=True)
            for child in self._children:
                each = child.process
                stem = log_stem(each.role, each.node, each.rank)
                (exits / stem).write_text(f"{child.exit_code}\n")

    def _was_asked(self) -> bool:
        return marker_of(self._paths, self._entry(self._children[0])).exists()

    @staticmethod
    def _entry(child: Child) -> ProcessEntry:
        each = child.process
        return ProcessEntry(
            node=each.node,
            role=each.role,
            rank=each.rank,
            pid=child.pid,
            started=start_of(child.pid),
        )

    def _ship(self, loki: LokiAddress, width: int) -> None:
        process = local_shipper(self._plan.server.node, self._paths.root, loki)
        try:
            say = self._behind(Text(f"{ROLE:<{width}}", style="dim"))
            self._shippers.append(Child(process, say))
        except LaunchError as error:
            self._say(f"the logs are not shipped: {error}", "yellow")

    def _watch(self, asked: Interrupts) -> int:
        server, *workers = self._children
        while not asked:
            code = server.exit_code
            self._follow()
            self._report_failures(workers)
            if code is not None:
                if code == 0:
                    wait_for(workers, SHUTDOWN_TIMEOUT_S, lambda: bool(asked))
                return code
            if self._is_deserted(workers):
                raise LaunchError(
                    f"no worker is left ({'; '.join(f'{w.process.title} {w.ending}' for w in workers)}): "
                    f"the run was stopped; their logs are in {self._paths.logs}"
                )
            time.sleep(POLL_S)
        self._view.close(show_last=False)
        self._say("stopping everything that was started; Ctrl-C again to do it at once", "yellow")
        return asked.exit_code

    def _report_failures(self, workers: list[Child]) -> None:
        for worker in workers:
            if worker.exit_code not in (None, 0) and worker.pid not in self._reported:
                self._reported.add(worker.pid)
                self._say(f"{worker.process.title} {worker.ending}", "yellow")

    def _is_deserted(self, workers: list[Child]) -> bool:
        """Whether all our workers have failed, and for a while nobody else has taken part."""
        failed = all(worker.exit_code not in (None, 0) for worker in workers)
        if not failed or self._members or self._run_ended:
            self._alone = None
            return False
        self._alone = self._alone or Deadline(self._patience_s)
        return self._alone.expired

    def _follow(self) -> None:
        for line in self._feed.metrics.poll():
            self._view.log(line.record)
        self._view.tick()
        for record in self._feed.events.poll():
            match record.event:
                case WorkerJoined(rank=rank):
                    self._members.add(rank)
                    self._has_begun = True
                case WorkerLeft(rank=rank) | WorkerLost(rank=rank):
                    self._members.discard(rank)
                case RunEnded(reason=reason):
                    self._run_ended, self._stopped = True, reason == STOPPED

    def _conclude(self, code: int, *, interrupted: bool) -> None:
        server = self._children[0]
        if code == 0 and self._paths.summary.is_file():
            summary = read_summary(self._paths.summary)
            with steady(self._console):
                self._console.print(table(summary))
                if self._paths.sample.is_file():
                    self._console.print(shown_text(self._console, sample_shown(self._paths)))
        elif interrupted:
            self._say("stopped: nothing of it is left running")
        elif code != 0:
            self._say(f"{server.process.title} {server.ending}: the run has failed", "red")
        if code != 0 and self._paths.checkpoints.is_dir():
            self._say(f"{as_command('resume', self._paths.root)} goes on with it")
        self._say(f"files of the run: {self._paths.root}")

    def _say(self, line: str, style: str = "") -> None:
        self._view.print(Text(displayable(self._console, line), style=style))

    def _behind(self, prefix: Text) -> Callable[[str], None]:
        def say(line: str) -> None:
            shown = displayable(self._console, line)
            self._view.print(Text.assemble(prefix, " | ", shown))

        return say
