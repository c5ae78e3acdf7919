"""What is measured while a run goes on, and where it is reported.

One `MetricRecord` a step, an evaluation or a worker's report goes to every sink. A sink never
raises and never makes training wait: what it cannot report it drops, after one warning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from smolcluster.runs.files import StampedLog
from smolcluster.runs.series import RESERVED

MetricKind = Literal["step", "eval", "worker", "rank", "server"]


@dataclass(frozen=True)
class MetricRecord:
    """Values measured at one step; those that are not finite are reported as null.

    Epochs count from 0. `rank` and `node` say whose values they are, if they are one process's. A `worker`,
    `rank` (of a mesh) or `server` record is what a process reports of itself.
    """

    kind: MetricKind
    step: int
    epoch: int
    values: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None
    node: str | None = None

    def __post_init__(self) -> None:
        taken = RESERVED.intersection(self.values)
        if taken:
            raise ValueError(
                f"a metric cannot be named {sorted(taken)[0]!r}: the record's own field is"
            )


class Sink(Protocol):
    """A place where metrics are reported."""

    def log(self, record: MetricRecord) -> None:
        """Take one record; must not block or raise."""

    def close(self) -> None:
        """Report what is left, within a deadline; later records are ignored."""


class Metrics:
    """Hands each record to all sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def log(self, record: MetricRecord) -> None:
        """Report one record."""
        for sink in self._sinks:
            sink.log(record)

    def flush(self) -> None:
        """Write what the sinks that have a file keep back."""
        for sink in self._sinks:
            if isinstance(sink, StampedLog):
                sink.flush()

    def close(self) -> None:
        """Close the sinks, in order."""
        for sink in self._sinks:
            sink.close()
