"""TensorBoard's event files, as TensorBoard reads them."""

import errno
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from tensorboardX.proto.event_pb2 import Event

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.tensorboard import TensorBoardSink

DEADLINE_S = 60.0
STEP = MetricRecord("step", 3, 0, {"loss": 0.5, "start": 64.0})
REPORT = MetricRecord("worker", 3, 0, {"cpu": 0.25}, rank=1, node="mini2")


def events(folder: Path) -> Iterator[Event]:
    """What the files hold: TFRecords, each a length, its checksum, an event and the event's checksum."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (nbytes,) = struct.unpack_from("<Q", data)
            yield Event.FromString(data[12 : 12 + nbytes])
            data = data[12 + nbytes + 4 :]


def written(folder: Path) -> dict[tuple[str, int], float]:
    return {
        (value.tag, event.step): value.simple_value
        for event in events(folder)
        for value in event.summary.value
    }


def test_the_curves_have_the_names_that_they_have_in_weights_and_biases(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, warn=pytest.fail)
    sink.log(STEP)
    sink.tick()
    sink.log(REPORT)
    sink.close()
    assert written(tmp_path) == {
        ("epoch", 3): 0,
        ("loss", 3): 0.5,
        ("rank1/cpu", 3): 0.25,
    }


def test_a_run_that_goes_on_hides_what_it_had_after_its_checkpoint(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, warn=pytest.fail)
    sink.log(STEP)
    sink.close()
    assert any(event.session_log.status == event.session_log.START for event in events(tmp_path))


def test_without_records_there_is_no_folder(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path / "tensorboard", warn=pytest.fail).close()
    assert not (tmp_path / "tensorboard").exists()


def test_a_disk_that_fills_up_is_told_of_once_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", full)
    told: list[str] = []
    sink = TensorBoardSink(tmp_path, warn=told.append)

    def train() -> None:
        for _ in range(100):  # more than any queue between holds
            sink.log(STEP)
            sink.tick()
        sink.close()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert told == ["TensorBoard gets no more values: No space left on device"]
