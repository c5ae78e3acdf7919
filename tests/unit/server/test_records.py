"""The records of a run are written beside it: by a thread that no error ends, whatever the terminal does."""

import io
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rich.console import Console
from tensorboardX.record_writer import RecordWriter

from harness import local_settings
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks import console as console_sink
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.events import EpochFinished, read_events
from smolcluster.runs.files import LineWriter
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.server import records as records_module
from smolcluster.server.records import Records, open_records
from waiting import DEADLINE_S, eventually

STEP = MetricRecord("step", 1, 0, {"loss": 0.5})
EPOCH = EpochFinished(epoch=0, step=1, samples_applied=32)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "r1")


@pytest.fixture
def log() -> Iterator[NodeLog]:
    made = NodeLog("server", "here", console=SteadyConsole(file=io.StringIO()))
    yield made
    made.close()


def opened(
    paths: RunPaths, log: NodeLog, progress: Console | None = None, *, tensorboard: bool = False
) -> AbstractContextManager[Records]:
    run = local_settings().run_config("r1", "edp")
    train = run.train.model_copy(update={"tensorboard": tensorboard})
    run = run.model_copy(update={"train": train})
    return open_records(paths, run, role="server", node="here", log=log, progress=progress)


def tell(records: Records) -> None:
    records.metrics.log(STEP)
    records.events.write(EPOCH)


def test_what_is_told_is_in_the_files_soon_and_nobody_asks_for_it(
    paths: RunPaths, log: NodeLog
) -> None:
    with opened(paths, log) as records:
        tell(records)
        eventually(lambda: follow_metrics(paths.metrics).poll() and read_events(paths.events))


def test_at_the_end_all_of_it_is_there_also_after_an_error(paths: RunPaths, log: NodeLog) -> None:
    with pytest.raises(ZeroDivisionError), opened(paths, log) as records:
        tell(records)
        raise ZeroDivisionError
    assert [line.record for line in follow_metrics(paths.metrics).poll()] == [STEP]
    assert [record.event for record in read_events(paths.events)] == [EPOCH]


def test_one_that_fails_is_told_once_and_the_others_go_on(
    paths: RunPaths, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[float] = []
    errors: list[str] = []

    tick = LineWriter.tick

    def failing(writer: LineWriter) -> None:
        if writer.path != paths.metrics:
            return tick(writer)
        failures.append(1.0)
        raise ZeroDivisionError("oops")

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    log.logger.addHandler(Errors(logging.ERROR))
    monkeypatch.setattr(LineWriter, "tick", failing)
    with opened(paths, log) as records:
        tell(records)
        eventually(lambda: len(failures) > 2 and read_events(paths.events))
    assert len(errors) == 1
    assert "ZeroDivisionError: oops" in errors[0]


def test_a_disk_that_hangs_holds_up_neither_a_step_nor_the_end(
    paths: RunPaths, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader hangs as a disk may."""
    for name in ("SPACE_S", "HANG_S"):
        monkeypatch.setattr(records_module, name, 0.1)
    os.mkfifo(paths.metrics)
    warnings: list[str] = []
    monkeypatch.setattr(log.logger, "warning", lambda *args: warnings.append(args[0] % args[1:]))
    with opened(paths, log) as records:
        for _ in range(3):
            tell(records)
    assert [each.partition(":")[0] for each in warnings] == [
        "lost, because the disk did not take it in time"
    ]
    assert f"3 lines of {paths.metrics}" in warnings[0]
    assert f"3 lines of {paths.events}" in warnings[0]
    with paths.metrics.open("rb") as reader:
        paths.metrics.unlink()
        assert reader.read(1)


def test_a_disk_that_tensorboard_waits_for_does_not_hold_up_the_end(
    paths: RunPaths, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPACE_S", "HANG_S"):
        monkeypatch.setattr(records_module, name, 0.1)
    over, waiting, close = threading.Event(), dict[str, RecordWriter](), RecordWriter.close

    def hang(writer: RecordWriter) -> None:
        waiting[threading.current_thread().name] = writer
        over.wait(DEADLINE_S)

    monkeypatch.setattr(RecordWriter, "flush", hang)
    monkeypatch.setattr(RecordWriter, "close", hang)
    with opened(paths, log, tensorboard=True) as records:
        tell(records)
        eventually(lambda: waiting)
    over.set()
    close(waiting["records"])
    assert len(waiting) == 1, "nobody else has waited"


def test_a_terminal_that_hangs_holds_nothing_up(
    paths: RunPaths, log: NodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_sink, "CLOSE_TIMEOUT_S", 0.1)
    hangs, over = threading.Event(), threading.Event()

    class Hanging(io.StringIO):
        def write(self, text: str) -> int:
            hangs.set()
            over.wait(DEADLINE_S)
            return len(text)

    terminal = SteadyConsole(file=Hanging(), force_terminal=True, width=100)
    try:
        with opened(paths, log, terminal) as records:
            tell(records)
            assert hangs.wait(DEADLINE_S)
            eventually(lambda: follow_metrics(paths.metrics).poll() and read_events(paths.events))
    finally:
        over.set()
