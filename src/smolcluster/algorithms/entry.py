"""Where a server or worker process begins: its command line, its signals, and how it ends.

`server.py` and `worker.py` of every algorithm call `main` before anything that takes seconds to import, so
that `--help` answers at once and Ctrl-C ends a process quietly at any moment. What the process does then is
in `process.py`.
"""

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from smolcluster.configs.spec import AlgorithmSpec, Role, get_algorithm
from smolcluster.errors import DEVICE_FAILED, RANK_LOST, SmolclusterError
from smolcluster.observability.terminal import HANGING
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.bugs import describe_bug
from smolcluster.utils.replaced import say_what_replaces
from smolcluster.utils.stopping import (
    SIGNALS,
    STOP_ON_STDIN_EOF,
    Ended,
    Interrupted,
    at_stdin_eof,
    interrupt,
    interrupt_once,
    signals_as_raised,
    take_signals,
)

SWITCH_INTERVAL_S = 0.0005
"""A busy interpreter otherwise keeps the threads that send waiting 5 ms at a time."""


def main(name: str, role: Role) -> int:
    algorithm = get_algorithm(name)
    parser = PARSERS[role](algorithm)
    args = parser.parse_args()
    supervised = role != "server" and args.supervised is not None
    if not (supervised or args.stop_on_stdin_eof):
        say_what_replaces(os.environ)
    if role != "server" and args.restarts and not supervised:
        return supervise_process(role, args)

    def body() -> None:
        from smolcluster.algorithms import process  # noqa: PLC0415 - it imports torch

        gc.freeze()  # what is imported stays; to look through it takes 0.1 s each time
        if role == "stage":
            process.be_stage(name, args)
            return
        module = algorithm.module(role)
        if role == "server":
            process.serve(name, args, module.serve)
        elif role == "store":
            process.hold_slice(name, args, module.Held)
        else:
            process.work(name, args, module.Worker)

    return guarded(
        body, stop_on_stdin_eof=args.stop_on_stdin_eof or supervised, supervised=supervised
    )


def supervise_process(role: Role, args: argparse.Namespace) -> int:
    from smolcluster.algorithms.supervision import supervise  # noqa: PLC0415 - only launched ones

    if args.stop_on_stdin_eof:
        _end_with_launcher()
    named = not args.stop_on_stdin_eof
    rank = args.worker_id - 1 if role == "worker" else None
    return supervise(role, args.node, rank, args.restarts, named=named)


def guarded(
    body: Callable[[], None], *, stop_on_stdin_eof: bool = False, supervised: bool = False
) -> int:
    """Run a process's body with signals as exceptions, and return the exit code.

    `supervised`: who ends a process group is heard twice, by us and by the supervisor who hands it on.
    Where a thread still waits for a terminal that hangs, the process ends here: the interpreter, which
    flushes it at its end, would abort. So it does after a device has failed, or a rank that others wait for,
    which may not be tidied up.
    """
    code = _code_of(body, stop_on_stdin_eof=stop_on_stdin_eof, supervised=supervised)
    if code in (DEVICE_FAILED, RANK_LOST) or any(
        thread.name == HANGING for thread in threading.enumerate()
    ):
        os._exit(code)
    return code


def _code_of(body: Callable[[], None], *, stop_on_stdin_eof: bool, supervised: bool) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    handler = interrupt_once() if supervised else interrupt
    try:
        take_signals(handler)
        if stop_on_stdin_eof:
            _end_with_launcher()
        with signals_as_raised():
            body()
    except SmolclusterError as error:
        return _fail(str(error), error.exit_code)
    except (Ended, Interrupted) as end:
        return end.exit_code
    except Exception as error:
        return _fail(describe_bug(error), BUG)
    finally:
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
    return 0


def server_parser(algorithm: AlgorithmSpec) -> argparse.ArgumentParser:
    parser = _parser(f"The {algorithm.title} server.")
    parser.add_argument(
        "--train-config", metavar="FILE", help="training file, or a shipped name such as digits"
    )
    parser.add_argument("--run-id", help="name of the run; default: made from the time")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on from a run's newest good checkpoint: its name, latest, or auto, which is the run of "
        "--run-id, else the latest one, and begins it where there is no checkpoint yet",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="with --local: listen at all addresses of this machine, for machines that join",
    )
    parser.add_argument(
        "--no-progress", action="store_true", help="leave the progress to who started this"
    )
    return parser


def worker_parser(algorithm: AlgorithmSpec) -> argparse.ArgumentParser:
    parser = _parser(f"A worker of {algorithm.title}.")
    parser.add_argument("worker_id", type=int, help="counts from 1; one live process each")
    return _follows(parser)


def store_parser(algorithm: AlgorithmSpec) -> argparse.ArgumentParser:
    return _follows(_parser(f"A store of {algorithm.title}: it holds a slice of the weights."))


def stage_parser(algorithm: AlgorithmSpec) -> argparse.ArgumentParser:
    what = (
        f"A stage of a worker of {algorithm.title} that is a pipeline: it has some of the layers."
    )
    return _follows(_parser(what))


def _follows(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What a process is told that looks for a server."""
    parser.add_argument("node", help="this machine's name in host_ip")
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="where the server is; default: host_ip[node]:port"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start it again when it was killed or met an internal error, so often in a row",
    )
    parser.add_argument("--supervised", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--run-id", help="the run it is started for: then its log is there before it has joined"
    )
    return parser


PARSERS: Mapping[Role, Callable[[AlgorithmSpec], argparse.ArgumentParser]] = MappingProxyType(
    {
        "server": server_parser,
        "worker": worker_parser,
        "store": store_parser,
        "stage": stage_parser,
    }
)


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
        "--workload",
        metavar="FILE:FUNCTION",
        help="a function of your own that returns a Workload; also package.module:function",
    )
    parser.add_argument(
        "--override",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="such as num_epochs=5",
    )
    parser.add_argument(STOP_ON_STDIN_EOF, action="store_true", help=argparse.SUPPRESS)
    return parser


def _fail(sentence: str, exit_code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return exit_code


def _end_with_launcher() -> None:
    """The launcher holds our standard input; when it is gone, however it went, so are we."""
    at_stdin_eof(lambda: os.kill(os.getpid(), signal.SIGTERM))
