"""Metrics as JSON lines: `metrics.jsonl`, written and read.

A line is flat: `ts`, `kind`, `incarnation`, `step`, `epoch`, `rank` and `node` where they apply,
then the values by name.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from smolcluster.observability.metrics import MetricKind, MetricRecord
from smolcluster.runs.files import Follower, StampedLog
from smolcluster.runs.series import RESERVED


class JsonlSink(StampedLog):
    """Appends records to a file."""

    def log(self, record: MetricRecord) -> None:
        """Append one record."""
        who = {"rank": record.rank, "node": record.node}
        known = {name: value for name, value in who.items() if value is not None}
        values = {"step": record.step, "epoch": record.epoch, **known, **record.values}
        self.stamp(record.kind, values)


@dataclass(frozen=True)
class MetricLine:
    """One line of `metrics.jsonl`; a value that was null is NaN."""

    ts: str
    incarnation: str
    record: MetricRecord


def follow_metrics(path: Path) -> Follower[MetricLine]:
    """A follower whose `poll()` returns the records that are new."""
    return Follower(path, parse_metric)


def parse_metric(entry: dict[str, Any]) -> MetricLine | None:
    """The record of one line's JSON object; None when it is not one."""
    rank, node = entry.get("rank"), entry.get("node")
    if entry.get("kind") not in get_args(MetricKind):
        return None
    if not isinstance(rank, int | None) or not isinstance(node, str | None):
        return None
    try:
        record = MetricRecord(
            kind=entry["kind"],
            step=int(entry["step"]),
            epoch=int(entry["epoch"]),
            values={
                name: math.nan if value is None else float(value)
                for name, value in entry.items()
                if name not in RESERVED
            },
            rank=rank,
            node=node,
        )
        return MetricLine(str(entry["ts"]), sys.intern(str(entry["incarnation"])), record)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
