"""How a worker hears of the server's steps: mean gradients, commits and state, in the order of the wire."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from smolcluster.codec.registry import get_codec
from smolcluster.errors import PeerLost, ProtocolError
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.push import DIGEST_NBYTES, digests_spec
from smolcluster.server.slices import content_pieces, place_of
from smolcluster.server.store import state_of
from smolcluster.server.weights import StateReceiver
from smolcluster.training.buffers import BufferValues
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    WEIGHTS,
    Buffers,
    Commit,
    LeaseKey,
    Message,
    Park,
    Push,
    Reduced,
    Skip,
    State,
    StoreList,
    frame_of,
)
from smolcluster.wire.session import Receiver
from smolcluster.wire.streams import Assembler, Piece, span_pieces

PACE = 3
"""Buckets by which a push may be ahead of the mean that comes back."""


@dataclass(eq=False)
class StateArrived(Event):
    """A tensor of the server's state, or a bucket of its weights: `values` (n,) of what `state` names.

    `buffers`: those that came before it.
    """

    state: State
    values: Tensor
    buffers: BufferValues = field(default_factory=dict)


@dataclass(eq=False)
class Committed(Event):
    """A step to take, with the mean that `Means` has of its version.

    `digests`: of the server's weights before it, one a bucket, or none at all. `buffers`: the model's, if the
    step has changed any.
    """

    commit: Commit
    digests: Sequence[bytes] = ()
    buffers: BufferValues = field(default_factory=dict)


class MeanWhole(Event):
    """All that a store has of a mean is here: a Commit may have waited for it."""


class FellBehind(Event):
    """A mean came while both buffers were taken: it and all steps after it are left out until a `Park`."""


@dataclass
class Mean:
    """A mean gradient (num_params,) on its way, and how many buckets of each span have arrived."""

    gradient: Tensor
    num_reduced: Counter[range] = field(default_factory=Counter)


class Means:
    """The mean gradients on their way to a worker, in two buffers that take turns. Any thread.

    The server may be a step ahead of a worker that is still computing. One that is further behind makes its
    own reader wait for a buffer, but not for so long that the server would take it for dead.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, span: range, patience_s: float, longest_wait_s: float
    ) -> None:
        """The server adds up the buckets `span`; for the times in seconds see `StepReceiver`."""
        self.spans = [span]
        """What each sender adds up; the server's is the first."""
        self.has_fallen_behind = False
        self._patience_s, self._longest_wait_s = patience_s, longest_wait_s
        self._free = [torch.empty(numel, dtype=dtype) for _ in range(2)]
        self._open: dict[int, Mean] = {}
        """By version. Stores may be ahead of the server or behind."""
        self._changed = threading.Condition()
        self._is_closed = self._is_paced = False

    def memory_for(self, version: int) -> Tensor | None:
        """Where the mean of a step belongs (num_params,); None: there was no buffer for too long.

        Raises:
            PeerLost: the worker has left.
        """
        longest_s = None if math.isinf(self._longest_wait_s) else self._longest_wait_s
        with self._changed:
            self._changed.wait_for(
                lambda: version in self._open or self._free or self._is_closed, longest_s
            )
            if version not in self._open:
                if not self._free:
                    if self._is_closed:
                        raise PeerLost("the worker has left")
                    self.has_fallen_behind = True
                    return None
                self._open[version] = Mean(self._free.pop())
                self._changed.notify_all()
            return self._open[version].gradient

    def arrived(self, version: int, span: range) -> None:
        """The next bucket of a span is in its place."""
        with self._changed:
            self._open[version].num_reduced[span] += 1
            self._changed.notify_all()

    def is_whole(self, version: int, spans: Sequence[range] | None = None) -> bool:
        """Whether all buckets of these spans are there of a step's mean; None: of all spans."""
        with self._changed:
            mean = self._open.get(version)
            return mean is not None and all(
                mean.num_reduced[span] == len(span)
                for span in (self.spans if spans is None else spans)
            )

    def take(self, version: int) -> Tensor:
        """A whole mean (num_params,), which is the caller's until it is given back."""
        with self._changed:
            self._changed.notify_all()
            return self._open.pop(version).gradient

    def give_back(self, gradient: Tensor) -> None:
        with self._changed:
            self._free.append(gradient)
            self._changed.notify_all()

    def forget(self) -> None:
        """What is on its way is of no use."""
        with self._changed:
            self._free += [mean.gradient for mean in self._open.values()]
            self._open.clear()
            self.has_fallen_behind = False
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody may wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def pace(self, *, paced: bool) -> None:
        """Whether the frames of a push shall wait for the mean, or be sent as fast as the link can."""
        with self._changed:
            self._is_paced = paced
            self._changed.notify_all()

    def hold(self, bucket: int, longest_s: float) -> None:
        """Wait until a bucket of our push is fewer than `PACE` ahead of the mean; in the writer's thread.

        Flows that share the server's link do not share it evenly, and the mean can only come when the
        slowest has brought its part: whoever is ahead gives way. Nobody waits before the mean has begun
        to come, because somebody may still be computing, nor any more after `longest_s` seconds, or the
        run's `timeout`, in vain: only when a push is whole others learn that they are late.
        """
        patience_s = min(longest_s, self._patience_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_in_pace(bucket), patience_s):
                self._is_paced = False

    def _is_in_pace(self, bucket: int) -> bool:
        """As compared with what has come of the open step's mean from where the bucket goes to."""
        if self._is_closed or not self._is_paced or not self._open:
            return True
        span = next((span for span in self.spans if bucket in span), self.spans[0])
        num_reduced = self._open[min(self._open)].num_reduced[span]
        return not 0 < num_reduced <= bucket - span.start - PACE


class MeanReceiver(Receiver):
    """Takes the means of the buckets that one sender adds up, which come in order: one stream a step."""

    def __init__(
        self, means: Means, buckets: Sequence[slice], codec_name: str, span: range
    ) -> None:
        codec = get_codec(codec_name)  # its scratch is this reader's own
        pieces = span_pieces(codec, buckets, span)
        self._means, self._span = means, span
        self._place, self._is_lossless = place_of(buckets, span), codec.lossless
        self._version = 0
        """Of the newest stream."""
        self._stream = Assembler[Reduced](
            "mean gradient", partial(self._begin, pieces), self._memory
        )

    def _begin(self, pieces: Sequence[Piece], first: Reduced) -> Sequence[Piece]:
        self._version = first.version
        return pieces

    def _memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The buckets' place in the step's gradient; that of a mean that is left out is nobody's."""
        gradient = self._means.memory_for(self._version)
        return torch.empty(numel, dtype=dtype) if gradient is None else gradient[self._place]

    def forget(self) -> None:
        """What is on its way is left out."""
        self._stream.first = None

    def place_for(self, message: Message) -> memoryview | None:
        """A lossless mean goes straight to its place, which is nobody's until its commit."""
        is_placed = self._is_lossless and not self._means.has_fallen_behind
        if not isinstance(message, Reduced) or not is_placed:
            return None
        return self._stream.place_for(message)

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a bucket; the last one is told.

        Raises:
            ProtocolError: it is not the next one, or is not of the agreed shape and codec.
        """
        if not isinstance(message, Reduced):
            raise ProtocolError(f"a store sent {type(message).__name__}")
        if not (self._is_lossless or self._means.has_fallen_behind):
            self._stream.take(message, payload)
        if self._means.has_fallen_behind:
            return None
        self._means.arrived(message.version, self._span)
        return MeanWhole() if self._stream.first is None else None


class StepReceiver(StateReceiver):
    """A worker's receiver: puts means and the server's state together, and passes all else on.

    A worker that is too far behind reads on, and leaves out the steps for which it has no memory.
    """

    def __init__(
        self,
        replica: Replica,
        codec_name: str,
        patience_s: float = math.inf,
        longest_wait_s: float = math.inf,
    ) -> None:
        """`patience_s`: how long a push waits for the mean at most, each time; `longest_wait_s`: how long
        the reader waits for a buffer.
        """
        collector = BufferCollector(replica.buffers, replica.bucket_bytes)
        super().__init__(replica.buckets, replica.params.dtype, collector)
        self._codec_name = codec_name
        span = range(len(replica.buckets))
        self.means = Means(
            replica.num_params, get_codec(codec_name).dtype, span, patience_s, longest_wait_s
        )
        self._own = MeanReceiver(self.means, self._buckets, codec_name, span)
        self._is_told = False
        """Whether it has been said that the worker has fallen behind."""
        self._contents = state_of(replica)
        self._missing = list(self._contents)
        """Tensors of the state that are still to come; none: what comes are buckets of the weights."""
        self._states = Assembler[State]("state", self._pieces_of)

    def from_store(self, span: range) -> MeanReceiver:
        """What takes the means that a store on another host sends."""
        self.means.spans.append(span)
        return MeanReceiver(self.means, self._buckets, self._codec_name, span)

    def close(self) -> None:
        """The worker takes no more steps, or the session has ended: nobody may wait any more."""
        self.means.close()

    def place_for(self, message: Message) -> memoryview | None:
        return self._own.place_for(message) or super().place_for(message)

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, Reduced | Commit | Buffers):
            return self._of_step(message, payload)
        event = super().__call__(message, payload)
        if isinstance(message, Park):
            self._begin_anew()
        elif isinstance(message, StoreList):
            self.means.spans[0] = self._span
            self._own = MeanReceiver(self.means, self._buckets, self._codec_name, self._span)
        return event

    def _begin_anew(self) -> None:
        """Forget the steps and the state that are on their way: the whole state follows."""
        self._own.forget()
        self.means.forget()
        self._is_told = False
        self.forget()
        self._missing = list(self._contents)

    def _of_step(self, message: Reduced | Commit | Buffers, payload: memoryview) -> Event | None:
        """Take a part of what everybody is sent of a step; with its Commit it is whole."""
        if isinstance(message, Reduced):
            self._own(message, payload)
        if self.means.has_fallen_behind:
            is_news, self._is_told = not self._is_told, True
            return FellBehind() if is_news else None
        if isinstance(message, Commit):
            return self._committed(message, payload)
        return super().__call__(message, payload) if isinstance(message, Buffers) else None

    def _take(self, state: State, payload: memoryview) -> StateArrived | None:
        _, values = self._states.take(state, payload)
        if values is None:
            return None
        del self._missing[:1]
        return StateArrived(state, values, self.take_buffers())

    def _committed(self, commit: Commit, payload: memoryview) -> Committed:
        if not self.means.is_whole(commit.version, self.means.spans[:1]):
            raise ProtocolError(
                f"the server committed step {commit.version} before it had sent all of its mean gradient"
            )
        return Committed(commit, self._digests(commit, payload), self.take_buffers())

    def _digests(self, commit: Commit, payload: memoryview) -> list[bytes]:
        if commit.tensor is None:
            return []
        if commit.tensor != digests_spec(len(self._buckets)):
            raise ProtocolError("the server's digests are not one a bucket")
        starts = range(0, payload.nbytes, DIGEST_NBYTES)
        return [bytes(payload[start : start + DIGEST_NBYTES]) for start in starts]

    def _pieces_of(self, first: State) -> Sequence[Piece]:
        """Of the state each tensor in its turn, whole; after that single buckets of the weights."""
        if self._missing:
            if first.content != self._missing[0]:
                return []
            return content_pieces(first.content, self._contents[first.content], self._buckets)
        if first.content != WEIGHTS or first.bucket >= len(self._buckets):
            return []
        span = range(first.bucket, first.bucket + 1)
        return content_pieces(WEIGHTS, self._contents[WEIGHTS], self._buckets, span)


@dataclass
class Outgoing:
    """A push on its way out: what its frames wait for, how long they did, and whether it is called off."""

    lease: LeaseKey
    compute_s: float
    hold: Callable[[int, float], None] | None
    """Returns when a bucket may be sent, after so many seconds at most; None: at once."""
    is_wanted: bool = True
    held_s: float = 0.0
    is_cut_short: bool = False

    def frame(self, push: Push, payload: memoryview, longest_s: float) -> Frame | None:
        """The frame of its next bucket, when it may be sent; in the writer's thread."""
        if self.hold is not None and self.is_wanted:
            began = time.monotonic()
            self.hold(push.bucket, longest_s)
            self.held_s += time.monotonic() - began
        if not self.is_wanted:
            self.is_cut_short = True
        if self.is_cut_short:
            return None
        return frame_of(push.model_copy(update={"held_s": self.held_s}), payload)

    def ending(self, _longest_s: float) -> Frame | None:
        """Behind its last bucket: that no more of it comes, if it does not."""
        if not self.is_cut_short:
            return None
        return frame_of(Skip(lease=self.lease, compute_s=self.compute_s, held_s=self.held_s))
