"""The weights of a run cut into slices, one a host: contiguous ranges of buckets; and a slice on the wire."""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from smolcluster.codec.base import bytes_of
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import ProtocolError
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Arrived, PartKey, State, TensorSpec
from smolcluster.wire.streams import Piece, bucket_length, span_pieces, stream_frames

NORM_NBYTES = 8
ROUNDING = 1e-9


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


def arrived(
    key: PartKey | None, fragment: int, bucket: int, norms: Sequence[Sequence[float]]
) -> tuple[Arrived, memoryview]:
    """That buckets of a fragment have come, from `bucket` on; `norms` are rows of one a bucket."""
    values = torch.tensor(norms, dtype=torch.float64)
    tensor = _norms_spec(values.shape)
    return Arrived(key=key, fragment=fragment, bucket=bucket, tensor=tensor), bytes_of(values)


def read_norms(told: Arrived, payload: memoryview, held: range) -> list[list[float]]:
    """The rows of norms that a store has told, which has the buckets `held` of the fragment.

    Raises:
        ProtocolError: it told of others, or not as agreed.
    """
    num_rows, num_buckets = told.tensor.shape if len(told.tensor.shape) == 2 else (0, 0)
    if told.tensor != _norms_spec((num_rows, num_buckets)) or num_rows not in {1, 2}:
        raise ProtocolError("it did not send one norm a bucket, or two")
    last = told.bucket + num_buckets - 1
    if told.bucket not in held or last not in held:
        raise ProtocolError(
            f"it has told of bucket {told.bucket} of fragment {told.fragment}, which it has not"
        )
    norms = torch.frombuffer(bytearray(payload), dtype=torch.float64)
    rows: list[list[float]] = norms.view(num_rows, num_buckets).tolist()
    return rows


def _norms_spec(shape: Sequence[int]) -> TensorSpec:
    nbytes = NORM_NBYTES * math.prod(shape)
    return TensorSpec(codec="raw", dtype="float64", shape=tuple(shape), nbytes=nbytes)


def slice_pieces(
    buckets: Sequence[slice], span: range, contents: Sequence[str], dtype: torch.dtype
) -> list[Piece]:
    """A slice on the wire: tensors of its elements one after the other, by their names."""
    own = span_pieces(get_codec(lossless_for(dtype)), buckets, span)
    return [
        Piece({**fields, "content": content}, slice(start + place.start, start + place.stop), codec)
        for start, content in zip(itertools.count(0, own[-1].place.stop), contents, strict=False)
        for fields, place, codec, _ in own
    ]


def content_pieces(
    content: str, values: Tensor, buckets: Sequence[slice], span: range | None = None
) -> list[Piece]:
    """A tensor (n,) of a replica's state on the wire; `span`: only the buckets of these numbers."""
    codec, numel = get_codec(lossless_for(values.dtype)), values.numel()
    places = [slice(each.start, min(each.stop, numel)) for each in buckets if each.start < numel]
    return [
        piece._replace(fields={**piece.fields, "content": content})
        for piece in span_pieces(codec, places, span)
    ]


def slice_frames(
    contents: Mapping[str, Tensor],
    buckets: Sequence[slice],
    span: range,
    *,
    incarnation: str,
    version: int,
) -> list[Frame]:
    """Frames of a slice; `contents` (n,) of its elements, by name, are copied."""
    make = partial(State, incarnation=incarnation, version=version)
    sizes = [bucket_length(buckets[number]) for number in span]
    frames = []
    for content, values in contents.items():
        pieces = slice_pieces(buckets, span, [content], values.dtype)
        frames += stream_frames(make, pieces, torch.split(values.to("cpu", copy=True), sizes))
    return frames


def by_name(contents: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    """The tensors of a slice that has come: views of its `values` (len(contents) * n,), (n,) each."""
    return dict(zip(contents, values.chunk(len(contents)), strict=True)) if contents else {}
