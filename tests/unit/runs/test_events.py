import json
import math
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from smolcluster.runs.events import (
    Evaluated,
    Event,
    EventLog,
    EventRecord,
    PushDropped,
    RunEnded,
    WorkerJoined,
    WorkerLost,
    kind_of,
    read_events,
)

JOINED = WorkerJoined(rank=0, node="mini2", device="cpu", samples_per_s=3200.5)
LOST = WorkerLost(rank=0, node="mini2", reason="silent for 10 s")
ENDED = RunEnded(ok=True, reason="all epochs applied", wall_s=1.5, steps=3, samples_applied=96)


def event_log(path: Path, incarnation: str = "a1") -> EventLog:
    return EventLog(path, incarnation, warn=pytest.fail, now=lambda: 0.25)


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = event_log(path)
    dropped = PushDropped(
        rank=1, node="pi", outcome="stale", epoch=0, start=32, stop=64, staleness=9, reason="τ > 8"
    )
    for event in (JOINED, dropped, ENDED):
        log.write(event)
    log.close()
    stamp = "1970-01-01T00:00:00.250Z"
    assert read_events(path) == [EventRecord(stamp, "a1", e) for e in (JOINED, dropped, ENDED)]


def test_a_line_carries_time_kind_and_incarnation_first(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = event_log(path)
    log.write(LOST)
    log.close()
    line = json.loads(path.read_text())
    assert list(line.items()) == [
        ("ts", "1970-01-01T00:00:00.250Z"),
        ("kind", "worker_lost"),
        ("incarnation", "a1"),
        ("rank", 0),
        ("node", "mini2"),
        ("reason", "silent for 10 s"),
    ]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = event_log(path)
    log.write(Evaluated(epoch=0, step=1, val_loss=math.nan, val_accuracy=0.5))
    log.close()
    assert "NaN" not in path.read_text()
    event = read_events(path)[0].event
    assert isinstance(event, Evaluated)
    assert event.val_loss is None


def test_kinds_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"ts": "x", "kind": "unheard_of", "incarnation": "a"}\n{"kind": 3}\n{}\n')
    assert read_events(path) == []


def test_every_kind_has_its_own_name() -> None:
    kinds = [kind_of(event) for event in get_args(Event)]
    assert len(set(kinds)) == len(kinds) == 18
    assert "lease_returned" in kinds


def test_a_misspelt_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="staleness_s"):
        PushDropped.model_validate(
            {"rank": 0, "node": "a", "outcome": "late", "epoch": 0, "start": 0, "stop": 1}
            | {"reason": "", "staleness_s": 1}
        )
