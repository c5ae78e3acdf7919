"""Launching on this machine alone: from what the user asked for to a run that is followed or left."""

import shlex
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.load import Kind, find_config, shipped_names
from smolcluster.configs.meant import written_here
from smolcluster.configs.schema import Settings, config_of
from smolcluster.errors import ConfigError
from smolcluster.launch.group_plan import plan
from smolcluster.launch.host import Host
from smolcluster.launch.jobs.launch import launch_job
from smolcluster.launch.observe.beside import announce, beside_others, stack_for, within_reach
from smolcluster.launch.plan import NodePaths, PathsByNode, Request
from smolcluster.launch.prepare import Machine
from smolcluster.launch.remote import LaunchOptions, go_on, inherited, launch_remote, wants_window
from smolcluster.launch.requests import check_model, naming_workload, settings_of
from smolcluster.launch.run import Run
from smolcluster.launch.shipping import loki_of
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.runs.advice import ADVICE
from smolcluster.runs.launched import Launched
from smolcluster.runs.paths import create_run, new_run_id, runs_root
from smolcluster.server.listening import check_port
from smolcluster.wire.security import default_secret_path, ensure_secret


def launch(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Launch a cluster, or only print its plan; returns the exit code.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    if request.without and (local or how.on != "ssh"):
        raise ConfigError(
            f"--without {request.without[0]}: it leaves out machines that are reached over SSH; with --local "
            "say --workers N, with --on how many nodes"
        )
    if not local and how.on != "ssh":
        return launch_job(for_any_folder(request), how)
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
    request = naming_workload(request, settings)
    check_algorithm(settings, request.algorithm.name)
    check_model(request, settings)
    if request.algorithm.is_group:
        settings.of(config_of(request.algorithm)).check_device(settings.node.device)
    root = runs_root(settings.node.runs_dir)

    def planned(*, in_sessions: bool = False) -> Launched:
        launched = plan(
            request,
            settings,
            _places(request, settings, root),
            run_id,
            is_local=True,
            in_sessions=in_sessions,
        )
        return launched.resumed() if resume else launched

    if how.dry_run:
        for process in planned().processes:
            sys.stdout.write(f"{process.title}:\n  {shlex.join(process.argv)}\n")
        return 0
    check_port(settings.cluster)
    ensure_secret(settings.node.secret_file or default_secret_path())
    paths = create_run(root, run_id, newest=False)
    if how.prediction is not None:
        ADVICE.write(paths.advice, how.prediction)
    console = SteadyConsole()
    say = partial(print_line, console)
    stack = stack_for(how.observe, settings.cluster, say)
    if stack is not None:
        request = within_reach(request, settings.cluster)
        settings = settings_of(request, local=True)
    request = beside_others(request, settings.cluster, say)
    settings = settings_of(request, local=True)
    launched = planned(in_sessions=wants_window(how))
    env = inherited()
    machines = {
        each.node: Machine(Host(each.node), each.project_dir, "pypi", env)
        for each in launched.processes
    }
    run = Run(
        launched,
        paths,
        console,
        machines,
        num_epochs=None
        if request.script or settings.train.num_steps
        else settings.train.num_epochs,
    )
    run.keep_what_waits()
    if stack is not None:
        announce(stack, run_id, launched.processes, settings.cluster, ssh=lambda _: None, say=say)
    run.start(loki_of(settings.cluster, stack))
    return go_on(run, launched, how)


def _places(request: Request, settings: Settings, root: Path) -> PathsByNode:
    """All on this machine, with one compute thread each, but where the user has set their number.

    Side by side more threads get into each other's way.
    """
    here = NodePaths(
        ssh=None,
        project_dir=str(root),
        runs_dir=str(root),
        python=sys.executable,
        overrides=tuple(place_overrides(settings)),
    )
    nodes = settings.cluster.machines
    if request.algorithm.is_group:  # one process, whose ranks share the cores
        return dict.fromkeys(nodes, here)
    stated = {node: settings_of(request, True, node).node.threads for node in nodes}
    return {node: replace(here, threads=1 if stated[node] is None else None) for node in nodes}


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
