"""A worker as the server knows it, and who hears what becomes of workers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from smolcluster.runs.events import (
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRejected,
    WorkerStalled,
)
from smolcluster.runs.paths import process_title
from smolcluster.server.process_stats import Gauge
from smolcluster.utils.meter import Meter
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import Goodbye, Logged, Ready, Telemetry
from smolcluster.wire.session import Session


class Who(TypedDict):
    """A worker, as events and metrics name it."""

    rank: int
    node: str


@dataclass
class Worker:
    """A worker that takes part from its `Ready` on; times are of the monotonic clock, in seconds."""

    member: Member
    session: Session | None = None
    ready: Ready | None = None
    goodbye: Goodbye | None = None
    """What it has said when it left."""
    gauge: Gauge = field(default_factory=Gauge)
    admitted_at: float = field(default_factory=time.monotonic)
    role: str = "worker"
    """What it is to people."""
    is_slow: bool = False
    """Whether it has been said that it has not been ready for long."""

    @property
    def rank(self) -> int:
        """Worker ids count from 1, ranks from 0."""
        return self.member.worker_id - 1

    @property
    def who(self) -> Who:
        return Who(rank=self.rank, node=self.member.node)

    @property
    def live_session(self) -> Session:
        """The session of a worker that has one: every worker that said anything."""
        assert self.session is not None  # noqa: S101 - without a session it has said nothing
        return self.session

    @property
    def name(self) -> str:
        return process_title(self.role, self.member.node, self.rank)


WorkerNews = WorkerJoined | WorkerLeft | WorkerLost | WorkerStalled | WorkerRejected


class Listener:
    """Is told by the deciding thread what becomes of the workers of a `WorkerPool`.

    This one keeps what workers report of themselves, and nothing else.
    """

    is_waiting = False
    """Whether nobody trains, for lack of workers; the pool sets it."""

    def __init__(self, meter: Meter) -> None:
        """`meter` counts how long the pool waits for events."""
        self.meter = meter

    @property
    def ending(self) -> str:
        """What workers are told at the end of a run that has ended well."""
        return "all is done"

    @property
    def known_nodes(self) -> Mapping[int, str]:
        """The nodes of all workers that have taken part so far, by worker id."""
        return {}

    def begun(self) -> None:
        """There are enough workers for the first time."""

    def happened(self, event: WorkerNews, worker: Worker | None = None) -> None:
        """`worker` joined, left, was lost or does not answer, or None: one was refused."""

    def heard(self, worker: Worker, message: Telemetry | Logged) -> None:
        """A worker reports of itself, or its user's own loop has measured something."""
        if isinstance(message, Telemetry):
            worker.gauge.take(message)

    def ended(self, error: BaseException | None = None) -> None:
        """The run is over, and all workers have been told; `error` has ended it before its time."""
