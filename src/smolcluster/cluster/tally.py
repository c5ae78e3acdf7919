"""What a run counts: pushes by outcome, leases that came back, and each worker's part."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from smolcluster.runs.status import STALENESS_EDGES


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
        """Mean τ of the applied pushes."""
        return self.staleness_sum / self.pushes if self.pushes else 0.0


@dataclass
class Tally:
    """Counts of a run."""

    pushes: Counter[str] = field(default_factory=Counter)
    leases_returned: int = 0
    workers: dict[int, WorkerTally] = field(default_factory=dict)

    def worker(self, worker_id: int, node: str) -> WorkerTally:
        """The tally of a worker id; the node is that of its last process."""
        tally = self.workers.setdefault(worker_id, WorkerTally(worker_id - 1, node))
        tally.node = node
        return tally

    def applied(self, worker_id: int, node: str, num_samples: int, staleness: int) -> None:
        """Count a push that was applied."""
        self.pushes["applied"] += 1
        worker = self.worker(worker_id, node)
        worker.samples += num_samples
        worker.pushes += 1
        worker.staleness_sum += staleness
        worker.staleness_counts[bisect_left(STALENESS_EDGES, staleness)] += 1
