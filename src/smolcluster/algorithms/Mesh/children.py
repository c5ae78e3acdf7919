"""The ranks of one machine that one process has started, itself being rank 0.

So are those of an orchestrator with `tensor_parallel`, and those of a mesh that is one worker. They meet on
the loopback, by a secret of their own.
"""

import atexit
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess

from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.algorithms.Mesh.store import GroupStore, Host
from smolcluster.algorithms.Mesh.watch import Failure
from smolcluster.algorithms.supervision import spawned
from smolcluster.errors import TryAgain
from smolcluster.utils.stopping import signal_name
from smolcluster.wire.security import new_secret, secret_of_text

LOOPBACK = "127.0.0.1"
NEEDS = (
    "the model, its loss and its data must be of a module's own classes and functions, for each rank of "
    "tensor_parallel is a process"
)
END_S = 15.0
"""How long ranks may take to end by themselves."""
LOOK_EVERY_S = 1.0
SAFE_PATH = "PYTHONSAFEPATH"


class ChildRanks:
    """All ranks but rank 0, which this process is: they end with it, however that does.

    Attributes:
        ranks: what rank 0 and each of them is.
        store: rank 0's, in which they meet.
    """

    def __init__(
        self,
        bodies: Sequence[Callable[[Ranks, str], None]],
        *,
        node: str,
        timeout_s: float,
        log: logging.Logger,
    ) -> None:
        """Start a rank for each of `bodies`, which is called with what the rank is and the group's secret.

        `node`: this machine's name; `timeout_s`: how long ranks may wait for each other.

        Raises:
            ConfigError: what a body needs cannot be given to another process.
        """
        secret, size = new_secret(), 1 + len(bodies)
        host = Host([LOOPBACK], 0, secret_of_text(secret), log)
        self.store, self._node = GroupStore(host, timeout_s), node
        self.ranks = [
            Ranks(range(rank, rank + 1), size, True, LOOPBACK, host.port) for rank in range(size)
        ]
        self._processes: list[BaseProcess] = []
        atexit.register(self.end, 0.0)  # multiprocessing waits for each process that is left
        try:
            for ranks, body in zip(self.ranks[1:], bodies, strict=True):
                with _safe_path():
                    started = spawned(partial(_be_child, partial(body, ranks, secret)), NEEDS)
                self._processes.append(started)
        except BaseException:
            self.end(0.0)
            raise

    def ended(self) -> tuple[int, int] | None:
        """The first rank that has ended and its exit code, minus a signal's number; None: none has."""
        codes = ((rank, each.exitcode) for rank, each in enumerate(self._processes, 1))
        return next(((rank, code) for rank, code in codes if code is not None), None)

    def failed(self) -> Failure | None:
        """What is told of the first rank that has ended, if one has: none may before rank 0 says so."""
        if (ended := self.ended()) is None:
            return None
        rank, code = ended
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        said = ": its message is above" if code > 0 else ""
        return Failure(rank, self._node, f"it {how}{said}")

    def code_of(self, rank: int) -> int | None:
        """With which exit code a rank ends, minus a signal's number; None: it does not within `END_S`."""
        process = self._processes[rank - 1]
        process.join(END_S)
        return process.exitcode

    def end(self, patience_s: float = END_S) -> None:
        """Let the ranks end for so long, and kill what is left."""
        end = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join()
        self.store.close()
        atexit.unregister(self.end)


def _be_child(body: Callable[[], None]) -> None:
    threading.Thread(target=_end_after_parent, name="parent", daemon=True).start()
    body()


def _end_after_parent() -> None:
    """End this process `END_S` after the one that has started it, for which it may wait still."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(LOOK_EVERY_S)
    time.sleep(END_S)
    os._exit(TryAgain.exit_code)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let the folder in which a process is started bring no modules to it."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
