"""TensorBoard's event files, in the run's folder: the same curves as the server has in Weights & Biases."""

import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.wandb import values_of

if TYPE_CHECKING:
    from tensorboardX.record_writer import RecordWriter

MAX_WAITING = 20_000
SERVER = "server"


class TensorBoardSink:
    """Writes the records of a run's owner to event files in `folder`.

    `log` only keeps a record. `tick`, which may wait for the disk, writes those that are kept. After a
    failure `warn` is called once, and nothing is written any more.
    """

    # Not tensorboardX's SummaryWriter: its thread ends on a full disk, and then whoever adds a value waits
    # for ever.

    def __init__(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._waiting: deque[MetricRecord] = deque(maxlen=MAX_WAITING)
        self._file: RecordWriter | None = None
        self._is_off = False

    def log(self, record: MetricRecord) -> None:
        self._waiting.append(record)

    def tick(self) -> None:
        """Write what has come since the last time."""
        if self._is_off or not self._waiting:
            return
        try:
            while self._waiting:
                self._write(self._waiting.popleft())
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._warn(f"TensorBoard gets no more values: {error.strerror or error}")
            self._end()

    def close(self) -> None:
        """Write the rest and close the file, in the thread that ticks; then this does nothing."""
        if not self._is_off:
            self.tick()
            self._end()

    def abandon(self) -> None:
        """Write nothing any more, whether the disk takes it or not; any thread."""
        self._is_off = True

    def _end(self) -> None:
        self._is_off = True
        if self._file is not None:
            with suppress(OSError):  # it has been flushed, or that has failed
                self._file.close()
            self._file = None

    def _write(self, record: MetricRecord) -> None:
        from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415 - takes time, and few want it
        from tensorboardX.summary import scalar  # noqa: PLC0415

        if self._file is None:
            self._file = _open(self._folder, first_step=record.step)
        for name, value in values_of(record, SERVER).items():
            if name != "step":
                event = Event(wall_time=time.time(), step=record.step, summary=scalar(name, value))
                self._file.write(event.SerializeToString())


def _open(folder: Path, *, first_step: int) -> "RecordWriter":
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415
    from tensorboardX.record_writer import RecordWriter  # noqa: PLC0415

    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # it tells of every NaN
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    file = RecordWriter(str(folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}"))
    file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    # steps from the first one on are written again by a run that goes on from a checkpoint
    began = SessionLog(status=SessionLog.START)
    file.write(Event(wall_time=now, step=first_step, session_log=began).SerializeToString())
    return file
