"""Spans of a run's processes, all on the clock of its owner: `spans.jsonl`, for traces.

A line is what one process reported at once: `ts`, `role`, `rank` and `node` where they apply, `at` (seconds
since 1970), and `spans`, each `[what, start, length]` in microseconds from `at`; `what` is a place in
`utils.meter.PHASES`, or a whole step. The file is rotated, so that it holds the newest part of a long run.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from smolcluster.runs.files import LineWriter, json_objects, rotations, utc_timestamp
from smolcluster.wire.messages import Telemetry

MAX_NBYTES = 16 * 1024 * 1024


class SpanLine(BaseModel):
    """Spans that one process reported at once."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    role: str
    rank: int | None = None
    node: str
    at: float
    spans: list[tuple[int, int, int]]


class SpanLog(LineWriter):
    """Appends spans to a run's file; safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path, warn=warn, now=now, max_nbytes=MAX_NBYTES)

    def write(
        self,
        role: str,
        report: Telemetry,
        *,
        ahead_s: float = 0.0,
        node: str,
        rank: int | None = None,
    ) -> None:
        """Append the spans of a process whose clock is `ahead_s` seconds ahead of this one's."""
        if report.spans:
            line: dict[str, Any] = {"ts": utc_timestamp(self._now()), "role": role, "node": node}
            if rank is not None:
                line["rank"] = rank
            self.append(line | {"at": report.spans_at - ahead_s, "spans": report.spans})


def read_spans(path: Path) -> Iterator[SpanLine]:
    """The lines that the file and its old parts hold, in the order in which they were written."""
    for part in reversed(rotations(path)):
        if part.is_file():
            with part.open("rb") as file:
                for entry in json_objects(file):
                    try:
                        yield SpanLine.model_validate(entry)
                    except ValidationError:
                        continue
