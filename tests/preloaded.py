"""Programs of the project, forked from a process that has loaded PyTorch: loading it takes a core 2 s.

A program begins as if Python had been started for it: with its arguments, its environment, the folder of its
file in the module path, and a session of its own. What differs: its parent is the fork server, and so is the
command line that others see. One fork server serves a process of pytest, and ends with it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = (
    "torch",
    "smolcluster.api.network_worker",
    "smolcluster.api.orchestrator",
    "smolcluster.algorithms.entry",
    "smolcluster.algorithms.process",
    "smolcluster.algorithms.EDP.server",
    "smolcluster.algorithms.EDP.worker",
    "smolcluster.algorithms.Mesh.process",
    "smolcluster.algorithms.SynchronousPS.server",
    "smolcluster.algorithms.SynchronousPS.worker",
    "smolcluster.cli",
)
MAX_REQUEST_NBYTES = 1 << 20
READ_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "TORCH", "CUDA_")
"""Beginnings of the names of variables that the fork server's own environment decides."""
READ_LATER = {"PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR"}
"""Which have such a name, but may differ."""


class Forked:
    """A program that was forked; what there is of `subprocess.Popen`."""

    def __init__(self, told: socket.socket) -> None:
        self.returncode: int | None = None
        self._told = told
        self.pid = int(self._hear())

    def _hear(self) -> str:
        said = self._told.recv(100).decode()
        if not said:
            raise ChildProcessError("the fork server has ended")
        return said

    def poll(self) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end and return its exit code."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._told, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._hear())
            self._told.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def can_fork(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command is a program that a fork server may become."""
    is_program = argv[0] == sys.executable and (argv[1] == "-m" or argv[1].endswith(".py"))
    names = {name for name in (*environ, *os.environ) if name.startswith(READ_AT_IMPORT)}
    differ = {name for name in names if environ.get(name) != os.environ.get(name)}
    return is_program and hasattr(os, "pidfd_open") and differ <= READ_LATER


def fork(argv: Sequence[str], output: int, environ: Mapping[str, str]) -> Forked:
    """Start a Python program; both of its output streams go to the descriptor `output`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        request = json.dumps([list(argv[1:]), dict(environ), str(Path.cwd())]).encode()
        socket.send_fds(_fork_server(), [request], [theirs.fileno(), output])
    return Forked(ours)


@functools.cache
def _fork_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_NBYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno()), "smolcluster"],  # is one, for ps
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return ours


# --- in the fork server


def serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request; returns in each new process, with its arguments, and at the end with None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is pytest's, which ends us then
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != requests.fileno():
                    selector.unregister(key.fd)
                    _reap(key.fd, *running.pop(key.fd))
                    continue
                request, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_NBYTES, 2)
                if not request:  # pytest has ended, or was killed
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                told, output = socket.socket(fileno=fds[0]), fds[1]
                if (pid := os.fork()) == 0:
                    for fd in (requests.detach(), *running):
                        os.close(fd)
                    return _become(told, output, *json.loads(request))
                os.close(output)
                running[ending := os.pidfd_open(pid)] = (pid, told)
                selector.register(ending, selectors.EVENT_READ)


def _reap(ending: int, pid: int, told: socket.socket) -> None:
    os.close(ending)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with told, contextlib.suppress(OSError):  # nobody may wait for it any more
        told.send(str(code).encode())


def _become(
    told: socket.socket, output: int, argv: list[str], environ: dict[str, str], folder: str
) -> list[str]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    with told:
        told.send(str(os.getpid()).encode())
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    os.chdir(folder)
    return argv


def run(argv: list[str]) -> None:
    """Be the program that the arguments name."""
    if argv[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    if (program := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        run(program)
