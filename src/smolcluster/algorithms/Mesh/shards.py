"""Any range of a model's flat weights, of which each rank of a mesh has some elements.

A rank's part of a parameter is some of its rows and some of its columns, whoever has cut it: `tp`, `fsdp`, or
the order in which ranks take their shares of fused rows. So a range of the whole is filled by each rank with
what is its own, and summed: each element is told by one rank alone. No rank has more of the whole at a time
than that range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smolcluster.algorithms.Mesh.groups import DIMENSIONS, Groups
from smolcluster.algorithms.Mesh.parallel import Slot
from smolcluster.training.places import meeting, shifted


@dataclass(frozen=True)
class Shard:
    """What of a parameter lies here: its element (rows[i], columns[j]) is local element (i, j).

    Attributes:
        begin: of the parameter in the flat weights.
        numel, width: elements of the whole parameter, and of one of its rows.
        is_told: whether this rank tells of these elements, which others may have as well.
        in_row: where the local part begins in the flat weights, if its elements stand there in a row.
    """

    begin: int
    numel: int
    width: int
    rows: Tensor
    columns: Tensor
    is_told: bool
    in_row: int | None = None

    def fill(self, local: Tensor, place: slice, out: Tensor) -> None:
        """Copy what of the flat weights' `place` lies in `local` to where it is in `out` (place,)."""
        if self.in_row is not None:
            here, there = meeting(slice(self.in_row, self.in_row + local.numel()), place)
            out[there].copy_(local.view(-1)[here])
            return
        near, where, inside = self._overlap(place)
        if len(near):
            out[where[inside]] = self._matrix(local)[near][inside]

    def put(self, local: Tensor, place: slice, values: Tensor) -> None:
        """Copy `values`, those of the flat weights' `place`, to where they are in `local`."""
        if self.in_row is not None:
            here, there = meeting(slice(self.in_row, self.in_row + local.numel()), place)
            local.view(-1)[here].copy_(values[there])
            return
        near, where, inside = self._overlap(place)
        if len(near):
            matrix = self._matrix(local)
            rows = matrix[near]
            rows[inside] = values[where[inside]]
            matrix[near] = rows

    def _matrix(self, local: Tensor) -> Tensor:
        return local.view(len(self.rows), len(self.columns))

    def _overlap(self, place: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Local rows that `place` reaches, where their elements are in it, and which of them are."""
        first, stop = place.start - self.begin, place.stop - self.begin
        at = self.rows * self.width
        near = ((at + self.width > first) & (at < stop)).nonzero().flatten()
        where = at[near, None] + self.columns - first
        return near, where, (where >= 0) & (where < stop - first)


class Shards:
    """This rank's parts of all parameters."""

    def __init__(
        self, slots: Sequence[Slot], layers: Sequence[tuple[str, slice]], groups: Groups
    ) -> None:
        """`layers`: each parameter's place in the flat weights; all ranks must make them at once."""
        places = dict(layers)
        names = groups.all_told([slot.name for slot in slots])
        told: set[str] = set()
        self._shards: list[Shard] = []
        for slot in slots:
            is_first = slot.name not in told and not any(
                slot.name in names[groups.rank_at(pp=pp)] for pp in range(groups["pp"])
            )
            told.add(slot.name)
            is_told = is_first and _is_lowest(slot, groups)
            self._shards.append(_shard_of(slot, places[slot.name], is_told=is_told))

    def of(self, places: Sequence[slice]) -> list[int]:
        """The slots, by number, whose parameters lie in these places."""
        return [
            number
            for number, shard in enumerate(self._shards)
            if any(place.start <= shard.begin < place.stop for place in places)
        ]

    def fill(self, place: slice, locals_: Mapping[int, Tensor], out: Tensor) -> None:
        """Copy to `out` (place,) what this rank tells of a place; `locals_`: local parts, by slot."""
        for number, local in locals_.items():
            shard = self._shards[number]
            whole = slice(shard.begin, shard.begin + shard.numel)
            own, within = meeting(whole, place)
            if shard.is_told and own.start < own.stop:
                shard.fill(local, shifted(own, shard.begin), out[within])

    def put(self, place: slice, values: Tensor, locals_: Mapping[int, Tensor]) -> None:
        """Copy what of `values` (place,) lies here into the local parts, by slot."""
        for number, local in locals_.items():
            shard = self._shards[number]
            whole = slice(shard.begin, shard.begin + shard.numel)
            own, within = meeting(whole, place)
            if own.start < own.stop:
                shard.put(local, shifted(own, shard.begin), values[within])


def _shard_of(slot: Slot, place: slice, *, is_told: bool) -> Shard:
    numel = place.stop - place.start
    width = numel // slot.shape[0] if slot.shape else 1
    device = slot.local.device
    found = slot.part(torch.arange(numel, device=device))
    num_rows = found.shape[0] if found.ndim else 1
    found = found.reshape(num_rows, found.numel() // num_rows if num_rows else 0)
    rows, columns = found[:, :1].flatten() // width, found[:1].flatten() % width
    is_row = found.numel() == 0 or bool((found.flatten().diff() == 1).all())
    in_row = place.start + (int(found[0, 0]) if found.numel() else 0) if is_row else None
    return Shard(place.start, numel, width, rows, columns, is_told=is_told, in_row=in_row)


def _is_lowest(slot: Slot, groups: Groups) -> bool:
    """Whether no rank before this one in its stage has the same elements."""
    cut: set[str] = set()
    if isinstance(slot.parameter, DTensor):
        mesh = slot.parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        placements = zip(names, slot.parameter.placements, strict=True)
        cut = {name for name, each in placements if not each.is_replicate()}
    return all(groups[name] == 0 for name in DIMENSIONS if name not in cut | {"pp"})
