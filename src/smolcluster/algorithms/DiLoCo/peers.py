"""What the server remembers of the workers that take part: what they hold, and how fast they are."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from smolcluster.algorithms.DiLoCo.rounds import Pace
from smolcluster.cluster.worker import Worker
from smolcluster.transport.messages import LeaseKey, Stepped

AHEAD_S, LEAST_AHEAD, MOST_AHEAD = 0.25, 2, 16
"""A worker holds batches for so many seconds, and so many, so that it never waits for the next."""
LEAST_STEP_S = 1e-6
PATIENCE = 4.0
"""So many times what was expected of it a worker may take."""


class Outbox:
    """What a worker is to be sent, in order: batches may have to be loaded first."""

    def __init__(self) -> None:
        self._slots: deque[list[Callable[[], None]]] = deque()

    def place(self) -> Callable[[Callable[[], None]], None]:
        """Keep the next place; returns what fills it."""
        slot: list[Callable[[], None]] = []
        self._slots.append(slot)
        return partial(self._fill, slot)

    def put(self, send: Callable[[], None]) -> None:
        self.place()(send)

    def clear(self) -> None:
        """Drop what waits; what fills a place later is dropped as well."""
        self._slots.clear()

    def _fill(self, slot: list[Callable[[], None]], send: Callable[[], None]) -> None:
        slot.append(send)
        while self._slots and self._slots[0]:
            self._slots.popleft()[0]()


@dataclass
class Peer:
    """A worker that takes part. Times are of the monotonic clock, in seconds."""

    worker: Worker
    step_s: float
    """How long a batch takes it."""
    versions: list[int] = field(default_factory=list)
    """Of each fragment's weights that it has, when all that was sent has come."""
    outbox: Outbox = field(default_factory=Outbox)
    unanswered: set[LeaseKey] = field(default_factory=set)
    """Batches that it was given, and has not yet taken a step with."""
    is_asked: bool = False
    """Whether it was asked for its change, and gets nothing to compute before its new weights."""
    due_at: float = math.inf
    """When the change that it was asked for is late."""
    is_stalled: bool = False
    """Whether it was late, and has not been heard of since."""
    stepped_at: float = field(default_factory=time.monotonic)
    """When it joined, or was heard to have taken its last step."""
    upload_s: float = 0.0
    """How long after its last step its change is here."""
    waited_s: float | None = None
    """How long it had nothing to compute before this round's first step; None: that is to come."""

    @property
    def id(self) -> int:
        return self.worker.member.session_id

    @property
    def num_wanted(self) -> int:
        """How many more batches it should hold."""
        ahead = min(MOST_AHEAD, math.ceil(AHEAD_S / self.step_s))
        return max(LEAST_AHEAD, ahead) - len(self.unanswered)

    def pace(self, now: float) -> Pace:
        return Pace(self.step_s, self.upload_s, now + len(self.unanswered) * self.step_s)

    def stepped(self, stepped: Stepped, now: float) -> None:
        """Learn from a step how fast it is."""
        if self.waited_s is None:
            self.waited_s = max(0.0, now - self.stepped_at - stepped.compute_s)
        self.step_s = max(LEAST_STEP_S, 0.7 * self.step_s + 0.3 * stepped.compute_s)
        self.stepped_at = now

    def ask(self, now: float, least_patience_s: float, *, waits: bool) -> None:
        """It is asked for a change now; `waits`: and computes nothing before its new weights come."""
        self.is_asked = waits
        expected_s = self.pace(now).arrival(0) - now
        self.due_at = now + max(least_patience_s, PATIENCE * expected_s)

    def answered(self, now: float, *, is_all: bool) -> None:
        """A change has come; `is_all`: it was asked for no other."""
        if is_all:
            self.due_at = math.inf
        self.upload_s = 0.5 * self.upload_s + 0.5 * max(0.0, now - self.stepped_at)

    def begin(self) -> None:
        """A round begins with new weights, or it is to begin again."""
        self.is_asked, self.waited_s = False, None
