"""Samples that are handed out: their message, its payload, and what a worker makes of it."""

from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smolcluster.errors import DataError, NonFiniteLoss, ProtocolError
from smolcluster.net.inbox import Event
from smolcluster.ps.push import bytes_of
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.transport.messages import (
    MAX_LOSS,
    Assignment,
    LeaseKey,
    TensorSpec,
)

ROW_DTYPES = MappingProxyType({"uint16": np.uint16, "int32": np.int32, "uint32": np.uint32})
"""What tokens may be sent as."""


class Assigned(Event):
    """Samples to compute: `indices` (num_samples,) int32 into the training split.

    `rows` (num_samples, length + 1) are the samples themselves, where the server sends them.
    """

    def __init__(self, assignment: Assignment, payload: memoryview) -> None:
        """Unpack an assignment.

        Raises:
            ProtocolError: the payload does not hold its lease's indices, or not their samples.
        """
        self.assignment = assignment
        num_samples = assignment.lease.stop - assignment.lease.start
        if assignment.tensor != indices_spec(num_samples):
            raise ProtocolError("the server's assignment does not hold its lease's indices")
        after = assignment.tensor.nbytes
        self.indices = torch.frombuffer(bytearray(payload[:after]), dtype=torch.int32)
        self.rows = None
        if assignment.rows is not None:
            self.rows = _unpack_rows(assignment.rows, num_samples, payload[after:])

    def compute(self, training: TrainingContext) -> BatchLoss:
        """The mean loss of these samples, whose gradient is in the replica then.

        Raises:
            NonFiniteLoss: the loss or the gradient is NaN or infinite, or the loss is above `MAX_LOSS`.
            ProtocolError: the samples that the server sent are not of the model's size.
        """
        epoch, start = self.lease.epoch, self.lease.start
        if self.rows is None:
            return _sendable(training.compute(self.indices, epoch, start))
        try:
            return _sendable(training.compute_rows(self.rows, epoch, start))
        except DataError as error:
            raise ProtocolError(f"the server's samples are {error}, as it had said") from error

    @property
    def lease(self) -> LeaseKey:
        """Names what was assigned."""
        return self.assignment.lease

    @property
    def num_samples(self) -> int:
        """How many they are."""
        return self.indices.numel()


def _sendable(loss: BatchLoss) -> BatchLoss:
    if abs(loss.mean) > MAX_LOSS:
        raise NonFiniteLoss(f"loss is {loss.mean:g}, beyond all bounds; {DIVERGENCE_REMEDY}")
    return loss


def indices_spec(num_samples: int) -> TensorSpec:
    """Describe the indices of so many samples."""
    return TensorSpec(codec="raw", dtype="int32", shape=(num_samples,), nbytes=4 * num_samples)


def work_payload(
    indices: Tensor, rows: NDArray[Any] | None = None
) -> tuple[TensorSpec, TensorSpec | None, memoryview]:
    """Describe the two parts of an assignment's payload, and lay it out.

    Args:
        indices: (num_samples,) int32.
        rows: the samples' tokens, (num_samples, length + 1), where they are sent as well.
    """
    spec = indices_spec(indices.numel())
    if rows is None:
        return spec, None, bytes_of(indices)
    rows_spec = TensorSpec(codec="raw", dtype=rows.dtype.name, shape=rows.shape, nbytes=rows.nbytes)
    return spec, rows_spec, memoryview(bytes_of(indices).tobytes() + rows.tobytes())


def assignment_of(
    lease: LeaseKey,
    indices: Tensor,
    rows: NDArray[Any] | None = None,
    *,
    version: int,
    learning_rate: float,
    first_bucket: int = 0,
    backup: bool = False,
) -> tuple[Assignment, memoryview]:
    """The message that hands samples out at `version` of the weights, and its payload: `work_payload`."""
    spec, rows_spec, payload = work_payload(indices, rows)
    return Assignment(
        lease=lease,
        version=version,
        learning_rate=learning_rate,
        first_bucket=first_bucket,
        backup=backup,
        tensor=spec,
        rows=rows_spec,
    ), payload


def _unpack_rows(spec: TensorSpec, num_samples: int, payload: memoryview) -> Tensor:
    """Samples that the server sent, (num_samples, length + 1) int64."""
    kind = ROW_DTYPES.get(spec.dtype)
    if kind is None or len(spec.shape) != 2 or spec.shape[0] != num_samples:
        raise ProtocolError("the server's samples are not one row of tokens for each index")
    size = np.dtype(kind).itemsize * spec.shape[0] * spec.shape[1]
    if not spec.nbytes == len(payload) == size:
        raise ProtocolError("the server's samples are not of the size that it says")
    rows = np.frombuffer(payload, np.dtype(kind).newbyteorder("<")).reshape(spec.shape)
    return torch.from_numpy(rows.astype(np.int64))
