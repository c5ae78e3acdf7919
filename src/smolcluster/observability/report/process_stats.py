"""What processes reported of themselves, over the whole run: means, greatest and newest values."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from smolcluster.observability.sinks.jsonl import MetricLine, parse_metric
from smolcluster.runs.files import json_objects, seconds_of

SHARES = ("data", "forward", "backward", "encode", "send", "wait", "apply")
"""Of the time of a process, as `share/…`; the rest is other."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""How long the first report of a process counts, and any one at most, seconds."""
_KIND = re.compile(rb'"kind":\s*"(?:worker|server)"')


class Whose(NamedTuple):
    """A process: of the server, or its one process, the rank is -1."""

    rank: int
    node: str


@dataclass
class Measured:
    """One value over the run."""

    total: float = 0.0
    seconds: float = 0.0
    most: float = -math.inf
    newest: float = math.nan

    def take(self, value: float, seconds: float) -> None:
        """It had this value for so long."""
        self.total += value * seconds
        self.seconds += seconds
        self.most = max(self.most, value)
        self.newest = value

    @property
    def mean(self) -> float:
        """Over time."""
        return self.total / self.seconds


@dataclass
class ProcessStats:
    """What one process reported, by name; only finite values."""

    values: dict[str, Measured] = field(default_factory=dict)
    last_s: float | None = None
    """When it did last, seconds since 1970."""

    def take(self, line: MetricLine) -> None:
        """Add one report."""
        moment = seconds_of(line.ts, self.last_s or 0.0)
        elapsed = FIRST_S if self.last_s is None else min(moment - self.last_s, LONGEST_S)
        self.last_s = moment
        for name, value in line.record.values.items():
            if math.isfinite(value):
                self.values.setdefault(name, Measured()).take(value, max(elapsed, 1e-3))

    def mean(self, name: str) -> float | None:
        """The mean of a value; None: it was never reported."""
        return self.values[name].mean if name in self.values else None

    @property
    def step_s(self) -> float | None:
        """Mean time of a step: a report of a second cannot tell it, where a step takes longer than that."""
        steps_per_s = self.mean("steps_per_s")
        return 1.0 / steps_per_s if steps_per_s else self.mean("step_s")

    @property
    def shares(self) -> Mapping[str, float]:
        """Parts of its time by phase, which make a whole; none when it reported none."""
        known = {name: self.mean(f"share/{name}") for name in SHARES}
        shares = {name: max(0.0, share) for name, share in known.items() if share is not None}
        if not shares:
            return {}
        total = max(1.0, math.fsum(shares.values()))
        shares = {name: share / total for name, share in shares.items()}
        return shares | {"other": max(0.0, 1.0 - math.fsum(shares.values()))}


def read_process_stats(path: Path) -> dict[Whose, ProcessStats]:
    """What each process reported; nothing when the file does not exist.

    Raises:
        OSError: the file cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return process_stats_of(_reports(file))
    return {}


def _reports(lines: Iterable[bytes]) -> Iterator[MetricLine]:
    """The reports among a run's metrics: the steps, which are many more, are not even parsed."""
    for entry in json_objects(line for line in lines if _KIND.search(line, 0, 200)):
        if entry.get("kind") in ("worker", "server") and (line := parse_metric(entry)):
            yield line


def process_stats_of(reports: Iterable[MetricLine]) -> dict[Whose, ProcessStats]:
    """Put reports together, by process: the server's first."""
    found: dict[Whose, ProcessStats] = {}
    for line in reports:
        record = line.record
        rank = record.rank if isinstance(record.rank, int) and record.kind == "worker" else -1
        found.setdefault(Whose(rank, str(record.node or "")), ProcessStats()).take(line)
    return dict(sorted(found.items()))
