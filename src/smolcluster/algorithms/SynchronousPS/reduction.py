"""A host's sums: the gradients of all parts, added up as they come, and sent back as their mean.

A part's gradient comes bucket by bucket (`GradientSender` -> `PartReceiver`); a bucket's mean goes back as
soon as the last part's has arrived. What the server applies is what it sent: with a lossy codec, decoded from
the very bytes. So all replicas take the same step.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from smolcluster.algorithms.SynchronousPS.rule import ExpectedTerms
from smolcluster.algorithms.SynchronousPS.step import SliceStep, Step
from smolcluster.codec.base import NonFiniteValue, absmax
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.data.permutation import Range
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.push import push_assembler
from smolcluster.server.store import HeldSlice
from smolcluster.training.buffers import BufferValues
from smolcluster.training.optimizer import bucket_norms
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Buffers,
    LeaseKey,
    Message,
    PartKey,
    Push,
    Reduced,
    SendWeights,
    Skip,
    TakeMean,
    TakeStep,
)
from smolcluster.wire.session import Receiver
from smolcluster.wire.streams import bucket_length, span_pieces, stream_frames

RESIDUAL = "residual"
SPARE_BYTES = 16 * 1024 * 1024
MAX_BUFFERS = 64


@dataclass(eq=False)
class PushArrived(Event):
    """A frame of a push arrived. `reduced`: it completed its bucket; `whole`: it was the push's last one."""

    session_id: int
    push: Push
    reduced: bool
    whole: bool


class Reduction(HeldSlice):
    """The sum of the open step's gradients, in memory that does not grow with the number of workers.

    Frames of a mean gradient may still be under way when the next steps open. Lossless ones refer to the sum
    itself, so that sums take turns; lossy ones refer to encoded bytes, and these do. There are two, or as
    many as fit in `SPARE_BYTES`: with a small model a worker may be many steps behind. Memory that a frame
    still refers to when its turn comes, because a slow link is in the middle of it, is left to that frame.
    With a lossy codec two sums take turns, one in the memory of the replica's gradient.
    """

    def __init__(
        self,
        buckets: Sequence[slice],
        codec_name: str,
        grads: Tensor,
        parameter_at: Callable[[int], str],
        *,
        span: range,
        kept: range,
        incarnation: str,
    ) -> None:
        """Nothing is open.

        Args:
            buckets: of all parameters.
            grads: memory (n,) of the buckets whose mean lies here, for which there is no other use.
            parameter_at: names the parameter at a place in it.
            span: the numbers of the buckets that are added up here.
            kept: those of the ones whose mean lies here: other hosts add up the rest of it.
            incarnation: see `HeldSlice`.
        """
        super().__init__(buckets, span, incarnation)
        self.attempt = 0
        """What a store's means say of the open step."""
        self.means: list[Frame] = []
        """Of the open step, from the first bucket on, as far as `new_means` has told."""
        self.newest: SliceStep | None = None
        """The newest step that was opened, perhaps void by now."""
        self.followers: set[str] = set()
        """Instances of the workers that a store sends all means; the server has its members."""
        self._opened = threading.Condition()
        self._codec = get_codec(codec_name)
        self._pieces = span_pieces(self._codec, buckets, kept)
        self._first, self._places = kept.start, [piece.place for piece in self._pieces]
        self._parameter_at = parameter_at
        self._lossy_lock = threading.Lock()
        self._locks = [threading.Lock() for _ in self._places]
        self.num_buffers = max(2, min(MAX_BUFFERS, SPARE_BYTES // grads.nbytes))
        """Steps after which the memory of a mean is used again."""
        buffers = range(self.num_buffers)
        own = torch.empty_like(grads, device="cpu")
        if self._codec.lossless:
            self._sums = [own, *(torch.empty_like(own) for _ in buffers[1:])]
            self._feedback = None
        else:
            self._sums = [own, grads if grads.device.type == "cpu" else torch.empty_like(own)]
            self._feedback = ErrorFeedback(self._codec, grads.numel())
        self._encoded = [self._new_encoded() for _ in buffers]
        self._frames: list[list[weakref.ref[Frame]]] = [[] for _ in buffers]
        self._step: SliceStep | None = None
        self._num_added = [0] * len(self._places)
        self._num_terms = [0.0] * len(self._places)
        """Of the parts that have been added to each bucket."""
        self._expected: list[ExpectedTerms | None] = [None] * len(self._places)
        self._norms = [0.0] * len(self._places)
        self._largest = [(0.0, "")] * len(self._places)
        """Of each bucket of the open step, the largest value that a part added, and whose it was."""

    @property
    def is_lossless(self) -> bool:
        """Whether frames of a mean refer to it, so that nobody may change it."""
        return self._codec.lossless

    def contents(self) -> Mapping[str, Tensor]:
        """What a lossy codec owes to the next step; it changes at `close`."""
        return {} if self._feedback is None else {RESIDUAL: self._feedback.committed}

    def resume(self) -> None:
        """The `contents` have been filled, and are owed to the next step."""
        if self._feedback is not None:
            self._feedback.resume(self._places)

    def open(self, step: SliceStep) -> None:
        """Begin a step in the oldest one's memory, or in new memory if a link is still busy with that."""
        self.means = []
        self._num_added = [0] * len(self._places)
        self._largest = [(0.0, "")] * len(self._places)
        self._num_terms = [0.0] * len(self._places)
        self._expected = [None] * len(self._places)
        buffer = step.version % self.num_buffers
        if any(frame() is not None for frame in self._frames[buffer]):
            self._encoded[buffer] = self._new_encoded()
            if self._codec.lossless:
                self._sums[buffer] = torch.empty_like(self._sums[buffer])
        self._frames[buffer].clear()
        with self._opened:
            self._step = self.newest = step
            self._opened.notify_all()

    def await_step(self, version: int, timeout_s: float) -> bool:
        """Wait until the step that makes `version` has been opened; returns whether it has. Any reader."""
        with self._opened:
            return self._opened.wait_for(
                lambda: self.newest is not None and self.newest.version >= version, timeout_s
            )

    def prepare_mean(self, wanted: TakeMean) -> Sequence[Sequence[float]]:
        """Open a step of which somebody else has the books; its norms nobody has to be told."""
        self.abandon()  # if one is open, it is void
        start, sizes = wanted.parts[0].key.of, [int(part.weight) for part in wanted.parts]
        if not isinstance(start, int):
            raise ProtocolError("it wanted a mean of a worker's own parts")
        batch = Range(wanted.epoch, start, start + sum(sizes))
        self.attempt = wanted.attempt
        self.open(SliceStep(wanted.version, batch, sizes, self.span))
        return ()

    def close(self, *, is_skipped: bool = False) -> None:
        """The open step is over, or `is_skipped` by all; its mean stays for `num_buffers` steps."""
        if self._feedback is None or self._step is None:
            pass
        elif is_skipped:
            self._feedback.rollback()
        else:
            self._feedback.commit()
        self._step, self.means = None, []

    def _step_means(self, step: TakeStep, _means: Mapping[int, Tensor]) -> None:
        self.close(is_skipped=step.learning_rate is None)

    def drop(self, _key: PartKey) -> None:
        """The open step is void, and its workers begin anew."""
        self.abandon()
        self.followers.clear()

    def frames_for(self, wanted: SendWeights) -> Sequence[Frame]:
        """What the open step has of its mean; its new ones are for this worker too."""
        self.followers.add(wanted.instance)
        return self.means

    def leave(self, worker: str) -> None:
        self.followers.discard(worker)

    def abandon(self) -> None:
        """The open step is void: nothing of it has been added when this returns, or will be."""
        self._step, self.means = None, []
        for lock in self._locks:
            with lock:  # whoever was adding has done so
                pass
        if self._feedback is not None:
            self._feedback.rollback()

    def is_reduced(self, number: int) -> bool:
        """Whether the mean of a bucket of the open step is there."""
        step = self._step
        return step is not None and self._num_added[number - self._first] == len(step.parts)

    def add(self, session_id: int, push: Push, gradient: Tensor, largest: float) -> bool:
        """Add a bucket (n,) of a part's mean gradient, if it counts; returns whether that completes it.

        Any thread. No magnitude in the bucket exceeds `largest`; of infinity or NaN it holds some itself.

        Raises:
            ProtocolError: it holds NaN or infinity; nothing of it counts.
        """
        if not math.isfinite(largest):
            raise ProtocolError(f"bucket {push.bucket} of its push holds NaN or infinity")
        step = self._step
        claimed = step.claim(session_id, push) if step is not None else None
        if step is None or claimed is None:
            return False
        number = push.bucket - self._first
        total = self._sum_of(step.version, number)
        with self._locks[number]:
            if self._step is not step:  # it has been abandoned meanwhile
                return False
            expected = self._expected[number]
            if expected is None:
                expected = self._expected[number] = ExpectedTerms(
                    push.num_terms, claimed.num_samples, step.batch.num_samples
                )
            factor = expected.weight(push.num_terms)
            self._largest[number] = max(self._largest[number], (factor * largest, claimed.name))
            if self._num_added[number] == 0:
                torch.mul(gradient, factor, out=total)
            else:
                total.add_(gradient, alpha=factor)
            self._num_terms[number] += push.num_terms
            complete = self._num_added[number] + 1 == len(step.parts)
            if complete:
                correction = expected.correction(self._num_terms[number])
                if correction != 1.0:
                    total.mul_(correction)
                self._finish(step, number, total)
            self._num_added[number] += 1
        return complete

    def note_buffers(self, session_id: int, lease: LeaseKey | None, added: BufferValues) -> None:
        step = self._step
        if isinstance(step, Step) and lease is not None:
            step.note_buffers(session_id, lease, added)

    def new_means(self) -> Iterator[Frame]:
        """The open step's means, in the order of their buckets, as soon as they are there; each one once.

        Raises:
            NonFiniteLoss: see `frame`.
        """
        while (step := self._step) is not None and not self.is_whole:
            number = self.span.start + len(self.means)
            if not self.is_reduced(number):
                return
            self.means.append(self.frame(step.version, number))
            yield self.means[-1]

    @property
    def is_whole(self) -> bool:
        """Whether `new_means` has told all of the open step's that are added up here."""
        return len(self.means) == len(self.span)

    def frame(self, version: int, number: int) -> Frame:
        """The frame of a bucket's mean, to be shared by all sessions.

        Raises:
            NonFiniteLoss: the sum of the parts, of which each is finite, is not.
        """
        self.check(version, number)
        number -= self._first
        payload_of = self._sum_of if self._codec.lossless else self._encoded_of
        make = partial(Reduced, attempt=self.attempt, version=version)
        [frame] = stream_frames(make, [self._pieces[number]], [payload_of(version, number)])
        self._frames[version % self.num_buffers].append(weakref.ref(frame))
        return frame

    def check(self, version: int, number: int) -> None:
        """Look at the norm of a bucket's mean.

        Raises:
            NonFiniteLoss: it is not finite.
        """
        number -= self._first
        if not math.isfinite(self._norms[number]):
            name = self._parameter_at(self._places[number].start)
            largest, worker = self._largest[number]
            raise NonFiniteLoss(
                f"step {version}: the sum of the gradients overflows at layer {name} or after it; most of "
                f"it, {largest:.1e}, is of {worker}; {DIVERGENCE_REMEDY}"
            )

    def norm(self) -> float:
        return math.hypot(*self._norms)

    def mean(self, version: int) -> Tensor:
        return self._sums[version % len(self._sums)]

    def arrived(self, number: int, mean: Tensor) -> None:
        """The `mean` (n,) of a bucket, added up on another host, lies in its place. Any thread."""
        [self._norms[number]] = bucket_norms(mean, [slice(None)])

    def _finish(self, step: SliceStep, number: int, total: Tensor) -> None:
        """Take the norm of a bucket's mean; a lossy codec turns it into what everybody will decode."""
        if self._feedback is not None:
            encoded = self._encoded_of(step.version, number)
            with self._lossy_lock:
                try:
                    if self._num_terms[number]:
                        self._feedback.encode(self._places[number], total, encoded)
                    else:
                        self._codec.encode(total, encoded)
                    self._codec.decode(encoded, total)
                except NonFiniteValue:
                    total.fill_(math.nan)  # `frame` will say that it is not finite
        [self._norms[number]] = bucket_norms(total, [slice(None)])

    def _sum_of(self, version: int, number: int) -> Tensor:
        return self.mean(version)[self._places[number]]

    def _encoded_of(self, version: int, number: int) -> Tensor:
        return self._encoded[version % self.num_buffers][number]

    def _new_encoded(self) -> list[Tensor]:
        if self._codec.lossless:
            return []
        sizes = (self._codec.encoded_nbytes(bucket_length(bucket)) for bucket in self._places)
        return [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]


class PartReceiver(Receiver):
    """Takes one worker's messages, in its reader's thread, and adds what it pushes to the sum."""

    def __init__(
        self,
        session_id: int,
        reduction: Reduction,
        codec_name: str,
        buckets: Sequence[slice],
        collector: BufferCollector | None = None,
        *,
        has_loss_scale: bool = False,
        span: range | None = None,
        await_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Nothing of a push has come.

        Args:
            collector: takes the buffers that the model changes; None: it has none.
            span: the numbers of the buckets that come here, the others go elsewhere; None: all.
            await_step: returns when pushes of the step that makes a version may be added.
        """
        self._collector, self._await_step = collector, await_step
        self._session_id = session_id
        self._reduction = reduction
        self._codec = get_codec(codec_name)
        self._lossless = get_codec(lossless_for(self._codec.dtype))
        self._pushes = push_assembler(
            buckets, codec_name, partial=True, has_loss_scale=has_loss_scale, span=span
        )
        self._scratch = torch.empty(bucket_length(buckets[0]), dtype=self._codec.dtype)

    @property
    def in_progress(self) -> bool:
        return self._pushes.first is not None

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message; of a push, tell only when it completes a bucket or ends."""
        if isinstance(message, Buffers) and self._collector is not None:
            if (added := self._collector.take(message, payload)) is not None:
                self._reduction.note_buffers(self._session_id, message.lease, added)
            return None
        if not isinstance(message, Push):
            begun = self._pushes.first
            if isinstance(message, Skip) and begun and begun.lease == message.lease:
                self._pushes.first = None
            return MessageReceived(self._session_id, message)
        if not self.in_progress:
            self._await_step(message.base_version + 1)
        self._pushes.check(message)
        whole = not self.in_progress
        reduced = self._reduction.add(self._session_id, message, *self._decoded(message, payload))
        if not (whole or reduced):
            return None
        return PushArrived(self._session_id, message, reduced=reduced, whole=whole)

    def _decoded(self, push: Push, payload: memoryview) -> tuple[Tensor, float]:
        """The bucket's values (n,), and what no magnitude of theirs exceeds."""
        if push.tensor.codec == self._lossless.name:
            values = torch.frombuffer(payload, dtype=self._lossless.dtype)
            return values, absmax(values)
        values = self._scratch[: push.tensor.shape[0]]
        return values, self._codec.decode(torch.frombuffer(payload, dtype=torch.uint8), values)
