"""How tensors travel: views as bytes, their descriptions, and the frames of weights and indices."""

import functools

import torch
from torch import Tensor

from smolcluster.cluster.inbox import Event
from smolcluster.codec.base import Codec
from smolcluster.errors import ProtocolError
from smolcluster.transport.messages import Assignment, LeaseKey, TensorSpec


class Assigned(Event):
    """Samples to compute: `indices` (num_samples,) int32 into the training split."""

    def __init__(self, assignment: Assignment, payload: memoryview) -> None:
        """Unpack an assignment.

        Raises:
            ProtocolError: the payload does not hold its lease's indices.
        """
        self.assignment = assignment
        if assignment.tensor != indices_spec(assignment.lease.stop - assignment.lease.start):
            raise ProtocolError("the server's assignment does not hold its lease's indices")
        self.indices = torch.frombuffer(bytearray(payload), dtype=torch.int32)

    @property
    def lease(self) -> LeaseKey:
        """Names what was assigned."""
        return self.assignment.lease


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.numpy().data).cast("B")


def bucket_length(bucket: slice) -> int:
    """Number of values in a bucket."""
    return int(bucket.stop - bucket.start)


def bucket_spec(codec: Codec, bucket: slice) -> TensorSpec:
    """Describe a bucket that was encoded."""
    length = bucket_length(bucket)
    return _spec(codec.name, codec.dtype_name, length, codec.encoded_nbytes(length))


@functools.lru_cache(maxsize=64)
def _spec(codec: str, dtype: str, length: int, nbytes: int) -> TensorSpec:
    """Made once for buckets of one length, because every frame needs one."""
    return TensorSpec(codec=codec, dtype=dtype, shape=(length,), nbytes=nbytes)


def indices_spec(num_samples: int) -> TensorSpec:
    """Describe the indices of so many samples."""
    return TensorSpec(codec="raw", dtype="int32", shape=(num_samples,), nbytes=4 * num_samples)


def indices_payload(indices: Tensor) -> tuple[TensorSpec, memoryview]:
    """Describe and lay out the indices (num_samples,) int32 of an assignment."""
    return indices_spec(indices.numel()), bytes_of(indices)
