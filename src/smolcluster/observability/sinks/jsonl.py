"""Metrics as JSON lines: `metrics.jsonl`, written and read.

A line is flat: `ts`, `kind`, `incarnation`, `step`, `epoch`, `rank` and `node` where they apply,
then the values by name.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from smolcluster.observability.metrics import RESERVED, MetricKind, MetricRecord
from smolcluster.runs.files import Follower, LineWriter, utc_timestamp


class JsonlSink:
    """Appends records to a file, by way of `writer`; safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        incarnation: str,
        *,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._now = now
        self.writer = LineWriter(path, warn=warn, clock=clock)

    def log(self, record: MetricRecord) -> None:
        """Append one record."""
        line: dict[str, Any] = {
            "ts": utc_timestamp(self._now()),
            "kind": record.kind,
            "incarnation": self._incarnation,
            "step": record.step,
            "epoch": record.epoch,
        }
        if record.rank is not None:
            line["rank"] = record.rank
        if record.node is not None:
            line["node"] = record.node
        self.writer.write(line | dict(record.values))

    def flush(self) -> None:
        """Write what has been kept back."""
        self.writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


@dataclass(frozen=True)
class MetricLine:
    """One line of `metrics.jsonl`; a value that was null is NaN."""

    ts: str
    incarnation: str
    record: MetricRecord


def follow_metrics(path: Path) -> Follower[MetricLine]:
    """A follower whose `poll()` returns the records that are new."""
    return Follower(path, parse_metric)


def read_metrics(path: Path) -> list[MetricLine]:
    """All records that are in the file now; none when it does not exist."""
    return follow_metrics(path).poll()


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
