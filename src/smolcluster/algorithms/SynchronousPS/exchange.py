"""What SyncPS's server and workers exchange, both ends of each transfer side by side.

* a part's gradient: `GradientSender` (worker) -> `PartReceiver`, `Reduction` (server), added up as it comes;
* the mean gradient of a step: `Reduction.frame` (server) -> `StepReceiver` (worker), a frame a bucket, each
  as soon as the last part's has arrived;
* the whole state, for who joins: `StateStream` (server) -> `StepReceiver` (worker), bucket by bucket.

What the server applies is what it sent: with a lossy codec, decoded from the very bytes. So all replicas take
the same step.
"""

import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

from smolcluster.algorithms.SynchronousPS.rule import weight
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.cluster.inbox import Event, Said
from smolcluster.cluster.pushing import PushOrder
from smolcluster.cluster.session import Receiver
from smolcluster.cluster.tensors import Assigned, bucket_length, bucket_spec, bytes_of
from smolcluster.codec.base import NonFiniteValue
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import NonFiniteLoss, PeerLost, ProtocolError
from smolcluster.training.replica import DIVERGENCE_REMEDY, Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import (
    WEIGHTS,
    Assignment,
    Commit,
    Message,
    Push,
    Reduced,
    State,
    TensorSpec,
    frame_of,
)

DIGEST_NBYTES = 8
STEP_COUNT = "step"
"""The one part of an optimizer's state that is no tensor of the parameters' size: the version says it."""

Pieces = Iterator[tuple[slice, Tensor]]


class PartArrived(Event):
    """A frame of a push arrived. `reduced`: it completed its bucket; `whole`: it was the push's last one."""

    def __init__(self, seat: int, push: Push, *, reduced: bool, whole: bool) -> None:
        self.seat = seat
        self.push = push
        self.reduced = reduced
        self.whole = whole


class Reduction:
    """The sum of the open step's gradients, in memory that does not grow with the number of workers.

    Frames of a mean gradient may still be under way when the next step opens. Lossless ones refer to the sum
    itself, so that there are two sums that take turns; lossy ones refer to encoded bytes, and these do.
    """

    def __init__(self, replica: Replica, codec_name: str) -> None:
        self._buckets = replica.buckets
        self._replica = replica
        self._codec = get_codec(codec_name)
        self._lossy_lock = threading.Lock()
        self._locks = [threading.Lock() for _ in self._buckets]
        shape = (replica.num_params,)
        dtype = replica.params.dtype
        if self._codec.lossless:
            self._sums = [torch.empty(shape, dtype=dtype) for _ in range(2)]
            self._feedback = None
        else:
            self._sums = [torch.empty(shape, dtype=dtype)] * 2
            self._feedback = ErrorFeedback(self._codec, replica.num_params)
        self._encoded = [[self._new_encoded(bucket) for bucket in self._buckets] for _ in range(2)]
        self._step: Step | None = None
        self._num_added = [0] * len(self._buckets)
        self._norms = [0.0] * len(self._buckets)

    def open(self, step: Step) -> None:
        """Begin a step; the sums of the one before the last are given up."""
        self._num_added = [0] * len(self._buckets)
        self._step = step

    def close(self) -> None:
        """The open step is over; its mean stays until the next but one."""
        if self._feedback is not None:
            self._feedback.commit()
        self._step = None

    def add(self, seat: int, push: Push, gradient: Tensor) -> bool:
        """Add a bucket (n,) of a part's mean gradient, if it counts; returns whether that completes it.

        Any thread.
        """
        step = self._step
        part = step.claim(seat, push) if step is not None else None
        if step is None or part is None:
            return False
        number = push.bucket
        total = self._sum_of(step.version, number)
        factor = weight(part.num_samples, step.batch.num_samples)
        with self._locks[number]:
            if self._num_added[number] == 0:
                torch.mul(gradient, factor, out=total)
            else:
                total.add_(gradient, alpha=factor)
            complete = self._num_added[number] + 1 == len(step.parts)
            if complete:
                self._norms[number] = _norm(total)
                self._encode(step, number, total)
            self._num_added[number] += 1
        return complete

    def frame(self, version: int, number: int) -> Frame:
        """The frame of a bucket's mean, to be shared by all sessions.

        Raises:
            NonFiniteLoss: it holds NaN or infinity.
        """
        bucket = self._buckets[number]
        if not math.isfinite(self._norms[number]):
            name = self._replica.parameter_at(bucket.start)
            raise NonFiniteLoss(
                f"step {version}: the mean gradient holds NaN or infinity at layer {name} or after it; "
                f"{DIVERGENCE_REMEDY}"
            )
        if self._codec.lossless:
            payload = bytes_of(self._sum_of(version, number))
        else:
            payload = bytes_of(self._encoded_of(version, number))
        reduced = Reduced(
            version=version,
            bucket=number,
            num_buckets=len(self._buckets),
            tensor=bucket_spec(self._codec, bucket),
        )
        return frame_of(reduced, payload)

    def norm(self) -> float:
        """L2 norm of the whole mean gradient."""
        return math.hypot(*self._norms)

    def pieces(self, version: int) -> Pieces:
        """The mean gradient as it was sent, in pieces of which each is valid until the next one."""
        if self._codec.lossless:
            yield from self._replica.whole(self._sums[version % 2])
            return
        scratch = torch.empty(bucket_length(self._buckets[0]), dtype=self._codec.dtype)
        for number, bucket in enumerate(self._buckets):
            piece = scratch[: bucket_length(bucket)]
            self._codec.decode(self._encoded_of(version, number), piece)
            yield bucket, piece

    def _encode(self, step: Step, number: int, total: Tensor) -> None:
        if self._feedback is None or not math.isfinite(self._norms[number]):
            return  # `frame` will say that it is not finite
        encoded = self._encoded_of(step.version, number)
        bucket, num_samples = self._buckets[number], step.batch.num_samples
        with self._lossy_lock:
            try:
                self._feedback.encode(bucket, total, num_samples, encoded)
            except NonFiniteValue:
                self._norms[number] = math.nan

    def _sum_of(self, version: int, number: int) -> Tensor:
        return self._sums[version % 2][self._buckets[number]]

    def _encoded_of(self, version: int, number: int) -> Tensor:
        return self._encoded[version % 2][number]

    def _new_encoded(self, bucket: slice) -> Tensor:
        nbytes = 0 if self._codec.lossless else self._codec.encoded_nbytes(bucket_length(bucket))
        return torch.empty(nbytes, dtype=torch.uint8)


class PartReceiver(Receiver):
    """Takes one worker's messages, in its reader's thread, and adds what it pushes to the sum."""

    def __init__(
        self, seat: int, reduction: Reduction, codec_name: str, buckets: Sequence[slice]
    ) -> None:
        self._seat = seat
        self._reduction = reduction
        self._codec = get_codec(codec_name)
        self._lossless = get_codec(lossless_for(self._codec.dtype))
        self._order = PushOrder(buckets, codec_name, partial=True)
        self._scratch = torch.empty(bucket_length(buckets[0]), dtype=self._codec.dtype)

    @property
    def in_progress(self) -> bool:
        """Whether a push has begun and not ended."""
        return self._order.in_progress

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message; of a push, tell only when it completes a bucket or ends."""
        if not isinstance(message, Push):
            return Said(self._seat, message)
        whole = self._order.take(message)
        reduced = self._reduction.add(self._seat, message, self._decoded(message, payload))
        if not (whole or reduced):
            return None
        return PartArrived(self._seat, message, reduced=reduced, whole=whole)

    def _decoded(self, push: Push, payload: memoryview) -> Tensor:
        if push.tensor.codec == self._lossless.name:
            return torch.frombuffer(payload, dtype=self._lossless.dtype)
        values = self._scratch[: push.tensor.shape[0]]
        self._codec.decode(torch.frombuffer(payload, dtype=torch.uint8), values)
        return values


class StateStream:
    """Sends one joiner the state, bucket by bucket, of whatever version it then is.

    Between two buckets a step may be committed: the joiner takes it for what it has, like everybody else. So
    a bucket is sent as of the last commit, followed by what the open step has already reduced of it.
    """

    def __init__(self, replica: Replica, incarnation: str) -> None:
        self._replica = replica
        self._incarnation = incarnation
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return self._next == len(self._replica.buckets)

    def covers(self, bucket: int) -> bool:
        """Whether the joiner has this bucket, so that it needs its further steps."""
        return bucket < self._next

    def next_frames(self, version: int) -> tuple[int, list[Frame]]:
        """The next bucket, and its frames as of `version`, of memory of their own."""
        number = self._next
        self._next += 1
        return number, [
            _state_frame(self._replica, self._incarnation, version, number, content)
            for content in contents_of(self._replica)
        ]


def contents_of(replica: Replica) -> dict[str, Tensor]:
    """What a joiner needs, by name: the weights, and the optimizer's tensors of the same shape."""
    state = replica.optimizer.state.items()
    return {WEIGHTS: replica.params} | {name: part for name, part in state if name != STEP_COUNT}


def weights_frame(replica: Replica, incarnation: str, version: int, number: int) -> Frame:
    """A bucket of the weights, copied."""
    return _state_frame(replica, incarnation, version, number, WEIGHTS)


def _state_frame(
    replica: Replica, incarnation: str, version: int, number: int, content: str
) -> Frame:
    bucket = replica.buckets[number]
    state = State(
        incarnation=incarnation,
        version=version,
        content=content,
        bucket=number,
        num_buckets=len(replica.buckets),
        tensor=bucket_spec(get_codec(lossless_for(replica.params.dtype)), bucket),
    )
    return frame_of(state, bytes_of(contents_of(replica)[content][bucket].to("cpu", copy=True)))


class StateArrived(Event):
    """A bucket of the server's state: `values` (n,) of what `state.content` names."""

    def __init__(self, state: State, values: Tensor) -> None:
        self.state = state
        self.values = values


class Committed(Event):
    """A step to take.

    `gradient` is the flat mean (num_params,), of which the first `num_reduced` buckets were sent to us; None
    without any. `digests` are those of the server's weights before it, one a bucket, or none at all.
    """

    def __init__(
        self, commit: Commit, gradient: Tensor | None, num_reduced: int, digests: Sequence[bytes]
    ) -> None:
        self.commit = commit
        self.gradient = gradient
        self.num_reduced = num_reduced
        self.digests = digests


class StepReceiver(Receiver):
    """A worker's receiver: puts mean gradients together in one of two buffers, and passes all else on.

    The server may be a step ahead of a worker that is still computing. One that is further behind makes its
    own reader wait in `place_for`, and so in time the server, which then cuts it off.
    """

    def __init__(self, replica: Replica, codec_name: str) -> None:
        self._buckets = replica.buckets
        self._codec = get_codec(codec_name)
        self._lossless = get_codec(lossless_for(replica.params.dtype))
        self._contents = frozenset(contents_of(replica))
        shape = (replica.num_params,)
        self._free = [torch.empty(shape, dtype=self._codec.dtype) for _ in range(2)]
        self._given_back = threading.Condition()
        self._closed = False
        self._gradient: Tensor | None = None
        self._num_reduced = 0
        self._version = 0

    @property
    def in_progress(self) -> bool:
        """Whether a step's gradient has begun to arrive and was not committed."""
        return self._gradient is not None

    def give_back(self, gradient: Tensor) -> None:
        """The worker has done with a gradient."""
        with self._given_back:
            self._free.append(gradient)
            self._given_back.notify()

    def close(self) -> None:
        """The worker takes no more steps: nothing may wait for it."""
        with self._given_back:
            self._closed = True
            self._given_back.notify()

    def place_for(self, message: Message) -> memoryview | None:
        """A lossless mean goes straight to its place in the gradient, which is nobody's until its commit."""
        if not isinstance(message, Reduced):
            return None
        self._check(message)
        return bytes_of(self._bucket_of(message)) if self._codec.lossless else None

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message in the reader's thread."""
        match message:
            case Reduced():
                if not self._codec.lossless:
                    encoded = torch.frombuffer(payload, dtype=torch.uint8)
                    self._codec.decode(encoded, self._bucket_of(message))
                self._num_reduced += 1
                return None
            case Commit():
                digests = self._digests(message, payload)
                committed = Committed(message, self._gradient, self._num_reduced, digests)
                self._gradient, self._num_reduced = None, 0
                return committed
            case State():
                return StateArrived(message, self._state(message, payload))
            case Assignment():
                return Assigned(message, payload)
        return Said(0, message)

    def _check(self, reduced: Reduced) -> None:
        known = reduced.bucket < len(self._buckets) == reduced.num_buckets
        if not known or reduced.tensor != bucket_spec(self._codec, self._buckets[reduced.bucket]):
            raise ProtocolError(
                f"bucket {reduced.bucket} of {reduced.num_buckets} of the mean gradient is not of "
                "the agreed shape and codec"
            )
        if self._gradient is None:
            self._gradient, self._version = self._take_free(), reduced.version
        elif reduced.version != self._version:
            raise ProtocolError(
                f"the server began step {reduced.version} before it had committed {self._version}"
            )

    def _take_free(self) -> Tensor:
        with self._given_back:
            self._given_back.wait_for(lambda: self._free or self._closed)
            if not self._free:
                raise PeerLost("the worker has left")
            return self._free.pop()

    def _bucket_of(self, reduced: Reduced) -> Tensor:
        assert self._gradient is not None  # noqa: S101 - `_check` has seen to it
        return self._gradient[self._buckets[reduced.bucket]]

    def _digests(self, commit: Commit, payload: memoryview) -> list[bytes]:
        if commit.tensor is None:
            return []
        if commit.tensor != digests_spec(len(self._buckets)):
            raise ProtocolError("the server's digests are not one a bucket")
        starts = range(0, payload.nbytes, DIGEST_NBYTES)
        return [bytes(payload[start : start + DIGEST_NBYTES]) for start in starts]

    def _state(self, state: State, payload: memoryview) -> Tensor:
        known = state.bucket < len(self._buckets) == state.num_buckets
        if (
            not known
            or state.content not in self._contents
            or state.tensor != bucket_spec(self._lossless, self._buckets[state.bucket])
        ):
            raise ProtocolError(
                f"bucket {state.bucket} of {state.num_buckets} of the server's {state.content!r} is not "
                "of the agreed shape"
            )
        return torch.frombuffer(bytearray(payload), dtype=self._lossless.dtype)


def commit_frame(step: Step, clip: float, rate: float, digests: Sequence[bytes]) -> Frame:
    """The frame that ends a step, with digests of the weights before it or without any."""
    commit = Commit(
        version=step.version,
        num_samples=step.batch.num_samples,
        clip=clip,
        learning_rate=rate,
        tensor=digests_spec(len(digests)) if digests else None,
    )
    return frame_of(commit, b"".join(digests))


def digests_of(replica: Replica) -> list[bytes]:
    """xxh3-64 of the bytes of each bucket of the weights, 8 bytes each."""
    weights = replica.params.to("cpu")
    return [xxh3_64_digest(bytes_of(weights[bucket])) for bucket in replica.buckets]


def digests_spec(num_buckets: int) -> TensorSpec:
    """Describe the digests of so many buckets."""
    nbytes = DIGEST_NBYTES * num_buckets
    return TensorSpec(codec="raw", dtype="xxh3-64", shape=(num_buckets,), nbytes=nbytes)


def _norm(values: Tensor) -> float:
    """L2 norm of (n,); a sum of squares that overflows is taken again in float64."""
    norm = float(torch.linalg.vector_norm(values))
    if math.isinf(norm):
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm
