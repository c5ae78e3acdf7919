"""What ranks do that a test has started: each is told what it is, and the group's secret."""

import logging
import multiprocessing
import os
import signal
import sys
import time

from smolcluster.algorithms.children import SAFE_PATH
from smolcluster.algorithms.Mesh.child_ranks import ChildRanks
from smolcluster.algorithms.Mesh.meeting import reached
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.wire.security import secret_of_text
from waiting import DEADLINE_S


def greets(ranks: Ranks, secret: str) -> None:
    """Leaves in rank 0's store where its modules come from, and those of what it starts."""
    told, log = secret_of_text(secret), logging.getLogger("test")
    store = reached(ranks.address, ranks.port or 0, told, DEADLINE_S, log)
    store.set(f"rank {ranks.here.start} of {ranks.world_size}", ":".join(sys.path))
    store.set(SAFE_PATH, os.environ.get(SAFE_PATH, "not set"))
    store.close()


def ends_with_2(_ranks: Ranks, _secret: str) -> None:
    raise SystemExit(2)


def is_killed(_ranks: Ranks, _secret: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loads_in_a_process(_ranks: Ranks, _secret: str) -> None:
    """As a user's code may, with a DataLoader or a pool; ends with 3 if that has done it."""
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)


def hears_nothing(_ranks: Ranks, _secret: str) -> None:
    """Goes on whoever asks it to stop."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while True:
        time.sleep(60)


def leave_one(end: str) -> None:
    """Start a rank that hears nothing, say its process, and end by `kill` or as any program does."""
    log = logging.getLogger("test")
    ranks = ChildRanks([hears_nothing], node="gpubox", timeout_s=DEADLINE_S, log=log)
    sys.stdout.write(" ".join(str(each.pid) for each in multiprocessing.active_children()))
    sys.stdout.flush()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    assert ranks.ended() is None


if __name__ == "__main__":
    leave_one(*sys.argv[1:])
