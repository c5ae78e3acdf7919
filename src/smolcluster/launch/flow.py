"""Every launch: settings -> named -> checked -> plan -> begun -> followed or left.

What differs is where a run is: on this machine alone, on the machines of a cluster, or with a scheduler. Each
plans, says what it would start, checks its machines and makes them ready.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast, get_args

from rich.console import Console
from rich.text import Text

from smolcluster.configs.checks import check_unencrypted
from smolcluster.configs.overrides import (
    public_variables,
    unused_overrides,
    workload_overrides,
)
from smolcluster.configs.schema import config_of
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.doctor.checks_links import check_links, check_port
from smolcluster.launch.find import find
from smolcluster.launch.host import Host
from smolcluster.launch.invite.start import begin_inviting, check_invitable
from smolcluster.launch.jobs import kubernetes
from smolcluster.launch.jobs.scheduler import SUBMIT_FILE, Job
from smolcluster.launch.jobs.slurm import sbatch_script
from smolcluster.launch.kept import (
    StoredOptions,
    cluster_bytes,
    keep,
    keep_prediction,
)
from smolcluster.launch.observe.beside import announce, beside_others, stack_for, within_reach
from smolcluster.launch.places import (
    inherited,
    machines_here,
    machines_of,
    own_secret_file,
    project_root,
)
from smolcluster.launch.plan import (
    CLUSTER_FILE,
    TRAIN_FILE,
    Request,
    num_ranks,
    plan,
    plan_job,
    portable_request,
    ranks_command,
    runs_dir_override,
)
from smolcluster.launch.prepare import (
    NotFit,
    check_systems,
    examine,
    make_ready,
    settings_in,
)
from smolcluster.launch.project import read_project
from smolcluster.launch.requests import Resolved, training_line
from smolcluster.launch.run import Run
from smolcluster.launch.run_in_sessions import RunInSessions, left_running
from smolcluster.launch.run_of_children import RunOfChildren
from smolcluster.launch.sessions import host_of, put
from smolcluster.launch.shipping import loki_of
from smolcluster.launch.show_plan import show_plan
from smolcluster.launch.tmux import show_window, window_name
from smolcluster.launch.workload_check import calling
from smolcluster.launch.workload_code import WorkloadCode, code_of, code_of_script, put_code
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.runs.advice import Prediction
from smolcluster.runs.launched import Launched, Scheduler, launched_of
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import (
    RunPaths,
    all_runs,
    check_run_id,
    create_run,
    new_run_id,
    runs_root,
)
from smolcluster.server.listening import check_port as check_own_port
from smolcluster.utils.words import as_command, hint_at
from smolcluster.wire.security import cluster_secret, ensure_secret

Place = Literal["ssh"] | Scheduler
PLACES: Mapping[str, Place] = {"ssh": "ssh", **{each: each for each in get_args(Scheduler)}}


def place_of(stated: str, *, local: bool, without: Sequence[str] = ()) -> Place:
    """Where `--on` says that a run is; `without`: the nodes that `--without` leaves out.

    Raises:
        ConfigError: it says something else, or also --local; or no node can be left out there.
    """
    known = tuple(PLACES)
    if stated not in known:
        raise ConfigError(
            f"--on is {stated!r}, must be one of {', '.join(known)}{hint_at(stated, known)}"
        )
    if local and stated != "ssh":
        raise ConfigError(f"--local and --on {stated} are two places: leave one of them out")
    if without and (local or stated != "ssh"):
        raise ConfigError(
            f"--without {without[0]}: it leaves out machines that are reached over SSH; with --local "
            "say --workers N, with --on how many nodes"
        )
    return PLACES[stated]


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch.

    Attributes:
        dry_run: only print the plan.
        sync: bring code and environment to machines that have not these.
        tmux: open a window with a pane a process, where there is a terminal.
        detach: leave the run alone when all workers have joined.
        observe: start Grafana, Loki and Prometheus where they can be; None: as the cluster file says, and
            otherwise use those that run; False: leave them alone.
        prediction: what was predicted of the run; None: nothing.
        on: where a group runs that is not this machine's alone.
        invite: invite other machines into the run, by a code.
    """

    dry_run: bool = False
    sync: bool = True
    tmux: bool = True
    detach: bool = False
    observe: bool | None = None
    prediction: Prediction | None = None
    on: Place = "ssh"
    invite: bool = False


def launch(
    asked: Resolved, how: LaunchOptions, *, run_id: str | None = None, resume: bool = False
) -> int:
    """Launch a run whose settings are checked, or only print its plan; returns the exit code.

    With `resume` the run of that id goes on from its newest good checkpoint.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    request = asked.request
    for line in unused_overrides(request.overrides, request.algorithm.name):
        sys.stderr.write(f"{line}\n")
    if how.invite:
        check_invitable(request, asked.settings.cluster, local=asked.local)
    run_id = check_run_id(run_id or new_run_id(request.algorithm.name, datetime.now().astimezone()))
    kind = Here if asked.local else Cluster if how.on == "ssh" else Scheduled
    site: Here | Cluster | Scheduled = kind(asked, how)

    def planned() -> Launched:
        launched = site.plan(run_id)
        return launched.resumed() if resume and not launched.is_job else launched

    if how.dry_run:
        site.show(planned())
        return 0
    console, paths = SteadyConsole(), RunPaths(site.root / run_id)

    def say(line: str, style: str = "") -> None:
        print_line(console, Text(line, style=style))

    # two that start the same run at the same time would end each other's processes
    with run_lock(paths.starting, "started") if paths.root.is_dir() else nullcontext():
        site.check(say)
        launched = planned()
        run = run_of(launched, paths, console, site.env, num_epochs=site.num_epochs)
        run.keep_what_waits(without=request.without)
        site.make_ready(launched, say)
        cluster = site.asked.settings.cluster
        if site.stack is not None:
            announce(site.stack, run_id, launched.processes, cluster, say)
        run.start(None if launched.is_job else loki_of(cluster, site.stack))
    if how.invite:
        begin_inviting(run, launched, paths.root, inherited())
    return go_on(run, launched, how)


def run_of(
    launched: Launched,
    paths: RunPaths,
    console: Console,
    env: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    *,
    num_epochs: int | None = None,
) -> Run:
    """The run that starts, follows and ends these processes; `env`: added to what each node has."""
    if launched.has_sessions:
        return RunInSessions(launched, paths, console, env)
    return RunOfChildren(launched, paths, console, num_epochs=num_epochs)


Say = Callable[..., None]
"""Tells the user a line, in a style."""


class Site:
    """Where a run is: see `Here`, `Cluster` and `Scheduled`.

    Attributes:
        root: this machine's folder of runs.
        env: what the processes on each node have in their environment besides.
        stack: the folder of the Grafana that shows the run; None: there is none.
        num_epochs: that its progress is shown against, where it is shown.
    """

    root: Path
    env: Mapping[str, Mapping[str, str]] = {}
    stack: Path | None = None
    num_epochs: int | None = None

    def __init__(self, asked: Resolved, how: LaunchOptions) -> None:
        self.asked, self.how = asked, how

    def make_ready(self, launched: Launched, say: Say) -> RunPaths:  # noqa: ARG002 - there is nothing to say
        """Bring the machines what the processes need, and keep with the run what lets it go on.

        Raises:
            SmolclusterError: it cannot be done.
        """
        paths = create_run(self.root, launched.run_id, newest=False)
        if self.how.prediction is not None:
            keep_prediction(self.how.prediction, launched.server, paths)
        return paths

    def _keep(self, paths: RunPaths, code: WorkloadCode | None = None) -> None:
        asked, request = self.asked, self.asked.request
        told = StoredOptions(
            environ=settings_in(os.environ),
            overrides=(*request.overrides, *workload_overrides(request.workload)),
            script=request.script,
        )
        cluster_file = cluster_bytes(asked.cluster_file, request.without, travels=False)
        packed = None if code is None else code.packed
        keep(paths, cluster_file, asked.train_file.read_bytes(), told, packed)


class Here(Site):
    """This machine alone: children of the launcher, or sessions of tmux where there is a terminal."""

    def __init__(self, asked: Resolved, how: LaunchOptions) -> None:
        super().__init__(asked, how)
        request, settings = asked.request, asked.settings
        self.root = runs_root(settings.node.runs_dir)
        self.env = dict.fromkeys(settings.cluster.machines, inherited())
        if not (request.script or settings.train.num_steps):
            self.num_epochs = settings.train.num_epochs
        if request.algorithm.is_group:
            settings.of(config_of(request.algorithm)).check_device(settings.node.device)

    def plan(self, run_id: str) -> Launched:
        request, settings = self.asked.request, self.asked.settings
        machines = machines_here(request, settings, self.root)
        in_sessions = wants_window(self.how)
        return plan(request, settings, machines, run_id, is_local=True, in_sessions=in_sessions)

    def show(self, launched: Launched) -> None:
        for process in launched.processes:
            sys.stdout.write(f"{process.title}:\n  {shlex.join(process.argv)}\n")

    def check(self, say: Say) -> None:
        """See that the run can be started; choose its ports of metrics, which are in its commands.

        Raises:
            SmolclusterError: it cannot.
        """
        settings = self.asked.settings
        check_own_port(settings.cluster)
        cluster_secret(settings.node.secret_file, makes=True)
        self.stack = stack_for(self.how.observe, settings.cluster, say)
        if self.stack is not None:
            self.asked = self.asked.with_overrides(within_reach(settings.cluster))
        self.asked = self.asked.with_overrides(beside_others(self.asked.settings.cluster, say))


class Cluster(Site):
    """The machines of a cluster, over SSH: sessions of tmux."""

    def __init__(self, asked: Resolved, how: LaunchOptions) -> None:
        super().__init__(asked, how)
        request, settings = asked.request, asked.settings
        self.root, self._project = all_runs(), read_project(project_root())
        self._code, self._seen = _code_of(request)
        if request.algorithm.is_group:
            self._seen = portable_request(self._seen, settings)
        files = (asked.cluster_file, asked.train_file)
        self._machines = machines_of(
            request, settings, *files, here=self.root, project=self._project
        )
        self.env = {node: machine.env for node, machine in self._machines.items()}

    def plan(self, run_id: str) -> Launched:
        return plan(self._seen, self.asked.settings, self._machines, run_id)

    def show(self, launched: Launched) -> None:
        has_known_model = self.asked.request.script is None
        show_plan(launched, self.asked.settings, self._code, has_known_model=has_known_model)

    def check(self, say: Say) -> None:
        """See that all machines are fit for the run, and that its workload can be called.

        Of workers' machines out of reach it is said how the run is launched without them.

        Raises:
            SmolclusterError: one is not, or it cannot.
        """
        cluster, train = self.asked.settings.cluster, self.asked.settings.train
        machines, request = self._machines, self.asked.request
        own_env = next((each.env for each in machines.values() if each.is_here), None)
        with calling(request.workload, train.workload_args, cluster.seed, say, own_env) as wait:
            try:
                systems = examine(machines.values(), say, sync=self.how.sync)
            except NotFit as error:
                left_out = [node for node in error.unreached if node in cluster.workers]
                if not left_out or {cluster.server, *cluster.stage_nodes} & {*error.unreached}:
                    raise
                flags = " ".join(f"--without {node}" for node in left_out)
                raise LaunchError(f"{error}; {flags} launches the others alone") from None
            wait()
        if request.algorithm.is_group:
            check_systems(dict(zip(machines, systems, strict=True)))

    def make_ready(self, launched: Launched, say: Say) -> RunPaths:
        machines, secret = self._machines.values(), ensure_secret(own_secret_file()).key
        asked, cluster = self.asked, self.asked.settings.cluster
        check_port(cluster, self._machines[cluster.server].host)
        make_ready(machines, secret, say, project=self._project, sync=self.how.sync)
        check_links(cluster, self._machines, cluster.machines[1:])
        cluster_file = cluster_bytes(asked.cluster_file, asked.request.without)
        put_configuration(launched, cluster_file, asked.train_file.read_bytes(), self._code)
        paths = super().make_ready(launched, say)
        self._keep(paths, self._code)
        self.stack = stack_for(self.how.observe, cluster, say)
        return paths


def _code_of(named: Request) -> tuple[WorkloadCode | None, Request]:
    """What is sent of the user's code, and the request as machines see it that have it."""
    if named.script is not None:
        code = code_of_script(named.script)
        return code, replace(named, script=code.name)
    found = None if named.workload is None else code_of(named.workload)
    return found, replace(named, workload=found.name if found else named.workload)


def put_configuration(
    launched: Launched, cluster_file: bytes, train_file: bytes, code: WorkloadCode | None
) -> None:
    """Write what the processes read, and the code of their workload, into their run's folders.

    On this machine they read the files that the launch keeps.

    Raises:
        LaunchError: it cannot be written.
    """
    for process in {each.node: each for each in reversed(launched.processes)}.values():
        if process.ssh is not None:
            put(host_of(process), f"{process.run_dir}/{CLUSTER_FILE}", cluster_file)
        if code is not None:
            put_code(host_of(process), process.run_dir, code.packed, code.name)
    readers = launched.processes if launched.is_group else (launched.server,)
    for process in readers:
        if process.ssh is not None:
            put(host_of(process), f"{process.run_dir}/{TRAIN_FILE}", train_file)


class Scheduled(Site):
    """A group that a scheduler starts, when there is room; `text` is what it takes."""

    text = ""

    def __init__(self, asked: Resolved, how: LaunchOptions) -> None:
        request, settings = asked.request, asked.settings
        super().__init__(replace(asked, request=portable_request(request, settings)), how)
        self.root, self._on = all_runs(), cast("Scheduler", how.on)
        self._num_ranks = num_ranks(request, settings)
        cluster = settings.cluster
        if (cluster.slurm if self._on == "slurm" else cluster.kubernetes).nodes > 1:
            check_unencrypted(cluster.encryption)

    def plan(self, run_id: str) -> Launched:
        asked = self.asked
        launched = plan_job(asked.request, asked.settings, str(self.root), run_id, self._on)
        self.text = self._text_of(launched)
        return launched

    def _text_of(self, launched: Launched) -> str:
        """For `sbatch` a script, for `kubectl` objects.

        Raises:
            ConfigError: see `sbatch_script` and `manifests`.
        """
        asked, process, names = self.asked, launched.server, (CLUSTER_FILE, TRAIN_FILE)
        cluster, request = asked.settings.cluster, asked.request
        folder, runs_dir = process.run_dir, process.project_dir
        if self._on == "kubernetes":
            folder, runs_dir, names = kubernetes.CONFIG, kubernetes.RUNS, kubernetes.FILES
        config, train_config = (f"{folder}/{name}" for name in names)
        told = replace(request, config=config, train_config=train_config, overrides=request.public)
        last = (runs_dir_override(runs_dir),)
        command = ranks_command(told, launched.run_id, ("--resume", "auto"), last)
        job = Job(process, command, self._num_ranks, cluster.port, cluster.restarts)
        if self._on == "slurm":
            return sbatch_script(job, cluster.slurm)
        contents = cluster_bytes(asked.cluster_file), asked.train_file.read_bytes()
        files = dict(zip(names, map(bytes.decode, contents), strict=True))
        own = cluster.kubernetes
        public = public_variables(settings_in(os.environ))
        stated = {name: text for name, text in public.items() if name not in own.secrets}
        told_more = own.model_copy(update={"env": stated | own.env})
        return kubernetes.to_yaml(kubernetes.manifests(replace(job, files=files), told_more))

    def show(self, _: Launched) -> None:
        """With a comment below the line that names the shell, if there is one."""
        at = self.text.index("\n") + 1 if self.text.startswith("#!") else 0
        comment = training_line(self.asked)
        sys.stdout.write(f"{self.text[:at]}# {comment}\n{self.text[at:]}")

    def check(self, _: Say) -> None:
        """See that the scheduler's command is here.

        Raises:
            LaunchError: it is not.
        """
        tool = {"slurm": "sbatch", "kubernetes": "kubectl"}[self._on]
        if not Host(self._on).run(f"command -v {tool} >/dev/null").ok:
            raise LaunchError(
                f"{tool} is not on this machine: launch where {self._on} has its commands"
            )
        if self._on == "slurm":  # before ranks on several nodes look for it
            cluster_secret(self.asked.settings.node.secret_file, makes=True)

    def make_ready(self, launched: Launched, say: Say) -> RunPaths:
        paths = super().make_ready(launched, say)
        self._keep(paths)
        (paths.root / SUBMIT_FILE[self._on]).write_text(self.text, encoding="utf-8")
        return paths


def wants_window(how: LaunchOptions) -> bool:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return how.detach or (how.tmux and on_terminal and shutil.which("tmux") is not None)


def go_on(run: Run, launched: Launched, how: LaunchOptions) -> int:
    # A small one may end before its last worker is there, who must not wait for it.
    if not isinstance(run, RunInSessions) or run.is_over:
        return run.follow()
    has_window = how.tmux and not launched.is_job and shutil.which("tmux") is not None
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if has_window and (how.detach or on_terminal):
        try:
            run.open_window(is_shown=not how.detach)
        except LaunchError as error:
            run.say(f"no window: {error}", "yellow")
            has_window = False
    elif on_terminal:
        run.say("without a window: Ctrl-C asks whether to leave the run or to stop it")
    if how.detach:
        run.say(left_running(launched))
        return 0
    if has_window and on_terminal:
        show_window(window_name(launched.run_id))
        return run.left_window()
    return run.follow()


def attach(run: str) -> int:
    """Show a launched run in a window of this terminal; returns the exit code.

    Raises:
        SmolclusterError: there is no such run, or no terminal.
    """
    paths = find(run)
    launched = launched_of(paths)
    if launched is None or not launched.has_sessions or launched.is_job:
        raise ConfigError(
            f"run {paths.run_id} has no sessions to attach to: it ran without tmux, or was launched elsewhere"
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LaunchError(f"attach needs a terminal; {as_command('logs', '--follow')} needs none")
    shown = RunInSessions(launched, paths, SteadyConsole())
    shown.check_alive()
    show_window(shown.open_window(is_shown=True))
    return shown.left_window()


def stop(run: str, *, now: bool) -> int:
    """Stop a run on all its machines, and see that nothing is left; returns the exit code.

    With `now` all are killed at once, and nothing is saved.

    Raises:
        SmolclusterError: there is no such run.
    """
    paths = find(run, acts=True)
    launched = launched_of(paths)
    if launched is None:
        raise ConfigError(
            f"run {paths.run_id} was not launched from here: Ctrl-C where it was started saves a checkpoint "
            "and ends it"
        )
    return run_of(launched, paths, SteadyConsole()).stop(in_a_hurry=now)
