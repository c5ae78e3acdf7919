"""What every server and worker process does, whatever its algorithm: configuration, logging, records.

An algorithm's `server.py` has a function `serve` for a `ServerContext`, its `worker.py` a class `Worker`,
which is a `Participant`; nothing else differs between their processes. The launcher starts the same files
with the same arguments as a person does.
"""

import argparse
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from rich.console import Console

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import Ended, server_overrides
from smolcluster.algorithms.observed import WorkerRun, metrics_served
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.cluster.link import Participant, WorkerSetup, follow
from smolcluster.cluster.listening import check_port
from smolcluster.configs.function_name import known_here
from smolcluster.configs.resolve import (
    Settings,
    check_algorithm,
    check_node_overrides,
    default_training,
    load_settings,
    workload_overrides,
)
from smolcluster.configs.schema import AlgorithmName, NodeConfig, RunConfig
from smolcluster.configs.spec import algorithm_of_groups, get_algorithm
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.net.dialling import Address
from smolcluster.observability.exporter import ProcessLabels
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.ps.store_host import HeldSlice, StoreSetup, hold
from smolcluster.runs.paths import RunPaths, create_run, log_stem, runs_root
from smolcluster.runs.summary import Summary
from smolcluster.training.build import TrainingContext
from smolcluster.transport.handshake import introduce
from smolcluster.transport.messages import SESSION, STORE, Welcome, sets_of
from smolcluster.transport.security import (
    Secret,
    default_secret_path,
    ensure_secret,
    load_secret,
)
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.bugs import describe_bug
from smolcluster.utils.device import use_threads
from smolcluster.utils.device_errors import device_error
from smolcluster.utils.machine import machine_facts
from smolcluster.utils.meter import Meter
from smolcluster.utils.stopping import Interrupted

MAX_WORKER_ID = 2**31


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
    settings = load_settings(
        args.config or algorithm,
        args.train_config or default_training(args.workload, "digits" if args.local else "nn"),
        None,
        [*args.override, *workload_overrides(args.workload)],
        local=args.local,
        local_workers=args.workers,
    )
    check_algorithm(settings, algorithm)
    console = SteadyConsole(stderr=True)
    named = not args.stop_on_stdin_eof
    with process_log("server", settings.cluster.server, console=console, named=named) as log:
        secret = ensure_secret(settings.node.secret_file or default_secret_path())
        check_port(settings.cluster)
        own_run(
            Owner(algorithm, "server", settings.cluster.server, settings, secret),
            log,
            serve_run,
            run_id=args.run_id,
            resume=args.resume,
            progress=None if args.no_progress else console,
            output=None if args.no_progress else console,
        )


def work(
    algorithm: AlgorithmName,
    args: argparse.Namespace,
    make_participant: Callable[[Welcome, TrainingContext], Participant],
) -> None:
    settings = worker_settings(algorithm, args)
    cluster, node = settings.cluster, settings.node
    if not 1 <= args.worker_id <= MAX_WORKER_ID:
        raise ConfigError(f"worker_id is {args.worker_id}, must be between 1 and {MAX_WORKER_ID}")
    use_threads(node.threads)
    rank, root = args.worker_id - 1, runs_root(node.runs_dir)
    otherwise = root / f"{log_stem('worker', args.node, rank)}.log"
    meter, who = Meter(), ProcessLabels("worker", args.node, rank)
    with (
        process_log(
            "worker", args.node, rank, named=not args.stop_on_stdin_eof, otherwise=otherwise
        ) as log,
        closing(WorkerRun(args.node, rank, log, root)) as own,
        metrics_served(settings, who, meter, log.logger, run_id=lambda: own.run_id),
    ):

        def begin(run: RunConfig) -> None:
            _tell_supervisor(args, own.begin(run))

        if args.run_id is not None:
            own.file_logs(args.run_id)
        place = WorkerSetup(
            node=node,
            hello=introduce(args.node, args.worker_id, sets_of(algorithm)),
            address=Address(cluster.host_ip[args.node], cluster.port),
            secret=_secret(args.local, node.secret_file),
            start_timeout_s=cluster.start_timeout_s,
            encryption=cluster.encryption,
            log=log.logger,
            workload=args.workload and known_here(args.workload).text,
            meter=meter,
            own_folder=own.own_folder,
            on_run_known=begin,
            on_stats=own.take,
            spread=spread_over_ranks(algorithm, args, node, log.logger),
        )
        follow(place, make_participant)


def spread_over_ranks(
    algorithm: AlgorithmName, args: argparse.Namespace, node: NodeConfig, log: logging.Logger
) -> Callable[[Welcome, TrainingContext], TrainingContext] | None:
    """What spreads a worker over several processes of its machine; None: it is one.

    Raises:
        ConfigError: workers of this algorithm are one process each.
    """
    if node.ranks is None:
        return None
    spec = get_algorithm(algorithm)
    if not spec.has_local_steps:
        raise ConfigError(
            f"nodes.{args.node}.ranks is {node.ranks}, but a worker of {spec.title} is one process: set it "
            "to null, or launch diloco"
        )
    spread = import_module(f"{algorithm_of_groups().package}.group_worker").spread
    workload = args.workload and known_here(args.workload).text
    return partial(spread, node=node, name=args.node, workload=workload, log=log)


def hold_slice(algorithm: AlgorithmName, args: argparse.Namespace, held: type[HeldSlice]) -> None:
    """Be a store: hold a slice of the server's run."""
    settings = worker_settings(algorithm, args)
    cluster, node = settings.cluster, settings.node
    use_threads(node.threads)
    root = runs_root(node.runs_dir)
    otherwise = root / f"{log_stem('store', args.node)}.log"
    with process_log(
        "store", args.node, named=not args.stop_on_stdin_eof, otherwise=otherwise
    ) as log:

        def begin(run_id: str) -> None:
            paths = create_run(root, run_id, newest=False)
            log.file_logs_to(paths.log_file("store", args.node), run_id)
            _tell_supervisor(args, paths)

        if args.run_id is not None:
            begin(args.run_id)
        hold(
            StoreSetup(
                hello=introduce(args.node, sets=(SESSION, STORE)),
                address=Address(cluster.host_ip[args.node], cluster.port),
                secret=_secret(args.local, node.secret_file),
                start_timeout_s=cluster.start_timeout_s,
                encryption=cluster.encryption,
                held=held,
                addresses=node.addresses,
                log=log.logger,
                on_run_known=begin,
            )
        )


def _tell_supervisor(args: argparse.Namespace, paths: RunPaths) -> None:
    """Let the supervisor, if there is one, know the run's folder."""
    if args.supervised is not None:
        with suppress(OSError):  # it has gone, and so shall we; or was told often enough
            os.write(args.supervised, os.fsencode(paths.root.absolute()) + b"\0")


def worker_settings(algorithm: AlgorithmName, args: argparse.Namespace) -> Settings:
    """What the command line, environment and cluster file of a worker, or a store, say.

    Raises:
        ConfigError: one line with what is wrong, such as an override that is the server's.
    """
    check_node_overrides(args.override)
    overrides = [*args.override, *server_overrides(args.server, args.node)]
    return load_settings(
        args.config or algorithm,
        "digits",
        args.node,
        overrides,
        local=args.local,
        local_workers=args.workers,
    )


def _secret(local: bool, file: Path | None) -> Secret:
    """A worker never makes a secret, but for one that shares its machine with the server."""
    return (ensure_secret if local else load_secret)(file or default_secret_path())
