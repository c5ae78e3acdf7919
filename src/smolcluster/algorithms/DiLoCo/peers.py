"""What the server remembers of the workers that take part: what they hold, and how fast they are."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from smolcluster.algorithms.DiLoCo.rounds import Pace, is_retried
from smolcluster.cluster.worker import Worker
from smolcluster.transport.messages import LeaseKey, Stepped

AHEAD_S, LEAST_AHEAD, MOST_AHEAD = 0.25, 2, 16
"""A worker holds batches for so many seconds, and so many, so that it never waits for the next."""
MOST_BEHIND = 256
"""So many at most where messages wait behind a fragment on its link."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 1e6
NUM_RECENT = 3
"""A step counts as long as the median of so many: a machine may be held up once."""
LEAST_PATIENCE_S, PATIENCE = 30.0, 4.0
"""So long, and so many times what was expected, a worker may take for a step, or for its change."""


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

    @property
    def is_waiting(self) -> bool:
        """Whether something has still to be loaded."""
        return bool(self._slots)

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
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    """How long its newest steps took."""
    num_idle_rounds: int = 0
    """In so many rounds in a row it has been given nothing to compute."""
    has_had: bool = False
    """Whether it has been given something in this round."""
    is_measured_anew: bool = False
    """Whether its next step alone says how fast it is."""
    versions: list[int] = field(default_factory=list)
    """Of each fragment's weights that it has, when all that was sent has come."""
    outbox: Outbox = field(default_factory=Outbox)
    unanswered: set[LeaseKey] = field(default_factory=set)
    """Batches that it was given, and has not yet taken a step with."""
    is_asked: bool = False
    """Whether it was asked for its change, and gets nothing to compute before its new weights."""
    progressed_at: float = field(default_factory=time.monotonic)
    """When it was last seen to go on with what it is to do, or to be sent something, or had nothing to do."""
    num_sent: int = 0
    """How many frames it had been sent then."""
    began_at: float = 0.0
    """When it was given a batch after it had had none."""
    is_computing: bool = False
    """Whether it held more batches when it was heard to have taken its last step."""
    is_stalled: bool = False
    """Whether it was late, and has not been heard of since."""
    stepped_at: float = field(default_factory=time.monotonic)
    """When it joined, or was heard to have taken its last step."""
    upload_s: float = 0.0
    """How long after its last step its change is here."""
    drift: float | None = None
    """The norm of its newest change, as a share of that of the weights; None: it has sent none."""
    num_since_asked: int = 0
    """Batches that it was given since it was asked for its change last."""
    step_terms: float | None = None
    """Loss terms of a local step, on average over its last change; None: it has sent none."""
    waited_s: float | None = None
    """How long it had nothing to compute before this round's first step; None: that is to come."""

    @property
    def id(self) -> int:
        return self.worker.member.session_id

    def num_wanted(self, busy_s: float) -> int:
        """How many more batches it should hold, while its link may be busy with other things for so long."""
        ahead = min(MOST_AHEAD, math.ceil(AHEAD_S / self.step_s))
        behind = min(MOST_BEHIND, math.ceil(busy_s / self.step_s))
        return max(LEAST_AHEAD, ahead, 1 + behind) - len(self.unanswered)

    def pace(self, now: float, *, is_streaming: bool) -> Pace:
        """How fast it is; who is silent with batches in hand is as slow as it has been silent.

        In streaming nobody waits for an upload.
        """
        silent_s = now - max(self.stepped_at, self.began_at) if self.unanswered else 0.0
        step_s = max(self.step_s, silent_s)
        upload_s = 0.0 if is_streaming else self.upload_s
        return Pace(step_s, upload_s, now + len(self.unanswered) * step_s)

    def gets(self, lease: LeaseKey, now: float) -> None:
        """It is given a batch."""
        if not self.unanswered:
            self.began_at = now
        self.unanswered.add(lease)
        self.num_since_asked += 1
        self.is_measured_anew |= self.is_tried_again
        self.has_had = True

    def stepped(self, stepped: Stepped, now: float) -> None:
        """Learn from a step how fast it is: as it says, or as its steps come, if that is slower."""
        if self.waited_s is None:
            self.waited_s = max(0.0, now - self.stepped_at - stepped.compute_s)
        took_s = max(stepped.compute_s, now - self.stepped_at if self.is_computing else 0.0)
        if self.is_measured_anew:
            self.is_measured_anew, self.step_s = False, took_s
            self.recent_s.clear()
        self.recent_s.append(took_s)
        smoothed_s = 0.7 * self.step_s + 0.3 * median(self.recent_s)
        self.step_s = min(MOST_STEP_S, max(LEAST_STEP_S, smoothed_s))
        self.stepped_at = self.progressed_at = now
        self.is_computing = bool(self.unanswered)

    def answered(self, now: float) -> None:
        """A change has come."""
        self.progressed_at = now
        self.upload_s = 0.5 * self.upload_s + 0.5 * max(0.0, now - self.stepped_at)

    def is_late(
        self, now: float, *, owes_change: bool, heard_at: float, grace: float | None
    ) -> bool:
        """Whether it has not gone on for too long with what it is to do.

        What it has not been sent yet is not expected of it: a slow link is no slow worker.

        Args:
            now: on the same clock as all times.
            owes_change: whether it was asked for a change that has not come.
            heard_at: when a piece of one came last.
            grace: seconds beyond what is expected; None: by what is expected.
        """
        num_sent = self.worker.live_session.num_sent
        is_idle = not (self.unanswered or owes_change) or self.outbox.is_waiting
        if is_idle or num_sent != self.num_sent:
            self.progressed_at, self.num_sent = now, num_sent
        self.progressed_at = max(self.progressed_at, heard_at)
        expected_s = self.step_s if self.unanswered else self.upload_s
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * expected_s)
        if grace is not None:
            patience_s = expected_s + grace
        return now - self.progressed_at >= patience_s

    def begin(self) -> None:
        """A round begins with new weights, or it is to begin again."""
        self.is_asked, self.waited_s, self.num_since_asked = False, None, 0
        self.num_idle_rounds = 0 if self.has_had else self.num_idle_rounds + 1
        self.has_had = False

    @property
    def is_tried_again(self) -> bool:
        """Whether it should be given a batch because it was too slow for so long: it may not be any more."""
        return not self.has_had and is_retried(self.num_idle_rounds)


def share_of(peer: Peer, others: Iterable[Peer]) -> float:
    """The part of all loss terms a second that a worker brings; `others` may have sent no change yet.

    A worker whose link is slow brings a longer change more rarely, and counts for as much.
    """
    assert peer.step_terms is not None  # noqa: S101 - it is what its change has just said
    own = peer.step_terms
    theirs = sum(
        (own if each.step_terms is None else each.step_terms) / each.step_s for each in others
    )
    rate = own / peer.step_s
    return rate / (rate + theirs) if rate else 0.0
