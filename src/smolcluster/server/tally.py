"""What a run counts: samples and losses by epoch, pushes by outcome, lost leases, each worker's part."""

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from smolcluster.runs.status import STALENESS_EDGES
from smolcluster.runs.summary import Pushes

Dropped = Literal["stale", "late", "duplicate", "non_finite"]


@dataclass
class WorkerTally:
    """One worker's part in a run."""

    rank: int
    node: str
    samples: int = 0
    pushes: int = 0
    staleness_sum: int = 0
    staleness_counts: list[int] = field(default_factory=lambda: [0] * (len(STALENESS_EDGES) + 1))
    """Applied pushes by τ, see `STALENESS_EDGES`."""

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.pushes if self.pushes else 0.0


class Tally(BaseModel):
    """Counts of a run, as its checkpoints keep them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    wall_s: float
    """Of the starts before this one, as are `traffic`'s bytes sent and received."""
    traffic: tuple[int, int]
    epoch_samples: Counter[int]
    epoch_loss: defaultdict[int, float]
    """Sums of loss terms."""
    epoch_terms: defaultdict[int, float] = Field(default_factory=lambda: defaultdict(float))
    """How many there were; empty in a checkpoint whose samples have one each."""
    pushes: Counter[str]
    """By outcome: the names of `Pushes`."""
    leases_returned: int
    workers: dict[int, WorkerTally]
    steps_undone: float = 0.0
    """Of slices whose stores were lost, each step times the slice's share of the weights."""
    lowest_val_loss: float | None = None
    num_worse: int = 0
    """Evaluations in a row that did not lower it."""

    @classmethod
    def empty(cls) -> Self:
        return cls(
            wall_s=0.0,
            traffic=(0, 0),
            epoch_samples=Counter(),
            epoch_loss=defaultdict(float),
            pushes=Counter(),
            leases_returned=0,
            workers={},
        )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        Pushes(**self.pushes)  # it knows all outcomes, or refuses
        if not self.epoch_terms:
            self.epoch_terms = defaultdict(float, self.epoch_samples)
        return self

    def worker(self, worker_id: int, node: str) -> WorkerTally:
        """The tally of a worker id; the node is that of its last process."""
        tally = self.workers.setdefault(worker_id, WorkerTally(worker_id - 1, node))
        tally.node = node
        return tally

    def applied(self, worker_id: int, node: str, num_samples: int, staleness: int) -> None:
        self.pushes["applied"] += 1
        worker = self.worker(worker_id, node)
        worker.samples += num_samples
        worker.pushes += 1
        worker.staleness_sum += staleness
        worker.staleness_counts[bisect_left(STALENESS_EDGES, staleness)] += 1
