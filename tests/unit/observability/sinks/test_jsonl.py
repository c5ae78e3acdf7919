import json
import math
from pathlib import Path

import pytest

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import (
    JsonlSink,
    MetricLine,
    follow_metrics,
)

STEP = MetricRecord("step", 512, 2, {"loss": 0.25, "grad_norm/fc1.weight": 1.5}, rank=0, node="pi")
EVAL = MetricRecord("eval", 512, 2, {"val_loss": 0.3, "val_accuracy": 0.9})


def no_warning(sentence: str) -> None:
    raise AssertionError(sentence)


def jsonl_sink(path: Path, incarnation: str = "a1") -> JsonlSink:
    return JsonlSink(path, incarnation, warn=no_warning, now=lambda: 0.25)


def test_records_are_read_as_they_were_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    sink.log(STEP)
    sink.log(EVAL)
    sink.close()
    stamp = "1970-01-01T00:00:00.250Z"
    first, _ = path.read_text().splitlines()
    assert json.loads(first) == {
        "ts": stamp,
        "kind": "step",
        "incarnation": "a1",
        "step": 512,
        "epoch": 2,
        "rank": 0,
        "node": "pi",
        "loss": 0.25,
        "grad_norm/fc1.weight": 1.5,
    }
    assert follow_metrics(path).poll() == [
        MetricLine(stamp, "a1", STEP),
        MetricLine(stamp, "a1", EVAL),
    ]


def test_a_value_that_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    sink.log(MetricRecord("step", 1, 0, {"loss": math.inf}))
    sink.close()
    assert json.loads(path.read_text())["loss"] is None
    assert math.isnan(follow_metrics(path).poll()[0].record.values["loss"])


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step", "step": 1, "epoch": 0, "ts": "x"',
        '{"kind": "unheard_of", "step": 1, "epoch": 0, "ts": "x", "incarnation": "a"}',
        '{"kind": "step", "step": "a", "epoch": 0, "ts": "x", "incarnation": "a"}',
        '{"kind": "step", "step": 1, "epoch": 0, "ts": "x", "incarnation": "a", "loss": []}',
        '{"kind": "step"}',
    ],
)
def test_what_is_no_record_is_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    assert follow_metrics(path).poll() == []
