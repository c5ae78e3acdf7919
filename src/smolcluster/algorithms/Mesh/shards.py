"""What of a model's flat weights lies on each rank of a mesh.

A rank's part of a parameter is some of its rows and some of its columns, whoever has cut it: `tp`, `fsdp`, or
the order in which ranks take their shares of fused rows. Of ranks that have the same elements one alone, the
sender, tells them to rank 0. So any range of the whole is filled by each rank with what it sends, and summed.
What rank 0 tells of a range goes to all ranks, a bucket at a time, of which each takes its part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from smolcluster.algorithms.Mesh.groups import DIMENSIONS, Groups
from smolcluster.algorithms.Mesh.parallel import Slot
from smolcluster.algorithms.Mesh.trainer import MeshTrainer
from smolcluster.training.places import meeting, shifted
from smolcluster.training.replica import cut

Ranges = Sequence[tuple[int, int]]
"""Ascending numbers: from each first one to before its last."""


@dataclass(frozen=True)
class Shard:
    """What of a parameter lies on a rank: all elements of some rows and columns, in their order.

    Attributes:
        begin: of the parameter in the flat weights.
        numel, width: elements of the whole parameter, and of one of its rows.
        rows, columns: that lie there.
    """

    begin: int
    numel: int
    width: int
    rows: Ranges
    columns: Ranges

    @property
    def size(self) -> int:
        """Elements that lie there."""
        return _length(self.rows) * _length(self.columns)

    def place_whole(self, local: Tensor, flat: Tensor) -> None:
        """Copy all that lies there, `size` elements, to where it is in the flat weights."""
        if not self.size:
            return
        whole = flat[self.begin : self.begin + self.numel].view(-1, self.width)
        own = local.reshape(_length(self.rows), _length(self.columns))
        for to_rows, from_rows in _packed(self.rows):
            for to_columns, from_columns in _packed(self.columns):
                whole[to_rows, to_columns].copy_(own[from_rows, from_columns])

    def fill(self, local: Tensor, place: slice, out: Tensor) -> None:
        """Copy what of the flat weights' `place` lies in `local` to where it is in `out` (place,)."""
        here, there = self._overlap(place, local.device)
        out[there] = local.view(-1)[here]

    def put(self, local: Tensor, place: slice, values: Tensor) -> None:
        """Copy `values`, those of the flat weights' `place`, to where they are in `local`."""
        here, there = self._overlap(place, local.device)
        local.view(-1)[here] = values[there]

    @property
    def _in_row(self) -> int | None:
        """Where its elements begin in the flat weights, if they stand there one behind the other."""
        if not self.size:
            return self.begin
        is_row = _length(self.rows) == 1 or _length(self.columns) == self.width
        if len(self.rows) > 1 or len(self.columns) > 1 or not is_row:
            return None
        return self.begin + self.rows[0][0] * self.width + self.columns[0][0]

    def _overlap(
        self, place: slice, device: torch.device
    ) -> tuple[slice, slice] | tuple[Tensor, Tensor]:
        """Which of the elements that lie there `place` reaches, and where they are in it."""
        if self._in_row is not None:
            return meeting(slice(self._in_row, self._in_row + self.size), place)
        first, stop = place.start - self.begin, place.stop - self.begin
        at, columns = _numbers(self.rows, device) * self.width, _numbers(self.columns, device)
        near = ((at + self.width > first) & (at < stop)).nonzero().flatten()
        there = at[near, None] + columns - first
        here = near[:, None] * len(columns) + torch.arange(len(columns), device=device)
        inside = (there >= 0) & (there < stop - first)
        return here[inside], there[inside]


class Shards:
    """This rank's parts of all parameters.

    Attributes:
        num_elements: of the flat weights.
    """

    def __init__(self, trainer: MeshTrainer, layers: Sequence[tuple[str, slice]]) -> None:
        """All ranks must make them at once.

        `layers`: each parameter's place in the flat weights, which rank 0 says; others may know of none.
        """
        slots, groups = trainer.slots, trainer.groups
        self._like = torch.empty(0, dtype=trainer.dtype, device=groups.device)
        told, *_ = groups.all_told([[name, place.start, place.stop] for name, place in layers])
        places = {name: slice(start, stop) for name, start, stop in told}
        self.num_elements = max((place.stop for place in places.values()), default=0)
        names = groups.all_told([slot.name for slot in slots])
        seen: set[str] = set()
        self._shards = [_shard_of(slot, places[slot.name]) for slot in slots]
        self._is_sent: list[bool] = []
        for slot in slots:
            is_first = slot.name not in seen and not any(
                slot.name in names[groups.rank_at(pp=pp)] for pp in range(groups["pp"])
            )
            seen.add(slot.name)
            self._is_sent.append(is_first and _is_lowest(slot, groups))

    @property
    def sent(self) -> dict[int, Shard]:
        """What this rank sends, by slot; nothing that is empty."""
        both = enumerate(zip(self._shards, self._is_sent, strict=True))
        return {number: shard for number, (shard, is_sent) in both if is_sent and shard.size}

    def of(self, places: Sequence[slice]) -> list[int]:
        """The slots, by number, whose parameters lie in these places."""
        return [
            number
            for number, shard in enumerate(self._shards)
            if any(place.start <= shard.begin < place.stop for place in places)
        ]

    def shared(
        self, places: Sequence[slice], values: Sequence[Tensor] | None, most_elements: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """On every rank what rank 0 has of these places, so many elements at a time.

        `values`: of each place; ranks but rank 0 have none.
        """
        for number, place in enumerate(places):
            for bucket in cut(place.stop - place.start, most_elements):
                told = self._like.new_empty(bucket.stop - bucket.start)
                if values is not None:
                    told.copy_(values[number][bucket])
                dist.broadcast(told, src=0)
                yield shifted(bucket, place.start), told

    def fill(self, place: slice, locals_: Mapping[int, Tensor], out: Tensor) -> None:
        """Copy to `out` (place,) what this rank sends of a place; `locals_`: local parts, by slot."""
        for number, local in locals_.items():
            shard = self._shards[number]
            whole = slice(shard.begin, shard.begin + shard.numel)
            own, within = meeting(whole, place)
            if self._is_sent[number] and own.start < own.stop:
                shard.fill(local, shifted(own, shard.begin), out[within])

    def put(self, place: slice, values: Tensor, locals_: Mapping[int, Tensor]) -> None:
        """Copy what of `values` (place,) lies here into the local parts, by slot."""
        for number, local in locals_.items():
            shard = self._shards[number]
            whole = slice(shard.begin, shard.begin + shard.numel)
            own, within = meeting(whole, place)
            if own.start < own.stop:
                shard.put(local, shifted(own, shard.begin), values[within])


def _shard_of(slot: Slot, place: slice) -> Shard:
    numel = place.stop - place.start
    width = numel // slot.shape[0] if slot.shape else 1
    dtype = torch.int32 if numel < 2**31 else torch.int64
    found = slot.part(torch.arange(numel, dtype=dtype, device=slot.local.device))
    num_rows = found.shape[0] if found.ndim else 1
    found = found.reshape(num_rows, found.numel() // num_rows if num_rows else 0)
    rows, columns = found[:, :1].flatten() // width, found[:1].flatten() % width
    return Shard(place.start, numel, width, _ranges(rows), _ranges(columns))


def _is_lowest(slot: Slot, groups: Groups) -> bool:
    """Whether no rank before this one in its stage has the same elements."""
    cut: set[str] = set()
    if isinstance(slot.parameter, DTensor):
        mesh = slot.parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        placements = zip(names, slot.parameter.placements, strict=True)
        cut = {name for name, each in placements if not each.is_replicate()}
    return all(groups[name] == 0 for name in DIMENSIONS if name not in cut | {"pp"})


def _ranges(numbers: Tensor) -> Ranges:
    if not len(numbers):
        return []
    lasts = (numbers.diff() != 1).nonzero().flatten().tolist()
    firsts = [0, *(each + 1 for each in lasts)]
    return [
        (int(numbers[first]), int(numbers[last]) + 1)
        for first, last in zip(firsts, [*lasts, len(numbers) - 1], strict=True)
    ]


def _numbers(ranges: Ranges, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*each, device=device) for each in ranges])


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _packed(ranges: Ranges) -> Iterator[tuple[slice, slice]]:
    """Each range, and where it is when all stand one behind the other."""
    at = 0
    for start, stop in ranges:
        yield slice(start, stop), slice(at, at + stop - start)
        at += stop - start
