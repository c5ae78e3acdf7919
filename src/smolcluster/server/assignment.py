"""Samples that are handed out: their messages, and what a worker makes of them.

Samples that the worker has not itself come first, as a batch in pieces no larger than a bucket.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from psutil import virtual_memory
from torch import Tensor

from smolcluster.codec.base import bytes_of
from smolcluster.data.dataset import Batch, Sent
from smolcluster.data.pytree import Encoded, decode
from smolcluster.errors import DataError, NonFiniteLoss, OutOfMemory, ProtocolError
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.utils.meter import Computed
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    MAX_BATCH_NBYTES,
    MAX_LOSS,
    Assignment,
    EvaluateStages,
    LeaseKey,
    Served,
    TensorSpec,
    frame_of,
)
from smolcluster.wire.session import Session
from smolcluster.wire.streams import Assembler, byte_frames, bytes_piece


class Assigned(Event):
    """Samples to compute: `indices` (num_samples,) int32 into the training split."""

    def __init__(
        self, assignment: Assignment, payload: memoryview, batch: Batch | OutOfMemory = None
    ) -> None:
        """Unpack an assignment; `batch`: the samples, where the server sends them, or why they are not here.

        Raises:
            ProtocolError: the payload does not hold its lease's indices.
        """
        self.assignment = assignment
        num_samples = assignment.lease.stop - assignment.lease.start
        if assignment.tensor != _indices_spec(num_samples):
            raise ProtocolError("the server's assignment does not hold its lease's indices")
        self.indices = torch.frombuffer(bytearray(payload), dtype=torch.int32)
        self._batch = batch

    @property
    def batch(self) -> Batch:
        """The samples that the server has sent; None: this machine has them.

        Raises:
            OutOfMemory: this machine has no memory for them.
        """
        if isinstance(self._batch, OutOfMemory):
            raise self._batch
        return self._batch

    def begin_to_load(self, training: TrainingContext) -> None:
        """See to it that samples that this machine has are there when they are to be computed."""
        if self.assignment.batch_nbytes is None:
            training.want(self.indices, self.lease.epoch, self.lease.start)

    def compute(self, training: TrainingContext) -> BatchLoss:
        """The mean loss of these samples, whose gradient is in the replica then.

        Raises:
            NonFiniteLoss: the loss or the gradient is NaN or infinite, or the loss is above `MAX_LOSS`.
            ProtocolError: the samples that the server sent are not of the model's size.
            OutOfMemory: this machine has no memory for them.
        """
        loss = self._compute(training)
        self.note(training, loss.mean)
        return loss

    def examine(self, training: TrainingContext, *, loss: bool, buffers: bool) -> None:
        """See `TrainingContext.examine`; of these samples, which have been computed."""
        few = partial(training.few, self.indices, self.lease.epoch, self.lease.start)
        if self.assignment.batch_nbytes is not None:
            few = partial(training.few_sent, self.batch, self.num_samples)
        training.examine(few, loss=loss, buffers=buffers)

    def note(self, training: TrainingContext, loss: float) -> None:
        """Note in the replica's meter that these samples have been computed, with this mean loss."""
        epoch, stop = self.lease.epoch, self.lease.stop
        training.replica.meter.newest = Computed(epoch, stop, training.num_samples, loss)

    def _compute(self, training: TrainingContext) -> BatchLoss:
        epoch, start = self.lease.epoch, self.lease.start
        if self.assignment.batch_nbytes is None:
            return _sendable(training.compute(self.indices, epoch, start))
        try:
            return _sendable(training.compute_batch(self.batch, self.num_samples, epoch, start))
        except DataError as error:
            raise ProtocolError(f"the server's samples are {error}, as it had said") from error

    @property
    def lease(self) -> LeaseKey:
        return self.assignment.lease

    @property
    def num_samples(self) -> int:
        return self.indices.numel()


class HeldOut(Event):
    """Evaluate the `samples` that were sent; None: those of this machine. An error: why they are not here."""

    def __init__(self, wanted: EvaluateStages, samples: Sent | OutOfMemory | None) -> None:
        self.wanted, self.samples = wanted, samples


class AssignmentReceiver:
    """Puts the pieces of a batch together until its assignment comes; of one batch at a time."""

    def __init__(self, training: TrainingContext | None = None) -> None:
        """`training`: begins to load the samples that are assigned, while it computes others."""
        self._training = training
        self._batches = Assembler[Served](
            "batch",
            lambda served: bytes_piece(
                served.nbytes, lambda start: {"offset": start, "nbytes": served.nbytes}
            ),
            # Memory costs nothing before it is written to: what is announced may never come.
            lambda nbytes, dtype: (
                torch.empty(nbytes, dtype=dtype) if nbytes <= virtual_memory().available else None
            ),
        )
        self._whole: Served | None = None
        """The last piece of the batch that is whole."""

    def place_for(self, served: Served) -> memoryview | None:
        """Where a piece shall be written; None: there is no memory for it, as its assignment will say.

        Raises:
            ProtocolError: it does not follow on the piece before.
        """
        if served.offset == 0:  # the one before was given up
            self._batches.first = None
        place = self._batches.place_for(served)
        self._whole = served if self._batches.first is None else None
        return place

    def assigned(self, assignment: Assignment, payload: memoryview) -> Assigned:
        """The event of an assignment.

        Raises:
            ProtocolError: it is not valid, or the batch that it says has not come before it.
        """
        if assignment.batch_nbytes is None:
            assigned = Assigned(assignment, payload)
            if self._training is not None:
                assigned.begin_to_load(self._training)
            return assigned
        batch = self._taken(assignment.lease, assignment.batch_nbytes, "assignment")
        return Assigned(assignment, payload, batch)

    def held_out(self, wanted: EvaluateStages) -> HeldOut:
        """The event of samples that are to be evaluated.

        Raises:
            ProtocolError: it is not valid, or the batches that it says have not come before it.
        """
        lease, size = wanted.lease, wanted.batch_size
        if lease is None:
            return HeldOut(wanted, None)
        num_samples = lease.stop - lease.start
        if wanted.batch_nbytes is None:
            return HeldOut(wanted, Sent(num_samples, size, ()))
        batches = self._taken(lease, wanted.batch_nbytes, "evaluation")
        if isinstance(batches, OutOfMemory):
            return HeldOut(wanted, batches)
        if not isinstance(batches, list) or len(batches) != -(-num_samples // size):
            raise ProtocolError("the server's samples to evaluate are not as many batches")
        return HeldOut(wanted, Sent(num_samples, size, batches))

    def _taken(self, lease: LeaseKey, nbytes: int, what: str) -> Batch | OutOfMemory:
        """The batch that has come, in so many bytes; an error: there was no memory for it.

        Raises:
            ProtocolError: another one has come, or not all of it, or what has come is no batch.
        """
        served, self._whole = self._whole, None
        if served is None or (served.lease, served.nbytes) != (lease, nbytes):
            raise ProtocolError(f"the server's {what} came without its whole batch")
        data = self._batches.whole()
        with suppress(MemoryError):
            if data is not None:
                return decode(bytes_of(data))
        return OutOfMemory(
            f"this machine has no memory for a batch of {nbytes:,} bytes that the server sends; lower "
            "batch_size, or end what else runs here"
        )


def _sendable(loss: BatchLoss) -> BatchLoss:
    if abs(loss.mean) > MAX_LOSS:
        raise NonFiniteLoss(f"loss is {loss.mean:g}, beyond all bounds; {DIVERGENCE_REMEDY}")
    return loss


def _indices_spec(num_samples: int) -> TensorSpec:
    return TensorSpec(codec="raw", dtype="int32", shape=(num_samples,), nbytes=4 * num_samples)


class ServedBatch:
    """A batch of the server's samples in pieces of at most `piece_nbytes`, shared by all who get it."""

    def __init__(self, encoded: Encoded, piece_nbytes: int) -> None:
        """Cut it.

        Raises:
            DataError: it is too large to be sent.
        """
        if encoded.nbytes > MAX_BATCH_NBYTES:
            raise DataError(
                f"a batch takes {encoded.nbytes:,} bytes, at most {MAX_BATCH_NBYTES:,} can be sent; lower "
                "batch_size"
            )
        self.nbytes = encoded.nbytes
        self._pieces = list(encoded.cut(piece_nbytes))

    def frames(self, lease: LeaseKey) -> list[Frame]:
        """Its pieces, for the holder of a lease."""
        return list(byte_frames(partial(Served, lease=lease, nbytes=self.nbytes), self._pieces))


def assignment_of(
    lease: LeaseKey, indices: Tensor, batch: ServedBatch | None = None, **said: Any
) -> tuple[Assignment, memoryview]:
    """The message that hands samples out, and its payload; `said`: its other fields.

    `indices` (num_samples,) int32; `batch`: the samples, where they are sent as well: before it.
    """
    tensor, nbytes = _indices_spec(indices.numel()), None if batch is None else batch.nbytes
    assignment = Assignment(lease=lease, tensor=tensor, batch_nbytes=nbytes, **said)
    return assignment, bytes_of(indices)


def send_assignment(
    session: Session, assignment: Assignment, payload: memoryview, batch: ServedBatch | None
) -> None:
    """Send a worker what `assignment_of` gives, after its batch."""
    if batch is None:
        session.send(assignment, payload)
    else:
        session.send_frames([*batch.frames(assignment.lease), frame_of(assignment, payload)])
