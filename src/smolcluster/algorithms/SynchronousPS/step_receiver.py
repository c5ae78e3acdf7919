"""How a worker hears of the server's steps: mean gradients, commits and state, in the order of the wire."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from smolcluster.codec.base import bytes_of
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import PeerLost, ProtocolError
from smolcluster.server.assignment import AssignmentReceiver
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.push import DIGEST_NBYTES, digests_spec
from smolcluster.training.buffers import BufferValues
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    WEIGHTS,
    Assignment,
    Buffers,
    Commit,
    LeaseKey,
    Message,
    Park,
    Push,
    Reduced,
    Served,
    Skip,
    State,
    TensorSpec,
    frame_of,
)
from smolcluster.wire.session import Receiver
from smolcluster.wire.streams import bucket_spec

PACE = 3
"""Buckets by which a push may be ahead of the mean that comes back."""


class StateArrived(Event):
    """A bucket of the server's state: `values` (n,) of what `state.content` names.

    `buffers`: those that came before it.
    """

    def __init__(
        self, state: State, values: Tensor, buffers: BufferValues = MappingProxyType({})
    ) -> None:
        self.state = state
        self.values = values
        self.buffers = buffers


class Committed(Event):
    """A step to take.

    `gradient` is the flat mean (num_params,), of which the first `num_reduced` buckets were sent to us; None
    without any. `digests` are those of the server's weights before it, one a bucket, or none at all.
    `buffers`: the model's, if the step has changed any.
    """

    def __init__(
        self,
        commit: Commit,
        gradient: Tensor | None,
        num_reduced: int,
        digests: Sequence[bytes],
        buffers: BufferValues = MappingProxyType({}),
    ) -> None:
        self.buffers = buffers
        self.commit = commit
        self.gradient = gradient
        self.num_reduced = num_reduced
        self.digests = digests


class MeanWhole(Event):
    """All of a mean that comes from stores on other hosts is here: a Commit may have waited for it."""


@dataclass
class Mean:
    """A mean gradient (num_params,) on its way, and the buckets that have arrived."""

    gradient: Tensor
    reduced: set[int] = field(default_factory=set)


class FellBehind(Event):
    """A mean came while both buffers were taken: it and all steps after it are left out until a `Park`."""


class StepReceiver(Receiver):
    """A worker's receiver: puts mean gradients together in one of two buffers, and passes all else on.

    The server may be a step ahead of a worker that is still computing. One that is further behind makes its
    own reader wait in `place_for`, but not for so long that the server would take it for dead: then it reads
    on, and leaves out what it has no room for.
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
        self._patience_s = patience_s
        self._longest_wait_s = longest_wait_s
        self.has_fallen_behind = self._is_told = False
        self._collector = BufferCollector(replica.buffers, replica.bucket_bytes)
        self._buffers: BufferValues = {}
        """What has come of the server's buffers since the last state or commit."""
        self._assignments = AssignmentReceiver()
        self._buckets = replica.buckets
        self._codec = get_codec(codec_name)
        self._decoding = threading.Lock()
        """Readers of several stores share the codec's scratch."""
        self._lossless = get_codec(lossless_for(replica.params.dtype))
        self._optimizer = replica.optimizer
        shape = (replica.num_params,)
        self._free = [torch.empty(shape, dtype=self._codec.dtype) for _ in range(2)]
        self._changed = threading.Condition()
        self._closed = False
        self._paced = False
        self._means: dict[int, Mean] = {}
        """By version. From the server's session one at a time, stores may be ahead of it or behind."""
        self._spans: list[range] = []
        """Of the buckets that stores on other hosts have."""
        self._done = -1
        """Means of this version or before are of no use, where stores send them: see `from_store`."""

    def give_back(self, gradient: Tensor) -> None:
        with self._changed:
            self._free.append(gradient)
            self._changed.notify_all()

    def from_store(self, span: range) -> "MeanReceiver":
        """What takes the means that a store on another host sends."""
        self._spans.append(span)
        return MeanReceiver(self, span)

    def has(self, reduced: Reduced) -> bool:
        """Whether this bucket of a mean that is not complete has arrived already."""
        with self._changed:
            return reduced.bucket in self._reduced_of(reduced)

    def complete(self, committed: Committed) -> bool:
        """Whether all that stores have of a step's mean is here; then it is put into `committed`."""
        with self._changed:
            mean = self._means.get(committed.commit.version)
            if committed.gradient is not None or not self._spans:
                return True
            if mean is None or not self._has_all_of_stores(mean):
                return False
            self._done = committed.commit.version
            del self._means[self._done]
        committed.gradient, committed.num_reduced = mean.gradient, len(mean.reduced)
        return True

    def _has_all_of_stores(self, mean: Mean) -> bool:
        return all(number in mean.reduced for span in self._spans for number in span)

    def close(self) -> None:
        """The worker takes no more steps, or the session has ended: nobody may wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def pace(self, *, paced: bool) -> None:
        """Whether the frames of a push shall wait for the mean, or be sent as fast as the link can."""
        with self._changed:
            self._paced = paced
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
            if not self._changed.wait_for(lambda: self._in_pace(bucket), patience_s):
                self._paced = False

    def _in_pace(self, bucket: int) -> bool:
        """As compared with what has come of the open step's mean from where the bucket goes to."""
        reduced = self._means[min(self._means)].reduced if self._means else ()
        own = range(min((span.start for span in self._spans), default=len(self._buckets)))
        span = next((span for span in self._spans if bucket in span), own)
        num_reduced = sum(number in span for number in reduced)
        is_ahead = 0 < num_reduced <= bucket - span.start - PACE
        return self._closed or not self._paced or not is_ahead

    def place_for(self, message: Message) -> memoryview | None:
        """A lossless mean goes straight to its place in the gradient, which is nobody's until its commit."""
        if isinstance(message, Served):
            return self._assignments.place_for(message)
        if not isinstance(message, Reduced) or self.has_fallen_behind:
            return None
        self._check(message)
        if message.bucket in self._reduced_of(message):
            raise ProtocolError(
                f"the server sent bucket {message.bucket} of the mean gradient twice"
            )
        return None if self.has_fallen_behind else self.place_in_mean(message)

    def place_in_mean(self, reduced: Reduced) -> memoryview | None:
        """Where a bucket of a lossless mean shall be written; None: it has to be decoded, or is of no use."""
        mean = self._mean_of(reduced)
        if mean is None or not self._codec.lossless:
            return None
        return bytes_of(mean.gradient[self._buckets[reduced.bucket]])

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        return None if isinstance(message, Served) else self._take(message, payload)

    def _take(self, message: Message, payload: memoryview) -> Event | None:
        match message:
            case Reduced() | Commit() | Buffers() if self.has_fallen_behind:
                is_news, self._is_told = not self._is_told, True
                return FellBehind() if is_news else None
            case Park():
                self._collector.forget()
                self._buffers = {}
                with self._changed:
                    self.has_fallen_behind = self._is_told = False
                    self._forget(list(self._means))
            case Reduced() | Buffers():
                self._collect(message, payload)
                return None
            case Commit():
                digests = self._digests(message, payload)
                committed = Committed(message, None, 0, digests, self._take_buffers())
                if not self._spans:
                    self._put_into(committed)
                return committed
            case State():
                values = self._state(message, payload)
                self._begin_at(message.version)
                return StateArrived(message, values, self._take_buffers())
            case Assignment():
                return self._assignments.assigned(message, payload)
        return MessageReceived(0, message)

    def _collect(self, message: Reduced | Buffers, payload: memoryview) -> None:
        if isinstance(message, Buffers):
            self._buffers = self._collector.take(message, payload) or self._buffers
            return
        self.add_to_mean(message, payload)

    def add_to_mean(self, reduced: Reduced, payload: memoryview) -> bool:
        """Take a bucket of a mean; returns whether it was the last one that comes from stores."""
        mean = self._mean_of(reduced)
        if mean is None:
            return False
        if not self._codec.lossless:
            encoded = torch.frombuffer(payload, dtype=torch.uint8)
            with self._decoding:
                self._codec.decode(encoded, mean.gradient[self._buckets[reduced.bucket]])
        with self._changed:
            mean.reduced.add(reduced.bucket)
            self._changed.notify_all()
            return self._has_all_of_stores(mean)

    def _put_into(self, committed: Committed) -> None:
        """The server's means and commits are in one order: the only one that is open is the step's."""
        with self._changed:
            for mean in self._means.values():
                committed.gradient, committed.num_reduced = mean.gradient, len(mean.reduced)
            self._means.clear()
            self._changed.notify_all()

    def _begin_at(self, version: int) -> None:
        """The first state has come: what stores have sent of its step, or of earlier ones, is not needed."""
        if self._done < 0 and self._spans:
            with self._changed:
                self._done = version
                self._forget([each for each in self._means if each <= version])

    def _forget(self, versions: Sequence[int]) -> None:
        """Free the memory of these means; `_changed` is held."""
        for version in versions:
            self._free.append(self._means.pop(version).gradient)
        self._changed.notify_all()

    def _take_buffers(self) -> BufferValues:
        buffers, self._buffers = self._buffers, {}
        return buffers

    def check_shape(self, reduced: Reduced) -> None:
        known = reduced.bucket < len(self._buckets) == reduced.num_buckets
        if not known or reduced.tensor != bucket_spec(self._codec, self._buckets[reduced.bucket]):
            raise ProtocolError(
                f"bucket {reduced.bucket} of {reduced.num_buckets} of the mean gradient is not of "
                "the agreed shape and codec"
            )

    def _check(self, reduced: Reduced) -> None:
        """Of what comes from the server: it is of the open step."""
        self.check_shape(reduced)
        if self._means and not self._spans and reduced.version not in self._means:
            raise ProtocolError(
                f"the server began step {reduced.version} before it had committed {max(self._means)}"
            )

    def _reduced_of(self, reduced: Reduced) -> set[int]:
        mean = self._means.get(reduced.version)
        return set() if mean is None else mean.reduced

    def _mean_of(self, reduced: Reduced) -> Mean | None:
        """The mean that a bucket belongs to, in new memory if it is the first one; None: it is of no use."""
        with self._changed:
            mean = self._means.get(reduced.version)
            if mean is not None or reduced.version <= self._done:
                return mean
            gradient = self._take_free(reduced.version)
            if gradient is not None:
                self._means[reduced.version] = Mean(gradient)
                self._changed.notify_all()
            elif not self._is_settled(reduced.version):
                self.has_fallen_behind = True
            return self._means.get(reduced.version)

    def _is_settled(self, version: int) -> bool:
        """Whether a mean has its memory, or needs none: another reader may have been quicker."""
        return version in self._means or version <= self._done

    def _take_free(self, version: int) -> Tensor | None:
        """A buffer that nobody uses; None: `version` needs none, or there was none for too long."""
        longest_s = None if math.isinf(self._longest_wait_s) else self._longest_wait_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._free or self._closed or self._is_settled(version), longest_s
            )
            if self._is_settled(version):
                return None
            if self._closed and not self._free:
                raise PeerLost("the worker has left")
            return self._free.pop() if self._free else None

    def _digests(self, commit: Commit, payload: memoryview) -> list[bytes]:
        if commit.tensor is None:
            return []
        if commit.tensor != digests_spec(len(self._buckets)):
            raise ProtocolError("the server's digests are not one a bucket")
        starts = range(0, payload.nbytes, DIGEST_NBYTES)
        return [bytes(payload[start : start + DIGEST_NBYTES]) for start in starts]

    def _state(self, state: State, payload: memoryview) -> Tensor:
        known = state.bucket < len(self._buckets) == state.num_buckets
        if not known or state.tensor != self._state_spec(state):
            raise ProtocolError(
                f"bucket {state.bucket} of {state.num_buckets} of the server's {state.content!r} is not "
                "of the agreed shape"
            )
        return torch.frombuffer(bytearray(payload), dtype=self._lossless.dtype)

    def _state_spec(self, state: State) -> TensorSpec | None:
        """What a bucket of the server's weights or optimizer has to be; None: there is no such thing."""
        bucket = self._buckets[state.bucket]
        if state.content == WEIGHTS:
            return bucket_spec(self._lossless, bucket)
        whole = self._optimizer.moments.get(state.content)
        if whole is None:
            return None
        length = len(range(whole.numel())[bucket])  # a slice of it would be the device's work
        return bucket_spec(self._lossless, slice(0, length)) if length else None


class MeanReceiver(Receiver):
    """Takes the means that a store on another host sends."""

    def __init__(self, steps: StepReceiver, span: range) -> None:
        self._steps, self._span = steps, span

    def place_for(self, message: Message) -> memoryview | None:
        if not isinstance(message, Reduced):
            return None
        self._steps.check_shape(message)
        if message.bucket not in self._span:
            raise ProtocolError(f"it sent the mean of bucket {message.bucket}, which it has not")
        if self._steps.has(message):
            raise ProtocolError(f"it sent the mean of bucket {message.bucket} twice")
        place = self._steps.place_in_mean(message)
        if self._steps.has_fallen_behind:
            raise PeerLost("this worker does not keep up with the steps")
        return place

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if not isinstance(message, Reduced):
            raise ProtocolError(f"a store sent {type(message).__name__}")
        return MeanWhole() if self._steps.add_to_mean(message, payload) else None


class Outgoing:
    """A push on its way out: what its frames wait for, how long they did, and whether it is called off."""

    def __init__(
        self,
        lease: LeaseKey,
        compute_s: float,
        hold: Callable[[int, float], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hold`: returns when a bucket may be sent, after so many seconds at most; None: at once."""
        self.lease = lease
        self.is_wanted = True
        self._compute_s = compute_s
        self._held_s = 0.0
        self._hold = hold
        self._clock = clock
        self._is_cut_short = False

    def frame(self, push: Push, payload: memoryview, longest_s: float) -> Frame | None:
        """The frame of its next bucket, when it may be sent; in the writer's thread."""
        if self._hold is not None and self.is_wanted:
            began = self._clock()
            self._hold(push.bucket, longest_s)
            self._held_s += self._clock() - began
        if not self.is_wanted:
            self._is_cut_short = True
        if self._is_cut_short:
            return None
        return frame_of(push.model_copy(update={"held_s": self._held_s}), payload)

    def ending(self, _longest_s: float) -> Frame | None:
        """Behind its last bucket: that no more of it comes, if it does not."""
        if not self._is_cut_short:
            return None
        return frame_of(Skip(lease=self.lease, compute_s=self._compute_s, held_s=self._held_s))
