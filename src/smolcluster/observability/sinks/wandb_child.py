"""The child process of `WandbSink`: JSON lines from standard input to one W&B run.

The first line says what to start, each further line is a set of values to log, and the end of input
ends the run. It needs nothing but wandb, and is started as a file.
"""

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

BEST = {"val_loss": "min", "val_perplexity": "min", "val_accuracy": "max"}
"""What of an evaluation the table of all runs shows besides the last one."""


def main() -> None:
    """Report everything that comes; ends with an error if wandb does, its last line saying why."""
    lines = records(take_over_input())
    start = next(lines, None)
    if start is None:
        return
    import wandb  # noqa: PLC0415 - importing this module must not import wandb

    settings = wandb.Settings(console="off", silent=True, x_save_requirements=False)
    run = wandb.init(**start, settings=settings)
    define_metrics(run, start.get("job_type", ""))
    for values in lines:
        run.log({name: value for name, value in values.items() if value is not None})
    run.finish()


def define_metrics(run: Any, role: str) -> None:
    """Let everything be drawn over the steps of the process, so that the curves of many runs line up."""
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
