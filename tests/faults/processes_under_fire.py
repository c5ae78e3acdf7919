"""A server or worker that a signal strikes at a named point: what a test cannot time from outside.

    python processes_under_fire.py KILL "before the rename" 2 syncps server --local …

strikes when that point is come to for the second time.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smolcluster.algorithms.DiLoCo.worker import Worker as DiLoCoWorker
from smolcluster.algorithms.EDP.server import Server as EDPServer
from smolcluster.algorithms.entry import main
from smolcluster.algorithms.SynchronousPS.members import Members
from smolcluster.algorithms.SynchronousPS.worker import Worker as SyncPSWorker
from smolcluster.configs.spec import get_algorithm
from smolcluster.server.saver import Saver
from smolcluster.server.weights import StateReceiver
from smolcluster.training import checkpoint
from smolcluster.training.checkpoint import CheckpointStore, CheckpointWriter
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Push

Strike = Callable[[], None]
Call = Callable[..., Any]


def before(owner: Any, name: str, strike: Strike) -> None:
    real: Call = getattr(owner, name)

    def struck(*args: object, **kwargs: object) -> object:
        strike()
        return real(*args, **kwargs)

    setattr(owner, name, struck)


def behind(owner: Any, name: str, strike: Strike) -> None:
    """Strike when a function has done its work."""
    real: Call = getattr(owner, name)

    def struck(*args: object, **kwargs: object) -> object:
        result = real(*args, **kwargs)
        strike()
        return result

    setattr(owner, name, struck)


def in_a_file(blow: "Blow") -> None:
    """Strike when half of the optimizer's file has been written."""
    real: Call = vars(checkpoint)["save_file"]

    def struck(tensors: Any, path: Path) -> None:
        real(tensors, path)
        if path.name == checkpoint.OPTIMIZER_FILE and blow.is_due():
            os.truncate(path, path.stat().st_size // 2)
            blow.fall()

    vars(checkpoint)["save_file"] = struck


def around_push(where: str, blow: "Blow") -> None:
    """Strike when half a frame of a push is on the wire, or the whole of it."""
    real = Connection.send_frame

    def struck(self: Connection, frame: Frame, deadline: Deadline | None = None) -> None:
        is_due = frame.kind == Push.KIND and blow.is_due()
        if is_due and where == "half":
            whole = b"".join(bytes(part) for part in frame.buffers)
            self._socket.sendall(whole[: len(whole) // 2])
            blow.fall()
        real(self, frame, deadline)
        if is_due:
            blow.fall()

    Connection.send_frame = struck  # type: ignore[method-assign]


class Blow:
    """Sends a signal to this process when it is called for the `count`th time."""

    def __init__(self, signum: signal.Signals, count: int) -> None:
        self._signum = signum
        self._left = count

    def is_due(self) -> bool:
        """It is come to once more; whether this is the time."""
        self._left -= 1
        return self._left == 0

    def fall(self) -> None:
        os.kill(os.getpid(), self._signum)

    def __call__(self) -> None:
        if self.is_due():
            self.fall()


Arm = Callable[[Blow], None]
POINTS: MappingProxyType[str, Arm] = MappingProxyType(
    {
        # a server, while it saves
        "in the middle of a file": in_a_file,
        "before the rename": partial(before, CheckpointStore, "_put_in_place"),
        # a server, while it trains
        "after a step": partial(behind, Saver, "after_step"),
        "before an answer": partial(behind, EDPServer, "apply"),
        "after a commit": partial(behind, Members, "broadcast"),
        # a worker
        "before a DiLoCo change": partial(before, DiLoCoWorker, "send_change"),
        "before a SyncPS push": partial(before, SyncPSWorker, "push"),
        "in the middle of a push": partial(around_push, "half"),
        "after a push": partial(around_push, "whole"),
        "when EDP's weights come": partial(before, StateReceiver, "_take"),
        "when SyncPS's state comes": partial(before, SyncPSWorker, "join"),
    }
)


def wait_for_the_disk() -> None:
    """Let training wait for each checkpoint, so that every point is come to, however slow the disk."""
    CheckpointWriter.submit = CheckpointWriter._write  # type: ignore[method-assign]


if __name__ == "__main__":
    signum, point, count, name, role, *arguments = sys.argv[1:]
    algorithm = get_algorithm(name)
    sys.argv = [str(algorithm.server if role == "server" else algorithm.worker), *arguments]
    POINTS[point](Blow(signal.Signals[f"SIG{signum}"], int(count)))
    wait_for_the_disk()
    raise SystemExit(main(algorithm.name, "server" if role == "server" else "worker"))
