"""Who takes part in a run, and how each of them does: what a run's status says of its workers."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from smolcluster.runs.status import Instant, Presence, WorkerStatus, instant
from smolcluster.server.rates import SteadyRate
from smolcluster.server.tally import Tally
from smolcluster.server.worker import Worker


@dataclass
class WorkerRow:
    """What the board has of a worker. A worker that has gone is not held: its session's memory is free."""

    status: WorkerStatus
    """How it stood when it joined, or went."""
    worker: Worker | None
    pace: SteadyRate
    measured: dict[str, float] = field(default_factory=dict)
    """What the server has measured of it, by name."""


class StatusBoard:
    """The workers that took part since this start of the server, by worker id."""

    def __init__(
        self,
        tally: Tally,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` gives seconds since 1970; `clock` is that of connections, which is never set."""
        self._tally = tally
        self._now = now
        self._clock = clock
        self._rows: dict[int, WorkerRow] = {}
        self._evaluator_id = 0
        """The worker whose own loop evaluates for the run; 0: none does."""

    def joined(self, worker: Worker, device: str) -> None:
        """A worker takes part from now on, in the place of whoever had its id."""
        worker_id, node = worker.member.worker_id, worker.member.node
        before = self._rows.get(worker_id)
        status = WorkerStatus(
            **worker.who,
            state="joined",
            device=device,
            address=worker.live_session.connection.address,
            step=before.status.step if before else None,
            loss=before.status.loss if before else None,
            samples=0,
            samples_per_s=0.0,
            last_seen=self._seen_at(worker),
        )
        self._rows[worker_id] = WorkerRow(status, worker, self._pace(worker_id, node))

    def _pace(self, worker_id: int, node: str) -> SteadyRate:
        return SteadyRate(lambda: self._tally.worker(worker_id, node).samples, self._clock)

    def count_on(self, tally: Tally) -> None:
        """The run goes on from where that stood, with the same workers."""
        self._tally = tally
        for worker_id, row in self._rows.items():
            row.pace = self._pace(worker_id, row.status.node)

    def departed(self, worker: Worker, state: Presence) -> None:
        row = self._rows[worker.member.worker_id]
        gone: dict[str, object] = {"state": state, "samples_per_s": 0.0, "process_stats": {}}
        row.status = self._status(worker.member.worker_id, row).model_copy(update=gone)
        row.worker = None

    def is_evaluator(self, worker: Worker) -> bool:
        """Whether this worker's evaluations are the run's: the first that makes one, while it is there."""
        row = self._rows.get(self._evaluator_id)
        if row is None or row.worker is None:
            self._evaluator_id = worker.member.worker_id
        return worker.member.worker_id == self._evaluator_id

    def contributed(self, worker: Worker, step: int, loss: float) -> None:
        row = self._rows.get(worker.member.worker_id)
        if row is not None:
            newest = {"step": step, "loss": None if math.isnan(loss) else loss}
            row.status = row.status.model_copy(update=newest)

    def measured(self, worker: Worker, **values: float) -> None:
        """What the server has measured of a worker last, beside what that reports of itself."""
        row = self._rows.get(worker.member.worker_id)
        if row is not None and row.worker is worker:
            row.measured = values

    def workers(self) -> list[WorkerStatus]:
        return [self._status(worker_id, row) for worker_id, row in sorted(self._rows.items())]

    def _status(self, worker_id: int, row: WorkerRow) -> WorkerStatus:
        tally = self._tally.worker(worker_id, row.status.node)
        now = {
            "samples": tally.samples,
            "mean_staleness": tally.mean_staleness,
            "staleness": list(tally.staleness_counts),
        }
        if row.worker is not None:
            connection = row.worker.live_session.connection
            now |= {
                "samples_per_s": row.pace(),
                "process_stats": row.worker.gauge.values | link_stats(row.worker) | row.measured,
                "sent_bytes": connection.bytes_received,
                "received_bytes": connection.bytes_sent,
                "last_seen": self._seen_at(row.worker),
            }
        return WorkerStatus.model_validate({**dict(row.status), **now})

    def _seen_at(self, worker: Worker) -> Instant:
        """When the last byte came from it."""
        silent_s = self._clock() - worker.live_session.connection.last_byte_at
        return instant(self._now() - silent_s)


def link_stats(worker: Worker) -> dict[str, float]:
    """What the server knows of the way to a worker, by the names of `metrics.jsonl`."""
    best = worker.live_session.clocks.best
    return {} if best is None else {"rtt_s": best.round_trip_s, "clock_offset_s": best.offset_s}
