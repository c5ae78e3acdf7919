"""Processes of this program's own that a process starts: each runs a function, and none outlives it for long.

A child imports what the process imports that has started it, its signals do what they do in any program, and
it may have children of its own.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import MappingProxyType, ModuleType

from smolcluster.errors import ConfigError, TryAgain
from smolcluster.utils.stopping import SIGNALS, signal_name

END_S = 15.0
"""How long children may take to end by themselves."""
LOOK_EVERY_S = 1.0
SAFE_PATH = "PYTHONSAFEPATH"
"""Lets the folder in which a process is started bring no modules to it."""


class Children:
    """Children by their numbers."""

    def __init__(self, needs: str, *, orphaned_s: float = END_S) -> None:
        """`needs`: see `spawned`; `orphaned_s`: how long children may outlive this process."""
        self._needs, self._orphaned_s = needs, orphaned_s
        self._processes: dict[int, BaseProcess] = {}
        atexit.register(self.end)  # multiprocessing waits for each process that is left

    def start(
        self,
        number: int,
        body: Callable[[], None],
        environ: Mapping[str, str] = MappingProxyType({}),
        *,
        is_apart: bool = False,
    ) -> None:
        """Start a child for `body`; see `spawned`."""
        body = partial(_be_child, body, self._orphaned_s)
        self._processes[number] = spawned(body, self._needs, environ, is_apart=is_apart)

    @property
    def codes(self) -> dict[int, int | None]:
        """The exit code of each, minus a signal's number; None: it has not ended."""
        return {number: each.exitcode for number, each in self._processes.items()}

    def wait(self, patience_s: float) -> None:
        """Wait for so long until all have ended."""
        _wait(self._processes.values(), patience_s)

    def terminate(self) -> None:
        """Ask them to end."""
        for process in self._processes.values():
            process.terminate()

    def end(self, patience_s: float = 0.0) -> None:
        """Let them end for so long, and kill what is left."""
        _end(self._processes.values(), patience_s)
        atexit.unregister(self.end)

    def end_but(self, number: int, patience_s: float) -> None:
        """The same for all but one."""
        _end([each for key, each in self._processes.items() if key != number], patience_s)


def _wait(processes: Iterable[BaseProcess], patience_s: float) -> None:
    end = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def _end(processes: Collection[BaseProcess], patience_s: float) -> None:
    _wait(processes, patience_s)
    for process in processes:
        process.kill()
        process.join()


def how_ended(code: int) -> str:
    """What has become of a child with this exit code, after its name in a sentence."""
    if code >= 0:
        return f"it ended with code {code}{': its message is above' if code else ''}"
    by_whom = ": by hand, or by a system that is out of memory" if code == -signal.SIGKILL else ""
    return f"it was ended by {signal_name(-code)}{by_whom}"


def spawned(
    body: Callable[[], None],
    needs: str,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    is_apart: bool = False,
) -> BaseProcess:
    """Start a process of this program's own for `body`, with `environ` besides the environment of this one.

    Apart from this one it hears nothing of the terminal, and does not import what `python` was started with.
    Ctrl-C before its body begins is for this process alone.

    Raises:
        ConfigError: it holds what no other process can be given; `needs` says what it must be.
    """
    begin = partial(_begin, body, os.environ.get(SAFE_PATH), is_apart=is_apart)
    process = multiprocessing.get_context("spawn").Process(target=begin)
    try:
        with _environment({**environ, SAFE_PATH: "1"}):
            resource_tracker.ensure_running()  # else starting it would let signals through
            with _signals_held(), _no_program() if is_apart else nullcontext():
                process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"{needs}: {error}") from None
    return process


def _begin(body: Callable[[], None], safe_path: str | None, *, is_apart: bool) -> None:
    """What a spawned process does first: be as any other one of this program, for its body's own children."""
    if safe_path is None:
        del os.environ[SAFE_PATH]
    else:
        os.environ[SAFE_PATH] = safe_path
    if is_apart:
        os.setsid()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets one that was held
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGINT, handler)
    body()


def _be_child(body: Callable[[], None], orphaned_s: float) -> None:
    watching = partial(_end_after_parent, orphaned_s)
    threading.Thread(target=watching, name="parent", daemon=True).start()
    body()


def _end_after_parent(orphaned_s: float) -> None:
    """End this process so long after the one that has started it, for which it may wait still."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(LOOK_EVERY_S)
    time.sleep(orphaned_s)
    os._exit(TryAgain.exit_code)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The environment of what is started in the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _no_program() -> Iterator[None]:
    """What is started in the block imports no program: it may have no `if __name__ == "__main__"`."""
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


@contextmanager
def _signals_held() -> Iterator[None]:
    """What is started in the block gets no signal before it lets them through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
