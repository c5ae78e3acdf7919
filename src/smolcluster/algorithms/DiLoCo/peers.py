"""What the server remembers of workers: what each has, in which order messages leave for it, its batches."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from smolcluster.algorithms.DiLoCo.ledger import Applied
from smolcluster.algorithms.DiLoCo.rounds import Timing
from smolcluster.data.permutation import Range
from smolcluster.server.worker import Worker
from smolcluster.training.loop import StepTaken
from smolcluster.wire.messages import Message

LEAST_PATIENCE_S, PATIENCE = 30.0, 4.0
"""So long, and so many times what was expected, a worker may take for a step, or for its change."""
LEAST_RECEIVED_NBYTES = 64 * 1024
"""More than heartbeats are in that time, even from many hosts."""


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
class Peer(Timing):
    """A worker that takes part. Times are of the monotonic clock, in seconds."""

    worker: Worker = field(kw_only=True)
    versions: list[int] = field(default_factory=list)
    """Of each fragment's weights that it has, when all that was sent has come."""
    outbox: Outbox = field(default_factory=Outbox)
    num_gone: int = 0
    """How many frames had left for it, or been taken back, when it was last seen to go on."""
    num_received: int = 0
    """How many bytes it had received when it was last seen to go on."""
    is_joining: bool = False
    """Whether it has still to reach the other hosts, and is given no work."""
    steps_alone: bool = False
    """Whether it takes no part in a synchronous beginning: see `Ready`."""
    is_stalled: bool = False
    """Whether it was late, and has not been heard of since."""
    drift: float | None = None
    """The norm of its newest change, as a share of that of the weights; None: it has sent none."""
    step_terms: float | None = None
    """Loss terms of a local step, on average over its last change; None: it has sent none."""

    @property
    def id(self) -> int:
        return self.worker.member.session_id

    def is_late(self, now: float, *, owes_change: bool, grace: float | None) -> bool:
        """Whether it has not gone on for too long with what it is to do.

        What it has not been sent yet, by this or another host, is not expected of it: a slow link is no slow
        worker.

        Args:
            now: on the same clock as all times.
            owes_change: whether it was asked for a change that has not come.
            grace: seconds beyond what is expected; None: by what is expected.
        """
        num_gone = self.worker.live_session.num_gone
        is_idle = not (self.unanswered or owes_change) or self.outbox.is_waiting
        num_received = self.worker.gauge.received_bytes
        is_receiving = num_received - self.num_received >= LEAST_RECEIVED_NBYTES
        if is_idle or is_receiving or num_gone != self.num_gone:
            self.progressed_at, self.num_gone = now, num_gone
            self.num_received = num_received
        expected_s = self.step_s if self.unanswered else self.upload_s
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * expected_s)
        if grace is not None:
            patience_s = expected_s + grace
        return now - self.progressed_at >= patience_s


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


def tell(peer: Peer, message: Message) -> None:
    peer.outbox.put(partial(peer.worker.live_session.send, message))


def local_step(
    applied: Applied, worker: Worker, version: int, outer_step: int, drift: float | None
) -> StepTaken:
    """A batch that outer step number `outer_step` has applied, as step `version` of the run."""
    stepped = applied.stepped
    rate = stepped.learning_rate
    return StepTaken(
        version=version,
        samples=Range.of(applied.key),
        loss=stepped.mean_loss,
        learning_rate=applied.learning_rate if rate is None else rate,
        grad_norm=stepped.grad_norm,
        layer_norms={},
        num_terms=stepped.num_terms,
        **worker.who,
        outer_step=outer_step,
        drift=drift,
        is_skipped=stepped.overflow is not None,
    )
