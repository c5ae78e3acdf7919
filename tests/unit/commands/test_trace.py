"""Spans of all processes as one trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from connection_pairs import telemetry
from smolcluster.commands.trace import Traced, newest_stretch, write_trace
from smolcluster.errors import DataError
from smolcluster.observability.spans import SpanLog, read_spans
from smolcluster.runs.files import rotations
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.meter import PHASES, STEP


def steps(count: int, start: int = 0, length: int = 1000) -> list[tuple[int, int, int]]:
    """So many steps that follow each other, each with a forward pass, in microseconds."""
    spans = []
    for number in range(count):
        at = start + number * length
        spans += [(PHASES.index("forward"), at + 100, 500), (STEP, at, length)]
    return spans


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.fixture
def log(paths: RunPaths) -> SpanLog:
    return SpanLog(paths.spans, warn=pytest.fail)


def events(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["traceEvents"]  # type: ignore[no-any-return]


def test_all_processes_are_on_the_owners_clock(paths: RunPaths, log: SpanLog) -> None:
    log.write("server", telemetry(spans_at=1000.0, spans=steps(4)), node="mini1")
    ahead = telemetry(spans_at=1000.0005 + 77.0, spans=steps(4))
    log.write("worker", ahead, ahead_s=77.0, rank=0, node="mini2")
    log.close()
    assert write_trace(paths, 20, paths.trace) == 4
    names = {
        event["pid"]: event["args"]["name"]
        for event in events(paths.trace)
        if event["name"] == "process_name"
    }
    assert list(names.values()) == ["server mini1", "worker 1 (mini2)"]
    starts = {
        names[event["pid"]]: event["ts"]
        for event in reversed(events(paths.trace))
        if event["ph"] == "X" and event["cat"] == "step"
    }
    assert starts == {"server mini1": 0, "worker 1 (mini2)": 500}


def test_only_the_newest_steps_are_shown_with_what_lies_beside_them(
    paths: RunPaths, log: SpanLog
) -> None:
    log.write("server", telemetry(spans_at=1000.0, spans=steps(10)), node="a")
    log.write("worker", telemetry(spans_at=1000.0, spans=steps(10)), rank=0, node="b")
    log.close()
    assert write_trace(paths, 3, paths.trace) == 3
    shown = [event for event in events(paths.trace) if event["ph"] == "X"]
    assert {(event["pid"], event["name"]) for event in shown} == {
        (1, "step"),
        (1, "forward"),
        (2, "step"),
        (2, "forward"),
    }
    assert [e["ts"] for e in shown if (e["pid"], e["name"]) == (1, "step")] == [0, 1000, 2000]


def test_steps_of_two_windows_are_not_one_stretch() -> None:
    window = [Traced(at, 1000, STEP, "server") for at in range(0, 30_000, 1000)]
    later = [Traced(10_000_000 + at, 1000, STEP, "server") for at in range(0, 5_000, 1000)]
    assert newest_stretch(window + later, 20) == window[-20:]
    assert newest_stretch(window + later, 5) == later
    assert newest_stretch(window + later, 100) == window
    assert newest_stretch([], 5) == []


def test_of_two_stretches_that_are_too_short_the_newest_is_shown_unless_the_other_is_longer() -> (
    None
):
    sooner, later = (
        [Traced(begin + at, 1000, STEP, "server") for at in range(0, 5_000, 1000)]
        for begin in (0, 10_000_000)
    )
    assert newest_stretch(sooner + later, 20) == later
    assert newest_stretch(sooner + later[:-1], 20) == sooner


def test_a_run_that_was_resumed_on_another_machine_is_that_machines(
    paths: RunPaths, log: SpanLog
) -> None:
    log.write("server", telemetry(spans_at=1000.0, spans=steps(10)), node="mini1")
    log.write("server", telemetry(spans_at=2000.0, spans=steps(4)), node="mini2")
    log.close()
    assert write_trace(paths, 20, paths.trace) == 4
    [name] = [each for each in events(paths.trace) if each["name"] == "process_name"]
    assert name["args"]["name"] == "server mini2"


@pytest.mark.timeout(180)
def test_to_ask_for_many_steps_takes_no_longer_than_for_few() -> None:
    row = [Traced(at * 1000, 1000, STEP, "server") for at in range(100_000)]
    assert newest_stretch(row, len(row)) == row


def test_slow_steps_follow_each_other() -> None:
    slow = [Traced(at * 3_000_000, 2_500_000, STEP, "server") for at in range(8)]
    assert newest_stretch(slow, 8) == slow


def test_a_run_without_spans_says_so(paths: RunPaths) -> None:
    with pytest.raises(DataError, match="no spans to trace"):
        write_trace(paths, 20, paths.trace)
    assert not paths.trace.exists()


def test_old_parts_of_the_file_are_read_first_and_rubbish_is_left_out(
    paths: RunPaths, log: SpanLog
) -> None:
    log.write("server", telemetry(spans_at=5.0, spans=steps(1)), node="a")
    log.close()
    paths.spans.rename(rotations(paths.spans)[1])
    paths.spans.write_bytes(b'{"role":"server"}\nnonsense\n[1]\n{"role":"server","node":"a","at":7')
    later = SpanLog(paths.spans, warn=pytest.fail)
    later.write("server", telemetry(spans_at=6.0, spans=steps(1)), node="a")
    later.close()
    assert [line.at for line in read_spans(paths.spans)] == [5.0, 6.0]


def test_a_report_without_spans_leaves_none(paths: RunPaths, log: SpanLog) -> None:
    log.write("server", telemetry(), node="a")
    log.close()
    assert not paths.spans.exists()
