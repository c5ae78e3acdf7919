"""What every server and worker process does, whatever its algorithm: configuration, logging, records.

An algorithm's `server.py` has a function `serve` for a `ServerContext`, its `worker.py` a class `Worker`,
which is a `Participant`; nothing else differs between their processes. The launcher starts the same files
with the same arguments as a person does.
"""

import argparse
import logging
import os
import platform
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.observed import WorkerRun, metrics_served
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.algorithms.supervision import TOOK_PART
from smolcluster.configs.checks import check_algorithm, check_has_local_steps
from smolcluster.configs.function_name import known_here
from smolcluster.configs.meant import cluster_source, training_source
from smolcluster.configs.overrides import check_node_overrides, server_overrides, workload_overrides
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import AlgorithmName, ClusterConfig, RunConfig, Settings
from smolcluster.configs.spec import Role, algorithm_of_groups, algorithm_of_stages, get_algorithm
from smolcluster.errors import ConfigError, RunFailed, SmolclusterError
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import RunPaths, log_stem, runs_root
from smolcluster.runs.summary import Summary
from smolcluster.server.link import Participant, WorkerSetup, follow
from smolcluster.server.listening import check_port, opened
from smolcluster.server.store_host import SliceHost, StoreSetup, hold
from smolcluster.training.build import TrainingContext
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.bugs import describe_bug
from smolcluster.utils.device import use_threads
from smolcluster.utils.device_errors import device_error
from smolcluster.utils.folders import checkout
from smolcluster.utils.meter import Meter
from smolcluster.utils.stopping import Ended, Interrupted, signals_as_raised
from smolcluster.version import __version__
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import SESSION, STORE, Welcome, sets_of
from smolcluster.wire.security import Secret, cluster_secret

MAX_WORKER_ID = 2**31
SHARED_KEYS = ("server", "port", "encryption")
"""What a worker must be told as its server is, or they do not meet."""


@contextmanager
def process_log(
    component: str,
    node: str,
    rank: int | None = None,
    *,
    console: Console | None = None,
    named: bool = True,
    otherwise: Path | None = None,
) -> Iterator[NodeLog]:
    """The process's log. What ends the process is one line on the console; the file has the traceback.

    `named`: whether console lines say whose they are; a launcher says so itself. `otherwise`: the file of a
    process that fails before it knows its run.
    """
    log = NodeLog(component, node, rank, console=console, named=named)
    machine = machine_facts()
    versions = [f"{name} {machine[name]}" for name in ("smolcluster", "python", "torch")]
    log.logger.debug("process %d: %s", os.getpid(), ", ".join(versions), extra={"machine": machine})
    threading.excepthook = lambda args: log.logger.error(
        "internal error in thread %s: %r",
        args.thread and args.thread.name,
        args.exc_value,
        exc_info=args.exc_value,
    )
    try:
        with signals_as_raised():
            yield log
    except Interrupted as interrupt:
        log.logger.info("%s", interrupt)
        raise Ended(interrupt.exit_code) from None
    except Exception as error:
        known = error if isinstance(error, SmolclusterError) else device_error(error)
        sentence = describe_bug(error) if known is None else str(known)
        log.logger.log(logging.ERROR, "%s", sentence, exc_info=error)
        if otherwise is not None and not log.is_filed:
            with suppress(OSError):
                otherwise.parent.mkdir(parents=True, exist_ok=True)
            log.file_logs_to(otherwise, run_id="")
        raise Ended(BUG if known is None else known.exit_code) from None
    finally:
        threading.excepthook = threading.__excepthook__
        log.close()


def serve(
    algorithm: AlgorithmName,
    args: argparse.Namespace,
    serve_run: Callable[[ServerContext], Summary],
) -> None:
    settings = server_settings(algorithm, args)
    check_algorithm(settings, algorithm)
    console = SteadyConsole(stderr=True)
    named = not args.stop_on_stdin_eof
    with process_log("server", settings.cluster.server, console=console, named=named) as log:
        secret = cluster_secret(settings.node.secret_file, makes=True)
        check_port(settings.cluster)
        own_run(
            Owner(
                algorithm,
                "server",
                settings.cluster.server,
                settings,
                secret,
                worker_command=worker_command(algorithm, args, settings.cluster),
            ),
            log,
            serve_run,
            run_id=args.run_id,
            resume=args.resume,
            progress=None if args.no_progress else console,
            output=None if args.no_progress else console,
        )


def worker_command(
    algorithm: AlgorithmName, args: argparse.Namespace, cluster: ClusterConfig
) -> str | None:
    """How a person starts the first worker of a server with these arguments; None: a launcher does it."""
    if args.run_id is not None or args.stop_on_stdin_eof or not cluster.workers:
        return None
    file = Path(sys.argv[0]).with_name(Path(get_algorithm(algorithm).roles["worker"]).name)
    shared = [each for each in args.override if each.partition("=")[0] in SHARED_KEYS]
    words = [
        *(("uv", "run") if checkout() else ("python",)),
        *(str(file), "1", cluster.workers[0]),
        *(["--local"] if args.local else []),
        *(["--workers", str(args.workers)] if args.workers else []),
        *(["--config", args.config] if args.config else []),
        *(["--workload", args.workload] if args.workload else []),
        *(["--override", *shared] if shared else []),
    ]
    return shlex.join(words)


def work(
    algorithm: AlgorithmName,
    args: argparse.Namespace,
    make_participant: Callable[[Welcome, TrainingContext], Participant],
) -> None:
    settings = worker_settings(algorithm, args)
    if not 1 <= args.worker_id <= MAX_WORKER_ID:
        raise ConfigError(f"worker_id is {args.worker_id}, must be between 1 and {MAX_WORKER_ID}")
    rank = args.worker_id - 1
    who = Process(node=args.node, role="worker", rank=rank)
    with (
        _following(settings, args, "worker", rank) as (log, own, setup),
        metrics_served(settings, who, setup.meter, log, run_id=lambda: own.run_id),
    ):

        def begin(run: RunConfig) -> None:
            check_same_algorithm(algorithm, run)
            setup.on_run_known(run)

        place = replace(
            setup,
            hello=introduce(args.node, args.worker_id, sets_of(algorithm)),
            on_run_known=begin,
            on_stats=own.take,
            spread=spread_over_others(algorithm, args, settings, setup.secret, log),
        )
        follow(place, make_participant)


def check_same_algorithm(algorithm: AlgorithmName, run: RunConfig) -> None:
    """See to it that a worker of this algorithm computes for a run of the same one.

    Raises:
        ConfigError: the server's is another one.
    """
    if run.algorithm != algorithm:
        worker = get_algorithm(run.algorithm).worker
        raise ConfigError(
            f"the server trains by {run.algorithm}, and this is a worker of {algorithm}: start {worker}, or "
            f"name the port of a server of {algorithm}"
        )


def be_stage(algorithm: AlgorithmName, args: argparse.Namespace) -> None:
    """Be a stage of a worker that is a pipeline: have some of the layers, and follow that worker.

    Raises:
        ConfigError: no worker names this machine.
    """
    settings = worker_settings(algorithm, args)
    stages = settings.cluster.stages_with(args.node)
    if stages is None:
        raise ConfigError(
            f"{args.node} is a stage of no worker: list it under stages of a worker in nodes, as in "
            f"{{nodes: {{mini1: {{stages: {{host_ip: {{{args.node}: 192.168.50.2}}}}}}}}}}"
        )
    args.node = settings.cluster.node_of(args.node)
    worker_id = list(stages.host_ip).index(args.node) + 1
    pipeline = algorithm_of_stages()
    with _following(settings, args, "stage", None) as (_, own, setup):
        hello = introduce(args.node, worker_id, sets_of(pipeline.name))
        place = replace(setup, hello=hello, whom="its worker", on_stats=own.take)
        if args.server is None:
            worker = next(
                name for name, node in settings.cluster.nodes.items() if node.stages is stages
            )
            address = Address(stages.host_ip[args.node], stages.port, worker)
            place = replace(place, address=address)
        follow(place, pipeline.module("worker").Worker)


@contextmanager
def _following(
    settings: Settings, args: argparse.Namespace, role: Role, rank: int | None
) -> Iterator[tuple[logging.Logger, WorkerRun, WorkerSetup]]:
    """The log of a process that follows a run, its part of the run's folder, and how it follows.

    Whom, and as who, is said by those that ask.
    """
    cluster, node = settings.cluster, settings.node
    use_threads(settings.num_threads())
    root = runs_root(node.runs_dir)
    otherwise = root / f"{log_stem(role, args.node, rank)}.log"
    named = not args.stop_on_stdin_eof
    console, meter = SteadyConsole(stderr=True), Meter()
    with (
        process_log(
            role, args.node, rank, console=console, named=named, otherwise=otherwise
        ) as log,
        closing(WorkerRun(args.node, rank, log, root, role, meter=meter, console=console)) as own,
    ):

        def begin(run: RunConfig) -> None:
            if role == "worker" and args.run_id not in (None, run.run_id):
                raise RunFailed(
                    f"the server is of run {run.run_id} now, and this worker was started for {args.run_id}"
                )
            _tell_supervisor(args, _folder_told(own.begin(run)))

        if args.run_id is not None:
            own.file_logs(args.run_id)
        place = WorkerSetup(
            node=node,
            hello=introduce(args.node),
            address=_address_of_server(args, cluster),
            secret=cluster_secret(node.secret_file, makes=args.local),
            start_timeout_s=cluster.start_timeout_s,
            encryption=cluster.encryption,
            log=log.logger,
            workload=args.workload and known_here(args.workload).text,
            meter=meter,
            own_folder=own.own_folder,
            on_run_known=begin,
            on_ready=lambda: _tell_supervisor(args, TOOK_PART),
        )
        yield log.logger, own, place


def spread_over_others(
    algorithm: AlgorithmName,
    args: argparse.Namespace,
    settings: Settings,
    secret: Secret,
    log: logging.Logger,
) -> Callable[[Welcome, TrainingContext], TrainingContext] | None:
    """What spreads a worker over other processes, of its machine or of several; None: it is one.

    Raises:
        ConfigError: workers of this algorithm are one process each, or it shall be spread over both.
    """
    node, spec = settings.node, get_algorithm(algorithm)
    check_has_local_steps(args.node, node, spec)
    if node.ranks is not None and node.stages is not None:
        raise ConfigError(
            f"nodes.{args.node} has ranks and stages, but a worker is a mesh or a pipeline: set one of them "
            "to null"
        )
    if node.stages is not None:
        spread = import_module(f"{algorithm_of_stages().package}.head").spread
        name = settings.cluster.node_of(args.node)  # by which its stages know it
        return partial(spread, settings=settings, name=name, secret=secret, log=log)
    if node.ranks is not None:
        spread = import_module(f"{algorithm_of_groups().package}.group_worker").spread
        workload = args.workload and known_here(args.workload).text
        return partial(spread, node=node, name=args.node, workload=workload, log=log)
    return None


def hold_slice(algorithm: AlgorithmName, args: argparse.Namespace, held: type[SliceHost]) -> None:
    """Be a store: hold a slice of the server's run."""
    settings = worker_settings(algorithm, args)
    args.node = settings.cluster.node_of(args.node)
    with _following(settings, args, "store", None) as (log, own, place):

        def begin(run_id: str) -> None:
            _tell_supervisor(args, _folder_told(own.file_logs(run_id)))
            _tell_supervisor(args, TOOK_PART)

        if args.run_id is not None:
            begin(args.run_id)
        hold(
            StoreSetup(
                hello=introduce(args.node, sets=(SESSION, STORE)),
                address=place.address,
                secret=place.secret,
                start_timeout_s=place.start_timeout_s,
                encryption=place.encryption,
                held=held,
                addresses=settings.node.addresses,
                log=log,
                on_run_known=begin,
            )
        )


def _folder_told(paths: RunPaths) -> bytes:
    return os.fsencode(paths.root.absolute())


def _tell_supervisor(args: argparse.Namespace, what: bytes) -> None:
    """Let the supervisor, if there is one, know the run's folder, or that this process takes part."""
    if args.supervised is not None:
        with suppress(OSError):  # it has gone, and so shall we; or was told often enough
            os.write(args.supervised, what + b"\0")


def server_settings(algorithm: AlgorithmName, args: argparse.Namespace) -> Settings:
    """What the command line, environment and files of a server say; the files are those of a launch.

    Raises:
        ConfigError: one line with what is wrong.
    """
    cluster_file = cluster_source(args.config, algorithm)
    settings = load_settings(
        cluster_file,
        training_source(args.train_config, cluster_file, workload=args.workload),
        None,
        [*args.override, *workload_overrides(args.workload)],
        local=args.local,
        local_workers=args.workers,
    )
    return opened(settings) if args.local and args.open else settings


def worker_settings(algorithm: AlgorithmName, args: argparse.Namespace) -> Settings:
    """What the command line, environment and cluster file of a worker, or a store, say.

    `servers` is not read: `--override server=NODE` need not agree with the file's.

    Raises:
        ConfigError: one line with what is wrong, such as an override that is the server's.
    """
    check_node_overrides(args.override)
    overrides = ["servers=null", *args.override, *server_overrides(args.server, args.node)]
    return load_settings(
        cluster_source(args.config, algorithm),
        "digits",
        args.node,
        overrides,
        local=args.local,
        local_workers=args.workers,
    )


def _address_of_server(args: argparse.Namespace, cluster: ClusterConfig) -> Address:
    """Where the server is; its name is known unless `--server` says only where it is."""
    name = cluster.server if args.server is None else None
    return Address(cluster.host_ip[cluster.node_of(args.node)], cluster.port, name)


def machine_facts() -> dict[str, str | int]:
    """Versions, system, processor, cores and memory; imports nothing for it."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "smolcluster": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
    }
