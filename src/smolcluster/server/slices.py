"""The weights of a run cut into slices, one a host: contiguous ranges of buckets; and a slice on the wire."""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.errors import ProtocolError
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Arrived, PartKey, State, TensorSpec
from smolcluster.wire.streams import Piece, span_pieces, stream_frames

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
    key: PartKey | None,
    fragment: int,
    bucket: int,
    norms: Tensor | Sequence[Sequence[float]],
    *,
    is_whole: bool = False,
) -> tuple[Arrived, memoryview]:
    """That buckets of a fragment have come, from `bucket` on; `norms` (rows, n) are one a bucket each."""
    values = torch.as_tensor(norms, dtype=torch.float64)
    tensor = _norms_spec(values.shape)
    told = Arrived(key=key, fragment=fragment, bucket=bucket, is_whole=is_whole, tensor=tensor)
    return told, memoryview(values.numpy().tobytes())  # of no memory there is no view


def read_norms(told: Arrived, payload: memoryview, held: range) -> list[list[float]]:
    """The rows of norms that a store has told, which has the buckets `held` of the fragment; [] : of none.

    Raises:
        ProtocolError: it told of others, or not as agreed.
    """
    num_rows, num_buckets = told.tensor.shape if len(told.tensor.shape) == 2 else (-1, 0)
    if told.tensor != _norms_spec((num_rows, num_buckets)) or num_rows not in {0, 1, 2}:
        raise ProtocolError("it did not send one norm a bucket, or two")
    is_held = held.start <= told.bucket <= told.bucket + num_buckets <= held.stop
    if not is_held or (num_rows and not num_buckets):
        raise ProtocolError(
            f"it has told of bucket {told.bucket} of fragment {told.fragment}, which it has not"
        )
    if not num_rows:
        return []
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
    """A tensor of a replica's state on the wire: its buckets, or those of the numbers `span`."""
    if span is None:
        numel = values.numel()
        buckets = [slice(b.start, min(b.stop, numel)) for b in buckets if b.start < numel]
    return [
        piece._replace(fields={**piece.fields, "content": content})
        for piece in span_pieces(get_codec(lossless_for(values.dtype)), buckets, span)
    ]


def slice_frames(
    contents: Mapping[str, Tensor],
    buckets: Sequence[slice],
    span: range | None = None,
    **state: Any,
) -> list[Frame]:
    """Frames of the buckets `span` (None: all), to be shared by all who ask for them.

    `contents` (n,) of their elements, by name, are copied; `state`: what else each State says.
    """
    frames = []
    for content, values in contents.items():
        copied = values.to("cpu", copy=True)
        pieces = content_pieces(content, copied, buckets, span)
        make = partial(State, **state)
        frames += stream_frames(make, pieces, (copied[piece.place] for piece in pieces))
    return frames


def by_name(contents: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    """The tensors of a slice that has come: views of its `values` (len(contents) * n,), (n,) each."""
    return dict(zip(contents, values.chunk(len(contents)), strict=True)) if contents else {}
