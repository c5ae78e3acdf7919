"""What every server and worker process has in common: arguments, signals, logging, and how it ends.

An algorithm's `server.py` gives `run_server` a function that serves a `ServerContext`, its `worker.py` gives
`run_worker` what makes a participant; nothing else differs between their processes. The launcher starts the
same files with the same arguments as a person does.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

import smolcluster
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.records import open_records
from smolcluster.algorithms.registry import Algorithm, get_algorithm
from smolcluster.cluster.joining import ServerAddress
from smolcluster.cluster.link import Participant, Place, follow
from smolcluster.configs.resolve import (
    Settings,
    check_node_overrides,
    load_settings,
)
from smolcluster.configs.schema import AlgorithmName
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.observability.logs import NodeLog, setup_logging
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.paths import create_run, new_run_id, runs_root
from smolcluster.runs.summary import Summary, table, write_summary
from smolcluster.training.build import Workbench, build
from smolcluster.transport.frames import PROTOCOL_VERSION
from smolcluster.transport.messages import Hello, Welcome
from smolcluster.transport.security import (
    Secret,
    default_secret_path,
    ensure_secret,
    load_secret,
)
from smolcluster.utils.device import pick_device

SWITCH_INTERVAL_S = 0.0005
"""A busy interpreter otherwise keeps the threads that send waiting 5 ms at a time."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def run_server(algorithm: AlgorithmName, serve: Callable[[ServerContext], Summary]) -> int:
    """Be a server process: parse the command line, serve, and return the exit code."""
    args = server_parser(get_algorithm(algorithm)).parse_args()
    return guarded(args.stop_on_stdin_eof, lambda: _serve(algorithm, args, serve))


def run_worker(
    algorithm: AlgorithmName, make_participant: Callable[[Welcome, Workbench], Participant]
) -> int:
    """Be a worker process: parse the command line, follow the server, and return the exit code."""
    args = worker_parser(get_algorithm(algorithm)).parse_args()
    return guarded(args.stop_on_stdin_eof, lambda: _work(algorithm, args, make_participant))


def server_parser(algorithm: Algorithm) -> argparse.ArgumentParser:
    """The server's command line."""
    parser = _parser(f"The {algorithm.title} server.")
    parser.add_argument(
        "--train-config", metavar="FILE", help="training file, or a shipped name such as digits"
    )
    parser.add_argument("--run-id", help="name of the run; default: made from the time")
    parser.add_argument(
        "--no-progress", action="store_true", help="leave the progress to who started this"
    )
    return parser


def worker_parser(algorithm: Algorithm) -> argparse.ArgumentParser:
    """The worker's command line."""
    parser = _parser(f"An {algorithm.title} worker.")
    parser.add_argument("worker_id", type=int, help="counts from 1; one live process each")
    parser.add_argument("node", help="this machine's name in host_ip")
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="where the server is; default: host_ip[node]:port"
    )
    return parser


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", help="cluster file, or a shipped name; default: the algorithm's"
    )
    parser.add_argument(
        "--local", action="store_true", help="everything on this machine: 127.0.0.1, digits"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="with --local: number of workers")
    parser.add_argument(
        "--override",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="such as num_epochs=5",
    )
    parser.add_argument("--stop-on-stdin-eof", action="store_true", help=argparse.SUPPRESS)
    return parser


def guarded(stop_on_stdin_eof: bool, body: Callable[[], None]) -> int:
    """Run a process's body with signals as exceptions, and return the exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, _interrupt)
        if stop_on_stdin_eof:
            threading.Thread(target=_stop_on_stdin_eof, name="stdin", daemon=True).start()
        body()
    except SmolclusterError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - there is no log yet
        return error.exit_code
    except _Ended as end:
        return end.exit_code
    except Interrupted as interrupt:
        return interrupt.exit_code
    return 0


class _Ended(BaseException):
    """The process is over; its log has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@contextmanager
def process_log(
    component: str,
    node: str,
    rank: int | None = None,
    *,
    console: Console | None = None,
    named: bool = True,
) -> Iterator[NodeLog]:
    """The process's log. What ends the process is one line on the console; the file has the traceback.

    `named`: whether console lines say whose they are; a launcher says so itself.
    """
    log = setup_logging(component, node, rank, console=console, named=named)
    threading.excepthook = lambda args: log.logger.error(
        "internal error in thread %s: %r",
        args.thread and args.thread.name,
        args.exc_value,
        exc_info=args.exc_value,
    )
    try:
        yield log
    except SmolclusterError as error:
        log.logger.log(logging.ERROR, "%s", error, exc_info=error)
        raise _Ended(error.exit_code) from None
    except Interrupted as interrupt:
        log.logger.info("%s", interrupt)
        raise _Ended(interrupt.exit_code) from None
    except Exception as error:
        log.logger.critical(
            "internal error: %r; the log file has the traceback", error, exc_info=error
        )
        raise _Ended(1) from None
    finally:
        log.close()


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    raise Interrupted(signum)


def _stop_on_stdin_eof() -> None:
    """The launcher holds our standard input; when it is gone, however it went, so are we."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(
    algorithm: AlgorithmName, args: argparse.Namespace, serve: Callable[[ServerContext], Summary]
) -> None:
    settings = load_settings(
        args.config or algorithm,
        args.train_config or ("digits" if args.local else "nn"),
        None,
        args.override,
        local=args.local,
        local_workers=args.workers,
    )
    console = SteadyConsole(stderr=True)
    named = not args.stop_on_stdin_eof
    with process_log("server", settings.cluster.server, console=console, named=named) as log:
        secret = ensure_secret(settings.node.secret_file or default_secret_path())
        run_id = args.run_id or new_run_id(algorithm, datetime.now())
        run = settings.run_config(run_id, algorithm)
        bench = _build(settings)
        progress = None if args.no_progress else console
        with open_records(
            settings, run, role="server", node=settings.cluster.server, log=log, progress=progress
        ) as records:
            context = ServerContext(
                settings=settings,
                run=run,
                bench=bench,
                secret=secret,
                metrics=records.metrics,
                events=records.events,
                log=log.logger,
                incarnation=records.incarnation,
            )
            summary = serve(context)
        write_summary(records.paths.summary, summary)
        if progress:
            progress.print(table(summary))


def _build(settings: Settings) -> Workbench:
    if settings.node.threads is not None:
        torch.set_num_threads(settings.node.threads)
    device = pick_device(settings.node.device)
    return build(settings.train, settings.cluster.seed, settings.node.dataset, device)


def _work(
    algorithm: str,
    args: argparse.Namespace,
    make_participant: Callable[[Welcome, Workbench], Participant],
) -> None:
    check_node_overrides(args.override)
    settings = load_settings(
        args.config or algorithm,
        "digits",
        args.node,
        [*args.override, *_server_overrides(args.server, args.node)],
        local=args.local,
        local_workers=args.workers,
    )
    cluster, node = settings.cluster, settings.node
    if args.worker_id < 1:
        raise ConfigError(f"worker_id is {args.worker_id}, must be 1 or more")
    if node.threads is not None:
        torch.set_num_threads(node.threads)
    rank = args.worker_id - 1
    with process_log("worker", args.node, rank, named=not args.stop_on_stdin_eof) as log:
        place = Place(
            node=node,
            hello=Hello(
                protocol=PROTOCOL_VERSION,
                version=smolcluster.__version__,
                node=args.node,
                worker_id=args.worker_id,
                instance=secrets.token_hex(8),
            ),
            address=ServerAddress(cluster.host_ip[args.node], cluster.port),
            secret=_secret(args.local, node.secret_file),
            start_timeout_s=cluster.start_timeout_s,
            log=log.logger,
            on_run_known=lambda run_id: _file_worker_logs(
                log, node.runs_dir, run_id, args.node, rank
            ),
        )
        follow(place, make_participant)


def _secret(local: bool, file: Path | None) -> Secret:
    """A worker never makes a secret, but for one that shares its machine with the server."""
    return (ensure_secret if local else load_secret)(file or default_secret_path())


def _file_worker_logs(
    log: NodeLog, runs_dir: Path | None, run_id: str, node: str, rank: int
) -> None:
    paths = create_run(runs_root(runs_dir), run_id, newest=False)
    log.file_logs_to(paths.log_file("worker", node, rank), run_id)


def _server_overrides(stated: str | None, node: str) -> list[str]:
    """`--server HOST:PORT` as the keys that it stands for.

    Raises:
        ConfigError: it is malformed.
    """
    if stated is None:
        return []
    host, colon, port = stated.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ConfigError(f"--server is {stated!r}, must be HOST:PORT such as 10.10.0.1:65432")
    return [f"host_ip.{node}={host.strip('[]')}", f"port={port}"]
