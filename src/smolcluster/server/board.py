"""Who takes part in a run, and how each of them does: what a run's status says of its workers."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from smolcluster.runs.status import Presence, WorkerStatus, instant
from smolcluster.server.rates import SteadyRate
from smolcluster.server.tally import Tally
from smolcluster.server.worker import Worker
from smolcluster.wire.messages import Telemetry


@dataclass
class WorkerRow:
    """What the board has of a worker. A worker that has gone is not held: its session's memory is free."""

    rank: int
    node: str
    device: str
    address: str
    worker: Worker | None
    pace: SteadyRate
    state: Presence = "joined"
    step: int | None = None
    loss: float | None = None
    process_stats: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    """What the server has measured of it, by name."""
    last_seen: float = 0.0
    """Of a worker that has gone: when the last byte came from it, on the board's clock."""
    traffic: tuple[int, int] = (0, 0)
    """Of a worker that has gone: bytes that it sent and received in its last session."""

    @property
    def seen_at(self) -> float:
        """When the last byte came from it, on the clock of connections."""
        if self.worker is None:
            return self.last_seen
        return self.worker.live_session.connection.last_byte_at

    @property
    def moved(self) -> tuple[int, int]:
        if self.worker is None:
            return self.traffic
        connection = self.worker.live_session.connection
        return connection.bytes_received, connection.bytes_sent


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
        self._entries: dict[int, WorkerRow] = {}
        self._evaluator_id = 0
        """The worker whose own loop evaluates for the run; 0: none does."""

    def joined(self, worker: Worker, device: str) -> None:
        """A worker takes part from now on, in the place of whoever had its id."""
        worker_id, node = worker.member.worker_id, worker.member.node
        pace = self._pace(worker_id, node)
        before = self._entries.get(worker_id)
        address = worker.live_session.connection.address
        entry = self._entries[worker_id] = WorkerRow(
            worker.rank, node, device, address, worker, pace
        )
        if before is not None:
            entry.step, entry.loss = before.step, before.loss

    def _pace(self, worker_id: int, node: str) -> SteadyRate:
        return SteadyRate(lambda: self._tally.worker(worker_id, node).samples, self._clock)

    def count_on(self, tally: Tally) -> None:
        """The run goes on from where that stood, with the same workers."""
        self._tally = tally
        for worker_id, entry in self._entries.items():
            entry.pace = self._pace(worker_id, entry.node)

    def departed(self, worker: Worker, state: Presence) -> None:
        entry = self._entries[worker.member.worker_id]
        entry.last_seen, entry.traffic = entry.seen_at, entry.moved
        entry.state, entry.worker, entry.process_stats, entry.measured = state, None, {}, {}

    def is_evaluator(self, worker: Worker) -> bool:
        """Whether this worker's evaluations are the run's: the first that makes one, while it is there."""
        entry = self._entries.get(self._evaluator_id)
        if entry is None or entry.worker is None:
            self._evaluator_id = worker.member.worker_id
        return worker.member.worker_id == self._evaluator_id

    def heard(self, worker: Worker, telemetry: Telemetry) -> dict[str, float] | None:
        """A worker reports of itself; returns what is to be kept of that, if it is time."""
        kept = worker.gauge.take(telemetry)
        entry = self._entries.get(worker.member.worker_id)
        if entry is not None and entry.worker is worker:
            entry.process_stats = worker.gauge.values | link_stats(worker)
        return None if kept is None else kept | link_stats(worker)

    def contributed(self, worker: Worker, step: int, loss: float) -> None:
        entry = self._entries.get(worker.member.worker_id)
        if entry is not None:
            entry.step = step
            entry.loss = None if math.isnan(loss) else loss

    def measured(self, worker: Worker, **values: float) -> None:
        """What the server has measured of a worker last, beside what that reports of itself."""
        entry = self._entries.get(worker.member.worker_id)
        if entry is not None and entry.worker is worker:
            entry.measured = values

    def workers(self) -> list[WorkerStatus]:
        return [
            self._status(worker_id, entry) for worker_id, entry in sorted(self._entries.items())
        ]

    def _status(self, worker_id: int, entry: WorkerRow) -> WorkerStatus:
        tally = self._tally.worker(worker_id, entry.node)
        sent_bytes, received_bytes = entry.moved
        return WorkerStatus(
            rank=entry.rank,
            node=entry.node,
            state=entry.state,
            device=entry.device,
            step=entry.step,
            loss=entry.loss,
            samples=tally.samples,
            samples_per_s=entry.pace() if entry.state == "joined" else 0.0,
            mean_staleness=tally.mean_staleness,
            staleness=list(tally.staleness_counts),
            process_stats=entry.process_stats | entry.measured,
            address=entry.address,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            last_seen=instant(self._now() - (self._clock() - entry.seen_at)),
        )


def link_stats(worker: Worker) -> dict[str, float]:
    """What the server knows of the way to a worker, by the names of `metrics.jsonl`."""
    best = worker.live_session.clocks.best
    return {} if best is None else {"rtt_s": best.round_trip_s, "clock_offset_s": best.offset_s}
