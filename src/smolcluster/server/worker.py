"""A worker as the server knows it."""

import time
from dataclasses import dataclass, field
from typing import TypedDict

from smolcluster.runs.paths import process_title
from smolcluster.server.process_stats import Gauge
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import Ready
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
    goodbye: str | None = None
    """Why it leaves, once it has said so."""
    has_failed: bool = False
    """Whether it leaves because it cannot go on."""
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
