"""Where parts of parameters lie in the flat weights, without any process group."""

import pytest
import torch

from smolcluster.algorithms.Mesh.shards import Ranges, Shard

WIDTH, NUMEL, BEGIN = 4, 24, 100


def shard(rows: Ranges, columns: Ranges) -> Shard:
    return Shard(BEGIN, NUMEL, WIDTH, rows, columns)


ALL_ROWS, ALL_COLUMNS = [(0, 6)], [(0, 4)]
CUTS = {
    "columns": [shard(ALL_ROWS, [(0, 2)]), shard(ALL_ROWS, [(2, 4)])],
    "fused rows": [
        shard([(0, 1), (2, 3), (4, 5)], ALL_COLUMNS),
        shard([(1, 2), (3, 4), (5, 6)], ALL_COLUMNS),
    ],
    "rows": [shard([(0, 4)], ALL_COLUMNS), shard([(4, 6)], ALL_COLUMNS)],
    "rows and columns": [
        shard([rows], [columns]) for rows in ((0, 3), (3, 6)) for columns in ((0, 2), (2, 4))
    ],
    "single rows": [shard([(row, row + 1)], [(0, 1), (2, 4)]) for row in range(6)]
    + [shard(ALL_ROWS, [(1, 2)])],
    "nothing on one rank": [shard(ALL_ROWS, ALL_COLUMNS), shard([], ALL_COLUMNS)],
}


def numbers(ranges: Ranges) -> list[int]:
    return [number for each in ranges for number in range(*each)]


def parts_of(flat: torch.Tensor, cut: list[Shard]) -> list[torch.Tensor]:
    whole = flat.view(-1, WIDTH)
    return [whole[numbers(each.rows)][:, numbers(each.columns)].contiguous() for each in cut]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_parts_are_placed_where_they_were_taken_from(cut: list[Shard]) -> None:
    flat = torch.arange(BEGIN + NUMEL + 3, dtype=torch.float32)
    placed = torch.zeros_like(flat)
    for each, local in zip(cut, parts_of(flat[BEGIN : BEGIN + NUMEL], cut), strict=True):
        assert each.size == local.numel()
        each.place_whole(local.flatten(), placed)
    assert torch.equal(placed[BEGIN : BEGIN + NUMEL], flat[BEGIN : BEGIN + NUMEL])
    assert not placed[:BEGIN].any()
    assert not placed[BEGIN + NUMEL :].any()


@pytest.mark.parametrize("length", [1, 5, 24])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_range_is_told_and_taken_element_by_element(cut: list[Shard], length: int) -> None:
    flat = torch.arange(NUMEL, dtype=torch.float32) + 1
    locals_ = parts_of(flat, cut)
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
