"""What stages send each other: trees of tensors as bytes, and what has come and waits to be computed with.

What waits is found by attempt, step, stage and microbatch. Readers of sessions put, the thread that computes
takes. An attempt is the time from a plan, or from a step that is done again, until the next one: what comes
late of an older attempt or an older step is dropped, what comes early of a newer one is kept. Whoever waits
is woken when a neighbour is lost, or when the coordinator has decided otherwise.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from typing import Literal, NamedTuple

from smolcluster.data import pytree
from smolcluster.data.dataset import Batch
from smolcluster.data.pytree import Encoded, map_tensors
from smolcluster.errors import DataError, PeerLost, ProtocolError, SmolclusterError
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_bytes, format_duration
from smolcluster.wire.messages import MAX_BATCH_NBYTES, StageNeighbour, TransferPiece

TICK_S = 0.5
"""How soon whoever waits looks whether bytes still move."""
Direction = Literal["forward", "backward", "exchange"]


class Key(NamedTuple):
    """Names what one stage sends to another, as `TransferPiece` does."""

    attempt: int
    step: int
    direction: Direction
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = {"forward": "the input", "backward": "the gradient", "exchange": "tied gradients"}
        return f"{what[self.direction]} of microbatch {self.microbatch}, step {self.step}"


def key_of(piece: TransferPiece) -> Key:
    return Key(piece.attempt, piece.step, piece.direction, piece.stage, piece.microbatch)


class Mailbox:
    """Trees of tensors by their keys, and why they will not come any more; processes by their `instance`."""

    def __init__(self, max_held_nbytes: int) -> None:
        """`max_held_nbytes`: what may wait here in all; more is a mistake of whoever sends it."""
        self._max_held_nbytes = max_held_nbytes
        self._changed = threading.Condition()
        self._trees: dict[Key, tuple[Batch, int]] = {}
        """With the bytes that each has taken."""
        self._held_nbytes = 0
        """Of these, and of what is arriving."""
        self._attempt = self._step = 0
        self._interrupted: tuple[int, SmolclusterError] | None = None
        """What has ended all attempts up to this one."""
        self._lost: dict[str, str] = {}
        self._num_pieces: Counter[str] = Counter()

    # any thread

    def interrupt(self, error: SmolclusterError, through: int) -> None:
        """Have whoever waits in an attempt up to `through`, now or later, raise this error."""
        with self._changed:
            if self._interrupted is None or self._interrupted[0] <= through:
                self._interrupted = (through, error)
            self._changed.notify_all()

    def is_interrupted(self) -> bool:
        with self._changed:
            return self._interrupted is not None and self._interrupted[0] >= self._attempt

    def lose(self, instance: str, reason: str) -> None:
        """Nothing more comes from that process, nor goes to it, until it is `found`."""
        with self._changed:
            self._lost[instance] = reason
            self._changed.notify_all()

    def found(self, instance: str) -> None:
        """That process can be reached."""
        with self._changed:
            self._lost.pop(instance, None)
            self._changed.notify_all()

    def notify(self) -> None:
        """Have whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    # readers

    def is_wanted(self, piece: TransferPiece) -> bool:
        """Whether it is of an attempt and a step that are not over."""
        with self._changed:
            return self._is_wanted(piece.attempt, piece.step)

    def reserve(self, nbytes: int) -> None:
        """Memory is about to be taken for what comes.

        Raises:
            ProtocolError: more would wait here than may.
        """
        with self._changed:
            if self._held_nbytes + nbytes > self._max_held_nbytes:
                raise ProtocolError(
                    f"{format_bytes(nbytes)} of activations come, {format_bytes(self._held_nbytes)} wait "
                    f"already, and this machine has {format_bytes(self._max_held_nbytes)} for both: lower "
                    "batch_size, or raise microbatches"
                )
            self._held_nbytes += nbytes

    def release(self, nbytes: int) -> None:
        """What had been reserved is needed no more."""
        with self._changed:
            self._held_nbytes -= nbytes

    def count_piece(self, source: str) -> None:
        """A part of something has come from that process."""
        self._num_pieces[source] += 1

    def put(self, key: Key, tree: Batch, nbytes: int) -> None:
        """Leave what is whole, and for which `nbytes` had been reserved.

        Raises:
            ProtocolError: it is here already.
        """
        with self._changed:
            if not self._is_wanted(key.attempt, key.step):
                self._held_nbytes -= nbytes
                return
            if key in self._trees:
                raise ProtocolError(f"{key} came twice")
            self._trees[key] = (tree, nbytes)
            self._changed.notify_all()

    # the thread that computes

    def begin(self, attempt: int, step: int) -> None:
        """Forget what is older than this attempt and step, and who was lost before."""
        with self._changed:
            self._attempt, self._step = attempt, step
            self._lost.clear()
            self._drop()

    def begin_step(self, step: int) -> None:
        """Forget what is older."""
        with self._changed:
            self._step = step
            self._drop()

    def key(self, direction: Direction, stage: int, microbatch: int) -> Key:
        """What is of this attempt and step."""
        return Key(self._attempt, self._step, direction, stage, microbatch)

    def take(self, key: Key, source: StageNeighbour, timeout_s: float) -> Batch:
        """Wait for what has this key, and comes from `source`.

        Raises:
            PeerLost: that is lost, or has sent nothing for `timeout_s` seconds.
            SmolclusterError: what `interrupt` was given.
        """
        self.wait_for(
            lambda: key in self._trees,
            peer=source,
            timeout_s=timeout_s,
            progress=lambda: self._num_pieces[source.instance],
            what=f"{key} did not come",
        )
        with self._changed:
            tree, nbytes = self._trees.pop(key)
            self._held_nbytes -= nbytes
        return tree

    def check(self, peers: Iterable[StageNeighbour]) -> None:
        """See to it that none of these is lost.

        Raises:
            PeerLost: one is.
        """
        with self._changed:
            for peer in peers:
                if (reason := self._lost.get(peer.instance)) is not None:
                    raise PeerLost(f"{peer} is lost: {reason}")

    def wait_for(
        self,
        is_ready: Callable[[], object],
        *,
        peer: StageNeighbour,
        timeout_s: float,
        progress: Callable[[], int],
        what: str,
    ) -> None:
        """Wait until it is so, for `timeout_s` seconds without `progress` at most; `what`: what was not.

        Raises:
            PeerLost: the peer is lost, or time is over.
            SmolclusterError: what `interrupt` was given.
        """
        with self._changed:
            so_far, deadline = progress(), Deadline(timeout_s)
            while True:
                if self._interrupted and self._interrupted[0] >= self._attempt:
                    # a copy: what was raised refers to its frames, and those to the layers of this attempt
                    raise copy(self._interrupted[1])
                if is_ready():
                    return
                self.check([peer])
                if (now := progress()) != so_far:
                    so_far, deadline = now, Deadline(timeout_s)
                if deadline.expired:
                    raise PeerLost(f"{peer}: {what} within {format_duration(timeout_s)}")
                self._changed.wait(min(deadline.remaining(), TICK_S))

    def _is_wanted(self, attempt: int, step: int) -> bool:
        return (attempt, step) >= (self._attempt, self._step)

    def _drop(self) -> None:
        for key in [each for each in self._trees if not self._is_wanted(each.attempt, each.step)]:
            _, nbytes = self._trees.pop(key)
            self._held_nbytes -= nbytes


def on_cpu(tree: Batch) -> Batch:
    """The tree's values on the CPU, without their graphs; what is there already is not copied."""
    return map_tensors(tree, lambda tensor: tensor.detach().to("cpu"))


def encode(tree: Batch, codec: str) -> Encoded:
    """Lay out a tree on the CPU, whose activations are written as `codec` does.

    Raises:
        DataError: something in it cannot travel, or it is too large.
    """
    encoded = pytree.encode(tree, codec)
    if encoded.nbytes > MAX_BATCH_NBYTES:
        raise DataError(
            f"it takes {encoded.nbytes:,} bytes, at most {MAX_BATCH_NBYTES:,} can be sent; raise "
            "microbatches"
        )
    return encoded
