"""Where parts of parameters lie in the flat weights, without any process group."""

import pytest
import torch

from smolcluster.algorithms.Mesh.shards import Shard

WIDTH, NUMEL, BEGIN = 4, 24, 100


def shard(rows: list[int], columns: list[int], *, in_row: int | None = None) -> Shard:
    return Shard(
        BEGIN,
        NUMEL,
        WIDTH,
        torch.tensor(rows, dtype=torch.long),
        torch.tensor(columns),
        True,
        in_row=in_row,
    )


CUTS = {
    "columns": [shard([0, 1, 2, 3, 4, 5], [0, 1]), shard([0, 1, 2, 3, 4, 5], [2, 3])],
    "fused rows": [shard([0, 2, 4], [0, 1, 2, 3]), shard([1, 3, 5], [0, 1, 2, 3])],
    "rows": [
        shard([0, 1, 2, 3], [0, 1, 2, 3], in_row=BEGIN),
        shard([4, 5], [0, 1, 2, 3], in_row=BEGIN + 16),
    ],
    "rows and columns": [
        shard(rows, columns) for rows in ([0, 1, 2], [3, 4, 5]) for columns in ([0, 1], [2, 3])
    ],
    "nothing on one rank": [shard(list(range(6)), [0, 1, 2, 3]), shard([], [0, 1, 2, 3])],
}


@pytest.mark.parametrize("length", [1, 5, 24])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_range_is_told_and_taken_element_by_element(cut: list[Shard], length: int) -> None:
    flat = torch.arange(NUMEL, dtype=torch.float32) + 1
    whole = flat.view(-1, WIDTH)
    locals_ = [whole[each.rows][:, each.columns].contiguous() for each in cut]
    taken = [torch.zeros_like(local) for local in locals_]
    for start in range(0, NUMEL, length):
        stop = min(start + length, NUMEL)
        place = slice(BEGIN + start, BEGIN + stop)
        told = torch.zeros(stop - start)
        for each, local in zip(cut, locals_, strict=True):
            own = torch.zeros_like(told)
            each.fill(local, place, own)
            told += own
        assert torch.equal(told, flat[start:stop])
        for each, new in zip(cut, taken, strict=True):
            each.put(new, place, told)
    for new, local in zip(taken, locals_, strict=True):
        assert torch.equal(new, local)
