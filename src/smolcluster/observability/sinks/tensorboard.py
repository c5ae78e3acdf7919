"""TensorBoard's event files, in the run's folder: the same curves as the server has in Weights & Biases."""

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.wandb import values_of

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

MAX_WAITING = 20_000
SERVER = "server"


class TensorBoardSink:
    """Writes the records of a run's owner to event files in `folder`.

    `log` only keeps a record. `tick`, which may wait for the disk, writes those that are kept. After a
    failure `warn` is called once, and nothing is written any more.
    """

    def __init__(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._waiting: deque[MetricRecord] = deque(maxlen=MAX_WAITING)
        self._writer: SummaryWriter | None = None
        self._is_off = False

    def log(self, record: MetricRecord) -> None:
        self._waiting.append(record)

    def tick(self) -> None:
        """Write what has come since the last time."""
        while self._waiting and not self._is_off:
            record = self._waiting.popleft()
            try:
                self._write(record)
            except OSError as error:
                self._is_off = True
                self._warn(f"TensorBoard gets no more values: {error.strerror or error}")

    def close(self) -> None:
        """Write the rest and close the files, in the thread that ticks; then this does nothing."""
        self.tick()
        self._is_off = True
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, record: MetricRecord) -> None:
        if self._writer is None:
            # steps from the first one on are written again by a run that goes on from a checkpoint
            self._writer = _open(self._folder, first_step=record.step)
        for name, value in values_of(record, SERVER).items():
            if name != "step":
                self._writer.add_scalar(name, value, record.step)


def _open(folder: Path, *, first_step: int) -> "SummaryWriter":
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # it tells of every NaN
    from tensorboardX import SummaryWriter  # noqa: PLC0415 - takes time, and few want it

    return SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
