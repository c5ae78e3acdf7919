"""The child process of `WandbSink`: JSON lines from standard input to one W&B run.

The first line says what to start, each further line is a set of values to log, and the end of input
ends the run. Where W&B cannot be reached the run is kept offline, and the exit code is `KEPT`. It needs
nothing but wandb, and is started as a file.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

KEPT = 3
CONNECT_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 20.0

BEST = {"val_loss": "min", "val_perplexity": "min", "val_accuracy": "max"}
"""What of an evaluation the table of all runs shows besides the last one."""


def main() -> None:
    """Report everything that comes; ends with an error if wandb does, its last line saying why."""
    lines = records(take_over_input())
    start = next(lines, None)
    if start is None:
        return
    import wandb  # noqa: PLC0415 - importing this module must not import wandb

    run, is_kept = begin(wandb, start)
    define_metrics(run, start.get("job_type", ""))
    for values in lines:
        run.log({name: value for name, value in values.items() if value is not None})
    run.finish()
    sys.exit(KEPT if is_kept else 0)


def begin(wandb: Any, start: dict[str, Any]) -> tuple[Any, bool]:
    """Begin the run; whether it is kept offline for want of a connection."""
    settings = wandb.Settings(
        console="off", silent=True, x_save_requirements=False, init_timeout=INIT_TIMEOUT_S
    )
    is_online = start["mode"] == "online"
    if not is_online or can_connect(wandb.setup().settings.base_url):
        try:
            return wandb.init(**start, settings=settings), False
        except wandb.errors.CommError:
            if not is_online:
                raise
    return wandb.init(**start | {"mode": "offline"}, settings=settings), True


def can_connect(url: str) -> bool:
    """Whether a server answers at its address; behind a proxy only a try can tell."""
    if urllib.request.getproxies():
        return True
    parts = urlsplit(url)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def define_metrics(run: Any, role: str) -> None:
    step = "worker/step" if role == "worker" else "step"
    run.define_metric(step, hidden=True)
    run.define_metric("*", step_metric=step)
    if role != "worker":
        for name, best in BEST.items():
            run.define_metric(name, step_metric=step, summary=f"{best},last")


def take_over_input() -> BinaryIO:
    """Standard input under another number; a prompt that reads standard input meets its end."""
    feed = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    return feed


def records(feed: BinaryIO) -> Iterator[dict[str, Any]]:
    """The objects in the feed; half a line, left by a killed parent, is left out.

    A thread reads ahead, so that the feed's end starts the deadline also while wandb is busy.
    """
    first = json.loads(feed.readline() or b"null")
    if first is None:
        return
    deadline_s = first.pop("finish_timeout_s")
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_ahead, args=(feed, lines, deadline_s), daemon=True).start()
    yield first
    while (line := lines.get()).endswith(b"\n"):
        yield json.loads(line)


def read_ahead(feed: BinaryIO, lines: queue.SimpleQueue[bytes], deadline_s: float) -> None:
    """Queue every line and an empty one at the end, from which on all must be over in time."""
    for line in feed:
        lines.put(line)
    lines.put(b"")
    timer = threading.Timer(deadline_s + 1.0, lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
