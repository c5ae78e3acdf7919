"""A server or worker that a signal strikes at a named point: what a test cannot time from outside.

    python processes_under_fire.py KILL "before the rename" 2 syncps server --local …

strikes when that point is come to for the second time. `TERM,TERM` are two signals, one after the other.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smolcluster.algorithms.DiLoCo.worker import Worker as DiLoCoWorker
from smolcluster.algorithms.EDP.server import Server as EDPServer
from smolcluster.algorithms.EDP.worker import Worker as EDPWorker
from smolcluster.algorithms.entry import main
from smolcluster.algorithms.SynchronousPS.members import Members
from smolcluster.algorithms.SynchronousPS.worker import Worker as SyncPSWorker
from smolcluster.configs.spec import get_algorithm
from smolcluster.server.saver import Saver
from smolcluster.server.weights import StateReceiver
from smolcluster.training import checkpoint
from smolcluster.training.checkpoint import CheckpointStore, CheckpointWriter, Snapshot
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Push

FLUSH_S = 60.0
GAP_S = 0.1
"""Between two signals: the first one has been noticed."""

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


def at_file(name: str, blow: "Blow", *, torn: bool = False) -> None:
    """Strike when a file of tensors has been written, or half of it."""
    real: Call = vars(checkpoint)["save_file"]

    def struck(tensors: Any, path: Path) -> None:
        real(tensors, path)
        if path.name == name and blow.is_due():
            if torn:
                os.truncate(path, path.stat().st_size // 2)
            blow.fall()

    vars(checkpoint)["save_file"] = struck


def in_tidying(strike: Strike) -> None:
    """Strike when an old checkpoint is out of its place and not yet deleted."""
    tidy, delete = CheckpointStore._tidy, checkpoint._delete
    tidying: list[bool] = []

    def watched(self: CheckpointStore, newest: int) -> None:
        tidying.append(True)
        tidy(self, newest)
        tidying.clear()

    def struck(path: Path) -> None:
        if tidying:
            strike()
        delete(path)

    CheckpointStore._tidy = watched  # type: ignore[method-assign]
    checkpoint._delete = struck


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
    """Sends the signals to this process when it is called for the `count`th time."""

    def __init__(self, signals: str, count: int) -> None:
        self._signals = [signal.Signals[f"SIG{name}"] for name in signals.split(",")]
        self._left = count

    def is_due(self) -> bool:
        """It is come to once more; whether this is the time."""
        self._left -= 1
        return self._left == 0

    def fall(self) -> None:
        for signum in self._signals:
            os.kill(os.getpid(), signum)
            time.sleep(GAP_S)

    def __call__(self) -> None:
        if self.is_due():
            self.fall()


Arm = Callable[[Blow], None]
POINTS: MappingProxyType[str, Arm] = MappingProxyType(
    {
        # a server, while it saves
        "in the middle of a file": partial(at_file, checkpoint.OPTIMIZER_FILE, torn=True),
        "after the model's file": partial(at_file, checkpoint.MODEL_FILE),
        "after the optimizer's file": partial(at_file, checkpoint.OPTIMIZER_FILE),
        "before the rename": partial(before, CheckpointStore, "_put_in_place"),
        "before the link": partial(behind, CheckpointStore, "_put_in_place"),
        "while tidying": in_tidying,
        # a server, while it trains
        "after a step": partial(behind, Saver, "after_step"),
        "before an answer": partial(behind, EDPServer, "apply"),
        "after a commit": partial(behind, Members, "broadcast"),
        # a worker
        "before a DiLoCo change": partial(before, DiLoCoWorker, "send_change"),
        "before an EDP push": partial(before, EDPWorker, "frames"),
        "before a SyncPS push": partial(before, SyncPSWorker, "push"),
        "in the middle of a push": partial(around_push, "half"),
        "after a push": partial(around_push, "whole"),
        "when EDP's weights come": partial(before, StateReceiver, "_take"),
        "when SyncPS's state comes": partial(before, SyncPSWorker, "join"),
    }
)


def wait_for_the_disk() -> None:
    """Let training wait for each checkpoint, so that every point is come to, however slow the disk."""
    submit = CheckpointWriter.submit

    def patient(self: CheckpointWriter, snapshot: Snapshot) -> None:
        submit(self, snapshot)
        self.flush(FLUSH_S)

    CheckpointWriter.submit = patient  # type: ignore[method-assign]


if __name__ == "__main__":
    signals, point, count, name, role, *arguments = sys.argv[1:]
    algorithm = get_algorithm(name)
    sys.argv = [str(algorithm.server if role == "server" else algorithm.worker), *arguments]
    POINTS[point](Blow(signals, int(count)))
    wait_for_the_disk()
    raise SystemExit(main(algorithm.name, "server" if role == "server" else "worker"))
