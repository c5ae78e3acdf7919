"""The generated lists: executable, complete, within their memory, and as short as the papers say."""

from types import SimpleNamespace
from typing import Any

import pytest

from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import (
    SCHEDULES,
    Instruction,
    Op,
    Schedule,
    dualpipe_v,
    generate,
    one_f_one_b,
    stage_ranks,
    zb_v,
)
from smolcluster.training.schedules.simulation import Costs, simulate
from smolcluster.training.schedules.validation import execution_order, most_held

COSTS = Costs(1.0, 1.25, 0.5)


def allowed(name: str, ranks: int, num: int, num_stages: int) -> list[int]:
    """Activations that the papers allow each rank to hold."""
    match name:
        case "gpipe":
            most = [num] * ranks
        case "1f1b":
            most = [ranks - rank for rank in range(ranks)]
        case "eager-1f1b":
            most = [2 * (ranks - rank) - 1 for rank in range(ranks)]
        case "zero-bubble":
            most = [ranks] * ranks
        case "zb-v":
            most = [2 * ranks] * ranks
        case "dualpipev":
            most = [2 * ranks + 1] * ranks
        case _:
            most = [2 * (ranks - rank - 1) + ranks + 1 for rank in range(ranks)]
    return [min(each, num * num_stages) for each in most]


def assert_complete(schedule: Schedule, num: int) -> None:
    """Each stage has one forward and one backward, whole or in two parts, of each microbatch, and no more."""
    parts = [Op.BACKWARD], [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
    for stage, rank in enumerate(stage_ranks(schedule)):
        own = [each for each in schedule[rank] if each.stage == stage]
        assert own == [each for one in schedule for each in one if each.stage == stage]
        done = [[each.op for each in own if each.microbatch == number] for number in range(num)]
        assert all(first is Op.FORWARD and rest in parts for first, *rest in done), stage
        assert len(own) == sum(map(len, done))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_list_can_be_executed_within_its_memory(name: str) -> None:
    kind = SCHEDULES[name]
    for ranks in (1, 2, 3, 4, 6, 8):
        for num in (*range(1, 18), 24, 32):
            schedule = kind.generate(ranks, num)
            assert len(schedule) == ranks
            assert_complete(schedule, num)
            assert len(list(execution_order(schedule))) == sum(map(len, schedule))
            held = [most_held(each)[0] for each in schedule]
            most = allowed(name, ranks, num, kind.num_stages)
            assert all(a <= b for a, b in zip(held, most, strict=True)), (ranks, num, held)


def makespan(schedule: Schedule) -> float:
    return simulate(schedule, [COSTS] * len(schedule)).makespan_s


@pytest.mark.parametrize(("ranks", "num"), [(1, 1), (2, 8), (4, 8), (3, 7), (8, 32)])
def test_makespans_of_equal_stages_are_those_of_the_papers(ranks: int, num: int) -> None:
    work = num * COSTS.total_s
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        assert makespan(generate(name, ranks, num)) == pytest.approx(
            work + (ranks - 1) * COSTS.total_s
        )
    equal = Costs(1.0, 1.0, 1.0)
    zb_h1 = simulate(generate("zero-bubble", ranks, num), [equal] * ranks)
    assert zb_h1.makespan_s == pytest.approx(num * 3 + ranks - 1)
    assert zb_h1.bubble == pytest.approx((ranks - 1) / (3 * num + ranks - 1))


@pytest.mark.parametrize(("ranks", "num"), [(2, 8), (4, 8), (8, 32)])
def test_two_stages_a_rank_halve_the_bubble_of_1f1b(ranks: int, num: int) -> None:
    half = Costs(0.5, 0.625, 0.25)
    timeline = simulate(generate("interleaved", ranks, num), [half] * (2 * ranks))
    assert timeline.makespan_s - num * COSTS.total_s == pytest.approx((ranks - 1) * half.total_s)


@pytest.mark.parametrize(("ranks", "num"), [(2, 8), (4, 8), (8, 32)])
def test_zb_v_waits_for_the_first_microbatch_alone(ranks: int, num: int) -> None:
    timeline = simulate(zb_v(ranks, num), [Costs(0.5, 0.5, 0.5)] * (2 * ranks))
    assert timeline.makespan_s == pytest.approx(3 * num + 0.5 * (ranks - 1))
    assert stage_ranks(zb_v(ranks, num))[0] == stage_ranks(zb_v(ranks, num))[-1] == 0


@pytest.mark.parametrize(("ranks", "num"), [(1, 2), (2, 5), (3, 6), (4, 8), (5, 13)])
def test_dualpipe_v_is_that_of_torch(ranks: int, num: int) -> None:
    """What it would overlap is forward, then backward, here."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    size: Any = SimpleNamespace(pp_group_size=ranks, _n_microbatches=num)
    ops = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for rank, own in enumerate(dualpipe_v(ranks, num)):
        theirs = ScheduleDualPipeV._calculate_single_rank_operations(size, rank)
        assert own == tuple(
            Instruction(
                Op(ops[part.computation_type.name]), part.microbatch_index or 0, part.stage_index
            )
            for each in theirs
            if each is not None
            for part in each.sub_actions or (each,)
        )


def test_1f1b_reads_as_in_the_paper() -> None:
    first, last = one_f_one_b(2, 3)
    assert " ".join(f"{each.op}{each.microbatch}" for each in first) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(f"{each.op}{each.microbatch}" for each in last) == "F0 B0 F1 B1 F2 B2"
    assert last[1] == Instruction(Op.BACKWARD, 0, 1)


@pytest.mark.parametrize(
    ("name", "ranks", "num", "said"),
    [
        ("1f2b", 2, 4, "1f1b"),
        ("1f1b", 2, 0, "0 microbatches"),
        ("interleaved", 4, 3, "needs 4 microbatches"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, ranks: int, num: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        generate(name, ranks, num)


@pytest.mark.parametrize(
    ("op", "source", "target"),
    [
        (Op.FORWARD, 1, 3),
        (Op.BACKWARD, 3, 1),
        (Op.BACKWARD_INPUT, 3, 1),
        (Op.BACKWARD_WEIGHT, -1, -1),
    ],
)
def test_an_instruction_takes_of_a_stage_and_hands_on_to_the_other(
    op: Op, source: int, target: int
) -> None:
    each = Instruction(op, 0, 2)
    assert (each.source, each.target) == (source, target)
