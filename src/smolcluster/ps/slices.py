"""The weights of a run cut into slices, one a host: contiguous ranges of buckets; and a slice on the wire."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import ProtocolError
from smolcluster.ps.push import state_frame
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import LeaseKey, State, TensorSpec
from smolcluster.transport.streams import bucket_spec

NORM_NBYTES = 8
ROUNDING = 1e-9


class PushKey(NamedTuple):
    """Which push: of which worker's process, for which lease. Nobody can send a part in another's name."""

    instance: str
    lease: LeaseKey


def spans(num_buckets: int, shares: Sequence[float]) -> list[range]:
    """The numbers of the buckets of each host: at least one each, and about its share, which is above 0.

    Where there are fewer buckets than hosts, the last ones are left out.
    """
    shares = shares[:num_buckets]
    cuts, total = [0], sum(shares)
    for number, upto in enumerate(itertools.accumulate(shares)):
        wanted = math.floor(num_buckets * upto / total + ROUNDING)
        num_after = len(shares) - number - 1
        cuts.append(max(cuts[-1] + 1, min(wanted, num_buckets - num_after)))
    return list(itertools.starmap(range, itertools.pairwise(cuts)))


def place_of(buckets: Sequence[slice], span: range) -> slice:
    """Where the buckets of these numbers lie in the flat tensors."""
    return slice(buckets[span.start].start, buckets[span.stop - 1].stop)


def norms_spec(num_buckets: int) -> TensorSpec:
    """Of the norms of a push: one a bucket, in float64."""
    nbytes = NORM_NBYTES * num_buckets
    return TensorSpec(codec="raw", dtype="float64", shape=(num_buckets,), nbytes=nbytes)


def slice_frames(
    contents: Mapping[str, Tensor],
    buckets: Sequence[slice],
    span: range,
    *,
    incarnation: str,
    version: int,
) -> list[Frame]:
    """Frames of a slice, one tensor after the other; `contents` (n,) of its elements, by name, are copied."""
    start = buckets[span.start].start
    frames = []
    for content, values in contents.items():
        copied = values.to("cpu", copy=True)
        for number in span:
            bucket = buckets[number]
            frames.append(
                state_frame(
                    copied[bucket.start - start : bucket.stop - start],
                    number,
                    len(buckets),
                    incarnation=incarnation,
                    version=version,
                    content=content,
                )
            )
    return frames


class SliceCollector:
    """Puts the frames of `slice_frames` together, in memory of its own.

    Attributes:
        values: by name, each (n,) of the slice's elements, on the CPU.
        version: of what has arrived.
        num_taken: frames so far.
    """

    def __init__(
        self,
        buckets: Sequence[slice],
        span: range,
        contents: Sequence[str],
        dtype: torch.dtype,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`values`: memory that may be written over; None: new memory."""
        self._buckets = buckets
        self._codec = get_codec(lossless_for(dtype))
        place = place_of(buckets, span)
        self._start = place.start
        self._expected = [(content, number) for content in contents for number in span]
        self.num_taken = 0
        self.version = 0
        if values is None:
            values = {
                content: torch.empty(place.stop - place.start, dtype=dtype) for content in contents
            }
        self.values = values

    @property
    def is_whole(self) -> bool:
        return self.num_taken == len(self._expected)

    def take(self, state: State, payload: memoryview) -> bool:
        """Take the next frame; returns whether it was the last one.

        Raises:
            ProtocolError: it is not what may come next.
        """
        if self.is_whole:
            raise ProtocolError("it sent more of its slice than was asked for")
        content, number = self._expected[self.num_taken]
        bucket = self._buckets[number]
        is_next = (state.content, state.bucket) == (content, number)
        if not is_next or state.num_buckets != len(self._buckets):
            raise ProtocolError(
                f"it sent {state.content} of bucket {state.bucket}, expected {content} of bucket {number}"
            )
        if state.tensor != bucket_spec(self._codec, bucket):
            raise ProtocolError(f"bucket {number} of its slice is not of the agreed shape")
        if self.num_taken and state.version != self.version:
            raise ProtocolError("its slice is of two versions")
        self.version = state.version
        values = self.values[content][bucket.start - self._start : bucket.stop - self._start]
        self._codec.decode(torch.frombuffer(payload, dtype=torch.uint8), values)
        self.num_taken += 1
        return self.is_whole
